"""Whether a host, or what a client says to be one, is this machine by a name that only this machine has. Pure.

A page that a browser shows under a name of its own can have that name lead to any address (DNS rebinding). Its requests
then carry that name as Host, and the page may read the answers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Final

#: A name or an IPv4 address, or an IPv6 address in brackets; and a port.
_AUTHORITY: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/?#@\s]+)(?::(\d{1,5}))?")


def is_own_host(authority: str, names: Collection[str]) -> bool:
    """Whether ``host`` or ``host:port`` is an address, a loopback name or one of ``names``.

    Nobody else can have these lead here: who sends an address means that address.
    """
    found = _AUTHORITY.fullmatch(authority)
    host = _plain(found[1]) if found else ""
    return _is_address(host) or _is_local_name(host) or host in {_plain(name) for name in names}


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
