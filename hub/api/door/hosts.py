"""Whether a request means this host by a name that only this host has, and comes from no page of another. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from omni_discovery.sockets.hosts import is_own_host

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://([^/?#\s]+)")


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
