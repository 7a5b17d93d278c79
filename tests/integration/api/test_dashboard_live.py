"""The snapshots of a hub whose registry is away: what is known goes on to be shown, and what is not is said."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from hub.api.dashboard.live import LiveSnapshots, as_events
from omni_discovery.errors import OverloadedError, RegistryUnavailableError
from omni_discovery.view.recent_events import RecentEvents
from omni_discovery.view.table import View
from tests.support.hub_fakes import FakeReplica, running_hub


class AwayRegistry:
    """A client whose etcd does not answer."""

    def view(self) -> View:
        return View()

    def calls(self) -> Any:
        raise RegistryUnavailableError("no etcd answers at there:2379")


async def test_a_registry_that_is_away_is_named_and_the_replicas_are_shown_all_the_same() -> None:
    async with asyncio.timeout(30.0), running_hub(FakeReplica()) as omni:
        live = LiveSnapshots(omni, AwayRegistry(), "test", RecentEvents())
        async for encoded in live.watch(lambda: True):
            shown = msgspec.json.decode(encoded)
            if shown["checks"]["problem"]:
                break
        assert shown["checks"] == {"fine": 0, "at": None, "problem": "no etcd answers at there:2379"}
        assert [replica["state"] for replica in shown["stages"][0]["replicas"]] == ["up"]


async def test_a_stream_ends_with_its_welcome_and_with_the_hub() -> None:
    async with asyncio.timeout(30.0), running_hub(FakeReplica()) as omni:
        live = LiveSnapshots(omni, AwayRegistry(), "test", RecentEvents())
        welcomes = iter([True, False])
        seen = [event async for event in as_events(live.watch(lambda: next(welcomes)))]
        assert seen[0] == b"retry: 2000\n\n"
        assert seen[1].startswith(b'data: {"at":')
        assert len(seen) == 2
        other = live.watch(lambda: True)
        assert await anext(other)
        live.close()
        assert [each async for each in other] == []


async def test_pages_that_come_at_the_same_moment_are_no_more_than_may_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. room for two, and three find room before any has begun to look; 2. the third one's stream ends at once"""
    monkeypatch.setattr("hub.api.dashboard.live.MOST_WATCHERS", 2)
    async with asyncio.timeout(30.0), running_hub(FakeReplica()) as omni:
        live = LiveSnapshots(omni, AwayRegistry(), "test", RecentEvents())
        pages = []
        for _ in range(3):
            live.check_room()
            pages.append(live.watch(lambda: True))
        assert await anext(pages[0])
        assert await anext(pages[1])
        assert [each async for each in pages[2]] == []
        with pytest.raises(OverloadedError):
            live.check_room()
        await pages[0].aclose()
        live.check_room()
        live.close()
