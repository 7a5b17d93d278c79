"""The numbers of hosts that producers name, looked up within the time of a fetch: a DNS may never answer.

A look-up can't be cancelled, so each has a thread of its own; a name of which one is overdue fails at once.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from stage_runtime.connectors.errors import TransferError, TransferTimeoutError

#: How long a fetch waits for the number of a name, and how long an answer counts.
_TIMEOUT_S: Final = 2.0
_TTL_S: Final = 30.0
#: Look-ups at one time, those included that are overdue; and names that are remembered.
_MOST_LOOKUPS: Final = 32
_MOST_NAMES: Final = 1024

#: Family, type, protocol and address, as ``socket.socket`` and ``connect`` take them.
Found = list[tuple[int, int, int, tuple[Any, ...]]]


def look_up(host: str, port: int) -> Found:
    """The addresses of a host. Blocks. Raise OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, kind, protocol, address) for family, kind, protocol, _, address in found]


@dataclass(slots=True)
class _Lookup:
    begun_s: float
    ended: threading.Event = field(default_factory=threading.Event)
    ended_s: float = 0.0
    found: Found = field(default_factory=list)
    error: Exception | None = None


class Names:
    """Used by any thread."""

    def __init__(
        self,
        lookup: Callable[[str, int], Found] = look_up,
        timeout_s: float = _TIMEOUT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup, self._timeout_s, self._now = lookup, timeout_s, now
        self._lock = threading.Lock()
        self._lookups: dict[tuple[str, int], _Lookup] = {}

    def addresses(self, host: str, port: int, left_s: float) -> Found:
        """The addresses of a producer, within ``left_s`` seconds. Raise TransferError or TransferTimeoutError."""
        if _is_number(host):
            return self._lookup(host, port)
        asked = self._lookup_of(host, port)
        overdue_s = asked.begun_s + self._timeout_s - self._now()
        if not asked.ended.wait(max(0.0, min(left_s, overdue_s))):
            raise TransferTimeoutError(f"{host}: the DNS does not answer")
        if asked.error is not None:
            raise TransferError(f"{host}: {asked.error}") from asked.error
        return asked.found

    def _lookup_of(self, host: str, port: int) -> _Lookup:
        with self._lock:
            known = self._lookups.get((host, port))
            if known is not None and (not known.ended.is_set() or self._is_fresh(known)):
                return known
            running = sum(not each.ended.is_set() for each in self._lookups.values())
            if running >= _MOST_LOOKUPS:
                raise TransferError(f"{host}: {running} names are being looked up, and the DNS does not answer")
            self._make_room()
            made = self._lookups[host, port] = _Lookup(self._now())
        try:
            threading.Thread(target=self._run, args=(host, port, made), name=f"look up {host}", daemon=True).start()
        except RuntimeError as error:
            made.error = error
            self._end(made)
        return made

    def _is_fresh(self, known: _Lookup) -> bool:
        return known.error is None and self._now() - known.ended_s < _TTL_S

    def _make_room(self) -> None:
        if len(self._lookups) >= _MOST_NAMES:
            ended = [name for name, each in self._lookups.items() if each.ended.is_set()]
            for name in ended[: len(ended) // 2 + 1]:
                del self._lookups[name]

    def _run(self, host: str, port: int, made: _Lookup) -> None:
        try:
            made.found = self._lookup(host, port)
        except Exception as error:  # noqa: BLE001 - it becomes the reason of the fetches that wait
            made.error = error
        self._end(made)

    def _end(self, made: _Lookup) -> None:
        made.ended_s = self._now()
        made.ended.set()


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
