"""Old path of omni_discovery.records.schema; removed in 0.3."""

from omni_discovery.records.schema import *  # noqa: F403 - every name that was here
