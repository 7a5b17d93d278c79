"""A watch that lies by silence, and what finds it out; in memory, on a clock moved by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import pytest

from omni_discovery.errors import CompactedError, RegistryRefusedError, RegistryUnavailableError
from omni_discovery.kv import DeleteEvent, Listing, PutEvent, WatchBatch
from omni_discovery.records import keys
from omni_discovery.records.beat import Beat, decode_beat
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.testing import FakeKV, ManualClock, settle
from omni_discovery.view.anti_entropy import AntiEntropyOptions
from omni_discovery.view.table import ReplicaTable, View
from omni_discovery.view.watcher import Watcher

NS = "default"
BEAT = keys.beat_key(NS, "hub-1")


def key(replica_id: int) -> str:
    return keys.replica_key(NS, 0, replica_id)


def value(replica_id: int, status: ReplicaStatus = ReplicaStatus.UP) -> bytes:
    return encode_record(
        ReplicaRecord(stage_id=0, replica_id=replica_id, input_addr="i", output_addr="o", status=status)
    )


class LyingKV(FakeKV):
    """Its watches may drop the events of some keys, or all events, and say nothing; its beats may be refused."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self._call_clock = clock
        self.lists = self.watches = 0
        self.drops: set[str] = set()
        self.is_mute = self.is_read_only = self.hangs = False
        self.moves = 0
        #: Ends the open watch, and each later one, with this error.
        self.watch_error: Exception | None = None
        self._watch_ends = asyncio.Event()

    def end_watch(self, error: Exception) -> None:
        self.watch_error = error
        self._watch_ends.set()

    def move_on(self) -> None:
        self.moves += 1

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        self.lists += 1
        await self._answer()
        return await super().list(prefix, keys_only=keys_only)

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        if self.is_read_only:
            raise RegistryUnavailableError("no space")
        await self._answer()
        return await super().put(key, value, lease_id)

    async def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        self.watches += 1
        self._watch_ends.clear()
        async for batch in self._until_ended(super().watch(prefix, start_revision)):
            kept = [event for event in batch.events if not (self.is_mute or _key_of(event) in self.drops)]
            if kept or not batch.events:
                yield WatchBatch(batch.revision, tuple(kept))

    async def _until_ended(self, batches: AsyncGenerator[WatchBatch, None]) -> AsyncGenerator[WatchBatch, None]:
        ended = asyncio.ensure_future(self._watch_ends.wait())
        try:
            while True:
                batch = asyncio.ensure_future(anext(batches))
                await asyncio.wait([batch, ended], return_when=asyncio.FIRST_COMPLETED)
                if ended.done() and self.watch_error is not None:
                    batch.cancel()
                    await asyncio.gather(batch, return_exceptions=True)
                    raise self.watch_error
                yield await batch
        finally:
            ended.cancel()
            await batches.aclose()

    async def _answer(self) -> None:
        """A stopped server: the call gets no answer and ends by its own timeout, as EtcdKV's do."""
        if self.hangs:
            await self._call_clock.sleep(6.0)
            raise RegistryUnavailableError("timeout")


def _key_of(event: PutEvent | DeleteEvent) -> str:
    return event.item.key if isinstance(event, PutEvent) else event.key


