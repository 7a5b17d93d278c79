"""Probation: who may be tried where, so that no request takes a stage, and no innocent one waits for ever."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from hub.pool.probation import GiveUp, Healthy, Probation, Suspect, Together, Try

PATIENCE_S = 10.0


def suspect(
    request_id: str,
    *deaths: str,
    since_s: float = 0.0,
    until_s: float = 300.0,
    wanted: int = 2,
    avoid: Collection[str] = (),
    lost_after_s: float = 0.0,
    alone: bool = False,
) -> Suspect:
    return Suspect(request_id, deaths or ("x 1",), avoid, since_s, until_s, wanted, lost_after_s, alone)


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
    assert probation.placed("c", "r1") == []
    assert probation.due(two, 0.0) == []
    probation.ended("c")
    assert probation.due(two, 0.0) == [Try("a")]
    assert len(probation) == 1


def test_with_more_replicas_suspects_are_tried_side_by_side_each_at_its_own() -> None:
    probation = holding(*(suspect(name) for name in "abc"))
    four = healthy("r1", "r2", "r3", "r4")
    for number, name in enumerate("cab", 1):
        busy = frozenset(f"r{each}" for each in range(1, number))
        assert probation.due(four, 0.0) == [Try(name, busy)]
        probation.placed(name, f"r{number}")
    probation.hold(suspect("d", "y 1"))
    assert probation.due(four, 0.0) == []


def test_the_earliest_death_comes_first_and_of_its_suspects_by_turns_the_youngest_and_the_oldest() -> None:
    """What kills at its start was sent last; where an engine works in order, the first in its queue holds up the rest.

    Before all others come those that were at two deaths.
    """
    waiting = [suspect(name, "x 1") for name in "abcd"] + [
        suspect("e", "y 1"),
        suspect("f", "y 1"),
        suspect("g", "y 1"),
    ]
    probation = holding(*waiting, suspect("h", "y 1", "z 1", alone=True))
    order = []
    for _ in range(8):
        (step,) = probation.due(healthy("r1", "r2"), 0.0)
        order.append(step.request_id)
        probation.placed(step.request_id, "r1")
        probation.ended(step.request_id)
    assert "".join(order) == "hdacbgef"
    assert probation.due(healthy("r1", "r2"), 0.0) == []


def test_a_long_row_is_tried_together_after_a_second_but_never_on_the_replica_that_is_kept_free() -> None:
    """1. d is on trial and says nothing; after a second the others are let go, too, to the same replica
    2. all there are told that they are not alone
    """
    probation = holding(*(suspect(name) for name in "abcd"))
    two = healthy("r1", "r2")
    assert probation.due(two, 5.0) == [Try("d")]
    assert probation.placed("d", "r1") == []
    assert probation.due(two, 5.9) == []
    for name, there in (("a", "da"), ("c", "dac"), ("b", "dacb")):
        assert probation.due(two, 6.0) == [Try(name, frozenset({"r2"}))]
        assert probation.placed(name, "r1") == [Together(each) for each in there]
    assert probation.due(two, 6.0) == []


def test_a_long_row_is_passed_on_the_only_replica_of_a_stage_too() -> None:
    probation = holding(*(suspect(name, wanted=1) for name in "ab"))
    one = healthy("r1")
    assert probation.due(one, 0.0) == [Try("b")]
    probation.placed("b", "r1")
    assert probation.due(one, 0.9) == []
    assert probation.due(one, 1.0) == [Try("a")]


def test_nobody_is_put_on_the_last_replica_beside_another_while_a_second_one_is_waited_for() -> None:
    """1. b is tried while two replicas are up; the free one ends
    2. until a second one is up, or is waited for no longer, a waits
    """
    probation = holding(suspect("a"), suspect("b"))
    probation.due(healthy("r1", "r2"), 0.0)
    probation.placed("b", "r1")
    assert probation.due(healthy("r1", starting=True), 9.0) == []
    assert probation.due(healthy("r1", "r3"), 9.0) == [Try("a", frozenset({"r3"}))]


def test_a_request_that_hangs_is_found_out_before_others_are_tried_beside_it() -> None:
    """Its first replica was given up after 60 s, so the second one will be after as long, and a little."""
    probation = holding(suspect("a", lost_after_s=2.0), suspect("b", lost_after_s=60.0))
    two = healthy("r1", "r2")
    assert probation.due(two, 0.0) == [Try("b")]
    probation.placed("b", "r1")
    assert probation.due(two, 119.0) == []
    assert probation.due(two, 120.0) == [Try("a", frozenset({"r2"}))]


def test_half_of_its_time_is_the_longest_that_a_suspect_waits_for_others() -> None:
    probation = holding(suspect("a", until_s=20.0), suspect("b", lost_after_s=60.0))
    probation.due(healthy("r1", "r2"), 0.0)
    probation.placed("b", "r1")
    assert probation.due(healthy("r1", "r2"), 19.0) == []
    assert probation.due(healthy("r1", "r2"), 20.0) == [Try("a", frozenset({"r2"}))]


def test_those_that_were_at_two_deaths_are_tried_alone_however_long_that_takes() -> None:
    """1. a and b were at two deaths: b is tried, nobody comes beside it, and a goes beside nobody
    2. with b's end a has its turn
    """
    twice = [suspect(name, "x 1", "y 1", alone=True) for name in "ab"]
    probation = holding(suspect("c"), *twice)
    two = healthy("r1", "r2")
    assert probation.due(two, 0.0) == [Try("b")]
    probation.placed("b", "r1")
    assert probation.due(two, 250.0) == []
    probation.ended("b")
    assert probation.due(two, 250.0) == [Try("a")]


def test_the_second_for_which_suspects_are_alone_counts_from_when_any_of_them_could_be_tried() -> None:
    """1. one replica is left; a second one comes after 9 s
    2. only then the first is tried, and the others wait for it
    """
    probation = holding(suspect("a"), suspect("b"))
    assert probation.due(healthy("r1", starting=True), 0.0) == []
    assert probation.due(healthy("r1", "r2"), 9.0) == [Try("b")]
    probation.placed("b", "r1")
    assert probation.due(healthy("r1", "r2"), 9.9) == []
    assert len(probation.due(healthy("r1", "r2"), 10.0)) == 1


def test_the_last_replica_is_spared_until_another_is_there() -> None:
    """1. one replica is left: nobody is tried there; 2. a second one is up: one is."""
    probation = holding(suspect("a"), suspect("b"))
    assert probation.due(healthy("r1"), 9.9) == []
    assert probation.due(healthy("r1", "r2"), 9.9) == [Try("b")]


def test_where_no_other_comes_the_last_one_gets_them_one_by_one() -> None:
    probation = holding(suspect("a"), suspect("b"))
    assert probation.due(healthy("r1"), 10.0) == [Try("b")]
    probation.placed("b", "r1")
    assert probation.due(healthy("r1"), 10.9) == []
    probation.ended("b")
    assert probation.due(healthy("r1"), 10.9) == [Try("a")]


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


def test_a_suspect_that_has_to_avoid_all_that_are_there_waits_for_another_and_then_gives_up() -> None:
    """1. the only replicas that take work are those that it must avoid: it waits for another
    2. no other comes: it gives up; a pick would be refused at once, and the next one after it, without end
    3. an ejected one that it need not avoid would do
    """
    avoiding = suspect("a", avoid=("r1", "r2"))
    probation = holding(avoiding)
    assert probation.due(healthy("r1", "r2"), 9.0) == []
    assert probation.due(healthy("r1", "r2"), 10.0) == [GiveUp("a")]
    assert probation.due(healthy("r1", "r2"), 10.0) == []
    with_ejected = Healthy(frozenset(["r1", "r2"]), ejected=frozenset(["r3"]))
    assert holding(avoiding).due(with_ejected, 10.0) == [Try("a")]


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
