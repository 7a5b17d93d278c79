"""``omni status``: what needs an operator now, and what is there beside what is asked for."""
