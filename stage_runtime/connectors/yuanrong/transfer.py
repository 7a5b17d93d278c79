"""Hand-offs moved by Yuanrong's transfer engine, from the memory of one Ascend NPU into that of another."""

from __future__ import annotations

import ctypes
import importlib
import ipaddress
import logging
import re
import socket
from typing import Any, ClassVar, Final

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.errors import TransferError
from stage_runtime.connectors.mooncake.engine import EngineEnd
from stage_runtime.connectors.mooncake.transfer import MooncakeTransferEngineConnector
from stage_runtime.connectors.settings import port

logger = logging.getLogger(__name__)

PROTOCOL: Final = "ascend"
_DEVICE: Final = re.compile(r"npu:[0-9]+")
#: The library that the engine loads with its first read.
_NPU_LIBRARY: Final = "libascendcl.so"
#: The module's name, and what it was called before.
_MODULES: Final = ("yr.datasystem", "datasystem")


def load_library() -> Any:
    """The package's module. Raise ConfigError that names what to install."""
    reasons: list[str] = []
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
            _ = module.TransferEngine
        except (ImportError, AttributeError) as error:
            reasons.append(str(error))
        else:
            return module
    raise ConfigError(
        "YuanrongTransferEngineConnector needs the package openyuanrong-datasystem: "
        f"pip install 'omni-discovery[yuanrong]' ({'; '.join(reasons)})"
    )


def check_npu() -> None:
    """Raise ConfigError if there is no usable NPU."""
    try:
        importlib.import_module("torch_npu")
        ctypes.CDLL(_NPU_LIBRARY)
    except (ImportError, OSError) as error:
        raise ConfigError(
            "YuanrongTransferEngineConnector moves hand-offs between Ascend NPUs only, which takes the CANN toolkit "
            f"and torch_npu: {error}. Where there is no NPU, take YuanrongConnector, TcpConnector or AutoConnector"
        ) from error


def check_host(host: str) -> str:
    """The address at which peers reach this process. Raise ConfigError for one that the library can't use."""
    host = host or "127.0.0.1"
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError as error:
        raise ConfigError(f"Yuanrong's engines find each other by IPv4 addresses only, and {host!r} is none") from error


def check_protocol(protocol: Any) -> str:
    """``ascend``. Raise ConfigError."""
    if protocol != PROTOCOL:
        raise ConfigError(f"protocol is {protocol!r}; Yuanrong's engine has {PROTOCOL!r} only")
    return PROTOCOL


def check_device(name: str) -> str:
    """``npu:0``, ``npu:1`` ...; ``auto`` is the first that this process may see. Raise ConfigError."""
    name = "npu:0" if name == "auto" else name
    if not _DEVICE.fullmatch(name):
        raise ConfigError(f"device_name is {name!r}; 'npu:' and a number is wanted, or 'auto'")
    return name


class _Engine:
    """The library's engine with outcomes as numbers, 0 for success. Failures are logged."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def get_rpc_port(self) -> int:
        return int(self._engine.get_rpc_port())

    def register_memory(self, address: int, length: int) -> int:
        return _outcome("register", self._engine.register_memory(address, length))

    def unregister_memory(self, address: int) -> int:
        """Unregister the only pool, and finalize the engine."""
        code = _outcome("unregister", self._engine.unregister_memory(address))
        return code or _outcome("finalize", self._engine.finalize())

    def transfer_sync_read(self, session: str, here: int, there: int, length: int) -> int:
        return _outcome("read", self._engine.transfer_sync_read(session, here, there, length))


class YuanrongEngineEnd(EngineEnd):
    """See EngineEnd. Each connector has its own engine; ``rpc_port`` 0 is a port of the kernel's choice."""

    whose = "Yuanrong"

    def __init__(self, host: str, rpc_port: int, device_name: str, pool_bytes: int, pool_device: str) -> None:
        self._asked_port = rpc_port
        super().__init__(host, PROTOCOL, device_name, pool_bytes, pool_device)

    def _check(self) -> None:
        """Does nothing: the connector checks, after its settings."""

    def _make_engine(self) -> Any:
        engine = load_library().TransferEngine()
        where = f"{self._host}:{self._asked_port or _free_port(self._host)}"
        result = engine.initialize(where, self._protocol, self._device_name)
        if result.is_error():
            raise TransferError(f"Yuanrong's engine does not start on {where}: {_told(result)}")
        return _Engine(engine)


def _outcome(what: str, result: Any) -> int:
    if result.is_error():
        logger.warning("yuanrong.engine_failed call=%s reason=%s", what, _told(result))
        return 1
    return 0


def _told(result: Any) -> str:
    # Each reason of the library ends with lines of its source; the part before them is the cause.
    return str(result.get_msg()).partition(", file=")[0].partition(";")[0]


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class YuanrongTransferEngineConnector(MooncakeTransferEngineConnector):
    """As Mooncake's connector, over another library: the pool, the buffers and the protocol are the same.

    The constructor raises ConfigError if there is no NPU.
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
        rpc_port = port(given, "rpc_port")
        return YuanrongEngineEnd(self.host, rpc_port, self.device_name, self.pool_size, self.pool_device)
