"""Old path of omni_discovery.data_urls; removed in 0.3."""

from omni_discovery.data_urls import *  # noqa: F403 - every name that was here
