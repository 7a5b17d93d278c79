"""The numbers of hosts that producers name, looked up within the time of a fetch: a DNS may be slow, or never answer.

A look-up can't be cancelled, so each has a thread of its own; a name of which the first one is overdue fails at once. A
name that was found before counts as it was found while it is looked up again, and for as long as that fails. Each
producer has a few look-ups at a time, so that names of its making, which hang, keep no other's waiting.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from omni_discovery.records.addresses import is_number
from stage_runtime.connectors.base import current_producer
from stage_runtime.connectors.errors import TransferError, TransferTimeoutError

#: How long fetches wait for the number of a name that has none: a resolver asks its second server after 5 s.
_TIMEOUT_S: Final = 10.0
#: After how long a name is looked up again, and after how long if that has failed.
_TTL_S: Final = 30.0
_RETRY_S: Final = 5.0
#: How long fetches wait for that: a host that has moved is mostly found at once.
_GRACE_S: Final = 0.2
#: Look-ups at one time, those included that are overdue: of names without a number, in all and of one producer, and
#: apart from those of the others.
_MOST_LOOKUPS: Final = 128
_MOST_OF_PRODUCER: Final = 4
_MOST_REFRESHES: Final = 32
#: Names that are remembered.
_MOST_NAMES: Final = 1024
#: How often a fetch that waits looks whether it was cancelled.
_CHECK_EVERY_S: Final = 0.1

#: Family, type, protocol and address, as ``socket.socket`` and ``connect`` take them.
Found = list[tuple[int, int, int, tuple[Any, ...]]]


def look_up(host: str, port: int) -> Found:
    """The addresses of a host. Blocks. Raise OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, kind, protocol, address) for family, kind, protocol, _, address in found]


@dataclass(slots=True)
class _Lookup:
    """Fetches wait for it until it is overdue. ``is_first``: the name had no number when it was begun.

    ``producer``: whose hand-off was fetched then; empty if that is not known.
    """

    begun_s: float
    is_first: bool
    producer: str
    overdue_s: float
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


@dataclass(slots=True)
class _Name:
    """What was found last and when; and the look-up that runs, or ended last."""

    found: Found = field(default_factory=list)
    found_s: float = 0.0
    lookup: _Lookup | None = None


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
        #: The one asked for longest ago first.
        self._names: dict[tuple[str, int], _Name] = {}

    def addresses(self, host: str, port: int, left_s: float, check: Callable[[], None] = lambda: None) -> Found:
        """The addresses of a producer, within ``left_s`` seconds; ``check`` is called meanwhile, and may raise.

        Raise TransferError or TransferTimeoutError.
        """
        if is_number(host):
            return self._lookup(host, port)
        name, lookup = self._begin(host, port)
        if lookup is not None:
            _wait(lookup.ended, max(0.0, min(left_s, lookup.overdue_s - self._now())), check)
        if name.found:
            return name.found
        if lookup is None or not lookup.ended.is_set():
            raise TransferTimeoutError(f"{host}: the DNS does not answer")
        raise TransferError(f"{host}: {lookup.error or 'no address'}") from lookup.error

    def _begin(self, host: str, port: int) -> tuple[_Name, _Lookup | None]:
        """What is known of a name, and the look-up to wait for; None if what is known is to be used as it is."""
        with self._lock:
            name = self._names.pop((host, port), None)
            if name is None:
                self._make_room()
                name = _Name()
            self._names[host, port] = name
            if not self._is_due(name):
                return name, None if name.lookup is None or name.lookup.ended.is_set() else name.lookup
            is_first, producer = not name.found, current_producer()
            running = self._running(is_first=is_first)
            of_producer = sum(each.producer == producer for each in running)
            if is_first and producer and of_producer >= _MOST_OF_PRODUCER:
                raise TransferError(f"{host}: {of_producer} other names of replica {producer} are being looked up")
            if len(running) >= (_MOST_LOOKUPS if is_first else _MOST_REFRESHES):
                if is_first:
                    raise TransferError(
                        f"{host}: {len(running)} names are being looked up, and the DNS does not answer"
                    )
                return name, None
            now_s = self._now()
            wait_s = self._timeout_s if is_first else min(self._timeout_s, _GRACE_S)
            lookup = name.lookup = _Lookup(now_s, is_first, producer, now_s + wait_s)
        try:
            run = threading.Thread(
                target=self._run, args=(host, port, name, lookup), name=f"look up {host}", daemon=True
            )
            run.start()
        except RuntimeError as error:
            lookup.error = error
            lookup.ended.set()
        return name, lookup

    def _is_due(self, name: _Name) -> bool:
        if name.lookup is None or not name.lookup.ended.is_set():
            return name.lookup is None
        if not name.found:
            return True
        since_s = name.found_s if name.lookup.error is None else name.lookup.begun_s
        return self._now() - since_s >= (_TTL_S if name.lookup.error is None else _RETRY_S)

    def _running(self, *, is_first: bool) -> list[_Lookup]:
        lookups = (name.lookup for name in self._names.values())
        return [each for each in lookups if each is not None and not each.ended.is_set() and each.is_first == is_first]

    def _make_room(self) -> None:
        """Forget names if there are too many: first those without a number, then those not asked for of late."""
        if len(self._names) >= _MOST_NAMES:
            ended = [key for key, name in self._names.items() if name.lookup is None or name.lookup.ended.is_set()]
            ended.sort(key=lambda key: bool(self._names[key].found))
            for key in ended[: len(ended) // 2 + 1]:
                del self._names[key]

    def _run(self, host: str, port: int, name: _Name, lookup: _Lookup) -> None:
        try:
            found = self._lookup(host, port)
            name.found_s, name.found = self._now(), found
        except Exception as error:  # noqa: BLE001 - it becomes the reason of the fetches that wait
            lookup.error = error
        lookup.ended.set()


def _wait(ended: threading.Event, wait_s: float, check: Callable[[], None]) -> None:
    """Wait for a look-up, so long at most. Raise what ``check`` raises."""
    until_s = time.monotonic() + wait_s
    while not ended.wait(max(0.0, min(_CHECK_EVERY_S, until_s - time.monotonic()))):
        check()
        if time.monotonic() >= until_s:
            return
