"""Two records with one address: who answers has it; while none does, they are tried in turns."""

from __future__ import annotations

import pytest

from hub.replicas.address_claims import TURN_S, AddressClaims
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus


def record(stage_id: int, replica_id: int, epoch: int, pid: int = 0) -> ReplicaInfo:
    return ReplicaInfo(
        "tcp://h:1", "", stage_id, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id=replica_id, epoch=epoch, pid=pid
    )


class Scene:
    def __init__(self) -> None:
        self.answering: list[ReplicaInfo] = []
        self.claims = AddressClaims(
            lambda info: info in self.answering, lambda older, newer: bool(older.pid) and older.pid == newer.pid
        )

    def owners(self, *claimants: ReplicaInfo, at_s: tuple[float, ...]) -> list[tuple[int, int]]:
        owners = [self.claims.owner(claimants, each) for each in at_s]
        return [(info.stage_id, info.replica_id) for info in owners]


OLDER, NEWER = record(1, 0, 3), record(0, 8, 9)


@pytest.mark.attack("A23")
def test_who_answers_keeps_the_address() -> None:
    scene = Scene()
    scene.answering = [OLDER]
    assert scene.owners(NEWER, OLDER, at_s=(0.0, 100.0)) == [(1, 0), (1, 0)]
    assert scene.claims.next_turn_s is None


@pytest.mark.attack("A23")
def test_while_none_answers_they_are_tried_in_turns_the_newest_first() -> None:
    scene = Scene()
    for claimants in ((OLDER, NEWER), (NEWER, OLDER)):
        scene.claims.forget_turns(set())
        at_s = (0.0, TURN_S - 0.1, TURN_S, 2 * TURN_S - 0.1, 2 * TURN_S)
        assert scene.owners(*claimants, at_s=at_s) == [(0, 8), (0, 8), (1, 0), (1, 0), (0, 8)]
        assert scene.claims.next_turn_s == 3 * TURN_S


def test_who_answers_in_its_turn_has_the_address_from_then_on() -> None:
    scene = Scene()
    scene.owners(OLDER, NEWER, at_s=(0.0, TURN_S))
    scene.answering = [OLDER]
    assert scene.owners(OLDER, NEWER, at_s=(TURN_S + 0.1, 100.0)) == [(1, 0), (1, 0)]
    assert scene.claims.next_turn_s is None


def test_one_that_is_gone_leaves_its_turn_to_the_others() -> None:
    scene, third = Scene(), record(0, 9, 12)
    assert scene.owners(OLDER, NEWER, third, at_s=(0.0,)) == [(0, 9)]
    assert scene.owners(OLDER, NEWER, at_s=(1.0,)) == [(0, 8)]
    scene.claims.forget_turns({"tcp://other:1"})
    assert scene.claims.next_turn_s is None


def test_a_process_that_registers_again_takes_its_own_address_over() -> None:
    scene = Scene()
    assert scene.owners(record(0, 0, 3, pid=7), record(0, 1, 9, pid=7), at_s=(0.0, 100.0)) == [(0, 1), (0, 1)]
