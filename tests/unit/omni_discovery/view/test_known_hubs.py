"""Whom a replica lets in while the registry is in trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from omni_discovery.records.schema import HubRecord
from omni_discovery.testing import ManualClock
from omni_discovery.view.known_hubs import KnownHubs
from omni_discovery.view.table import Delta, View


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.told: list[list[str]] = []
        self.revoked: list[list[str]] = []
        self.known = KnownHubs(10.0, self._tell, self.clock, lambda hubs: self.revoked.append(sorted(hubs)))
        self.revoke()

    def revoke(self, *hubs: str, history: int = 0, stale_since_s: float | None = None) -> None:
        view = View(revoked=frozenset(hubs), revision=5, history=history, stale_since_s=stale_since_s)
        self.known.on_control_view(view, Delta())

    def _tell(self, hubs: Mapping[str, HubRecord]) -> None:
        self.told.append(sorted(hubs))

    def see(self, *hubs: str, history: int = 0, stale_since_s: float | None = None) -> list[str]:
        records = {hub_id: HubRecord(hub_id=hub_id) for hub_id in hubs}
        self.known.on_view(View(hubs=records, revision=5, history=history, stale_since_s=stale_since_s), Delta())
        return self.told[-1]


async def test_a_hub_that_leaves_is_forgotten_and_news_is_told_once() -> None:
    scene = Scene()
    assert scene.see("a", "b", "c") == ["a", "b", "c"]
    assert scene.see("a", "b") == ["a", "b"]
    scene.see("a", "b")
    assert len(scene.told) == 2


async def test_no_hub_is_news_too_but_not_before_the_first_list() -> None:
    scene = Scene()
    scene.known.on_view(View(), Delta())
    assert scene.told == []
    assert scene.see() == []


async def test_hubs_that_a_wipe_took_may_come_in_until_the_registry_has_recovered() -> None:
    """1. the registry is wiped: the only hub is still let in
    2. a TTL after the list of the new registry it is not, if it has not registered by then
    """
    scene = Scene()
    scene.see("a")
    assert scene.see(history=1) == ["a"]
    await scene.clock.advance(9.0)
    scene.known.run_timers()
    assert scene.told[-1] == ["a"]
    await scene.clock.advance(1.1)
    scene.known.run_timers()
    assert scene.told[-1] == []


async def test_hubs_that_vanish_together_are_kept_while_the_view_is_stale() -> None:
    scene = Scene()
    scene.see("a", "b", "c")
    assert scene.see("c") == ["a", "b", "c"]
    scene.see("c", stale_since_s=1.0)
    await scene.clock.advance(600.0)
    scene.known.run_timers()
    assert scene.told[-1] == ["a", "b", "c"]
    assert scene.see("c", "b") == ["a", "b", "c"]
    await scene.clock.advance(10.1)
    scene.known.run_timers()
    assert scene.told[-1] == ["b", "c"]


async def test_nobody_is_let_in_before_it_is_known_who_is_revoked() -> None:
    told: list[list[str]] = []
    known = KnownHubs(10.0, lambda hubs: told.append(sorted(hubs)), ManualClock())
    hubs = {hub_id: HubRecord(hub_id=hub_id) for hub_id in ("a", "b")}
    known.on_view(View(hubs=hubs, revision=5), Delta())
    known.on_control_view(View(), Delta())
    assert told == []
    known.on_control_view(View(revoked=frozenset({"b"}), revision=5), Delta())
    assert told == [["a"]]


async def test_a_revoked_hub_is_shut_out_and_one_that_is_allowed_again_comes_in() -> None:
    scene = Scene()
    assert scene.see("a", "b") == ["a", "b"]
    scene.revoke("b")
    assert (scene.told[-1], scene.revoked) == (["a"], [["b"]])
    assert scene.see("a") == ["a"]
    assert scene.see("a", "b") == ["a"]
    scene.revoke()
    assert (scene.told[-1], scene.revoked) == (["a", "b"], [["b"], []])


async def test_a_wipe_lifts_no_revocation_until_the_new_registry_has_had_a_ttl() -> None:
    """1. the registry is wiped: hub and control key are gone; the hub is known, and shut out
    2. it registers anew: still
    3. nobody puts the control key back within a TTL of the first list: then it is forgotten
    """
    scene = Scene()
    scene.see("a", "b")
    scene.revoke("b")
    scene.revoke(history=1)
    assert scene.see(history=1) == ["a"]
    assert scene.see("a", "b", history=1) == ["a"]
    assert scene.known.revoked == {"b"}
    await scene.clock.advance(9.0)
    scene.known.run_timers()
    assert scene.known.revoked == {"b"}
    await scene.clock.advance(1.1)
    scene.known.run_timers()
    assert (scene.told[-1], scene.revoked[-1]) == (["a", "b"], [])


async def test_while_etcd_is_away_a_revoked_hub_stays_revoked() -> None:
    scene = Scene()
    scene.see("a", "b")
    scene.revoke("b")
    scene.revoke("b", stale_since_s=1.0)
    await scene.clock.advance(600.0)
    scene.known.run_timers()
    assert (scene.told[-1], scene.known.revoked) == (["a"], {"b"})


@pytest.mark.attack("Q41")
async def test_of_many_hubs_that_change_at_once_each_fifth_of_a_second_is_told() -> None:
    """1. a hundred are told; fifty views in one moment are not yet, and the last of them is after 0.2 s
    2. a hub that is revoked meanwhile is shut out at once
    """
    scene = Scene()
    many = [f"h{number:02}" for number in range(99)]
    scene.see("a", *many)
    for number in range(50):
        scene.see("b", *many[number:])
    assert len(scene.told) == 1
    scene.revoke("a")
    assert (len(scene.told), scene.told[-1]) == (2, many)
    await scene.clock.advance(0.21)
    scene.known.run_timers()
    assert (len(scene.told), scene.told[-1]) == (3, ["b", *many[49:]])


@pytest.mark.attack("Q41")
async def test_a_hub_among_many_that_change_is_told_without_another_view() -> None:
    told: list[int] = []
    is_told = asyncio.Event()

    def take(hubs: Mapping[str, HubRecord]) -> None:
        told.append(len(hubs))
        if len(hubs) == 101:
            is_told.set()

    known = KnownHubs(10.0, take)
    known.on_control_view(View(revision=5), Delta())
    many = {f"h{number}": HubRecord(hub_id=f"h{number}") for number in range(100)}
    known.on_view(View(hubs=many, revision=5), Delta())
    known.on_view(View(hubs={**many, "a": HubRecord(hub_id="a")}, revision=6), Delta())
    assert told == [100]
    await asyncio.wait_for(is_told.wait(), 5.0)
    assert told == [100, 101]


@pytest.mark.attack("Q41")
async def test_hubs_that_come_and_go_are_kept_in_a_bounded_number() -> None:
    """More than half go at once, again and again: as many as are read in two views are let in beside the rest."""
    scene = Scene()
    for turn in range(6):
        scene.see(*(f"t{turn}-{number}" for number in range(1000)))
        await scene.clock.advance(0.21)
        scene.known.run_timers()
    assert 1000 < len(scene.told[-1]) <= 3 * 1024
