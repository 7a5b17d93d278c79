"""Whom to serve though the registry lists them no more, on a clock of the test's own."""

from __future__ import annotations

import pytest

from omni_discovery.view.mass_loss import MassLossGuard

TTL_S = 10.0


class Scene:
    """One pool of replicas that all answer, unless said otherwise."""

    def __init__(self, *members: str) -> None:
        self.core: MassLossGuard[int, str] = MassLossGuard(TTL_S)
        self.now_s = 100.0
        self.silent: set[str] = set()
        self.list(*members)

    def list(self, *members: str, out: tuple[str, ...] = (), fresh: bool = True, regressed: bool = False) -> list[str]:
        """The registry lists ``members`` in service and ``out`` out of it; return who is served besides."""
        listed = {0: {**dict.fromkeys(members, True), **dict.fromkeys(out, False)}}
        self.core.apply_members(listed, fresh=fresh, regressed=regressed, now_s=self.now_s, answers=self.answers)
        return self.kept()

    def kept(self, after_s: float = 0.0) -> list[str]:
        self.now_s += after_s
        return self.core.kept_without_record(self.answers, self.now_s).get(0, [])

    def answers(self, _pool: int, member: str) -> bool:
        return member not in self.silent


def test_one_that_vanishes_is_not_kept() -> None:
    assert Scene("a", "b", "c").list("a", "b") == []
    assert Scene("a").list() == []


def test_half_of_a_pool_is_no_mass_and_more_is() -> None:
    assert Scene("a", "b", "c", "d").list("a", "b") == []
    assert Scene("a", "b", "c", "d").list("a") == ["b", "c", "d"]
    assert Scene("a", "b").list() == ["a", "b"]


def test_those_that_vanish_one_by_one_within_a_ttl_are_a_mass_in_the_end() -> None:
    """1. of three, a goes: picks stop
    2. b goes 9 s later: now two of three went within one TTL, and both are kept
    """
    scene = Scene("a", "b", "c")
    assert scene.list("b", "c") == []
    scene.now_s += 9.0
    assert scene.list("c") == ["a", "b"]


def test_those_that_were_dead_before_their_keys_went_are_no_mass() -> None:
    """1. of two, a is killed: its session goes, and its key when the lease ends; 2. b hangs, and its lease ends, too
    3. both witnesses said of each that it is gone: nobody is kept, and nobody is tracked for longer than a TTL
    """
    scene = Scene("a", "b")
    scene.silent.add("a")
    assert scene.list("b") == []
    scene.now_s += 9.0
    scene.silent.add("b")
    assert scene.list() == []
    assert Scene("x", "y").list() == ["x", "y"]


def test_of_a_mass_those_that_were_dead_before_are_not_kept() -> None:
    scene = Scene("a", "b", "c", "d")
    scene.silent.add("a")
    assert scene.list("b", "c", "d") == []
    assert scene.list("b") == ["c", "d"]


def test_those_that_vanish_slowly_are_not() -> None:
    scene = Scene("a", "b", "c")
    assert scene.list("b", "c") == []
    scene.now_s += TTL_S + 0.1
    assert scene.list("c") == []
    assert scene.core.tracked() == {(0, "b")}


def test_who_said_farewell_first_is_not_missed() -> None:
    """All of a pool drain, then withdraw: a scale-down, however fast it is."""
    scene = Scene("a", "b", "c", "d")
    scene.list("d", out=("a", "b", "c"))
    assert scene.list("d") == []
    assert scene.core.tracked() == set()


def test_a_history_that_went_back_keeps_even_a_single_one() -> None:
    assert Scene("a").list(regressed=True) == ["a"]
    assert Scene("a", "b", "c").list("a", "b", regressed=True) == ["c"]


def test_each_pool_is_judged_alone() -> None:
    core: MassLossGuard[int, str] = MassLossGuard(TTL_S)
    core.apply_members(
        {0: {"a": True, "b": True}, 1: {"x": True, "y": True, "z": True}}, fresh=True, regressed=False, now_s=0
    )
    core.apply_members({0: {}, 1: {"x": True, "y": True}}, fresh=True, regressed=False, now_s=0)
    assert core.kept_without_record(lambda pool, member: True, 0.0) == {0: ["a", "b"]}


def test_they_are_kept_until_one_ttl_after_the_view_is_proved_fresh_again() -> None:
    """1. three of three vanish from a view that then turns stale: no end is known
    2. it is proved fresh 60 s later: the TTL counts from there; a came back meanwhile
    """
    scene = Scene("a", "b", "c")
    assert scene.list() == ["a", "b", "c"]
    assert scene.list(fresh=False) == ["a", "b", "c"]
    assert scene.core.next_review_s is None
    assert scene.kept(60.0) == ["a", "b", "c"]
    assert scene.list("a") == ["b", "c"]
    assert scene.core.next_review_s == scene.now_s + TTL_S
    assert scene.kept(TTL_S - 0.01) == ["b", "c"]
    assert scene.kept(0.02) == []
    assert scene.core.tracked() == set()


def test_the_last_that_answers_stays_as_long_as_it_does() -> None:
    """1. all vanish and none comes back: after the TTL one that answers is left, not the silent one
    2. it stays for hours; when it goes silent, too, nobody is left
    """
    scene = Scene("a", "b", "c")
    scene.silent.add("a")
    scene.list()
    assert scene.kept(TTL_S + 1) == ["b"]
    assert scene.core.next_review_s is None
    assert scene.kept(7200.0) == ["b"]
    scene.silent.add("b")
    assert scene.kept() == []
    scene.silent.clear()
    assert scene.kept() == []


def test_the_last_goes_when_another_that_is_listed_answers() -> None:
    scene = Scene("a", "b")
    scene.list()
    assert scene.kept(TTL_S + 1) == ["a"]
    scene.silent.add("new")
    assert scene.list("new") == ["a"]
    scene.silent.clear()
    assert scene.kept() == []


def test_who_comes_back_is_listed_and_may_vanish_alone_later() -> None:
    scene = Scene("a", "b", "c")
    scene.list()
    assert scene.list("a", "b", "c") == []
    scene.now_s += TTL_S + 1
    assert scene.list("a", "b") == []


def test_an_outage_alone_keeps_nobody_that_is_missing_afterwards() -> None:
    """The table itself is kept during an outage; what one relist afterwards misses has gone in the usual way."""
    scene = Scene("a", "b", "c")
    assert scene.list("a", "b", "c", fresh=False) == []
    scene.now_s += 600.0
    assert scene.list("a", "b") == []


@pytest.mark.attack("P1")
def test_thousands_that_nobody_was_behind_are_forgotten_as_they_vanish() -> None:
    """Each later change would cost as much as all of them, for a TTL; unless the registry has lost its history."""
    scene = Scene("a", "b", *map(str, range(1000)))
    scene.silent.update(map(str, range(1000)))
    assert scene.list("a", "b") == []
    assert not scene.core.tracked()
    assert scene.list("b") == []
    assert scene.core.tracked() == {(0, "a")}
    scene.silent.add("b")
    assert scene.list(regressed=True) == ["a", "b"]


def test_of_two_that_vanish_one_after_the_other_the_first_goes_first() -> None:
    """1. a history that went back takes a away, and later b; 2. a's time is over, and b, which answers, is kept"""
    scene = Scene("a", "b")
    assert scene.list("b", regressed=True) == ["a"]
    scene.now_s += 5.0
    assert scene.list(regressed=True) == ["a", "b"]
    assert scene.kept(after_s=6.0) == ["b"]
