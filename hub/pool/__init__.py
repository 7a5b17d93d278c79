"""One stage as a hub sees it: members, picks, credits, outlier ejection. Pure but for stage_pool.py."""
