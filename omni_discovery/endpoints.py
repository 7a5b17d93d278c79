"""Where etcd listens, as people write it: ``host:port``, a comma list, or a list; with ``https://`` it is TLS."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from omni_discovery.errors import ConfigError

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?")
_RIGHT = "write host:port, for example 10.0.0.5:2379 or [fd00::5]:2379, several with commas"


def parse_endpoints(endpoints: str | Sequence[str]) -> tuple[str, ...]:
    """Return each endpoint once as ``host:port``, in the order given. Raise ConfigError."""
    words = [endpoints] if isinstance(endpoints, str) else list(endpoints)
    if not all(isinstance(word, str) for word in words):
        raise ConfigError(f"etcd endpoints {endpoints!r} are not text: {_RIGHT}")
    parts = [part.strip() for word in words for part in word.split(",")]
    found = dict.fromkeys(_parse_one(part) for part in parts if part)
    if not found:
        raise ConfigError(f"no etcd endpoint in {endpoints!r}: {_RIGHT}")
    return tuple(found)


def scheme_of(endpoints: str | Sequence[str]) -> str:
    """``https``, ``http``, or empty where no endpoint says either. Raise ConfigError if they differ."""
    words = [endpoints] if isinstance(endpoints, str) else list(endpoints)
    parts = [part.strip() for word in words for part in word.split(",")]
    found = {part.partition("://")[0] for part in parts if "://" in part}
    if len(found) > 1:
        raise ConfigError(f"etcd endpoints {endpoints!r} mix http:// and https://; a cluster speaks one of them")
    return found.pop() if found else ""


def _parse_one(text: str) -> str:
    rest = text.removeprefix("http://").removeprefix("https://").removesuffix("/")
    host, colon, port = rest.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"etcd endpoint {text!r} has no usable port: {_RIGHT}")
    if not _is_host(host):
        raise ConfigError(f"etcd endpoint {text!r} has no usable host: {_RIGHT}")
    return f"{host}:{int(port)}"


def _is_host(host: str) -> bool:
    if not host.startswith("["):
        return _HOST.fullmatch(host) is not None
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return False
    return host.endswith("]")
