"""AddressClaims: which of the replicas that name one address is connected to. Pure.

Of two processes at one address the older may be dead, and the newer has got its port; or the newer's record is wrong,
or forged. One process may have two records: it has registered again, or somebody has copied its record. Who answers is
right, and the process itself names the epoch of its own record. While none answers they are tried in turns: those with
a lease before those without, the newest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from omni_discovery.records.schema import ReplicaInfo

#: How long one of them is tried before the next one is.
TURN_S: Final = 5.0
#: However often processes name another epoch, the owners are looked for once in so long for that.
_LOOK_S: Final = 1.0


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
        #: The addresses that several name.
        self._shared: frozenset[str] = frozenset()
        #: Who is being tried, by the shared addresses where none answers.
        self._turns: dict[str, _Turn] = {}
        #: When the owners are to be looked for since a process has named its epoch, and when that was last so.
        self._look_s: float | None = None
        self._looked_s = float("-inf")

    def __repr__(self) -> str:
        return f"AddressClaims({len(self._shared)} shared, {len(self._turns)} tried in turns)"

    @property
    def next_turn_s(self) -> float | None:
        """When ``owner`` may return another without a change of the records; None if that is not to be expected."""
        moments_s = [turn.since_s + TURN_S for turn in self._turns.values()]
        return min(moments_s if self._look_s is None else [*moments_s, self._look_s], default=None)

    def share(self, addrs: set[str]) -> None:
        """Only these addresses are named by several replicas now; ``owner`` is asked for each of them next."""
        self._shared, self._look_s = frozenset(addrs), None
        for addr in self._turns.keys() - addrs:
            del self._turns[addr]

    def look_again(self, addr: str, now_s: float) -> None:
        """The process at an address has named another epoch than before."""
        if addr in self._shared and self._look_s is None:
            self._look_s = self._looked_s = max(now_s, self._looked_s + _LOOK_S)

    def owner(self, claimants: Sequence[ReplicaInfo], now_s: float) -> ReplicaInfo:
        """The one of several replicas with one address that is connected to now."""
        # What is named goes first: a process that has registered again may still have the session of its former life.
        for is_right in (self._is_named, self._answers):
            for info in claimants:
                if is_right(info):
                    self._turns.pop(info.input_addr, None)
                    return info
        in_order = sorted(claimants, key=lambda info: (info.leased, info.epoch), reverse=True)
        return self._in_turn(in_order[0].input_addr, in_order, now_s)

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
