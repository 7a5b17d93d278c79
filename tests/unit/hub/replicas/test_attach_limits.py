"""Who may be connected to: those that never answer, and a lack of descriptors, keep no good replica out for ever."""

from __future__ import annotations

import pytest

from hub.replicas.attach_limits import TURN_S, UNCONNECTED_TURN_S, AttachLimits, most_unanswered


class Scene:
    def __init__(self, most: int = 3) -> None:
        self.answered: set[str] = set()
        self.unleased: set[str] = set()
        self.unconnected: set[str] = set()
        self.limits = AttachLimits(
            self.answered.__contains__,
            most,
            lambda addr: addr not in self.unleased,
            lambda addr: addr not in self.unconnected,
        )

    def attach(self, addr: str, now_s: float) -> bool:
        if self.limits.must_wait(addr, now_s):
            return False
        self.limits.attached(addr, now_s)
        return True

    def turn(self, now_s: float) -> tuple[list[str], list[str]]:
        """One review: who gives way, and who is connected to then."""
        waiting, overdue = self.limits.review(now_s)
        for addr in overdue:
            self.limits.gone(addr)
            self.limits.postpone(addr)
        return overdue, [addr for addr in waiting if self.attach(addr, now_s)]


def test_those_that_have_answered_count_no_more() -> None:
    """1. three places: the fourth waits; 2. one of the three answers: the next review has room for the fourth"""
    scene = Scene()
    assert [scene.attach(addr, 0.0) for addr in "abcd"] == [True, True, True, False]
    assert "3 others have never answered" in scene.limits.must_wait("d", 0.0)
    assert scene.limits.review(1.0) == (["d"], [])
    scene.answered.add("b")
    assert scene.limits.review(2.0) == (["d"], [])
    assert scene.attach("d", 2.0)
    assert scene.limits.next_review_s is None


def test_those_that_never_answer_take_turns() -> None:
    """So a good replica behind many records of nobody has its turn, in the order of arrival."""
    scene = Scene()
    for addr in "abcde":
        scene.attach(addr, 0.0)
    assert scene.limits.review(TURN_S - 1) == (["d", "e"], [])
    waiting, overdue = scene.limits.review(TURN_S)
    assert (waiting, overdue) == (["d", "e"], ["a", "b"])
    for addr in overdue:
        scene.limits.gone(addr)
        scene.limits.postpone(addr)
    assert [scene.attach(addr, TURN_S) for addr in waiting] == [True, True]
    assert scene.limits.review(TURN_S + 1)[0] == ["a", "b"]


def test_a_lack_of_descriptors_is_tried_again_ever_more_rarely_and_forgotten_when_it_is_over() -> None:
    scene = Scene(100)
    now_s, tries = 0.0, 0
    while now_s < 300.0:
        assert not scene.limits.must_wait("a", now_s)
        scene.limits.ran_out("a", now_s)
        assert "no file descriptor" in scene.limits.must_wait("b", now_s)
        due_s = scene.limits.next_review_s
        assert due_s is not None
        assert now_s < due_s <= now_s + 30.0
        now_s, tries = due_s, tries + 1
    assert 10 <= tries <= 16
    assert scene.limits.review(now_s) == (["a", "b"], [])
    assert scene.attach("a", now_s)
    assert scene.attach("b", now_s)
    scene.limits.ran_out("c", now_s)
    assert scene.limits.next_review_s == now_s + 1.0


def test_one_that_is_gone_waits_no_more() -> None:
    scene = Scene(1)
    scene.attach("a", 0.0)
    scene.attach("b", 0.0)
    scene.limits.gone("b")
    assert scene.limits.next_review_s is None
    scene.limits.gone("a")
    assert scene.attach("c", 0.0)


@pytest.mark.attack("A24")
def test_replicas_that_never_answer_get_a_quarter_of_the_descriptors_at_most() -> None:
    """Ten descriptors each: the rest is for those that answer, and for clients."""
    assert [most_unanswered(limit) for limit in (10, 256, 1024, 20_000, 1 << 62)] == [1, 6, 25, 256, 256]


@pytest.mark.attack("H7")
def test_records_without_a_lease_give_way_at_once_to_those_with_one() -> None:
    """1. five records without a lease are there first, and have no turn behind them yet
    2. two replicas register: they get places at the next review, and lose them to none without a lease
    3. those without a lease have the places that are left in turns
    """
    scene = Scene()
    scene.unleased |= set("abcde")
    for addr in "abcdexy":
        scene.attach(addr, 0.0)
    assert scene.turn(1.0) == (["a", "b"], ["x", "y"])
    assert scene.turn(TURN_S - 1) == ([], [])
    assert scene.turn(TURN_S) == (["c"], ["d"])
    scene.unconnected |= set("xy")
    assert scene.turn(2 * TURN_S) == (["d"], ["e"])


@pytest.mark.attack("H7")
def test_where_nobody_listens_a_turn_is_short() -> None:
    scene = Scene()
    for addr in "abcdef":
        scene.attach(addr, 0.0)
    scene.unconnected |= {"a", "c"}
    assert scene.turn(UNCONNECTED_TURN_S - 1) == ([], [])
    assert scene.turn(UNCONNECTED_TURN_S) == (["a", "c"], ["d", "e"])
    assert scene.turn(2 * UNCONNECTED_TURN_S) == ([], [])


def test_while_there_is_room_nobody_gives_way() -> None:
    """1. of three places two are taken, long ago, by those that never answer; 2. one that waits is tried, they stay"""
    scene = Scene()
    assert [scene.attach(addr, 0.0) for addr in "ab"] == [True, True]
    scene.limits.postpone("c")
    assert scene.limits.review(1000.0) == (["c"], [])


def test_where_nobody_waits_nobody_gives_way() -> None:
    scene = Scene(1)
    assert scene.attach("a", 0.0)
    assert scene.limits.review(1000.0) == ([], [])


def test_one_that_waits_for_another_turn_is_not_connected_to_for_the_first_time() -> None:
    scene = Scene()
    assert scene.limits.attached("a", 0.0)
    scene.limits.gone("a")
    scene.limits.postpone("a")
    assert not scene.limits.attached("a", 1.0)
    scene.limits.gone("a")
    assert scene.limits.attached("a", 2.0)
