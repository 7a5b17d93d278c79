"""Mooncake's own package, asked for when it is needed, and what can be checked before."""

from __future__ import annotations

import importlib
import ipaddress
from pathlib import Path
from typing import Any, Final

from omni_discovery.errors import ConfigError

_WANTED: Final = "pip install 'omni-discovery[mooncake]' and Debian's libibverbs1 (apt-get install libibverbs1)"
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
PROTOCOLS: Final = ("tcp", "rdma")


def load(module: str) -> Any:
    """A module of the package. Raise ConfigError, which says what to install."""
    try:
        return importlib.import_module(f"mooncake.{module}")
    except ImportError as error:
        raise ConfigError(f"Mooncake's connectors need {_WANTED}: {error}") from error


def check_protocol(protocol: Any) -> str:
    """``tcp`` or ``rdma``. Raise ConfigError."""
    if protocol not in PROTOCOLS:
        raise ConfigError(f"protocol is {protocol!r}; one of {', '.join(PROTOCOLS)} is wanted")
    return str(protocol)


def check_devices(protocol: str, names: str, folder: Path = _RDMA_DEVICES) -> None:
    """Raise ConfigError for RDMA without the devices that it is to use: the library would take TCP, and not say so."""
    if protocol != "rdma":
        return
    there = {device.name for device in folder.iterdir()} if folder.is_dir() else set()
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    if not there or not wanted <= there:
        told = ", ".join(sorted(there)) or "none"
        raise ConfigError(
            f"protocol is rdma, and {names or 'an RDMA device'} is not here; there are: {told}; or use tcp"
        )


def check_host(host: str) -> str:
    """The address that peers know this process by. Raise ConfigError for one that the library can't use."""
    host = host.strip("[]") or "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version != 4:
        raise ConfigError(f"Mooncake's processes find each other by IPv4 only, and {host} is none: use TcpConnector")
    return host
