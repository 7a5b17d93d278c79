"""Which addresses a consumer takes for those of producers: registered lately, of that stage and edge."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.known_producers import KnownProducers

TCP = {"connector": "TcpConnector", "host": "10.0.0.1", "port": 4000}
HERE = ("10.0.0.1", 4000)


def record(stage_id: int = 0, **connectors: Any) -> ReplicaInfo:
    return ReplicaInfo("tcp://10.0.0.1:1", "", stage_id, ReplicaStatus.UP, 0, 0.0, 0.0, connectors=connectors)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def known(*infos: ReplicaInfo, edges: tuple[tuple[int, int], ...] = ((0, 2), (1, 2))) -> tuple[KnownProducers, Clock]:
    clock = Clock()
    producers = KnownProducers(edges, clock)
    producers.apply_records(infos)
    return producers, clock


def knows(producers: KnownProducers, named: Any, from_stage: int = 0, to_stage: int = 2) -> bool:
    return producers.hands_over_at(from_stage, to_stage, named, 0.0)


@pytest.mark.attack("A19")
def test_only_what_a_producer_of_that_edge_has_registered_is_known() -> None:
    producers, _ = known(record(**{"0-2": TCP, "0-3": {**TCP, "port": 5000}}))
    assert producers.stage_ids == [0, 1]
    assert knows(producers, HERE)
    for wrong in (("169.254.169.254", 80), ("10.0.0.1", 5000), ("10.0.0.1", 22), ("10.0.0.1", None), (None, None)):
        assert not knows(producers, wrong)
    for unhashable in (([], 4000), ("10.0.0.1", {})):
        assert not knows(producers, unhashable)
    assert not knows(producers, HERE, from_stage=1)


def test_a_record_without_an_address_stands_for_its_host() -> None:
    producers, _ = known(record())
    assert knows(producers, HERE)
    assert not knows(producers, ("10.0.0.2", 4000))


def test_a_producer_is_known_for_a_quarter_of_an_hour_after_its_record_is_gone() -> None:
    """A lost lease is no lost replica, and its hand-offs are still there."""
    producers, clock = known(record(**{"0-2": TCP}))
    clock.now_s = 800.0
    producers.apply_records([])
    assert knows(producers, HERE)
    clock.now_s = 901.0
    producers.apply_records([])
    assert not knows(producers, HERE)


def test_an_unknown_address_has_the_registry_read_at_once_but_seldom() -> None:
    """1. a producer that has just registered is found; 2. forged addresses ask at most once a second"""
    producers, clock = known()
    asked: list[float] = []

    def ask() -> None:
        asked.append(clock.now_s)
        threading.Thread(target=lambda: producers.apply_records([record(**{"0-2": TCP})])).start()

    producers.on_miss(ask)
    assert producers.hands_over_at(0, 2, HERE, 30.0)
    for _ in range(100):
        assert not producers.hands_over_at(0, 2, ("10.9.9.9", 1), 30.0)
    assert asked == [0.0]
    clock.now_s = 1.5
    assert not producers.hands_over_at(0, 2, ("10.9.9.9", 1), 30.0)
    assert asked == [0.0, 1.5]


def test_who_asks_while_the_registry_is_read_waits_for_the_same_answer() -> None:
    """1. one thread has asked for an address, and the answer is not there; 2. another asks: both find it"""
    producers, _ = known()
    asked = threading.Event()
    producers.on_miss(asked.set)
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda: found.append(producers.hands_over_at(0, 2, HERE, 30.0))) for _ in range(2)
    ]
    threads[0].start()
    assert asked.wait(30.0)
    threads[1].start()
    # The second one can only be given time to ask: if it has not, it finds what it looks for at once.
    threads[1].join(0.2)
    producers.apply_records([record(**{"0-2": TCP})])
    for thread in threads:
        thread.join(30.0)
    assert found == [True, True]


def test_a_registry_that_does_not_answer_leaves_what_is_known() -> None:
    producers, _ = known(record(**{"0-2": TCP}))
    producers.on_miss(lambda: threading.Thread(target=producers.read_failed).start())
    assert not producers.hands_over_at(0, 2, ("10.9.9.9", 1), 30.0)
    assert knows(producers, HERE)


@pytest.mark.attack("A19")
def test_a_kv_cache_is_fetched_from_registered_hosts_only() -> None:
    producers, _ = known(record(kv={"hosts": ["ib-1"]}))
    assert producers.has_kv_at(0, "10.0.0.1", 0.0)
    assert producers.has_kv_at(0, "ib-1", 0.0)
    for wrong in ("169.254.169.254", "", None, ["ib-1"]):
        assert not producers.has_kv_at(0, wrong, 0.0)
    assert not producers.has_kv_at(1, "ib-1", 0.0)


@pytest.mark.attack("Q61")
def test_an_address_is_that_replicas_which_has_registered_it_first() -> None:
    """1. 0/1 hands over there, and 0/9, which came later, says so, too; 2. 0/1 goes; 3. so does 0/9"""
    first = replace(record(**{"0-2": TCP}), replica_id=1, epoch=3)
    copy = replace(record(**{"0-2": TCP}), replica_id=9, epoch=7)
    producers, _ = known(copy, first)
    assert producers.owner_of(0, 2, HERE) == first.name == "0/1"
    producers.apply_records([copy])
    assert producers.owner_of(0, 2, HERE) == "0/9"
    producers.apply_records([])
    assert producers.owner_of(0, 2, HERE) == "0/9"
    assert producers.owner_of(0, 2, ("10.0.0.2", 4000)) == ""


@pytest.mark.attack("Z33")
def test_a_record_adds_a_few_hosts_only_and_those_seen_long_ago_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "h" * 256
    many = record(
        kv={"hosts": [long, *(f"ib-{number}" for number in range(8000))]}, **{"0-2": {"host": long, "port": 1}}
    )
    producers, _ = known(record(**{"0-2": TCP}), many)
    assert producers.has_kv_at(0, "ib-6", 0.0)
    assert not producers.has_kv_at(0, "ib-7", 0.0)
    assert not producers.has_kv_at(0, long, 0.0)
    assert not knows(producers, (long, 1))
    monkeypatch.setattr("omni_discovery.view.known_producers._MOST_PLACES", 12)
    others = [replace(record(kv={"hosts": [f"ib-{number}"]}), replica_id=number) for number in range(100, 110)]
    producers.apply_records(others)
    assert all(producers.has_kv_at(0, f"ib-{number}", 0.0) for number in range(100, 110))
    assert not producers.has_kv_at(0, "ib-0", 0.0)
