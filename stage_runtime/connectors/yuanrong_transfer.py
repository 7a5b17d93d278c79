"""Hand-offs that Yuanrong's transfer engine reads from one NPU's memory into another's."""

from __future__ import annotations

from typing import Any, ClassVar

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.mooncake_engine import EngineEnd
from stage_runtime.connectors.mooncake_transfer import MooncakeTransferEngineConnector
from stage_runtime.connectors.yuanrong_engine import (
    YuanrongEngineEnd,
    check_device,
    check_host,
    check_npu,
    check_protocol,
    load_library,
)


class YuanrongTransferEngineConnector(MooncakeTransferEngineConnector):
    """As Mooncake's, with another library below: the pool, the buffers and the conversation are the same.

    Refused at the start where there is no NPU.
    """

    known_settings = MooncakeTransferEngineConnector.known_settings | {"rpc_port"}
    _usual: ClassVar[dict[str, str]] = {"protocol": "ascend", "device_name": "auto", "memory_pool_device": "npu:0"}
    _check_host = staticmethod(check_host)
    _check_protocol = staticmethod(check_protocol)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        load_library()
        check_npu()

    def _make_engine(self, given: dict[str, Any]) -> EngineEnd:
        self.device_name = check_device(self.device_name)
        port = given.get("rpc_port") or 0
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
            raise ConfigError(f"rpc_port is {port!r}; a port is wanted, or 0 for any")
        return YuanrongEngineEnd(self.host, port, self.device_name, self.pool_size, self.pool_device)
