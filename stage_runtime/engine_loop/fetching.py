"""Fetches hand-offs in threads, so that neither the engine nor its other requests wait for a slow producer.

Used by the engine's thread, which gets what has come as a Fetched among its jobs. Each fetch has a thread of its own.
There are at most 16 that have not taken long, and 4 for one producer: the fetches of others go past those of a producer
that is slow. Producers that have been slow share few threads, by however many addresses they go.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from omni_discovery.records.handoff_addresses import named_addresses
from omni_discovery.wire import PayloadRef
from stage_runtime.config import PayloadError
from stage_runtime.engine_loop.jobs import Fetched, HandOffs, Outcome
from stage_runtime.engine_loop.payloads import Payloads

logger = logging.getLogger(__name__)

#: Fetches at one time, of all and of one producer; those that have taken long do not count among the former.
MAX_FETCHES: Final = 16
MAX_OF_PRODUCER: Final = 4
#: A fetch has taken long after so many seconds.
LONG_S: Final = 0.5
#: With those that have taken long; and of producers whose fetches took long last, in all and of one.
MAX_THREADS: Final = 32
MAX_OF_SLOW: Final = 8
MAX_OF_SLOW_PRODUCER: Final = 1
#: Producers that are remembered as slow.
_MOST_SLOW: Final = 4096

#: What is done with the hand-offs, or with the reason why there are none.
Then = Callable[[HandOffs | Exception], Sequence[Outcome]]
#: Runs a function beside the engine's thread. Raise RuntimeError if there can be no more threads.
RunAside = Callable[[Callable[[], None]], None]


def in_thread(run: Callable[[], None]) -> None:
    """Run a function in a thread of its own, which ends with the process at the latest."""
    threading.Thread(target=run, name="fetch", daemon=True).start()


@dataclass(frozen=True, slots=True)
class _HandOffFetch:
    """A fetch that was asked for. ``producers`` are the places that it is fetched from."""

    number: int
    key: str
    refs: Sequence[PayloadRef]
    deadline_s: float
    producers: frozenset[str]
    then: Then


class HandOffFetches:
    """All fetches of one engine's requests. ``deliver`` is called from other threads."""

    def __init__(
        self,
        payloads: Payloads,
        deliver: Callable[[Fetched], None],
        run_aside: RunAside = in_thread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._payloads = payloads
        self._deliver = deliver
        self._run_aside = run_aside
        self._last_number = 0
        #: Those that wait for a thread, the oldest first, and those that have one, by number.
        self._waiting: list[_HandOffFetch] = []
        self._running: dict[int, _HandOffFetch] = {}
        self._began_s: dict[int, float] = {}
        self._clock = clock
        #: Producers whose last fetch took long, the oldest first.
        self._slow: dict[str, None] = {}
        #: Of the running ones, those whose request has ended.
        self._forgotten: set[int] = set()

    def fetch(self, key: str, refs: Sequence[PayloadRef], deadline_s: float, then: Then) -> None:
        """Fetch hand-offs of a request; ``then`` is called by ``finish``, unless the request was forgotten."""
        self._last_number += 1
        self._waiting.append(_HandOffFetch(self._last_number, key, refs, deadline_s, _producers_of(refs), then))
        self.start_due()

    def finish(self, fetched: Fetched) -> Sequence[Outcome]:
        """A fetch has ended: go on with its request; the outcomes of that."""
        asked = self._running.pop(fetched.fetch, None)
        is_forgotten = fetched.fetch in self._forgotten
        self._forgotten.discard(fetched.fetch)
        began_s = self._began_s.pop(fetched.fetch, inf)
        if asked is not None:
            self._note_pace(asked, is_slow=self._clock() - began_s >= LONG_S)
        self.start_due()
        return () if asked is None or is_forgotten else asked.then(fetched.result)

    def forget_request(self, key: str) -> None:
        """Drop the fetches of a request that is over. Those that run end by themselves."""
        if self._waiting:
            self._waiting = [asked for asked in self._waiting if asked.key != key]
        self._forgotten.update(number for number, asked in self._running.items() if asked.key == key)

    def _note_pace(self, asked: _HandOffFetch, *, is_slow: bool) -> None:
        for producer in asked.producers:
            self._slow.pop(producer, None)
            if is_slow:
                self._slow[producer] = None
        while len(self._slow) > _MOST_SLOW:
            del self._slow[next(iter(self._slow))]

    def start_due(self) -> None:
        """Start those that wait and may have a thread now; that changes with time, too."""
        if not self._waiting:
            return
        now_s = self._clock()
        late = {number for number, began_s in self._began_s.items() if now_s - began_s >= LONG_S}
        slow = {producer for number in late for producer in self._running[number].producers} | self._slow.keys()
        running = Counter(producer for asked in self._running.values() for producer in asked.producers)
        of_slow = sum(not slow.isdisjoint(asked.producers) for asked in self._running.values())
        for asked in list(self._waiting):
            if len(self._running) >= MAX_THREADS or len(self._running) - len(late) >= MAX_FETCHES:
                return
            is_slow = not slow.isdisjoint(asked.producers)
            most = MAX_OF_SLOW_PRODUCER if is_slow else MAX_OF_PRODUCER
            if (is_slow and of_slow >= MAX_OF_SLOW) or any(running[each] >= most for each in asked.producers):
                continue
            self._waiting.remove(asked)
            self._running[asked.number], self._began_s[asked.number] = asked, now_s
            running.update(asked.producers)
            of_slow += is_slow
            self._start(asked)

    def _start(self, asked: _HandOffFetch) -> None:
        try:
            self._run_aside(lambda: self._deliver(Fetched(asked.number, self._result_of(asked))))
        except RuntimeError as error:
            logger.warning("payload.no_thread reason=%s", error)
            self._deliver(Fetched(asked.number, PayloadError(f"the hand-off can't be fetched: {error}")))

    def _result_of(self, asked: _HandOffFetch) -> HandOffs | Exception:
        try:
            return self._payloads.fetch(asked.refs, asked.deadline_s)
        except Exception as error:  # noqa: BLE001 - it ends the request, in the engine's thread
            return error


def _producers_of(refs: Sequence[PayloadRef]) -> frozenset[str]:
    """The addresses that hand-offs are fetched from; for those of none, such as shared memory, their stage."""
    found = set[str]()
    for ref in refs:
        addresses = set(map(str, named_addresses(ref.metadata)))
        found |= addresses or {str(ref.from_stage)}
    return frozenset(found)
