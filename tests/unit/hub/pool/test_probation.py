"""Probation: who may be tried where, so that no request takes a stage, and no innocent one waits for ever."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from hub.pool.probation import GiveUp, Healthy, Probation, Suspect, Try

PATIENCE_S = 10.0


def suspect(
    request_id: str,
    *deaths: str,
    since_s: float = 0.0,
    until_s: float = 300.0,
    wanted: int = 2,
    avoid: Collection[str] = (),
) -> Suspect:
    return Suspect(request_id, deaths or ("x 1",), avoid, since_s, until_s, wanted)


def healthy(*addrs: str, starting: bool = False) -> Healthy:
    return Healthy(frozenset(addrs), starting)


def holding(*suspects: Suspect) -> Probation:
    probation = Probation(PATIENCE_S)
    for each in suspects:
        probation.hold(each)
    return probation


def test_one_suspect_is_tried_at_a_time_and_one_replica_stays_free_of_them() -> None:
    """1. of three suspects one is picked a replica for; until it has one, no other is
    2. two replicas are left, and one of them has a suspect: the next waits
    3. the first trial is over: the next begins
    """
    probation = holding(suspect("a"), suspect("b"), suspect("c"))
    two = healthy("r1", "r2")
    assert probation.due(two, 0.0) == [Try("c")]
    assert probation.due(two, 0.0) == []
    probation.placed("c", "r1")
    assert probation.due(two, 0.0) == []
    probation.ended("c")
    assert probation.due(two, 0.0) == [Try("b")]
    assert len(probation) == 1


def test_with_more_replicas_suspects_are_tried_side_by_side_each_at_its_own() -> None:
    probation = holding(*(suspect(name) for name in "abc"))
    four = healthy("r1", "r2", "r3", "r4")
    for number, name in enumerate("cba", 1):
        busy = frozenset(f"r{each}" for each in range(1, number))
        assert probation.due(four, 0.0) == [Try(name, busy)]
        probation.placed(name, f"r{number}")
    probation.hold(suspect("d", "y 1"))
    assert probation.due(four, 0.0) == []


def test_the_youngest_of_the_earliest_death_is_tried_first() -> None:
    """It is the likeliest cause: what kills at its start was sent last."""
    probation = holding(suspect("a", "x 1"), suspect("b", "x 1"), suspect("c", "y 1"))
    order = []
    for _ in range(3):
        (step,) = probation.due(healthy("r1", "r2"), 0.0)
        order.append(step.request_id)
        probation.ended(step.request_id)
    assert order == ["b", "a", "c"]


def test_the_last_replica_is_spared_until_another_is_there() -> None:
    """1. one replica is left: nobody is tried there; 2. a second one is up: one is."""
    probation = holding(suspect("a"), suspect("b"))
    assert probation.due(healthy("r1"), 9.9) == []
    assert probation.due(healthy("r1", "r2"), 9.9) == [Try("b")]


def test_where_no_other_comes_the_last_one_gets_them_one_by_one() -> None:
    probation = holding(suspect("a"), suspect("b"))
    assert probation.due(healthy("r1"), 10.0) == [Try("b")]
    probation.placed("b", "r1")
    assert probation.due(healthy("r1"), 11.0) == []
    probation.ended("b")
    assert probation.due(healthy("r1"), 11.0) == [Try("a")]


def test_while_another_is_being_started_they_wait_longer_but_keep_half_of_their_time() -> None:
    probation = holding(suspect("a", until_s=60.0))
    assert probation.due(healthy("r1", starting=True), 50.0) == []
    assert probation.due(healthy("r1"), 59.9) == []
    assert probation.due(healthy("r1", starting=True), 60.0) == [Try("a")]


def test_a_replica_that_failed_to_start_is_waited_for_no_longer_than_others() -> None:
    probation = holding(suspect("a"))
    assert probation.due(healthy("r1", starting=True), 20.0) == []
    assert probation.due(healthy("r1"), 29.9) == []
    assert probation.due(healthy("r1"), 30.0) == [Try("a")]


def test_a_stage_of_one_replica_has_nothing_to_wait_for_but_that() -> None:
    probation = holding(suspect("a", wanted=1), suspect("b", wanted=1))
    assert probation.due(healthy(starting=True), 5.0) == []
    assert probation.due(healthy("r1"), 6.0) == [Try("b")]
    probation.placed("b", "r1")
    assert probation.due(healthy("r1"), 6.0) == []


def test_without_any_replica_they_fail_as_all_others_do() -> None:
    probation = holding(suspect("a"), suspect("b", since_s=5.0))
    assert probation.due(healthy(), 9.0) == []
    assert probation.due(healthy(starting=True), 10.0) == [GiveUp("a")]
    assert len(probation) == 1


def test_once_the_cause_is_found_those_that_were_with_it_may_go_anywhere_at_once() -> None:
    """1. a was with the culprit when x ended, b when y did; c was there when z ended, too
    2. the culprit of x and y is found: a and b are no suspects any more, c is
    3. one that hears later that it was at y is none either
    """
    probation = holding(suspect("a", "x 1"), suspect("b", "y 1"), suspect("c", "x 1", "z 1"))
    probation.explain(["x 1", "y 1"])
    last = healthy("r1")
    assert probation.due(last, 0.0) == [Try("a", is_trial=False), Try("b", is_trial=False)]
    probation.hold(suspect("d", "y 1"))
    assert probation.due(last, 0.0) == [Try("d", is_trial=False)]
    assert len(probation) == 1


def test_another_life_of_a_replica_is_not_explained_with_the_one_before() -> None:
    probation = holding(suspect("a", "x 2"))
    probation.explain(["x 1"])
    assert probation.due(healthy("r1"), 0.0) == []


def test_a_suspect_that_has_to_avoid_all_that_are_there_waits_for_another_and_then_fails_by_its_pick() -> None:
    probation = holding(suspect("a", avoid=("r1", "r2")))
    assert probation.due(healthy("r1", "r2"), 9.0) == []
    assert probation.due(healthy("r1", "r2"), 10.0) == [Try("a")]


def test_a_trial_that_begins_again_blocks_nobody() -> None:
    """Its dispatch was refused: it waits with the others."""
    probation = holding(suspect("a"))
    assert probation.due(healthy("r1", "r2"), 0.0) == [Try("a")]
    assert probation.is_on_trial("a")
    probation.hold(suspect("a"))
    assert not probation.is_on_trial("a")
    assert probation.due(healthy("r1", "r2"), 0.0) == [Try("a")]
    probation.placed("a", "r1")
    assert probation.is_placed("a")
    probation.ended("a")
    probation.placed("a", "r1")
    assert not probation.is_placed("a")


_STEPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.booleans()), max_size=60)


@given(_STEPS)
def test_whatever_happens_one_healthy_replica_is_free_of_suspects_before_their_patience_ends(
    steps: list[tuple[int, int, bool]],
) -> None:
    probation, placed = Probation(PATIENCE_S), dict[str, str]()
    for number, (count, which, ends) in enumerate(steps):
        names = [f"r{each}" for each in range(count)]
        if ends and placed:
            probation.ended(placed.popitem()[0])
        else:
            probation.hold(suspect(f"s{number}", f"x {which}"))
        for step in probation.due(healthy(*names), 1.0):
            assert isinstance(step, Try)
            assert step.is_trial
            free = [name for name in names if name not in step.avoid]
            assert free
            assert free[0] not in placed.values()
            placed[step.request_id] = free[0]
            probation.placed(step.request_id, free[0])
            assert len(set(names) & set(placed.values())) < count
