"""The watcher against a registry in memory, on a clock moved by hand."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from omni_discovery.errors import CompactedError, RegistryError, RegistryRefusedError, RegistryUnavailableError
from omni_discovery.etcd.config import RegistryConfig
from omni_discovery.kv import Listing, WatchBatch
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.registration.registrars import HubRegistrar
from omni_discovery.testing import FakeKV, ManualClock, settle
from omni_discovery.view import table
from omni_discovery.view.hub_watcher import HubWatcher, ViewOptions
from omni_discovery.view.record_bounds import Most
from omni_discovery.view.table import Delta, ReplicaTable, View
from omni_discovery.view.watcher import Watcher

NS = "default"
PREFIX = keys.namespace_prefix(NS)


def key(replica_id: int) -> str:
    return keys.replica_key(NS, 0, replica_id)


def value(replica_id: int) -> bytes:
    return encode_record(
        ReplicaRecord(stage_id=0, replica_id=replica_id, input_addr="i", output_addr="o", status=ReplicaStatus.UP)
    )


class UnreliableKV(FakeKV):
    """Counts lists, and ends watches with the errors it is given, each right after the watch stands."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.lists = 0
        self.watch_errors: list[RegistryError | Exception] = []

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        self.lists += 1
        return await super().list(prefix, keys_only=keys_only)

    async def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        batches = super().watch(prefix, start_revision)
        async for batch in batches:
            yield batch
            if self.watch_errors:
                raise self.watch_errors.pop(0)


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.kv = UnreliableKV(self.clock)
        self.seen: list[tuple[View, Delta]] = []
        table = ReplicaTable(NS)
        self.watcher = Watcher(
            self.kv, table, PREFIX, lambda *news: self.seen.append(news), clock=self.clock, jitter=lambda: 0.0
        )

    @property
    def view(self) -> View:
        return self.seen[-1][0]

    @property
    def ids(self) -> list[int]:
        return sorted(replica_id for _, replica_id in self.view.replicas)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    await scene.kv.put(key(0), value(0))
    scene.watcher.start()
    await settle()
    yield scene
    await scene.watcher.close()
    await scene.watcher.close()


async def test_what_is_there_and_what_comes_is_seen(scene: Scene) -> None:
    assert scene.ids == [0]
    await scene.kv.put(key(1), value(1))
    await settle()
    assert scene.ids == [0, 1]
    await scene.kv.delete(key(0))
    await settle()
    assert scene.ids == [1]
    assert scene.kv.lists == 1


async def test_an_outage_keeps_the_table_and_says_since_when_it_is_stale(scene: Scene) -> None:
    """1. etcd goes: same replicas, marked stale, said once
    2. etcd is back: fresh again, and what came meanwhile is there
    """
    await scene.clock.advance(10.0)
    scene.kv.is_out = True
    await scene.clock.advance(30.0)
    assert (scene.ids, scene.view.stale_since_s, len(scene.seen)) == ([0], scene.clock.wall_s() - 30.0, 2)
    scene.kv.is_out = False
    await scene.kv.put(key(1), value(1))
    await scene.clock.advance(3.0)
    assert (scene.ids, scene.view.stale_since_s) == ([0, 1], None)


async def test_fresh_again_is_told_even_if_nothing_else_changed(scene: Scene) -> None:
    scene.kv.is_out = True
    await scene.clock.advance(1.0)
    scene.kv.is_out = False
    await scene.clock.advance(3.0)
    assert [(view.stale_since_s is None, bool(delta)) for view, delta in scene.seen[1:]] == [
        (False, False),
        (True, False),
    ]


async def test_what_was_deleted_and_compacted_in_an_outage_leaves_the_view(scene: Scene) -> None:
    scene.kv.is_out = True
    await scene.clock.advance(1.0)
    scene.kv.is_out = False
    await scene.kv.delete(key(0))
    scene.kv.compact()
    await scene.clock.advance(3.0)
    assert scene.ids == []


async def test_a_wipe_is_noticed_and_the_new_history_is_followed(scene: Scene) -> None:
    for _ in range(20):
        await scene.kv.put("/elsewhere", b"")
    scene.kv.wipe()
    await scene.kv.put(key(3), value(3))
    await scene.clock.advance(1.0)
    assert scene.ids == [3]
    await scene.kv.put(key(4), value(4))
    await settle()
    assert scene.ids == [3, 4]


