"""Whether a request means this host by a name that only this host has. Pure.

A page that a browser shows under a name of its own can have that name lead to any address (DNS rebinding). Its requests
then carry that name as Host, and the page may read the answers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Final

#: A name or an IPv4 address, or an IPv6 address in brackets; and a port.
_AUTHORITY: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/?#@\s]+)(?::(\d{1,5}))?")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://([^/?#\s]+)")


def is_own_host(authority: str, names: Collection[str]) -> bool:
    """Whether ``host`` or ``host:port`` is an address, a loopback name or one of ``names``.

    Nobody else can have these lead here: who sends an address means that address.
    """
    found = _AUTHORITY.fullmatch(authority)
    host = _plain(found[1]) if found else ""
    return _is_address(host) or _is_local_name(host) or host in {_plain(name) for name in names}


def is_own_page(origin: str, authority: str) -> bool:
    """Whether a page of this origin is one of the host and port that a request was sent to.

    The scheme may differ: a proxy may add TLS.
    """
    found = _ORIGIN.fullmatch(origin.lower())
    return found is not None and found[1] == authority.lower()


def means_this_host(headers: Iterable[tuple[bytes, bytes]], names: Collection[str]) -> bool:
    """Whether Host names this host, and Origin, where a browser sends one, the same host and port."""
    given = [(name.lower(), value.decode("latin-1")) for name, value in headers]
    hosts = [value for name, value in given if name == b"host"]
    origins = [value for name, value in given if name == b"origin"]
    if len(hosts) != 1 or not is_own_host(hosts[0], names):
        return False
    return all(is_own_page(origin, hosts[0]) for origin in origins)


def comes_from_elsewhere(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a browser says that a page of another origin sent the request; others than browsers don't say."""
    sites = [value.lower() for name, value in headers if name.lower() == b"sec-fetch-site"]
    return any(site not in (b"same-origin", b"none") for site in sites)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to this host."""
    return _is_local_name(host) or (_is_address(host) and ipaddress.ip_address(host.strip("[]")).is_loopback)


def _plain(host: str) -> str:
    return host.lower().rstrip(".")


@lru_cache(maxsize=64)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_local_name(name: str) -> bool:
    """Whether it is a name that always leads to the machine that asks."""
    return name == "localhost" or name.endswith(".localhost")
