"""The addresses in the records of replicas: what a hub connects to, and what it refuses. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from omni_discovery.errors import ConfigError

_TCP: Final = "tcp://"
_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_MOST_SHOWN: Final = 100


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host, by number or by name, and a port."""

    host: str
    port: int

    @property
    def is_numeric(self) -> bool:
        """Whether the host needs no resolution."""
        return is_number(self.host)

    def endpoint(self, number: str) -> str:
        """What ZMQ connects to: this port at a host's number, never a name, which ZMQ would resolve by itself."""
        return f"{_TCP}[{number}]:{self.port}" if ":" in number else f"{_TCP}{number}:{self.port}"


def parse_address(addr: str) -> TcpAddress:
    """Read ``tcp://host:port``. Raise ConfigError for other transports, wildcards and all else that is no peer.

    A record must not make the hub open files or sockets of its own host, as ``ipc://`` would.
    """
    # In ASCII: it goes into lines and tables, of each hub and again and again.
    shown = ascii(addr if len(addr) <= _MOST_SHOWN else addr[:_MOST_SHOWN] + "...")
    host, colon, port = addr.removeprefix(_TCP).rpartition(":")
    if not addr.startswith(_TCP) or not colon:
        raise ConfigError(f"its address {shown} can't be used: hubs connect to tcp://<host>:<port> only")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        is_host = ":" in host and is_number(host)
    else:
        is_host = is_number(host) or _NAME.fullmatch(host) is not None
    if not is_host:
        raise ConfigError(f"its address {shown} names no host")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise ConfigError(f"its address {shown} names no port")
    return TcpAddress(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether only this machine answers at a host, by number or as localhost."""
    return ipaddress.ip_address(host).is_loopback if is_number(host) else host == "localhost"


def is_number(host: str) -> bool:
    """Whether a host is an address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
