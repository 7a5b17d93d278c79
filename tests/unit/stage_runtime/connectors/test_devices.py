"""The name of a connector's device: refused when the connector is built, not with the first hand-off."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.errors import ConfigError
from stage_runtime.connectors import SharedMemoryConnector
from stage_runtime.connectors.devices import check_device


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:0", "xpu:1", "npu:3", "hpu", "meta"])
def test_a_device_of_torch_is_taken_whether_or_not_this_host_has_it(name: str) -> None:
    assert check_device(name) == name


@pytest.mark.parametrize("name", ["bogus", "bogus:0", "", "cuda:", "CUDA", "cuda:x", None, 0, True])
def test_a_connector_refuses_what_is_no_device_at_once(name: Any) -> None:
    with pytest.raises(ConfigError, match="a device of torch, such as"):
        SharedMemoryConnector({"device": name})
