"""AddressClaims: which of the replicas that name one address is connected to. Pure.

Of two processes at one address the older may be dead, and the newer has got its port; or the newer's record is wrong,
or forged. Who answers is right. While none does they are tried in turns, the newest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from omni_discovery.records.schema import ReplicaInfo

#: How long one of them is tried before the next one is.
TURN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Turn:
    replica: tuple[int, int, int]
    since_s: float


class AddressClaims:
    """``answers``: whether this life of a replica has a session now. ``is_same_life``: of an older and a newer record.

    Moments are monotonic seconds.
    """

    def __init__(
        self, answers: Callable[[ReplicaInfo], bool], is_same_life: Callable[[ReplicaInfo, ReplicaInfo], bool]
    ) -> None:
        self._answers = answers
        self._is_same_life = is_same_life
        #: Who is being tried, by the addresses that several name and where none answers.
        self._turns: dict[str, _Turn] = {}

    def __repr__(self) -> str:
        return f"AddressClaims({len(self._turns)} tried in turns)"

    @property
    def next_turn_s(self) -> float | None:
        """When time alone changes what ``owner`` returns; None if it does not."""
        return min((turn.since_s + TURN_S for turn in self._turns.values()), default=None)

    def forget_turns(self, addrs: set[str]) -> None:
        """Only these addresses are named by several replicas now."""
        for addr in self._turns.keys() - addrs:
            del self._turns[addr]

    def owner(self, claimants: Sequence[ReplicaInfo], now_s: float) -> ReplicaInfo:
        """The one of several replicas with one address that is connected to now."""
        newest_first = sorted(claimants, key=lambda info: info.epoch, reverse=True)
        lives: list[ReplicaInfo] = []
        for info in newest_first:
            # A process that has registered again: its former record ends with its lease.
            if not any(self._is_same_life(info, newer) for newer in lives):
                lives.append(info)
        addr, answering = lives[0].input_addr, [info for info in lives if self._answers(info)]
        if answering or len(lives) == 1:
            self._turns.pop(addr, None)
            return answering[-1] if answering else lives[0]
        return self._in_turn(addr, lives, now_s)

    def _in_turn(self, addr: str, lives: list[ReplicaInfo], now_s: float) -> ReplicaInfo:
        turn = self._turns.get(addr)
        places = [index for index, info in enumerate(lives) if turn is not None and _name(info) == turn.replica]
        if turn is not None and places and now_s - turn.since_s < TURN_S:
            return lives[places[0]]
        chosen = lives[(places[0] + 1) % len(lives)] if places else lives[0]
        self._turns[addr] = _Turn(_name(chosen), now_s)
        return chosen


def _name(info: ReplicaInfo) -> tuple[int, int, int]:
    return info.stage_id, info.replica_id, info.epoch
