"""Names are looked up elsewhere, within bounds: who asks never waits, and one slow name holds up no other."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest

from hub.replicas.resolver import Resolver


class Names:
    """A DNS: names that begin with ``slow`` are not answered, ``none`` does not exist."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.numbers = ["10.0.0.1", "10.0.0.2"]
        self.waits: dict[str, threading.Event] = {}

    def give_up(self, hosts: Iterable[str]) -> None:
        """The system's own limit has come for these look-ups."""
        for host in hosts:
            if host in self.waits:
                self.waits[host].set()

    def lookup(self, host: str) -> list[str]:
        self.asked[host] += 1
        if host.startswith("slow"):
            self.waits[host] = threading.Event()
            self.waits[host].wait()
            raise OSError("timed out")
        if host == "none":
            raise OSError("no such name")
        return [] if host == "empty" else self.numbers


@pytest.fixture
def names() -> Iterator[Names]:
    made = Names()
    yield made
    made.give_up(made.waits)


class Scene:
    def __init__(self, names: Names) -> None:
        self.now_s = 0.0
        self.resolver = Resolver(names.lookup, now=lambda: self.now_s)

    def until(self, condition: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < limit_s
            time.sleep(0.001)

    def is_quiet(self) -> bool:
        return self.resolver._answers.qsize() == len(self.resolver._running)

    def numbers(self, host: str) -> tuple[str, ...]:
        return self.resolver.resolve(host).addresses

    def problem(self, host: str) -> str:
        return self.resolver.resolve(host).problem


def test_an_answer_counts_for_its_time_and_then_until_a_newer_one_comes(names: Names) -> None:
    scene = Scene(names)
    assert scene.problem("a") == "it is being looked up"
    scene.until(lambda: scene.numbers("a") == ("10.0.0.1", "10.0.0.2"))
    scene.now_s = 29.0
    scene.numbers("a")
    assert names.asked["a"] == 1
    names.numbers = ["10.0.0.3"]
    scene.now_s = 31.0
    assert scene.numbers("a")
    scene.until(lambda: scene.numbers("a") == ("10.0.0.3",))
    assert names.asked["a"] == 2


def test_a_name_that_does_not_exist_is_asked_for_again_and_ever_more_rarely(names: Names) -> None:
    scene = Scene(names)
    scene.until(lambda: scene.problem("none") == "no such name")
    scene.until(lambda: scene.problem("empty") == "it has no address")
    for tenth_s in range(1, 3000):
        scene.now_s = tenth_s / 10
        scene.problem("none")
        scene.until(scene.is_quiet)
    assert 8 <= names.asked["none"] <= 14


def test_names_that_are_not_answered_take_a_bounded_number_of_threads_and_hold_up_no_other(names: Names) -> None:
    scene = Scene(names)
    slow = [f"slow-{number}" for number in range(100)]
    for host in slow:
        assert scene.problem(host) == "it is being looked up"
    assert scene.problem("good") == "it is being looked up"
    seen: set[str] = set()
    while not scene.numbers("good"):
        scene.now_s += 1.0
        running = scene.resolver._running
        names.give_up([host for host, begun_s in running.items() if scene.now_s - begun_s > 20])
        for host in slow:
            seen.add(scene.problem(host))
        assert len(running) <= 32
        assert scene.now_s < 200
        time.sleep(0.01)
    assert "the DNS has not answered for 5 s" in seen


def test_a_number_stays_in_use_while_the_dns_is_away(names: Names) -> None:
    scene = Scene(names)
    scene.until(lambda: bool(scene.numbers("a")))

    def away(_host: str) -> list[str]:
        raise OSError("away")

    scene.resolver._lookup = away
    scene.now_s = 1000.0
    scene.numbers("a")
    scene.until(lambda: not scene.resolver._answers.empty())
    assert scene.numbers("a") == ("10.0.0.1", "10.0.0.2")


@pytest.mark.attack("Z17")
def test_more_names_than_are_remembered_wait_while_the_dns_hangs_and_the_last_asked_for_are_found(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. the DNS hangs, and of fifty names more are asked for than forty may be remembered
    2. it answers again: those that are still asked for are found, and of the others none stays behind
    """
    monkeypatch.setattr("hub.replicas.resolver._MOST_NAMES", 40)
    scene = Scene(names)
    for number in range(16):
        scene.problem(f"slow-{number}")
    for number in range(50):
        assert scene.problem(f"host-{number}") == "it is being looked up"
    assert len(scene.resolver._names) == 40
    assert set(scene.resolver._waiting) <= set(scene.resolver._names)
    scene.now_s = 6.0
    names.give_up([f"slow-{number}" for number in range(16)])
    asked = [f"host-{number}" for number in range(30, 50)]
    scene.until(lambda: [scene.numbers(host) for host in asked] == [("10.0.0.1", "10.0.0.2")] * 20)
    assert not scene.resolver._waiting


class Host(str):
    """A name that counts how often one of them was looked for."""

    __slots__ = ()
    looked_for = 0

    def __hash__(self) -> int:
        Host.looked_for += 1
        return super().__hash__()


@pytest.mark.attack("Z34")
def test_slow_names_that_wait_cost_nothing_whenever_another_is_asked_for(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. names are not answered in time  2. all of them wait for a thread, and another name is asked for"""
    scene, slow = Scene(names), [Host(f"slow-{number}") for number in range(200)]
    for begin in range(0, len(slow), 8):
        some = slow[begin : begin + 8]
        for host in some:
            scene.problem(host)
        scene.until(lambda some=some: set(some) <= names.waits.keys())
        scene.now_s += 6.0
        assert {scene.problem(host) for host in some} == {"the DNS has not answered for 5 s"}
        names.give_up(some)
        scene.until(lambda some=some: not scene.numbers("none") and not scene.resolver._running.keys() & set(some))
    monkeypatch.setattr("hub.replicas.resolver._MOST_OF_SLOW", 0)
    scene.now_s += 60.0
    for host in slow:
        scene.problem(host)
    assert len(scene.resolver._slow_waiting) == len(slow)
    Host.looked_for = 0
    scene.until(lambda: bool(scene.numbers("good")))
    assert Host.looked_for == 0
    monkeypatch.undo()
    names.waits.clear()
    scene.numbers("good")
    scene.until(lambda: len(names.waits) >= 8)
    assert len(scene.resolver._slow_waiting) == len(slow) - len(scene.resolver._running)
