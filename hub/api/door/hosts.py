"""Whether a request means this host by a name that only this host has. Pure.

A page that a browser shows under a name of its own can have that name lead to any address (DNS rebinding). Its requests
then carry that name as Host, and the page may read the answers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit


def host_of(authority: str) -> str:
    """The host of ``host``, ``host:port`` or ``[address]:port``, in lower case; empty if it is none."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Whether ``host`` is an address, ``localhost`` or one of ``names``: nobody else can have these lead here."""
    if host == "localhost" or host in {name.lower().rstrip(".") for name in names}:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def means_this_host(headers: Iterable[tuple[bytes, bytes]], names: Collection[str]) -> bool:
    """Whether Host names this host, and Origin, where a browser sends one, the same host and port."""
    given = [(name.lower(), value.decode("latin-1")) for name, value in headers]
    hosts = [value for name, value in given if name == b"host"]
    origins = [value for name, value in given if name == b"origin"]
    if len(hosts) != 1 or not is_own_host(host_of(hosts[0]), names):
        return False
    return all(_authority_of(origin) == hosts[0] for origin in origins)


def _authority_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
