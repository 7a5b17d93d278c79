"""Who has answered a collective call, and who is not waited for any more."""

from __future__ import annotations

import pytest

from hub.orchestrator.collective import Correlator, ReplicaResult, Target


def targets(*names: str) -> list[Target]:
    """``0/1`` is replica 1 of stage 0; the name stands for its session."""
    return [Target(*map(int, name.split("/")), session=name) for name in names]


def test_every_replica_has_one_result_in_order_whatever_the_order_of_the_answers() -> None:
    correlator = Correlator()
    wire_id = correlator.begin("c", targets("0/0", "0/1", "1/0"))
    assert correlator.settle(wire_id, "1/0", ok=True, result=7)
    assert correlator.settle(wire_id, "0/1", error="ValueError: no")
    assert correlator.take_done() == []
    assert correlator.settle(wire_id, "0/0", ok=True)
    results = [
        ReplicaResult(0, 0, ok=True),
        ReplicaResult(0, 1, ok=False, error="ValueError: no"),
        ReplicaResult(1, 0, ok=True, result=7),
    ]
    assert correlator.take_done() == [(wire_id, results)]
    assert correlator.take_done() == []
    assert len(correlator) == 0


def test_a_second_call_of_the_same_id_is_refused_while_the_first_is_open() -> None:
    """And once it is done, its late answers are not the second one's."""
    correlator = Correlator()
    first = correlator.begin("c", targets("0/0"))
    with pytest.raises(RuntimeError, match="'c' is already open"):
        correlator.begin("c", targets("0/1"))
    correlator.begin("d", targets("0/0"))
    correlator.expire(first, "late")
    assert [wire_id for wire_id, _ in correlator.take_done()] == [first]
    second = correlator.begin("c", targets("0/0"))
    assert second != first
    assert not correlator.settle(first, "0/0", ok=True, result="old")
    assert correlator.open() == ["d~2", second]


def test_an_answer_that_comes_twice_late_or_from_elsewhere_changes_nothing() -> None:
    correlator = Correlator()
    wire_id = correlator.begin("c", targets("0/0", "0/1"))
    assert correlator.settle(wire_id, "0/0", ok=True, result=1)
    assert not correlator.settle(wire_id, "0/0", ok=True, result=2)
    assert not correlator.settle(wire_id, "1/0", ok=True)
    assert not correlator.settle("unknown", "0/1", ok=True)
    correlator.expire(wire_id, "late")
    assert not correlator.settle(wire_id, "0/1", ok=True)
    ((_, results),) = correlator.take_done()
    assert results == [ReplicaResult(0, 0, ok=True, result=1), ReplicaResult(0, 1, ok=False, error="late")]


def test_a_replica_that_is_lost_ends_its_entry_in_every_call_and_no_other() -> None:
    correlator = Correlator()
    both, one = correlator.begin("c", targets("0/0", "0/1")), correlator.begin("d", targets("0/1"))
    correlator.lose("0/1", "gone")
    correlator.lose("0/9", "gone")
    assert correlator.take_done() == [(one, [ReplicaResult(0, 1, ok=False, error="gone")])]
    assert correlator.settle(both, "0/0", ok=True)
    ((_, results),) = correlator.take_done()
    assert [result.error for result in results] == ["", "gone"]


def test_a_call_that_concerns_nobody_is_done_at_once() -> None:
    correlator = Correlator()
    wire_id = correlator.begin("c", [])
    assert correlator.take_done() == [(wire_id, [])]
    correlator.expire(wire_id, "late")
