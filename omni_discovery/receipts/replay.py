"""Replay: has the shipped policy make a pick again, from what a receipt holds of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from omni_discovery.balancing.base import Member
from omni_discovery.balancing.policies import LoadBalancingPolicy, build_load_balancer_factory
from omni_discovery.balancing.prefix import PrefixIndex
from omni_discovery.balancing.weighted import KeyedIndex, StrideIndex
from omni_discovery.receipts.receipt import BY_BINDING, BY_POLICY, Candidate, Picking
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus

_SHIPPED: Final = frozenset(each.value for each in LoadBalancingPolicy)


@dataclass(frozen=True, slots=True)
class Replayed:
    """``choice`` is what the policy chose now; empty where ``lacks`` says what the receipt would have to hold."""

    choice: str = ""
    lacks: str = ""
    #: Why there was nothing to choose, if so.
    note: str = ""


class _MissingDrawError(Exception):
    """The policy wants more chance than was drawn at the time."""


def replay(picking: Picking) -> Replayed:
    """Make a pick again. Nothing of the hub is needed, and nothing is drawn."""
    if picking.how == BY_BINDING:
        note = "the request, or the one that it belongs to, was there already: no policy was asked"
        return Replayed(picking.chosen, note=note)
    if not picking.chosen:
        return Replayed(note="nobody could be picked: it waited")
    if picking.how != BY_POLICY:
        note = "all others had to be avoided, so an ejected one was taken: no policy was asked"
        return Replayed(picking.chosen, note=note)
    if picking.policy not in _SHIPPED:
        return Replayed(lacks=f"the state of the policy {picking.policy!r}, which is not one that is shipped")
    if picking.cut:
        held = len(picking.candidates)
        return Replayed(lacks=f"{picking.cut} of {held + picking.cut} replicas: a receipt holds at most so many")
    free = [each for each in picking.candidates if not each.out]
    tier = min((each.tier for each in free), default=0)
    try:
        return Replayed(_pick([each for each in free if each.tier == tier], picking))
    except _MissingDrawError:
        return Replayed(lacks=f"chance: the policy drew {len(picking.draws)} times then, and now wants more")


def _pick(candidates: list[Candidate], picking: Picking) -> str:
    index = build_load_balancer_factory(picking.policy)().index()
    names: dict[Member, str] = {}
    for number, each in enumerate(sorted(candidates, key=lambda each: each.position)):
        member = _member(each, number)
        names[member] = each.replica
        if isinstance(index, StrideIndex):
            index.restore_turn(member, each.key)
        index.add(member)
    if not names:
        return ""
    if isinstance(index, KeyedIndex | PrefixIndex):
        index.chance = _drawing(iter(picking.draws))
    if isinstance(index, KeyedIndex):
        index.restore_basis(tuple(picking.basis))
    if isinstance(index, PrefixIndex):
        index.restore_basis(tuple(picking.basis))
        return names[index.pick_from(picking.basis[0])]
    chosen = index.pick({})
    return "" if chosen is None else names[chosen]


def _member(candidate: Candidate, number: int) -> Member:
    stage, _, replica = candidate.replica.partition("/")
    info = ReplicaInfo(
        input_addr=f"{candidate.replica}@{candidate.epoch}",
        output_addr="",
        stage_id=int(stage),
        status=ReplicaStatus.UP,
        queue_length=candidate.reported,
        last_heartbeat=0.0,
        registered_at=0.0,
        replica_id=int(replica),
        epoch=candidate.epoch,
        capacity=candidate.capacity,
        weight=candidate.weight,
    )
    member = Member(info, candidate.load)
    member.position = number
    return member


def _drawing(draws: Iterator[float]) -> Callable[[], float]:
    def draw() -> float:
        number = next(draws, None)
        if number is None:
            raise _MissingDrawError
        return number

    return draw
