"""Whom a replica lets in while the registry is in trouble."""

from __future__ import annotations

from collections.abc import Mapping

from omni_discovery.known_hubs import KnownHubs
from omni_discovery.messages import HubRecord
from omni_discovery.table import Delta, View
from omni_discovery.testing import ManualClock


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.told: list[list[str]] = []
        self.known = KnownHubs(10.0, self._tell, self.clock)

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
    scene.known.review()
    assert scene.told[-1] == ["a"]
    await scene.clock.advance(1.1)
    scene.known.review()
    assert scene.told[-1] == []


async def test_hubs_that_vanish_together_are_kept_while_the_view_is_stale() -> None:
    scene = Scene()
    scene.see("a", "b", "c")
    assert scene.see("c") == ["a", "b", "c"]
    scene.see("c", stale_since_s=1.0)
    await scene.clock.advance(600.0)
    scene.known.review()
    assert scene.told[-1] == ["a", "b", "c"]
    assert scene.see("c", "b") == ["a", "b", "c"]
    await scene.clock.advance(10.1)
    scene.known.review()
    assert scene.told[-1] == ["b", "c"]
