"""The list-and-watch loop, on a registry in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import pytest

from omni_discovery.kv import DeleteEvent, Listing, WatchBatch
from omni_discovery.list_watch import list_and_watch
from omni_discovery.testing import FakeKV, ManualClock, settle


class Copy:
    """A sink that keeps what a client of it would: the values by key, and how often each thing happened."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lists = 0
        self.failures: list[tuple[str, int]] = []
        self.defect: Exception | None = None

    async def replace(self, listing: Listing, asked_at_s: float) -> None:
        self.lists += 1
        self.values = {item.key: item.value for item in listing.items}

    async def apply(self, batch: WatchBatch) -> None:
        if self.defect is not None:
            defect, self.defect = self.defect, None
            raise defect
        for event in batch.events:
            if isinstance(event, DeleteEvent):
                self.values.pop(event.key, None)
            else:
                self.values[event.item.key] = event.item.value

    def on_watch_failed(self, error: Exception, log_level: int) -> None:
        self.failures.append((type(error).__name__, log_level))


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.kv = FakeKV(self.clock)
        self.copy = Copy()
        self.beside: Sequence[Coroutine[Any, Any, None]] = ()
        self.task: asyncio.Task[None] | None = None

    async def start(self, name: str, *, is_prefix: bool) -> None:
        work = list_and_watch(
            self.kv,
            name,
            self.copy,
            is_prefix=is_prefix,
            clock=self.clock,
            jitter=lambda: 1.0,
            beside_watch=lambda: self.beside,
        )
        self.task = asyncio.create_task(work)
        await settle()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    assert scene.task is not None
    assert not scene.task.done()
    scene.task.cancel()
    await asyncio.gather(scene.task, return_exceptions=True)


async def test_a_prefix_is_listed_once_and_then_watched(scene: Scene) -> None:
    await scene.kv.put("p/a", b"1")
    await scene.start("p/", is_prefix=True)
    await scene.kv.put("p/b", b"2")
    await scene.kv.put("q", b"3")
    await scene.kv.delete("p/a")
    await settle()
    assert (scene.copy.values, scene.copy.lists) == ({"p/b": b"2"}, 1)


async def test_one_key_is_kept_without_the_keys_that_begin_like_it(scene: Scene) -> None:
    await scene.kv.put("r/10", b"other")
    await scene.start("r/1", is_prefix=False)
    await scene.kv.put("r/11", b"other")
    await scene.kv.put("r/1", b"mine")
    await settle()
    assert scene.copy.values == {"r/1": b"mine"}


async def test_an_outage_is_announced_and_the_list_after_it_has_what_the_watch_missed(scene: Scene) -> None:
    """1. etcd goes away for ten seconds: no news, its connection says so, so each failure is for DEBUG
    2. it comes back with another value and without its history: listed
    """
    await scene.kv.put("k", b"1")
    await scene.start("k", is_prefix=False)
    scene.kv.is_out = True
    await scene.clock.advance(10.0)
    assert set(scene.copy.failures) == {("RegistryUnavailableError", logging.DEBUG)}
    scene.kv.is_out = False
    await scene.kv.put("k", b"2")
    scene.kv.compact()
    await scene.clock.advance(3.0)
    assert scene.copy.values == {"k": b"2"}


async def test_a_compaction_leads_to_one_new_list(scene: Scene) -> None:
    await scene.start("k", is_prefix=False)
    for _ in range(3):
        await scene.kv.put("other", b"")
    scene.kv.compact()
    await scene.clock.advance(3.0)
    assert [name for name, _ in scene.copy.failures] == ["CompactedError"]
    assert scene.copy.lists == 2


async def test_a_sink_that_raises_is_told_and_fed_again(scene: Scene) -> None:
    scene.copy.defect = ZeroDivisionError()
    await scene.start("k", is_prefix=False)
    await scene.kv.put("k", b"1")
    await scene.clock.advance(1.0)
    assert scene.copy.failures == [("ZeroDivisionError", logging.WARNING)]
    assert scene.copy.values == {"k": b"1"}


async def test_work_beside_the_watch_ends_it_with_its_error(scene: Scene) -> None:
    async def disprove() -> None:
        await scene.clock.sleep(2.0)
        scene.beside = ()
        raise TimeoutError

    scene.beside = (disprove(),)
    await scene.start("k", is_prefix=False)
    await scene.clock.advance(3.0)
    assert [name for name, _ in scene.copy.failures] == ["TimeoutError"]
    assert scene.copy.lists == 2