@pytest.mark.parametrize(
    "error",
    [
        CompactedError("compacted"),
        RegistryUnavailableError("reset"),
        RegistryRefusedError("permission denied"),
        ZeroDivisionError("a defect"),
    ],
)
async def test_every_kind_of_error_converges(scene: Scene, error: Exception) -> None:
    """The watch ends with the error three times in a row; a change in between is in the view in the end."""
    scene.kv.watch_errors = [error, error, error]
    await scene.kv.put(key(1), value(1))
    await scene.clock.advance(5.0)
    await scene.kv.put(key(2), value(2))
    await scene.clock.advance(0.0)
    assert (scene.ids, scene.view.stale_since_s) == ([0, 1, 2], None)


async def test_a_registry_that_ends_every_watch_is_not_stormed(scene: Scene) -> None:
    scene.kv.watch_errors = [CompactedError("again")] * 10_000
    await scene.kv.put(key(1), value(1))
    before = scene.kv.lists
    await scene.clock.advance(60.0)
    assert scene.kv.lists - before < 80


async def test_a_reader_that_raises_does_not_stop_the_watch() -> None:
    clock = ManualClock()
    kv = FakeKV(clock)
    table = ReplicaTable(NS)

    def raises(view: View, delta: Delta) -> None:
        raise ZeroDivisionError

    watcher = Watcher(kv, table, PREFIX, raises, clock=clock)
    watcher.start()
    await settle()
    await kv.put(key(0), value(0))
    await settle()
    assert len(table.snapshot().replicas) == 1
    await watcher.close()


async def test_a_bad_value_that_goes_away_leaves_the_view(scene: Scene) -> None:
    await scene.kv.put(key(7), b"nonsense")
    await settle()
    assert list(scene.view.bad) == [key(7)]
    await scene.kv.delete(key(7))
    await settle()
    assert not scene.view.bad


async def test_a_delta_names_the_revision_of_the_view_that_was_delivered_before(scene: Scene) -> None:
    """Beats and control keys are in no view: they raise the revision of the table, and deliver nothing. A stale view
    and the fresh one after it are delivered.
    """
    await scene.kv.put(keys.beat_key(NS, "h"), b"{}")
    await scene.kv.put(key(1), value(1))
    await scene.kv.put(keys.beat_key(NS, "h"), b"{}")
    await scene.clock.advance(1.0)
    scene.kv.is_out = True
    await scene.clock.advance(1.0)
    scene.kv.is_out = False
    await scene.clock.advance(3.0)
    assert [view.revision for view, _ in scene.seen] == [2, 4, 5, 5]
    assert [delta.since_revision for _, delta in scene.seen] == [None, 2, 4, 5]


async def test_a_view_whose_listener_failed_counts_as_delivered() -> None:
    """The listener may have applied none of it: the next delta must not seem to lead on from the view before."""
    clock = ManualClock()
    kv = FakeKV(clock)
    since: list[int | None] = []

    def listen(view: View, delta: Delta) -> None:
        since.append(delta.since_revision)
        if len(since) == 2:
            raise ZeroDivisionError

    watcher = Watcher(kv, ReplicaTable(NS), PREFIX, listen, clock=clock)
    watcher.start()
    for number in range(3):
        await settle()
        await kv.put(key(number), value(number))
    await settle()
    await watcher.close()
    assert since == [None, 1, 2, 3]


