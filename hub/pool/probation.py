"""Probation: when and where the suspects of one stage are tried, so that one request can't take the whole stage. Pure.

A request is a suspect if a replica ended under it before any output of it came. Each replica runs at most one suspect
at a time, until output comes or its work is over: a second death then has one explanation. One healthy replica is kept
free of suspects. Where only one is left, suspects wait for another, but not for ever: then they go to the last one, one
after the other. Where many wait, those that would wait too long are tried beside others, but never at the replica that
is kept free. Decision 13 says why.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

#: So many deaths that were explained are remembered, for suspects that are told of them later.
_REMEMBERED: Final = 64
#: So long each suspect is tried alone at least, in seconds, and so much longer than the lost attempts had lasted: a
#: request that hangs is found out by then.
_ALONE_S: Final = 1.0
_ALONE_TIMES: Final = 2.0


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
    #: How long its lost attempt had lasted, in seconds.
    lost_after_s: float = 0.0
    #: The next death proves that it was the cause, so it must be the only suspect there.
    must_be_alone: bool = False


@dataclass(frozen=True, slots=True)
class Healthy:
    """A stage's replicas that take work, by input address, and whether another one is being started.

    ``ejected`` take work, too, where a request must go to none of ``addrs``.
    """

    addrs: frozenset[str]
    is_another_starting: bool = False
    ejected: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Try:
    """Pick a replica for the request, none of ``avoid``; ``is_trial`` False: it is no suspect any more."""

    request_id: str
    avoid: frozenset[str] = frozenset()
    is_trial: bool = True


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No replica that the request may go to was healthy for as long as a request waits for one."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Together:
    """Another suspect has come to the replica where this one is on trial."""

    request_id: str


@dataclass(slots=True)
class _Trial:
    suspect: Suspect
    #: The input address where it is on trial; empty while that is being picked.
    addr: str = ""


@dataclass(slots=True)
class Probation:
    """The suspects of one stage: those that wait, and those on trial."""

    #: How long a suspect waits for a second replica while none is being started, in seconds.
    patience_s: float
    #: By request id, in the order in which they came.
    _waiting: dict[str, Suspect] = field(default_factory=dict)
    #: By request id.
    _trials: dict[str, _Trial] = field(default_factory=dict)
    #: How many trials were begun of the suspects of one death; empty while there are no suspects.
    _begun: Counter[str] = field(default_factory=Counter)
    #: Since when there has always been a trial while suspects waited; None while there is none.
    _trying_since_s: float | None = None
    _explained: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    #: When another replica was last seen being started.
    _starting_seen_s: float = float("-inf")

    def __len__(self) -> int:
        """How many suspects wait."""
        return len(self._waiting)

    def __repr__(self) -> str:
        trials = ", ".join(f"{request_id} at {trial.addr}" for request_id, trial in self._trials.items())
        return f"Probation({len(self._waiting)} waiting, on trial: {trials or 'none'})"

    def hold(self, suspect: Suspect) -> None:
        """Let a suspect wait for its trial; one that it had is over."""
        self._trials.pop(suspect.request_id, None)
        self._waiting[suspect.request_id] = suspect

    def placed(self, request_id: str, addr: str) -> list[Together]:
        """The suspect's work goes to this replica; return who is on trial there now, if there are several.

        Does nothing for a request that is not on trial.
        """
        placed = self._trials.get(request_id)
        if placed is None:
            return []
        placed.addr = addr
        self._begun[placed.suspect.blamed_for[-1]] += 1
        there = [each for each, trial in self._trials.items() if trial.addr == addr]
        return [Together(each) for each in there] if len(there) > 1 else []

    def is_on_trial(self, request_id: str) -> bool:
        """Whether the suspect's trial was begun and is not over."""
        return request_id in self._trials

    def is_placed(self, request_id: str) -> bool:
        """Whether the suspect is on trial, and its replica was picked."""
        trial = self._trials.get(request_id)
        return trial is not None and bool(trial.addr)

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
            suspect = self._waiting.pop(trial.request_id)
            self._trials[trial.request_id] = _Trial(suspect)
            over.append(trial)
        self._note_progress(now_s)
        return over

    def _note_progress(self, now_s: float) -> None:
        if not self._trials:
            self._trying_since_s = None
            if not self._waiting:
                self._begun.clear()
        elif self._trying_since_s is None:
            self._trying_since_s = now_s

    def _cleared(self) -> list[Try | GiveUp]:
        explained = set(self._explained)
        cleared = [each for each in self._waiting.values() if explained.issuperset(each.blamed_for)]
        return [Try(each.request_id, is_trial=False) for each in cleared]

    def _hopeless(self, healthy: Healthy, now_s: float) -> list[Try | GiveUp]:
        if healthy.addrs:
            able = healthy.addrs | healthy.ejected
            # Each of them has failed it: a pick would be refused at once, and the suspect would wait again at once.
            late = [
                each for each in self._waiting.values() if able <= set(each.avoid) and self._has_waited(each, now_s)
            ]
        else:
            late = [each for each in self._waiting.values() if now_s - each.since_s >= self.patience_s]
        return [GiveUp(each.request_id) for each in late]

    def _next_trial(self, healthy: Healthy, now_s: float) -> Try | None:
        if not healthy.addrs or any(not trial.addr for trial in self._trials.values()):
            return None
        for suspect in self._likeliest_first():
            avoid = self._to_avoid(suspect, healthy.addrs, now_s)
            if avoid is not None:
                return Try(suspect.request_id, avoid)
        return None

    def _to_avoid(self, suspect: Suspect, addrs: frozenset[str], now_s: float) -> frozenset[str] | None:
        """The replicas that a suspect must not be tried at now; None if it has to wait."""
        busy = addrs & {trial.addr for trial in self._trials.values()}
        is_spare_left, has_waited = len(busy) + 1 < len(addrs), self._has_waited(suspect, now_s)
        may_take_last = suspect.wanted < 2 or has_waited
        has_place = not addrs <= busy | set(suspect.avoid) or (has_waited and not busy)
        if has_place and (is_spare_left or (not busy and may_take_last)):
            return busy
        if self._may_join(suspect, now_s) and (len(addrs) > 1 or may_take_last):
            closed = {trial.addr for trial in self._trials.values() if trial.suspect.must_be_alone}
            if shared := busy - closed - set(suspect.avoid):
                return addrs - shared
        return None

    def _may_join(self, suspect: Suspect, now_s: float) -> bool:
        """Whether it has waited for so long that it may be tried beside others."""
        if suspect.must_be_alone or self._trying_since_s is None:
            return False
        known = [*self._waiting.values(), *(trial.suspect for trial in self._trials.values())]
        alone_s = max(_ALONE_S, _ALONE_TIMES * max(each.lost_after_s for each in known))
        return now_s >= suspect.until_s or now_s - max(suspect.since_s, self._trying_since_s) >= alone_s

    def _likeliest_first(self) -> Iterator[Suspect]:
        """Those that were at two deaths; then those of the earliest death first, of one death from both ends."""
        by_death: dict[str, list[Suspect]] = defaultdict(list)
        for suspect in sorted(self._waiting.values(), key=lambda each: not each.must_be_alone):
            by_death[suspect.blamed_for[-1]].append(suspect)
        for death, suspects in by_death.items():
            yield from _from_both_ends(suspects, is_oldest_next=self._begun[death] % 2 == 1)

    def _has_waited(self, suspect: Suspect, now_s: float) -> bool:
        quiet_since_s = max(suspect.since_s, self._starting_seen_s)
        return now_s >= suspect.until_s or now_s - quiet_since_s >= self.patience_s


def _from_both_ends(suspects: list[Suspect], *, is_oldest_next: bool) -> Iterator[Suspect]:
    """By turns the youngest, which was at its very beginning, and the oldest, which may have held up all others."""
    left = deque(suspects)
    while left:
        yield left.popleft() if is_oldest_next else left.pop()
        is_oldest_next = not is_oldest_next
