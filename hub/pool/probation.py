"""Probation: when and where the suspects of one stage are tried, so that one request can't take the whole stage. Pure.

A request is a suspect if a replica ended under it before any output of it came. Each replica runs at most one suspect
at a time, until output comes or its work is over: a second death then has one explanation. One healthy replica is kept
free of suspects. Where only one is left, suspects wait for another, but not for ever: then they go to the last one, one
after the other. Decision 13 says why.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

#: So many deaths that were explained are remembered, for suspects that are told of them later.
_REMEMBERED: Final = 64


@dataclass(frozen=True, slots=True)
class Suspect:
    """A request that waits for its trial. Moments are monotonic seconds."""

    request_id: str
    #: The lives of replicas that ended under it, each by a name of its own.
    blamed_for: tuple[str, ...]
    #: Replicas that it must not go to, by input address.
    avoid: Collection[str]
    #: Since when it waits, and until when it waits for a second replica at most.
    since_s: float
    until_s: float
    #: How many healthy replicas it waits for: 2, or 1 if the stage had no other than the one that ended.
    wanted: int = 2


@dataclass(frozen=True, slots=True)
class Healthy:
    """A stage's replicas that take work, by input address, and whether another one is being started."""

    addrs: frozenset[str]
    is_another_starting: bool = False


@dataclass(frozen=True, slots=True)
class Try:
    """Pick a replica for the request, none of ``avoid``; ``is_trial``: no other suspect may come there meanwhile."""

    request_id: str
    avoid: frozenset[str] = frozenset()
    is_trial: bool = True


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No replica at all was healthy for as long as a request waits for one."""

    request_id: str


@dataclass(slots=True)
class Probation:
    """The suspects of one stage: those that wait, and those on trial."""

    #: How long a suspect waits for a second replica while none is being started, in seconds.
    patience_s: float
    #: By request id, in the order in which they came.
    _waiting: dict[str, Suspect] = field(default_factory=dict)
    #: By request id, the input address where it is on trial; empty while that is being picked.
    _trials: dict[str, str] = field(default_factory=dict)
    _explained: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    #: When another replica was last seen being started.
    _starting_seen_s: float = float("-inf")

    def __len__(self) -> int:
        """How many suspects wait."""
        return len(self._waiting)

    def __repr__(self) -> str:
        return f"Probation({len(self._waiting)} waiting, on trial: {self._trials})"

    def hold(self, suspect: Suspect) -> None:
        """Let a suspect wait for its trial; one that it had is over."""
        self._trials.pop(suspect.request_id, None)
        self._waiting[suspect.request_id] = suspect

    def placed(self, request_id: str, addr: str) -> None:
        """The suspect's work goes to this replica. Does nothing for a request that is not on trial."""
        if request_id in self._trials:
            self._trials[request_id] = addr

    def is_on_trial(self, request_id: str) -> bool:
        """Whether the suspect's trial was begun and is not over."""
        return request_id in self._trials

    def is_placed(self, request_id: str) -> bool:
        """Whether the suspect is on trial, and its replica was picked."""
        return bool(self._trials.get(request_id))

    def ended(self, request_id: str) -> None:
        """The suspect's trial is over, or it need not wait any more. Requests that are no suspects are fine."""
        self._trials.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def explain(self, deaths: Collection[str]) -> None:
        """The end of these replicas is explained: who is a suspect only for that may go where it likes."""
        self._explained.extend(deaths)

    def due(self, healthy: Healthy, now_s: float) -> list[Try | GiveUp]:
        """Remove and return the suspects whose wait is over; at most one of them begins its trial.

        Call it after each change, and while suspects wait also as time passes.
        """
        if healthy.is_another_starting:
            self._starting_seen_s = now_s
        over = self._cleared() + self._hopeless(healthy, now_s)
        for step in over:
            del self._waiting[step.request_id]
        trial = self._next_trial(healthy, now_s)
        if trial is not None:
            del self._waiting[trial.request_id]
            self._trials[trial.request_id] = ""
            over.append(trial)
        return over

    def _cleared(self) -> list[Try | GiveUp]:
        explained = set(self._explained)
        cleared = [each for each in self._waiting.values() if explained.issuperset(each.blamed_for)]
        return [Try(each.request_id, is_trial=False) for each in cleared]

    def _hopeless(self, healthy: Healthy, now_s: float) -> list[Try | GiveUp]:
        if healthy.addrs:
            return []
        late = [each for each in self._waiting.values() if now_s - each.since_s >= self.patience_s]
        return [GiveUp(each.request_id) for each in late]

    def _next_trial(self, healthy: Healthy, now_s: float) -> Try | None:
        addrs = healthy.addrs
        if not addrs or "" in self._trials.values():
            return None
        busy = addrs & set(self._trials.values())
        is_spare_left = len(busy) + 1 < len(addrs)
        for suspect in self._likeliest_first():
            has_waited = self._has_waited(suspect, now_s)
            if addrs <= busy | set(suspect.avoid) and not (has_waited and not busy):
                continue
            if is_spare_left or (not busy and (suspect.wanted < 2 or has_waited)):
                return Try(suspect.request_id, busy)
        return None

    def _likeliest_first(self) -> Iterator[Suspect]:
        """Those of the earliest death first; of one death the youngest request, as it was at its beginning."""
        by_death: dict[str, list[Suspect]] = defaultdict(list)
        for suspect in self._waiting.values():
            by_death[suspect.blamed_for[-1]].append(suspect)
        return chain.from_iterable(reversed(suspects) for suspects in by_death.values())

    def _has_waited(self, suspect: Suspect, now_s: float) -> bool:
        quiet_since_s = max(suspect.since_s, self._starting_seen_s)
        return now_s >= suspect.until_s or now_s - quiet_since_s >= self.patience_s
