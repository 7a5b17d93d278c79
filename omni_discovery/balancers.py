"""Old path of omni_discovery.balancing.policies; removed in 0.3."""

from omni_discovery.balancing.policies import *  # noqa: F403 - every name that was here