@pytest.mark.attack("K4")
async def test_values_that_are_bad_again_and_again_are_logged_once_and_many_in_few_lines(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """1. twenty values that are too long: eight lines say which and what to do, one how many more
    2. they are written again and again: no line until ten minutes later; the replica beside them is seen all the time
    """
    with caplog.at_level("WARNING"):
        # All at once, as in the list of a hub that starts.
        scene.kv.is_out = True
        await scene.clock.advance(1.0)
        scene.kv.is_out = False
        caplog.clear()
        for number in range(20):
            await scene.kv.put(key(number + 100), b"[" * 200_000)
        await scene.clock.advance(3.0)
        lines = [each.getMessage() for each in caplog.records if "watcher.bad_value" in each.getMessage()]
        assert len(lines) == 9
        assert lines[0] == (
            f"watcher.bad_value key={key(100)} reason=has more than 98304 bytes, as no record has: find who writes it, "
            "then delete it with etcdctl del"
        )
        assert lines[8] == "watcher.bad_values more=12: omni doctor names them"
        for _ in range(5):
            await scene.kv.put(key(100), b"[" * 200_000)
            await settle()
        assert len(caplog.records) == 9
        await scene.clock.advance(700.0)
        await scene.kv.put(key(100), b"[" * 200_000)
        await settle()
        assert sum("watcher.bad_value " in each.getMessage() for each in caplog.records) == 9
    assert scene.ids == [0]
    assert all(len(row.value) < 100_000 for row in (await scene.kv.list(PREFIX)).items)


@pytest.fixture
def few_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST_REPLICAS", Most(3, 1 << 20))
    monkeypatch.setattr(table, "MOST_HUBS", Most(2, 1 << 20))


@pytest.mark.attack("P3")
@pytest.mark.usefixtures("few_are_read")
async def test_that_there_are_too_many_records_is_logged_once_in_ten_minutes(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """And readers learn how many there are too many each time, and what has room once others have left."""
    for number in range(1, 6):
        await scene.kv.put(key(number), value(number))
        await settle()
    lines = [each.getMessage() for each in caplog.records if "watcher.too_many_records" in each.getMessage()]
    assert lines == [
        f"watcher.too_many_records prefix={PREFIX} read=3 refused=1: find who writes them; omni doctor says more"
    ]
    assert (scene.ids, scene.view.refused_count) == ([0, 1, 2], 3)
    await scene.kv.delete(key(1))
    await settle()
    assert (scene.ids, scene.view.refused_count) == ([0, 2, 3], 2)


@pytest.mark.attack("Q41")
@pytest.mark.usefixtures("few_are_read")
async def test_that_there_are_too_many_hubs_is_logged_once_in_ten_minutes(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        await scene.kv.put(keys.hub_key(NS, f"h{number}"), b'{"hub_id":"h%d"}' % number)
        await settle()
    lines = [each.getMessage() for each in caplog.records if "watcher.too_many" in each.getMessage()]
    assert lines == [
        f"watcher.too_many_hubs prefix={PREFIX} read=2 refused=1: find who writes them; omni doctor says more"
    ]
    assert (sorted(scene.view.hubs), scene.view.refused_hubs) == (["h0", "h1"], 3)


@pytest.mark.attack("Q62")
@pytest.mark.usefixtures("few_are_read")
async def test_a_hub_whose_own_record_is_not_read_says_so_until_older_ones_have_gone(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """1. two older hubs, and this one; 2. one of the older goes, and this hub is let in; 3. a third comes behind it"""
    for number in range(2):
        await scene.kv.put(keys.hub_key(NS, f"h{number}"), b'{"hub_id":"h%d"}' % number)
    await scene.kv.put(keys.hub_key(NS, "own"), b'{"hub_id":"own"}')
    seen: list[View] = []
    config = RegistryConfig("e:1", namespace=NS)
    registrar = HubRegistrar(scene.kv, NS, HubRecord(hub_id="own"), ttl_s=10.0)
    watcher = HubWatcher(
        scene.kv, config, lambda view, _: seen.append(view), ViewOptions(), "own", registrar, scene.clock
    )
    watcher.start()
    await settle()
    (line,) = [each.getMessage() for each in caplog.records if "own_record" in each.getMessage()]
    assert line.startswith("watcher.own_record_not_read hub=own refused=1: no replica lets this hub in")
    caplog.clear()
    await scene.kv.delete(keys.hub_key(NS, "h0"))
    await settle()
    assert sorted(seen[-1].hubs) == ["h1", "own"]
    await scene.clock.advance(1200.0)
    await scene.kv.put(keys.hub_key(NS, "h2"), b'{"hub_id":"h2"}')
    await settle()
    assert (sorted(seen[-1].hubs), seen[-1].refused_hubs) == (["h1", "own"], 1)
    assert "own_record" not in caplog.text
    await watcher.close()
