"""AddressClaims: which of the replicas that name one address is connected to. Pure.

Of two processes at one address the older may be dead, and the newer has got its port; or the newer's record is wrong,
or forged. One process may have two records: it has registered again, or somebody has copied its record. Who answers is
right, and the process itself names the epoch of its own record. While none answers they are tried in turns: those with
a lease before those without, the newest first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import Final

from omni_discovery.records.schema import ReplicaInfo

#: How long one of them is tried before the next one is.
TURN_S: Final = 5.0
#: However often a process names another epoch, the owner of its address is looked for once in so long for that.
_LOOK_S: Final = 1.0
#: So many addresses are looked at in one pass: anybody may write records of thousands.
AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class _Turn:
    replica: tuple[int, int, int]
    since_s: float


class AddressClaims:
    """``answers``: whether this life of a replica has a session now. ``is_named``: whether its process says so itself.

    Moments are monotonic seconds.
    """

    def __init__(self, answers: Callable[[ReplicaInfo], bool], is_named: Callable[[ReplicaInfo], bool]) -> None:
        self._answers = answers
        self._is_named = is_named
        #: How many name each address that several name, the one looked at longest ago first.
        self._shared: dict[str, int] = {}
        #: Who is being tried, by the shared addresses where none answers.
        self._turns: dict[str, _Turn] = {}
        #: When shared addresses are due to be looked at; each is also in the heap, which may have former moments, too.
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        #: When those whose process has named its epoch were due for that.
        self._asked_s: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"AddressClaims({len(self._shared)} shared, {len(self._turns)} tried in turns)"

    @property
    def next_look_s(self) -> float | None:
        """When ``owner`` may return another without a change of the records; None if that is not to be expected."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def share(self, addr: str, count: int) -> None:
        """So many replicas name this address, which are several; ``owner`` is asked for it next."""
        self._shared[addr] = count

    def unshare(self, addr: str) -> None:
        """They do so no more. Unknown ones are fine."""
        if addr in self._shared:
            del self._shared[addr]
            for each in (self._turns, self._due, self._asked_s):
                each.pop(addr, None)

    def share_only(self, counts: Mapping[str, int]) -> None:
        """Only these addresses are named by several replicas now; ``owner`` is asked for each of them next."""
        for addr in self._shared.keys() - counts.keys():
            self.unshare(addr)
        self._shared.update(counts)

    def to_look_at(self, now_s: float) -> list[str]:
        """The next few addresses to ask ``owner`` for: those that are due, then those looked at longest ago.

        An address that very many name is looked at when it is due, and when their records change.
        """
        found: dict[str, None] = {}
        while len(found) < AT_ONCE and (due_s := self.next_look_s) is not None and due_s <= now_s:
            addr = heappop(self._heap)[1]
            del self._due[addr]
            found[addr] = None
        others = (addr for addr, count in self._shared.items() if count <= AT_ONCE)
        found.update(dict.fromkeys(islice(others, AT_ONCE - len(found))))
        return list(found)

    def look_again(self, addr: str, now_s: float) -> None:
        """The process at an address has named another epoch than before, or does not answer any more."""
        if addr not in self._shared:
            return
        asked_s = self._asked_s.get(addr, float("-inf"))
        if asked_s < now_s:
            self._asked_s[addr] = asked_s = max(now_s, asked_s + _LOOK_S)
        elif addr in self._due:
            return
        # Or it was put off to that moment already, and ``owner`` has found one since, who may be gone by now.
        self._look_at(addr, asked_s)

    def _look_at(self, addr: str, moment_s: float) -> None:
        if self._due.get(addr) != moment_s:
            self._due[addr] = moment_s
            heappush(self._heap, (moment_s, addr))

    def owner(self, claimants: Sequence[ReplicaInfo], now_s: float) -> ReplicaInfo:
        """The one of several replicas with one address that is connected to now."""
        addr = claimants[0].input_addr
        if addr in self._shared:
            # Behind those that were looked at before.
            self._shared[addr] = self._shared.pop(addr)
        # What is named goes first: a process that has registered again may still have the session of its former life.
        for is_right in (self._is_named, self._answers):
            for info in claimants:
                if is_right(info):
                    self._turns.pop(addr, None)
                    self._due.pop(addr, None)
                    return info
        in_order = sorted(claimants, key=lambda info: (info.leased, info.epoch), reverse=True)
        owner = self._in_turn(addr, in_order, now_s)
        self._look_at(addr, self._turns[addr].since_s + TURN_S)
        return owner

    def _in_turn(self, addr: str, in_order: Sequence[ReplicaInfo], now_s: float) -> ReplicaInfo:
        turn = self._turns.get(addr)
        places = [index for index, info in enumerate(in_order) if turn is not None and _name(info) == turn.replica]
        if turn is not None and places and now_s - turn.since_s < TURN_S:
            return in_order[places[0]]
        chosen = in_order[(places[0] + 1) % len(in_order)] if places else in_order[0]
        self._turns[addr] = _Turn(_name(chosen), now_s)
        return chosen


def _name(info: ReplicaInfo) -> tuple[int, int, int]:
    return info.stage_id, info.replica_id, info.epoch
