"""Resolver: turns host names into numbers, within bounds, away from the hub's loop and from ZMQ's I/O thread.

libzmq resolves names in the one thread that moves the bytes of all connections: a DNS that does not answer would stop
them all. So each look-up has a thread of its own here, and ZMQ gets numbers only.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

#: Look-ups at the same time, those that are overdue not counted; and with them.
_MOST_LOOKUPS: Final = 8
_MOST_THREADS: Final = 32
#: Threads that names whose last look-up took too long may have.
_MOST_OF_SLOW: Final = 16
#: Names that are remembered.
_MOST_NAMES: Final = 20_000
_FIRST_RETRY_S: Final = 1.0
_MOST_RETRY_S: Final = 60.0


def addresses_of(host: str) -> list[str]:
    """The numbers of a host, the preferred one first. Blocks. Raise OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@dataclass(frozen=True, slots=True)
class Resolution:
    """The numbers of a host as far as they are known now; without any, why there are none."""

    addresses: tuple[str, ...]
    problem: str = ""


@dataclass(slots=True)
class _Name:
    addresses: tuple[str, ...] = ()
    #: Until when the addresses count without another look-up.
    fresh_until_s: float = float("-inf")
    #: Not looked up again before.
    retry_at_s: float = float("-inf")
    #: Look-ups that failed or took too long since the last that did not.
    failures: int = 0
    problem: str = ""
    is_slow: bool = False


class Resolver:
    """Used from one thread, which asks again and again: it never waits. Names are looked up one at a time.

    An answer counts for ``ttl_s``, and beyond that while no newer one comes. ``lookup`` is called on other threads and
    may block for as long as it likes; after ``timeout_s`` the name counts as not to be resolved.
    """

    def __init__(
        self,
        lookup: Callable[[str], Sequence[str]] = addresses_of,
        timeout_s: float = 5.0,
        ttl_s: float = 30.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup = lookup
        self._timeout_s, self._ttl_s, self._now = timeout_s, ttl_s, now
        #: The one that was asked for last is the last one. All that wait or have a thread are among them.
        self._names: OrderedDict[str, _Name] = OrderedDict()
        #: The names that wait for a thread, the slow ones apart, each with its number in the row; and those that have
        #: a thread, with the moment it began.
        self._waiting: OrderedDict[str, int] = OrderedDict()
        self._slow_waiting: OrderedDict[str, int] = OrderedDict()
        self._last_number = 0
        self._running: dict[str, float] = {}
        self._answers: queue.SimpleQueue[tuple[str, Sequence[str] | Exception]] = queue.SimpleQueue()

    def resolve(self, host: str) -> Resolution:
        """What is known of a host now; where that is old, a look-up begins, and a later call gets what it brings."""
        now_s = self._now()
        self._take_answers(now_s)
        name = self._names.get(host)
        if name is None:
            name = self._names[host] = _Name()
            if len(self._names) > _MOST_NAMES:
                self._forget_one()
        self._names.move_to_end(host)
        if host in self._running:
            self._note_overdue(host, name, now_s)
        elif now_s >= max(name.fresh_until_s, name.retry_at_s):
            self._wait(host, name)
        self._start_lookups(now_s)
        if name.addresses:
            return Resolution(name.addresses)
        return Resolution((), name.problem or "it is being looked up")

    def _take_answers(self, now_s: float) -> None:
        while True:
            try:
                host, answer = self._answers.get_nowait()
            except queue.Empty:
                return
            self._running.pop(host, None)
            name = self._names.get(host)
            if name is None:
                continue
            if isinstance(answer, Exception):
                reason = (answer.strerror if isinstance(answer, OSError) else "") or str(answer) or repr(answer)
                self._failed(name, reason, now_s)
                continue
            if not answer:
                self._failed(name, "it has no address", now_s)
                continue
            name.addresses, name.fresh_until_s = tuple(answer), now_s + self._ttl_s
            name.failures, name.problem, name.is_slow = 0, "", False

    def _note_overdue(self, host: str, name: _Name, now_s: float) -> None:
        if now_s - self._running[host] >= self._timeout_s:
            name.is_slow = True
            name.problem = f"the DNS has not answered for {self._timeout_s:g} s"

    def _failed(self, name: _Name, problem: str, now_s: float) -> None:
        name.failures += 1
        name.problem = problem
        name.retry_at_s = now_s + min(_MOST_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(10, name.failures - 1))

    def _wait(self, host: str, name: _Name) -> None:
        # What is slow is known when a look-up ends or is overdue, so none changes while it waits.
        waiting = self._slow_waiting if name.is_slow else self._waiting
        if host not in waiting:
            self._last_number += 1
            waiting[host] = self._last_number

    def _start_lookups(self, now_s: float) -> None:
        if not (self._waiting or self._slow_waiting):
            return
        on_time = sum(now_s - begun_s < self._timeout_s for begun_s in self._running.values())
        while on_time < _MOST_LOOKUPS and len(self._running) < _MOST_THREADS:
            rows = [self._waiting, self._slow_waiting] if len(self._running) < _MOST_OF_SLOW else [self._waiting]
            oldest = min((row for row in rows if row), key=lambda row: next(iter(row.values())), default=None)
            if oldest is None:
                return
            self._start(oldest.popitem(last=False)[0], now_s)
            on_time += 1

    def _start(self, host: str, now_s: float) -> None:
        # A daemon: a look-up that hangs must not hold up the end of the process.
        thread = threading.Thread(target=self._run, args=(host,), name=f"resolve {host}", daemon=True)
        self._running[host] = now_s
        try:
            thread.start()
        except RuntimeError as error:
            self._answers.put((host, error))

    def _run(self, host: str) -> None:
        try:
            self._answers.put((host, self._lookup(host)))
        except Exception as error:  # noqa: BLE001 - it becomes the reason that the log shows
            self._answers.put((host, error))

    def _forget_one(self) -> None:
        """Forget the name that nobody has asked for the longest, of those without a thread; it may wait for one."""
        oldest = next(host for host in self._names if host not in self._running)
        del self._names[oldest]
        self._waiting.pop(oldest, None)
        self._slow_waiting.pop(oldest, None)
