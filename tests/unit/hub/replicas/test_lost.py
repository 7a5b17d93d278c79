"""Replicas that left without goodbye, as the hub's report has them."""

from __future__ import annotations

from typing import Any

import pytest

from hub.replicas.lost import LostReplicas
from omni_discovery.records.health import MOST_REASON
from omni_discovery.records.schema import DRAINED_BY_OPERATOR, FORMER_END, ReplicaInfo, ReplicaStatus

Views = dict[tuple[int, int], ReplicaInfo]


def info(replica_id: int, epoch: int, **fields: Any) -> ReplicaInfo:
    address = f"tcp://h:{epoch}"
    known: dict[str, Any] = {"input_addr": address, "output_addr": address, "status": ReplicaStatus.UP, **fields}
    return ReplicaInfo(
        stage_id=0, queue_length=0, last_heartbeat=0.0, registered_at=0.0, replica_id=replica_id, epoch=epoch, **known
    )


def view(*infos: ReplicaInfo) -> Views:
    return {(each.stage_id, each.replica_id): each for each in infos}


def names(lost: LostReplicas, now_s: float = 0.0) -> list[str]:
    return [trouble.name for trouble in lost.troubles(now_s, 1000.0 + now_s)]


def test_a_replica_whose_key_ends_while_it_is_up_is_lost_until_one_takes_its_place() -> None:
    lost, a, b = LostReplicas(), info(0, 5), info(1, 6, host="gpu-7", pid=42)
    lost.follow_view({}, view(a, b), 0.0)
    assert names(lost) == []
    lost.follow_view(view(a, b), view(a), 10.0)
    (trouble,) = lost.troubles(15.0, 1015.0)
    assert (trouble.name, trouble.kind, trouble.epoch, trouble.since) == ("0/1", "lost", 6, 1010.0)
    assert (trouble.host, trouble.pid) == ("gpu-7", 42)
    assert "it had no session here" in trouble.reason
    lost.follow_view(view(a), view(a, info(1, 20)), 20.0)
    assert names(lost) == []
    assert repr(lost) == "LostReplicas(0 lost, 0 silent)"


@pytest.mark.parametrize(
    ("sessions", "known"),
    [
        ([], "it had no session here: whether it was stopped is not known"),
        (["up"], "vanished while it answered: its lease ended"),
        (["up", "lost"], "its session ended, then its lease: it died, was cut off, or was stopped while"),
        (["up", "lost", "up"], "vanished while it answered"),
    ],
)
def test_of_one_that_could_not_say_goodbye_is_told_what_is_known(sessions: list[str], known: str) -> None:
    """One that is stopped while it does not reach etcd, or after its lease has ended, looks like one that died."""
    lost, one = LostReplicas(), info(0, 5)
    for change in sessions:
        (lost.session_up if change == "up" else lost.session_lost)(one)
    lost.follow_view(view(one), {}, 10.0)
    (trouble,) = lost.troubles(15.0, 1015.0)
    assert known in trouble.reason
    assert len(trouble.reason) < MOST_REASON, "nothing of it is cut"
    assert "without goodbye" not in trouble.reason


def test_the_session_of_a_process_that_registers_again_goes_on() -> None:
    lost, first, second = LostReplicas(), info(0, 5, input_addr="tcp://h:1"), info(0, 9, input_addr="tcp://h:1")
    lost.session_up(first)
    lost.follow_view(view(first), view(second), 10.0)
    lost.follow_view(view(second), {}, 20.0)
    (trouble,) = lost.troubles(20.0, 1020.0)
    assert (trouble.epoch, "vanished while it answered" in trouble.reason) == (9, True)


def test_who_says_goodbye_is_not_lost_and_who_fails_is() -> None:
    lost = LostReplicas()
    goodbyes = [
        info(0, 5, status=ReplicaStatus.DOWN),
        info(1, 6, status=ReplicaStatus.DOWN, reason=DRAINED_BY_OPERATOR),
        info(2, 7, status=ReplicaStatus.DRAINING),
    ]
    failed = info(3, 8, status=ReplicaStatus.DOWN, reason="the engine died:\n no memory")
    lost.follow_view(view(*goodbyes, failed), {}, 0.0)
    (trouble,) = lost.troubles(0.0, 0.0)
    assert (trouble.name, trouble.reason) == ("0/3", "the engine died: no memory")


def test_the_end_of_the_process_before_is_not_the_reason_of_this_one() -> None:
    """Its record begins with how the one before it ended, until it has a reason of its own."""
    lost = LostReplicas()
    starting = info(0, 5, status=ReplicaStatus.STARTING, reason=f"{FORMER_END}no memory")
    stopped = info(1, 6, status=ReplicaStatus.DOWN, reason=f"{FORMER_END}no memory")
    lost.follow_view(view(starting, stopped), {}, 0.0)
    (trouble,) = lost.troubles(0.0, 0.0)
    assert (trouble.name, trouble.reason) == ("0/0", "starting")


