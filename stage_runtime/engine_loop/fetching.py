"""Fetches hand-offs in threads, so that neither the engine nor its other requests wait for a slow producer.

Used by the engine's thread, which gets what has come as a Fetched among its jobs. Each fetch has a thread of its own.
There are at most 16 that have not taken long, and 4 for one producer: the fetches of others go past those of a producer
that is slow. Producers that have been slow share few threads, by however many addresses they go. Some threads are kept
for producers whose hand-offs have come lately; and of those from which none ever came, too many that take long are
given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from math import inf
from typing import Final

from omni_discovery.records.handoff_addresses import MOST_ADDRESSES, named_addresses
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
#: Of all producers but the good ones: those that are not slow, and of which a hand-off has come in so many seconds.
MAX_OF_OTHERS: Final = 24
GOOD_S: Final = 300.0
#: So many of the good ones begin even while ``MAX_FETCHES`` have not taken long.
MAX_OF_GOOD_AT_ONCE: Final = 4
#: While others wait, so many may have taken long of producers from which nothing ever came; of more, the oldest are
#: given up, once they have taken so many seconds.
MAX_LONG: Final = 12
GIVE_UP_S: Final = 2.0
#: Producers that are remembered as slow, and as good.
_MOST_SLOW: Final = 4096
_MOST_GOOD: Final = 4096
#: How those without an address are named: a fetch from shared memory or a store says nothing of who left the hand-off.
_OF_STAGE: Final = "stage "

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


@dataclass(slots=True)
class _Thread:
    """A fetch in its thread, which writes ``began_s`` and, before it delivers the result, ``has_ended``.

    The engine's thread reads results between its steps only, so it can't tell by them how long a fetch took.
    """

    asked: _HandOffFetch
    started_s: float
    began_s: float | None = None
    has_ended: bool = False
    is_given_up: bool = False

    def age_s(self, now_s: float) -> float:
        return now_s - (self.started_s if self.began_s is None else self.began_s)


class _Kind(IntEnum):
    """Of the producers of a fetch, the worst."""

    GOOD = 0
    NEW = 1
    SLOW = 2


class _Places:
    """The threads that run now, and who may have one more."""

    def __init__(self, threads: Sequence[_Thread], kind_of: Callable[[_HandOffFetch], _Kind], now_s: float) -> None:
        self._kind_of = kind_of
        self._of_producer: Counter[str] = Counter()
        #: By kind, of all and of those that have not taken long.
        self._all: Counter[_Kind] = Counter()
        self._prompt: Counter[_Kind] = Counter()
        for each in threads:
            self._count(each.asked, kind_of(each.asked), is_prompt=each.age_s(now_s) < LONG_S)
        #: The kinds of which one more may begin now.
        self.open = self._open_kinds()

    def _count(self, asked: _HandOffFetch, kind: _Kind, *, is_prompt: bool) -> None:
        self._of_producer.update(asked.producers)
        self._all[kind] += 1
        self._prompt[kind] += is_prompt

    def take(self, asked: _HandOffFetch) -> bool:
        """Whether this fetch may begin now; it is counted then."""
        kind = self._kind_of(asked)
        most = MAX_OF_SLOW_PRODUCER if kind is _Kind.SLOW else MAX_OF_PRODUCER
        if kind not in self.open or any(self._of_producer[each] >= most for each in asked.producers):
            return False
        self._count(asked, kind, is_prompt=True)
        self.open = self._open_kinds()
        return True

    def _open_kinds(self) -> set[_Kind]:
        threads, good = self._all.total(), self._all[_Kind.GOOD]
        if threads >= MAX_THREADS:
            return set()
        if self._prompt.total() >= MAX_FETCHES:
            return {_Kind.GOOD} if self._prompt[_Kind.GOOD] < MAX_OF_GOOD_AT_ONCE else set()
        if threads - good >= MAX_OF_OTHERS:
            return {_Kind.GOOD}
        return {_Kind.GOOD, _Kind.NEW} if self._all[_Kind.SLOW] >= MAX_OF_SLOW else set(_Kind)


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
        self._running: dict[int, _Thread] = {}
        self._clock = clock
        #: Producers whose last fetch took long, the oldest first; and when a hand-off of a producer came last.
        self._slow: OrderedDict[str, None] = OrderedDict()
        self._good_s: OrderedDict[str, float] = OrderedDict()
        #: Of the running ones, those whose request has ended or has got its result.
        self._forgotten: set[int] = set()

    def fetch(self, key: str, refs: Sequence[PayloadRef], deadline_s: float, then: Then) -> None:
        """Fetch hand-offs of a request; ``then`` is called by ``finish``, unless the request was forgotten."""
        self._last_number += 1
        self._waiting.append(_HandOffFetch(self._last_number, key, refs, deadline_s, _producers_of(refs), then))
        # Where many wait, the loop's next ``start_due`` looks at all of them once, not once for each that is added.
        if len(self._waiting) <= MAX_THREADS:
            self.start_due()

    def finish(self, fetched: Fetched) -> Sequence[Outcome]:
        """A fetch has ended, or was given up: go on with its request; the outcomes of that."""
        thread = self._running.get(fetched.fetch)
        if thread is None:
            return ()
        is_forgotten = fetched.fetch in self._forgotten
        if thread.has_ended:
            del self._running[fetched.fetch]
            self._forgotten.discard(fetched.fetch)
        else:
            self._forgotten.add(fetched.fetch)
        self._note(thread, fetched)
        self.start_due()
        return () if is_forgotten else thread.asked.then(fetched.result)

    def forget_request(self, key: str) -> None:
        """Drop the fetches of a request that is over. Those that run end by themselves."""
        if self._waiting:
            self._waiting = [asked for asked in self._waiting if asked.key != key]
        self._forgotten.update(number for number, thread in self._running.items() if thread.asked.key == key)

    def _note(self, thread: _Thread, fetched: Fetched) -> None:
        """Remember how its producers did."""
        is_slow = thread.is_given_up or (fetched.took_s is not None and fetched.took_s >= LONG_S)
        for producer in thread.asked.producers:
            self._slow.pop(producer, None)
            if is_slow and _may_be_slow(producer):
                self._slow[producer] = None
            if not isinstance(fetched.result, Exception):
                self._good_s.pop(producer, None)
                self._good_s[producer] = self._clock()
        while len(self._slow) > _MOST_SLOW:
            self._slow.popitem(last=False)
        while len(self._good_s) > _MOST_GOOD:
            self._good_s.popitem(last=False)

    def start_due(self) -> None:
        """Start those that wait and may have a thread now; that changes with time, too."""
        if not self._waiting:
            return
        now_s = self._clock()
        threads = [each for each in self._running.values() if not each.has_ended]
        late = [each for each in threads if each.age_s(now_s) >= LONG_S]
        slow = {producer for each in late for producer in each.asked.producers if _may_be_slow(producer)}
        slow |= self._slow.keys()

        def kind_of(asked: _HandOffFetch) -> _Kind:
            if not slow.isdisjoint(asked.producers):
                return _Kind.SLOW
            return _Kind.GOOD if self._is_good(asked, now_s) else _Kind.NEW

        places, waiting = _Places(threads, kind_of, now_s), list[_HandOffFetch]()
        for at, asked in enumerate(self._waiting):
            if not places.open:
                waiting += self._waiting[at:]
                break
            if not places.take(asked):
                waiting.append(asked)
                continue
            self._running[asked.number] = thread = _Thread(asked, now_s)
            self._start(thread)
        self._waiting = waiting
        if len(late) > MAX_LONG and any(kind_of(asked) is not _Kind.SLOW for asked in waiting):
            self._give_up_some(late, now_s)

    def _is_good(self, asked: _HandOffFetch, now_s: float) -> bool:
        return all(now_s - self._good_s.get(producer, -inf) < GOOD_S for producer in asked.producers)

    def _give_up_some(self, late: Sequence[_Thread], now_s: float) -> None:
        """Of fetches from which nothing ever came, and that are late, the oldest ones leave their threads to others."""
        of_unknown = [each for each in late if not self._good_s.keys() >= each.asked.producers]
        due = [each for each in of_unknown if not each.is_given_up]
        due = [each for each in due[: max(0, len(due) - MAX_LONG)] if each.age_s(now_s) >= GIVE_UP_S]
        if not due:
            return
        # Fetches are cancelled by their keys: none of those keys may be that of a fetch which is well.
        unknown = {each.asked.number for each in of_unknown}
        kept = {ref.key for number, each in self._running.items() if number not in unknown for ref in each.asked.refs}
        for thread in due:
            thread.is_given_up = True
            stages = {ref.from_stage for ref in thread.asked.refs}
            text = f"the hand-off did not come in {GIVE_UP_S:g} s, and others wait for its place"
            error = PayloadError(text, stages.pop() if len(stages) == 1 else None)
            self._deliver(Fetched(thread.asked.number, error))
            self._payloads.cancel_fetch([ref for ref in thread.asked.refs if ref.key not in kept])

    def _start(self, thread: _Thread) -> None:
        try:
            self._run_aside(lambda: self._run(thread))
        except RuntimeError as error:
            logger.warning("payload.no_thread reason=%s", error)
            thread.has_ended = True
            text = f"the hand-off can't be fetched: {error}"
            self._deliver(Fetched(thread.asked.number, PayloadError(text)))

    def _run(self, thread: _Thread) -> None:
        """In the fetch's own thread."""
        began_s = thread.began_s = self._clock()
        result = self._result_of(thread.asked)
        took_s = self._clock() - began_s
        thread.has_ended = True
        self._deliver(Fetched(thread.asked.number, result, took_s))

    def _result_of(self, asked: _HandOffFetch) -> HandOffs | Exception:
        try:
            return self._payloads.fetch(asked.refs, asked.deadline_s)
        except Exception as error:  # noqa: BLE001 - it ends the request, in the engine's thread
            return error


def _producers_of(refs: Sequence[PayloadRef]) -> frozenset[str]:
    """The addresses that hand-offs are fetched from; for those of none, such as shared memory, their stage."""
    found = set[str]()
    for ref in refs:
        addresses = set(map(str, islice(named_addresses(ref.metadata), MOST_ADDRESSES)))
        found |= addresses or {f"{_OF_STAGE}{ref.from_stage}"}
    return frozenset(found)


def _may_be_slow(producer: str) -> bool:
    return not producer.startswith(_OF_STAGE)
