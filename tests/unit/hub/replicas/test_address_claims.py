"""Two records with one address: who answers has it; while none does, they are tried in turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hub.replicas.address_claims import AT_ONCE, TURN_S, AddressClaims
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus


def record(stage_id: int, replica_id: int, epoch: int, pid: int = 0) -> ReplicaInfo:
    return ReplicaInfo(
        "tcp://h:1", "", stage_id, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id=replica_id, epoch=epoch, pid=pid
    )


class Scene:
    def __init__(self) -> None:
        self.answering: list[ReplicaInfo] = []
        #: The epoch that the process at the address says is its own; 0 while it says nothing.
        self.named_epoch = 0
        self.claims = AddressClaims(lambda info: info in self.answering, lambda info: info.epoch == self.named_epoch)

    def owners(self, *claimants: ReplicaInfo, at_s: tuple[float, ...]) -> list[tuple[int, int]]:
        self.claims.share_only({claimants[0].input_addr: len(claimants)})
        owners = [self.claims.owner(claimants, each) for each in at_s]
        return [(info.stage_id, info.replica_id) for info in owners]


OLDER, NEWER = record(1, 0, 3), record(0, 8, 9)


@pytest.mark.attack("A23")
def test_who_answers_keeps_the_address() -> None:
    scene = Scene()
    scene.answering = [OLDER]
    assert scene.owners(NEWER, OLDER, at_s=(0.0, 100.0)) == [(1, 0), (1, 0)]
    assert scene.claims.next_look_s is None


@pytest.mark.attack("A23")
def test_while_none_answers_they_are_tried_in_turns_the_newest_first() -> None:
    scene = Scene()
    for claimants in ((OLDER, NEWER), (NEWER, OLDER)):
        scene.claims.share_only({})
        at_s = (0.0, TURN_S - 0.1, TURN_S, 2 * TURN_S - 0.1, 2 * TURN_S)
        assert scene.owners(*claimants, at_s=at_s) == [(0, 8), (0, 8), (1, 0), (1, 0), (0, 8)]
        assert scene.claims.next_look_s == 3 * TURN_S


def test_who_answers_in_its_turn_has_the_address_from_then_on() -> None:
    scene = Scene()
    scene.owners(OLDER, NEWER, at_s=(0.0, TURN_S))
    scene.answering = [OLDER]
    assert scene.owners(OLDER, NEWER, at_s=(TURN_S + 0.1, 100.0)) == [(1, 0), (1, 0)]
    assert scene.claims.next_look_s is None


def test_one_that_is_gone_leaves_its_turn_to_the_others() -> None:
    scene, third = Scene(), record(0, 9, 12)
    assert scene.owners(OLDER, NEWER, third, at_s=(0.0,)) == [(0, 9)]
    assert scene.owners(OLDER, NEWER, at_s=(1.0,)) == [(0, 8)]
    scene.claims.share_only({"tcp://other:1": 2})
    assert scene.claims.next_look_s is None


def test_a_process_that_registers_again_takes_its_own_address_over() -> None:
    """1. its session under the former record counts until it names the new epoch; 2. then the new record does"""
    scene, former, present = Scene(), record(0, 0, 3, pid=7), record(0, 1, 9, pid=7)
    scene.answering, scene.named_epoch = [former], 3
    assert scene.owners(former, present, at_s=(0.0, 100.0)) == [(0, 0), (0, 0)]
    scene.named_epoch = 9
    assert scene.owners(former, present, at_s=(101.0, 200.0)) == [(0, 1), (0, 1)]
    assert scene.claims.next_look_s is None


@pytest.mark.attack("H2")
def test_a_copy_of_a_record_takes_no_address_from_the_process_that_names_its_own_epoch() -> None:
    """With a session or before there is one, and whatever host and pid the copy says."""
    scene, own, copy = Scene(), record(0, 0, 3, pid=7), record(0, 700, 9, pid=7)
    scene.answering, scene.named_epoch = [own], 3
    assert scene.owners(copy, own, at_s=(0.0, 100.0)) == [(0, 0), (0, 0)]
    scene.answering.clear()
    assert scene.owners(copy, own, at_s=(101.0, 200.0)) == [(0, 0), (0, 0)]
    scene.answering, scene.named_epoch = [own], 0
    assert scene.owners(copy, own, at_s=(201.0, 300.0)) == [(0, 0), (0, 0)]


@pytest.mark.attack("H2")
def test_a_copy_without_a_lease_is_tried_after_the_records_with_one() -> None:
    scene, own, copies = Scene(), record(0, 0, 3, pid=7), [record(0, each, each, pid=7) for each in range(10, 14)]
    unleased = [replace(each, leased=False) for each in copies]
    assert scene.owners(*unleased, own, at_s=(0.0, TURN_S)) == [(0, 0), (0, 13)]


@pytest.mark.attack("H2")
def test_a_process_that_goes_on_naming_epochs_has_the_owners_looked_for_once_a_second() -> None:
    scene = Scene()
    scene.answering = [OLDER]
    scene.owners(OLDER, NEWER, at_s=(0.0,))
    scene.claims.look_again("tcp://other:1", 1.0)
    assert scene.claims.next_look_s is None
    scene.claims.look_again("tcp://h:1", 1.0)
    assert scene.claims.next_look_s == 1.0
    scene.owners(OLDER, NEWER, at_s=(1.0,))
    assert scene.claims.next_look_s is None
    for now_s in (1.1, 1.2, 1.3):
        scene.claims.look_again("tcp://h:1", now_s)
    assert scene.claims.next_look_s == 2.0


def test_an_owner_that_answers_once_more_and_is_gone_then_is_looked_for_all_the_same() -> None:
    """1. a second look within a second is put off to 2.0; 2. the owner answers before that, and the look is dropped;
    3. it falls silent, still before that: there is a look at 2.0
    """
    scene = Scene()
    scene.answering = [OLDER]
    scene.owners(OLDER, NEWER, at_s=(0.0,))
    scene.claims.look_again("tcp://h:1", 1.0)
    scene.owners(OLDER, NEWER, at_s=(1.0,))
    scene.claims.look_again("tcp://h:1", 1.3)
    assert scene.claims.next_look_s == 2.0
    scene.owners(OLDER, NEWER, at_s=(1.4,))
    assert scene.claims.next_look_s is None
    scene.claims.look_again("tcp://h:1", 1.6)
    assert scene.claims.next_look_s == 2.0


@pytest.mark.attack("P2")
def test_an_address_that_very_many_name_is_looked_at_only_when_it_is_due() -> None:
    scene = Scene()
    many = [record(0, each, each) for each in range(1, 2 * AT_ONCE)]
    scene.owners(*many, at_s=(0.0,))
    scene.claims.share("tcp://few:1", 2)
    assert scene.claims.to_look_at(1.0) == ["tcp://few:1"]
    assert scene.claims.to_look_at(TURN_S) == ["tcp://h:1", "tcp://few:1"]