def test_a_killed_process_is_replaced_while_its_record_still_stands() -> None:
    """1. the session of 0/0 ends; 2. its supervisor's next process claims 0/1; 3. the lease of 0/0 ends: all is well"""
    lost, old, new = LostReplicas(), info(0, 5), info(1, 9)
    lost.session_lost(old)
    lost.follow_view(view(old), view(old, new), 1.0)
    lost.follow_view(view(old, new), view(new), 10.0)
    assert names(lost) == []
    lost.follow_view(view(new), {}, 20.0)
    assert names(lost) == ["0/1"], "one newcomer replaces one replica"


def test_a_newcomer_replaces_nobody_who_answers_again() -> None:
    """1. a connection breaks; 2. another replica is added; 3. the first answers again, and is lost later"""
    lost, old, new = LostReplicas(), info(0, 5), info(1, 9)
    lost.session_lost(old)
    lost.follow_view(view(old), view(old, new), 1.0)
    lost.session_up(old)
    lost.follow_view(view(old, new), view(new), 10.0)
    assert names(lost) == ["0/0"]


def test_one_that_was_stopped_and_comes_back_takes_its_own_place() -> None:
    lost, a, b = LostReplicas(), info(0, 5, input_addr="tcp://h:a"), info(1, 6, input_addr="tcp://h:b")
    lost.follow_view(view(a, b), {}, 0.0)
    lost.follow_view(view(info(7, 1, input_addr="tcp://h:z")), {}, 0.0)
    assert names(lost) == ["0/7", "0/1", "0/0"]
    other = info(9, 2)
    lost.follow_view(view(other), view(other, info(0, 30, input_addr="tcp://h:b")), 1.0)
    assert names(lost) == ["0/7", "0/0"]


def test_all_that_vanish_together_and_return_are_not_lost() -> None:
    """1. the leases of all end in one moment, so that nothing is listed; 2. all register again, one as a new process"""
    lost = LostReplicas()
    before = [info(number, number + 1, input_addr=f"tcp://h:{number}") for number in range(4)]
    for each in before:
        lost.session_up(each)
    lost.follow_view(view(*before), {}, 0.0)
    assert names(lost) == ["0/3", "0/2", "0/1", "0/0"]
    back = [info(number, number + 11, input_addr=f"tcp://h:{number}") for number in range(1, 4)]
    lost.follow_view({}, view(back[2]), 1.0)
    assert names(lost) == ["0/2", "0/1", "0/0"]
    new = info(0, 20, input_addr="tcp://h:new")
    lost.follow_view(view(back[2]), view(new, *back), 2.0)
    assert names(lost) == []
    lost.follow_view(view(new, *back), view(new, *back[1:]), 3.0)
    (trouble,) = lost.troubles(3.0, 1003.0)
    assert (trouble.name, "vanished while it answered" in trouble.reason) == ("0/1", True), "its session went on"


def test_a_newcomer_takes_the_place_of_the_one_whose_id_it_has() -> None:
    lost, a, b = LostReplicas(), info(0, 5), info(1, 6)
    lost.follow_view(view(a, b), {}, 0.0)
    lost.follow_view({}, view(info(1, 20)), 1.0)
    assert names(lost) == ["0/0"]


def test_a_session_that_ends_after_the_record_is_not_replaced_a_second_time() -> None:
    """1. 0/0 loses its record, then its session, and is replaced; 2. 0/1 is killed and replaced, its lease ends"""
    lost, a, b = LostReplicas(), info(0, 5), info(1, 6)
    lost.session_up(a)
    lost.follow_view(view(a, b), view(b), 0.0)
    lost.session_lost(a)
    next_a, next_b = info(0, 20), info(2, 30)
    lost.follow_view(view(b), view(next_a, b), 1.0)
    lost.session_lost(b)
    lost.follow_view(view(next_a, b), view(next_a, b, next_b), 2.0)
    lost.follow_view(view(next_a, b, next_b), view(next_a, next_b), 3.0)
    assert names(lost) == []


def test_a_loss_is_forgotten_after_an_hour_and_a_landslide_is_bounded() -> None:
    lost = LostReplicas()
    lost.follow_view(view(*(info(number, number + 1) for number in range(100))), {}, 0.0)
    assert len(names(lost)) == 64
    assert len(names(lost, 3599.0)) == 64
    assert names(lost, 3601.0) == []


def test_of_those_that_answer_again_none_is_silent() -> None:
    lost, a = LostReplicas(), info(0, 5)
    lost.follow_view({}, view(a), 0.0)
    lost.session_lost(a)
    assert repr(lost) == "LostReplicas(0 lost, 1 silent)"
    lost.session_up(a)
    assert repr(lost) == "LostReplicas(0 lost, 0 silent)"


def test_a_loss_of_a_host_that_is_up_for_hours_is_remembered_for_an_hour_too() -> None:
    lost = LostReplicas()
    lost.follow_view(view(info(0, 5)), {}, 9000.0)
    assert names(lost, 12_600.0) == ["0/0"]
    assert names(lost, 12_600.1) == []