class Scene:
    """One hub's view, with beats under a lease that never ends."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.kv = LyingKV(self.clock)
        self.views: list[View] = []
        self.counts: Counter[str] = Counter()
        self.echoes_s: list[float] = []
        self.table = ReplicaTable(NS)
        self.applied_revision: Callable[[], int] | None = None

    async def start(self) -> None:
        lease_id = (await self.kv.grant(1_000_000.0)).lease_id
        await self.kv.put(key(0), value(0))
        options = AntiEntropyOptions(
            beat=lambda kv: Beat(kv, BEAT, lambda: lease_id),
            count=self._count,
            observe_echo=self.echoes_s.append,
            applied_revision=self.applied_revision,
        )
        prefix = keys.namespace_prefix(NS)
        self.watcher = Watcher(
            self.kv,
            self.table,
            prefix,
            lambda view, _: self.views.append(view),
            clock=self.clock,
            jitter=lambda: 0.5,
            options=options,
        )
        self.watcher.start()
        await settle()

    def _count(self, name: str) -> None:
        self.counts[name] += 1

    @property
    def ids(self) -> list[int]:
        return sorted(replica_id for _, replica_id in self.table.snapshot().replicas)

    async def beat(self) -> int:
        item = await self.kv.get(BEAT)
        return 0 if item is None else decode_beat(BEAT, item.value).counter

    async def applied(self) -> int:
        item = await self.kv.get(BEAT)
        return 0 if item is None else decode_beat(BEAT, item.value).revision


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    await scene.start()
    yield scene
    await scene.watcher.close()


async def test_a_quiet_watch_is_proved_each_second_by_a_leased_beat(scene: Scene) -> None:
    await scene.clock.advance(10.5)
    assert await scene.beat() == len(scene.echoes_s) == 10
    item = await scene.kv.get(BEAT)
    assert item is not None
    assert item.lease_id != 0
    assert decode_beat(BEAT, item.value).revision > 0
    assert scene.table.snapshot().stale_since_s is None
    assert (scene.kv.watches, scene.counts["unproved"], len(scene.views)) == (1, 0, 1)


async def test_a_watch_that_goes_mute_is_found_out_and_opened_anew(scene: Scene) -> None:
    """1. the watch says nothing any more, while replica 1 comes
    2. within five seconds the view is marked stale since the last proof, and a new list shows replica 1
    """
    await scene.clock.advance(5.5)
    scene.kv.is_mute = True
    await scene.kv.put(key(1), value(1))
    await scene.clock.advance(5.0)
    assert scene.ids == [0, 1]
    assert scene.counts["unproved"] == scene.kv.moves == 1
    stale = [view.stale_since_s for view in scene.views if view.stale_since_s is not None]
    assert len(stale) == 1
    assert 1_000_003.0 <= stale[0] <= 1_000_005.5
    scene.kv.is_mute = False
    await scene.clock.advance(10.0)
    assert scene.table.snapshot().stale_since_s is None


async def test_many_hubs_share_the_beats_between_them(scene: Scene) -> None:
    for number in range(60):
        hub_id = f"other-{number}"
        await scene.kv.put(keys.hub_key(NS, hub_id), encode_record(HubRecord(hub_id=hub_id)))
    await scene.clock.advance(31.0)
    assert 9 <= await scene.beat() <= 11


async def test_a_store_that_takes_no_writes_is_proved_by_lists(scene: Scene) -> None:
    scene.kv.is_read_only = True
    await scene.clock.advance(60.0)
    assert scene.table.snapshot().stale_since_s is None
    assert scene.kv.lists < 20
    assert scene.counts["unproved"] == 0


async def test_a_registry_that_goes_while_the_watch_stands_makes_the_view_stale(scene: Scene) -> None:
    await scene.clock.advance(3.5)
    scene.kv.is_out = True
    await scene.clock.advance(60.0)
    since_s = scene.table.snapshot().stale_since_s
    assert since_s is not None
    assert since_s <= 1_000_003.6
    assert scene.ids == [0]


async def test_a_deletion_lost_as_the_watch_opened_is_found_a_second_later(scene: Scene) -> None:
    scene.kv.drops.add(key(0))
    await scene.kv.delete(key(0))
    await scene.clock.advance(0.9)
    assert scene.ids == [0]
    await scene.clock.advance(0.2)
    assert scene.ids == []
    assert scene.counts["repair"] == 1


@pytest.mark.parametrize("event", ["put", "delete"])
async def test_an_event_lost_later_is_found_within_the_minute(scene: Scene, event: str) -> None:
    await scene.clock.advance(5.0)
    changed = key(1) if event == "put" else key(0)
    scene.kv.drops.add(changed)
    if event == "put":
        await scene.kv.put(changed, value(1))
    else:
        await scene.kv.delete(changed)
    await scene.clock.advance(62.0)
    assert scene.ids == ([0, 1] if event == "put" else [])
    assert scene.counts["repair"] == 1


async def test_a_view_that_is_right_is_not_read_again(scene: Scene) -> None:
    await scene.clock.advance(600.0)
    assert scene.kv.lists == 2
    assert scene.counts == Counter()


async def test_a_registry_that_went_back_unseen_is_read_anew(scene: Scene) -> None:
    """The watch stays silent on a wipe; the comparison of the minute, or the beat, notices."""
    await scene.clock.advance(2.0)
    history = scene.table.snapshot().history
    scene.kv.is_mute = True
    scene.kv.wipe()
    await scene.kv.put(key(5), value(5))
    scene.kv.is_mute = False
    await scene.clock.advance(6.0)
    assert scene.ids == [5]
    assert scene.table.snapshot().history == history + 1


async def test_a_drain_is_acknowledged_by_a_beat_on_a_busy_watch(scene: Scene) -> None:
    await scene.clock.advance(2.0)
    await scene.kv.put(key(0), value(0, ReplicaStatus.DRAINING))
    item = await scene.kv.get(key(0))
    assert item is not None
    for number in range(1, 20):
        await scene.clock.advance(0.1)
        await scene.kv.put(key(1), value(1) + b" " * number)
    beat = await scene.kv.get(BEAT)
    assert beat is not None
    assert decode_beat(BEAT, beat.value).revision >= item.mod_revision


async def test_a_hub_that_is_slow_to_apply_says_so_only_then_and_soon() -> None:
    """1. the watch brings a drain at R, and the hub goes by what came before: its beats don't reach R
    2. it has applied R: the next beat, within the common rate and not a second later, says so
    """
    scene = Scene()
    applied = [1]
    scene.applied_revision = lambda: applied[0]
    await scene.start()
    await scene.clock.advance(2.0)
    await scene.kv.put(key(0), value(0, ReplicaStatus.DRAINING))
    drained = await scene.kv.get(key(0))
    assert drained is not None
    await scene.clock.advance(0.3)
    assert await scene.applied() == 1
    applied[0] = drained.mod_revision
    await scene.clock.advance(0.2)
    assert await scene.applied() == drained.mod_revision
    beats = await scene.beat()
    await scene.clock.advance(2.0)
    assert await scene.beat() <= beats + 3
    await scene.watcher.close()


async def test_a_hub_that_never_applies_does_not_beat_fast_for_ever() -> None:
    scene = Scene()
    scene.applied_revision = lambda: 1
    await scene.start()
    await scene.kv.put(key(0), value(0, ReplicaStatus.DRAINING))
    await scene.clock.advance(10.0)
    beats = await scene.beat()
    await scene.clock.advance(10.0)
    assert await scene.beat() <= beats + 11
    await scene.watcher.close()


async def test_a_server_that_hangs_makes_the_view_stale_three_seconds_after_the_last_proof(scene: Scene) -> None:
    """SIGSTOP: the watch is silent, and the write of the beat hangs for longer than the view may be trusted."""
    await scene.clock.advance(5.5)
    scene.kv.is_mute = scene.kv.hangs = True
    await scene.clock.advance(2.4)
    assert scene.table.snapshot().stale_since_s is None
    await scene.clock.advance(0.2)
    assert scene.table.snapshot().stale_since_s == pytest.approx(1_000_005.0, abs=0.05)


@pytest.mark.parametrize(
    "error",
    [RegistryUnavailableError("keepalive"), RegistryRefusedError("permission denied"), ZeroDivisionError("a defect")],
)
async def test_however_a_watch_ends_the_view_is_stale_since_the_last_proof(scene: Scene, error: Exception) -> None:
    await scene.clock.advance(5.5)
    scene.kv.is_mute = True
    await scene.clock.advance(1.0)
    scene.kv.end_watch(error)
    await settle()
    assert [view.stale_since_s for view in scene.views[1:2]] == [pytest.approx(1_000_005.0, abs=0.05)]


async def test_a_change_that_came_is_the_last_proof_when_the_watch_ends(scene: Scene) -> None:
    await scene.clock.advance(5.2)
    await scene.kv.put(key(1), value(1))
    await scene.clock.advance(0.6)
    scene.kv.end_watch(RegistryUnavailableError("reset"))
    await settle()
    assert [view.stale_since_s for view in scene.views if view.stale_since_s] == [pytest.approx(1_000_005.2, abs=0.05)]


async def test_a_list_that_hangs_after_a_compaction_makes_the_view_stale_in_time(scene: Scene) -> None:
    """1. the watch ends because its revision is compacted: etcd answers, the view is fresh
    2. the list gets no answer: three seconds after the last proof the view is stale, before the list has failed
    """
    await scene.clock.advance(5.5)
    scene.kv.hangs = True
    scene.kv.end_watch(CompactedError("compacted"))
    await scene.clock.advance(2.0)
    assert scene.table.snapshot().stale_since_s is None
    await scene.clock.advance(0.6)
    assert scene.table.snapshot().stale_since_s == pytest.approx(1_000_005.0, abs=0.05)
    scene.kv.hangs = False
    await scene.clock.advance(10.0)
    assert scene.table.snapshot().stale_since_s is None
