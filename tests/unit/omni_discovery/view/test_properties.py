"""Whatever a stream of changes goes through, and whatever values people write, the view ends equal to the prefix."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_discovery.kv import DeleteEvent, KeyValue, Listing, PutEvent, WatchBatch, WatchEvent
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.testing import FakeKV, ManualClock, settle
from omni_discovery.view.anti_entropy import AntiEntropyOptions
from omni_discovery.view.table import Delta, ReplicaTable, View
from omni_discovery.view.watcher import Watcher

NS = "default"


def record(replica_id: int, **fields: Any) -> bytes:
    base = ReplicaRecord(stage_id=0, replica_id=replica_id, input_addr="i", output_addr="o", status=ReplicaStatus.UP)
    return encode_record(msgspec.structs.replace(base, **fields))


KEYS = [*(keys.replica_key(NS, 0, number) for number in range(3)), keys.hub_key(NS, "h"), keys.beat_key(NS, "h")]
KEYS += [keys.pipeline_key(NS), keys.replica_control_key(NS, 0, 0), f"{keys.replicas_prefix(NS)}stray"]


def a_value(key: str, number: int) -> bytes:
    if number == 0:
        return b"nonsense"
    if key == KEYS[3]:
        return encode_record(HubRecord(hub_id="h", pid=number))
    return record(int(key[-1]), queue_length=number) if key in KEYS[:3] else b"%d" % number


class Registry:
    """A prefix with its whole history."""

    def __init__(self) -> None:
        self.revision = 1
        self.items: dict[str, KeyValue] = {}
        self.batches: list[WatchBatch] = []

    def do(self, key: str, number: int | None) -> None:
        """Write the key, or delete it for None."""
        old = self.items.get(key)
        if number is None and old is None:
            return
        self.revision += 1
        event: WatchEvent = DeleteEvent(key, self.revision)
        if number is None:
            del self.items[key]
        else:
            created = old.create_revision if old is not None else self.revision
            self.items[key] = KeyValue(key, a_value(key, number), created, self.revision)
            event = PutEvent(self.items[key])
        self.batches.append(WatchBatch(self.revision, (event,)))

    def listing(self) -> Listing:
        return Listing(self.revision, 1, tuple(sorted(self.items.values(), key=lambda item: item.key)))


CHANGES = st.lists(st.tuples(st.sampled_from(KEYS), st.none() | st.integers(0, 3)), max_size=40)


def content(view: View) -> dict[str, Any]:
    return {
        "replicas": dict(view.replicas),
        "hubs": dict(view.hubs),
        "pipeline": view.pipeline,
        "bad": sorted(view.bad),
    }


def full_table(registry: Registry) -> ReplicaTable:
    table = ReplicaTable(NS)
    table.replace(registry.listing(), 0.0)
    return table


def fresh_view(registry: Registry) -> View:
    return full_table(registry).snapshot()


class Mirror:
    """A reader that knows only deltas, as a pool does."""

    def __init__(self) -> None:
        self.replicas: dict[tuple[int, int], Any] = {}

    def take(self, delta: Delta) -> None:
        for info in delta.removed:
            del self.replicas[info.stage_id, info.replica_id]
        for info in delta.added:
            assert (info.stage_id, info.replica_id) not in self.replicas
        for info in (*delta.added, *delta.updated):
            self.replicas[info.stage_id, info.replica_id] = info


@settings(deadline=None)
@given(changes=CHANGES, data=st.data())
def test_a_stream_cut_anywhere_with_repeats_and_relists_ends_equal(changes: list[Any], data: st.DataObject) -> None:
    """At each step a batch comes, comes again from some way back, or the stream is cut and a list is taken in."""
    registry, table, mirror, next_batch = Registry(), ReplicaTable(NS), Mirror(), 0
    mirror.take(table.replace(registry.listing(), 0.0))
    for key, number in changes:
        registry.do(key, number)
        step = data.draw(st.sampled_from(["deliver", "repeat", "wait", "relist"]))
        if step == "relist":
            # Compacted or cut: what was not delivered never will be.
            mirror.take(table.replace(registry.listing(), 0.0))
            next_batch = len(registry.batches)
        elif step != "wait":
            start = data.draw(st.integers(0, next_batch)) if step == "repeat" else next_batch
            for batch in registry.batches[start:]:
                mirror.take(table.apply(batch, 0.0))
            next_batch = len(registry.batches)
    for batch in registry.batches[next_batch:]:
        mirror.take(table.apply(batch, 0.0))
    expected = fresh_view(registry)
    assert content(table.snapshot()) == content(expected)
    assert mirror.replicas == dict(expected.replicas)
    assert table.summary() == full_table(registry).summary()


@settings(deadline=None)
@given(changes=CHANGES, data=st.data())
def test_a_stream_that_loses_and_reorders_is_mended_by_one_more_list(changes: list[Any], data: st.DataObject) -> None:
    registry, table, mirror = Registry(), ReplicaTable(NS), Mirror()
    mirror.take(table.replace(registry.listing(), 0.0))
    for key, number in changes:
        registry.do(key, number)
    kept = [batch for batch in registry.batches if data.draw(st.booleans())]
    for batch in data.draw(st.permutations(kept)):
        mirror.take(table.apply(batch, 0.0))
    table.begin_reconcile()
    delta, _ = table.reconcile(registry.listing(), 0.0)
    mirror.take(delta)
    assert content(table.snapshot()) == content(fresh_view(registry))
    assert mirror.replicas == dict(table.snapshot().replicas)


@settings(deadline=None)
@given(changes=CHANGES, later=CHANGES, cut=st.integers(0, 40))
def test_a_list_that_is_overtaken_by_the_watch_takes_nothing_back(
    changes: list[Any], later: list[Any], cut: int
) -> None:
    """The list is read at one revision; by the time it comes, the watch has brought some later changes."""
    registry, table, mirror = Registry(), ReplicaTable(NS), Mirror()
    mirror.take(table.replace(registry.listing(), 0.0))
    for key, number in changes:
        registry.do(key, number)
    for batch in registry.batches:
        mirror.take(table.apply(batch, 0.0))
    table.begin_reconcile()
    listing, done = registry.listing(), len(registry.batches)
    for key, number in later:
        registry.do(key, number)
    for batch in registry.batches[done : done + cut]:
        mirror.take(table.apply(batch, 0.0))
    delta, missed = table.reconcile(listing, 0.0)
    mirror.take(delta)
    assert missed == 0
    for batch in registry.batches[done + cut :]:
        mirror.take(table.apply(batch, 0.0))
    assert content(table.snapshot()) == content(fresh_view(registry))
    assert mirror.replicas == dict(table.snapshot().replicas)


# ---- values that nobody should write

GOOD = msgspec.json.decode(record(1))
BAD_FIELDS = st.one_of(
    st.tuples(st.just("queue_length"), st.sampled_from([-1, 1.5, None, "7", 2**64, -(10**30), True])),
    st.tuples(st.just("status"), st.sampled_from(["", "UP", "sleepy", None, 1, ["up"]])),
    st.tuples(st.just("input_addr"), st.sampled_from(["", None, 5, "x" * 5000, {}])),
    st.tuples(st.just("stage_id"), st.sampled_from([-1, 1, "0", None, 10**12])),
    st.tuples(st.just("weight"), st.sampled_from([-0.5, 1e9, "1", None])),
    st.tuples(st.just("capacity"), st.sampled_from([0, -3, 2**40, "8"])),
    st.tuples(st.just("schema"), st.sampled_from([0, -1, "1", None])),
    st.tuples(st.just("labels"), st.sampled_from([[], "x", {"a": 1}, None])),
)
BAD_VALUES = st.one_of(
    st.binary(max_size=200).filter(lambda raw: not raw.strip().startswith(b"{")),
    BAD_FIELDS.map(lambda change: msgspec.json.encode({**GOOD, change[0]: change[1]})),
    st.sampled_from(
        [
            b"",
            b"\xff\xfe\x00",
            b'{"stage_id": 1e999}',
            b"[" * 100_000,
            b'{"connectors": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
            b'{"labels": {"a": "\xff"}}',
            b"9" * (1 << 20),
            msgspec.json.encode({**GOOD, "reason": "x" * (1 << 20)}),
            record(1)[:-1],
            record(2),
        ]
    ),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=BAD_VALUES)
async def test_a_bad_value_hides_one_replica_and_costs_one_count_and_one_line(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """1. replicas 0 and 1 are there; somebody overwrites 1
    2. 0 stays as it is, 1 is hidden; a second list says nothing anew
    3. 1 is put right and is there again
    """
    caplog.clear()
    clock, counts = ManualClock(), Counter[str]()
    kv, table = FakeKV(clock), ReplicaTable(NS)
    for replica_id in (0, 1):
        await kv.put(keys.replica_key(NS, 0, replica_id), record(replica_id))
    options = AntiEntropyOptions(count=lambda name: counts.update([name]))
    prefix = keys.namespace_prefix(NS)
    watcher = Watcher(kv, table, prefix, lambda *_: None, clock=clock, options=options)
    watcher.start()
    await settle()
    with caplog.at_level(logging.WARNING):
        await kv.put(keys.replica_key(NS, 0, 1), value)
        await clock.advance(5.0)
    assert [number for _, number in table.snapshot().replicas] == [0]
    assert counts == Counter({"bad_value": 1})
    assert len(caplog.records) == 1
    assert len(caplog.records[0].getMessage()) < 2000
    await kv.put(keys.replica_key(NS, 0, 1), record(1))
    await settle()
    assert len(table.snapshot().replicas) == 2
    assert not table.snapshot().bad
    await watcher.close()


@pytest.mark.parametrize("change", [{"schema": 9, "mood": "fine"}, {"labels": {"rack": "7"}}, {"queue_length": 2**50}])
def test_what_a_later_release_writes_is_read(change: dict[str, Any]) -> None:
    item = KeyValue(keys.replica_key(NS, 0, 1), msgspec.json.encode({**GOOD, **change}), 5, 5)
    table = ReplicaTable(NS)
    table.replace(Listing(5, 1, (item,)), 0.0)
    assert len(table.snapshot().replicas) == 1
