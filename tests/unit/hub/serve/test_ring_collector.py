"""When a hub looks for rings of objects that nobody uses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from hub.serve.ring_collector import RingCollector


class Ring:
    """It holds itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def rare_looks() -> Iterator[None]:
    """Python's own looks are as rare as in a hub."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1_000_000, 10, 10)
    yield
    gc.set_threshold(*thresholds)


def test_a_ring_is_found_once_there_are_some_and_ten_seconds_have_passed() -> None:
    now_s = 100.0
    collector = RingCollector(lambda: now_s)
    rings = [Ring() for _ in range(1100)]
    found = weakref.ref(rings[0])
    del rings
    collector.look()
    assert found() is None
    rings = [Ring() for _ in range(1100)]
    found = weakref.ref(rings[0])
    del rings
    now_s += 9.0
    collector.look()
    assert found() is not None
    now_s += 2.0
    collector.look()
    assert found() is None


def test_few_objects_are_not_looked_through() -> None:
    found = weakref.ref(Ring())
    RingCollector().look()
    assert found() is not None


def test_every_tenth_look_goes_through_older_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, generations = 0.0, list[int]()
    monkeypatch.setattr(gc, "get_count", lambda: (1000, 0, 0))
    monkeypatch.setattr(gc, "collect", generations.append)
    collector = RingCollector(lambda: now_s)
    for _ in range(200):
        now_s += 10.0
        collector.look()
    assert [generations.count(each) for each in (0, 1, 2)] == [180, 18, 2]
