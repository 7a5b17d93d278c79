"""Which replica is next, and what is done to it. Pure: what runs here and the dice come in as arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from omni_discovery.records.schema import ReplicaInfo


class Act(StrEnum):
    """What is done to a replica."""

    KILL = "kill"
    STOP = "stop"
    CORDON = "cordon"

    @property
    def is_a_signal(self) -> bool:
        """Whether it can be done only on the replica's own host."""
        return self is not Act.CORDON


@dataclass(frozen=True, slots=True)
class ChaosStep:
    """One thing to do to one replica."""

    act: Act
    replica: ReplicaInfo


def serving(replicas: Iterable[ReplicaInfo]) -> Counter[int]:
    """How many replicas of each stage take new work."""
    return Counter(info.stage_id for info in replicas if info.takes_new_work)


def possible_steps(
    replicas: Sequence[ReplicaInfo], acts: Sequence[Act], can_signal: Callable[[ReplicaInfo], bool]
) -> list[ChaosStep]:
    """All that may be done: to replicas that take new work, and are not the last of their stage to do so."""
    left = serving(replicas)
    targets = [info for info in replicas if info.takes_new_work and left[info.stage_id] > 1]
    return [
        ChaosStep(act, info)
        for act in acts
        for info in sorted(targets, key=lambda each: (each.stage_id, each.replica_id))
        if not act.is_a_signal or can_signal(info)
    ]


def draw(possible: Sequence[ChaosStep], below: Callable[[int], int]) -> ChaosStep:
    """One of these, each act as likely as another; ``below(n)`` draws a number from 0 to n - 1."""
    acts = sorted({step.act for step in possible})
    act = acts[below(len(acts))]
    of_it = [step for step in possible if step.act is act]
    return of_it[below(len(of_it))]


def lacking(
    before: Mapping[int, int], replicas: Iterable[ReplicaInfo], dead: Container[tuple[int, int, int]]
) -> dict[int, int]:
    """How many replicas each stage lacks of those that served it before; empty if all came back.

    ``dead`` are stage, id and epoch of those that were killed: a record stays until its lease ends.
    """
    now = serving(each for each in replicas if (each.stage_id, each.replica_id, each.epoch) not in dead)
    return {stage_id: count - now[stage_id] for stage_id, count in before.items() if now[stage_id] < count}
