"""ReplicaTable: lists and batches in, views and deltas out."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_discovery.errors import ConfigError, RecordError
from omni_discovery.kv import DeleteEvent, KeyValue, Listing, PutEvent, WatchBatch, WatchEvent
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, ReplicaInfo, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.view.table import Delta, ReplicaTable, live_hubs

NS = "default"


def item(stage_id: int, replica_id: int, revision: int, *, created: int | None = None, **fields: Any) -> KeyValue:
    given_fields: dict[str, Any] = {"status": ReplicaStatus.UP, "input_addr": "in", "output_addr": "out", **fields}
    record = ReplicaRecord(stage_id=stage_id, replica_id=replica_id, **given_fields)
    key = keys.replica_key(NS, stage_id, replica_id)
    return KeyValue(key, encode_record(record), created or revision, revision, 1)


def hub_item(hub_id: str, revision: int) -> KeyValue:
    return KeyValue(keys.hub_key(NS, hub_id), encode_record(HubRecord(hub_id=hub_id)), revision, revision, 1)


def listing(revision: int, *items: KeyValue, cluster_id: int = 1) -> Listing:
    return Listing(revision, cluster_id, items)


def batch(*events: WatchEvent) -> WatchBatch:
    last = events[-1]
    return WatchBatch(last.item.mod_revision if isinstance(last, PutEvent) else last.mod_revision, events)


def ids(infos: tuple[ReplicaInfo, ...]) -> list[tuple[int, int, int]]:
    return [(info.stage_id, info.replica_id, info.epoch) for info in infos]


def test_before_the_first_list_the_view_is_empty_and_has_no_time() -> None:
    view = ReplicaTable(NS).snapshot()
    assert (dict(view.replicas), view.changed_at, view.revision, view.pipeline) == ({}, 0.0, 0, None)


def test_a_delta_is_true_if_anything_in_it_is_news() -> None:
    news: list[dict[str, Any]] = [
        {"hubs_changed": True},
        {"revoked_changed": True},
        {"pipeline_changed": True},
        {"bad": (RecordError("key", "reason"),)},
    ]
    assert not Delta(since_revision=3)
    assert all(Delta(**each) for each in news)


def test_an_empty_first_list_is_news_too() -> None:
    table = ReplicaTable(NS)
    assert not table.replace(listing(5), 100.0)
    assert (table.snapshot().revision, table.snapshot().changed_at) == (5, 100.0)


def test_relist_after_compaction_reports_what_vanished_meanwhile() -> None:
    """1. a and b are listed at revision 5
    2. the watch is lost; b dies; the registry is compacted
    3. the relist at revision 9 holds only a: b must come out as removed
    """
    table = ReplicaTable(NS)
    a, b = item(0, 0, 3), item(0, 1, 4)
    table.replace(listing(5, a, b), 1.0)
    delta = table.replace(listing(9, a), 2.0)
    assert (ids(delta.removed), delta.added, delta.updated) == ([(0, 1, 4)], (), ())
    assert list(table.snapshot().replicas) == [(0, 0)]


def test_the_same_list_twice_changes_nothing() -> None:
    table = ReplicaTable(NS)
    items = (item(0, 0, 3), hub_item("h", 4))
    table.replace(listing(5, *items), 1.0)
    view = table.snapshot()
    assert not table.replace(listing(5, *items), 2.0)
    assert table.snapshot() == view


def test_a_new_life_of_a_key_is_removed_and_added_even_if_the_record_is_the_same() -> None:
    table = ReplicaTable(NS)
    table.replace(listing(5, item(0, 0, 3)), 1.0)
    delta = table.apply(batch(DeleteEvent(keys.replica_key(NS, 0, 0), 6), PutEvent(item(0, 0, 7))), 2.0)
    assert ids(delta.removed) == [(0, 0, 3)]
    assert ids(delta.added) == [(0, 0, 7)]
    assert table.snapshot().replicas[0, 0].epoch == 7


def test_a_rewrite_within_one_life_is_an_update() -> None:
    table = ReplicaTable(NS)
    table.replace(listing(5, item(0, 0, 3)), 1.0)
    delta = table.apply(batch(PutEvent(item(0, 0, 6, created=3, queue_length=4))), 2.0)
    assert [info.queue_length for info in delta.updated] == [4]
    assert (delta.added, delta.removed) == ((), ())


def test_events_that_were_applied_before_change_nothing() -> None:
    """Servers have sent events twice, and old events to watches that asked for later ones."""
    table = ReplicaTable(NS)
    table.replace(listing(5, item(0, 0, 3)), 1.0)
    events = batch(PutEvent(item(0, 1, 6)), DeleteEvent(keys.replica_key(NS, 0, 0), 7))
    assert table.apply(events, 2.0)
    view = table.snapshot()
    assert not table.apply(events, 3.0)
    assert not table.apply(batch(PutEvent(item(0, 0, 3))), 3.0)
    assert table.snapshot() == view


def test_all_events_of_one_revision_are_applied() -> None:
    """A lease that held three keys ends: one revision, three deletes."""
    table = ReplicaTable(NS)
    table.replace(listing(5, *(item(0, number, 3) for number in range(3))), 1.0)
    delta = table.apply(batch(*(DeleteEvent(keys.replica_key(NS, 0, number), 6) for number in range(3))), 2.0)
    assert len(delta.removed) == 3


def test_what_came_and_went_within_one_batch_is_not_reported() -> None:
    table = ReplicaTable(NS)
    table.replace(listing(5), 1.0)
    assert not table.apply(batch(PutEvent(item(0, 0, 6)), DeleteEvent(keys.replica_key(NS, 0, 0), 7)), 2.0)


@pytest.mark.parametrize(
    "value",
    [b"", b"not json", b"[]", b"{}", b"\xff\xfe", b'{"stage_id": 1e999}', b"[" * 100_000, b'{"queue_length": -1}'],
)
def test_one_bad_value_hides_one_replica_and_is_reported_once(value: bytes) -> None:
    """1. replica 1 is overwritten with nonsense: it is removed, replica 0 stays
    2. a relist shows the same nonsense: no second report
    3. a good value follows: it is back
    """
    table = ReplicaTable(NS)
    good, other = item(0, 0, 3), item(0, 1, 4)
    table.replace(listing(5, good, other), 1.0)
    nonsense = KeyValue(other.key, value, 4, 6)
    delta = table.apply(batch(PutEvent(nonsense)), 2.0)
    assert [bad.key for bad in delta.bad] == [other.key]
    assert ids(delta.removed) == [(0, 1, 4)]
    assert list(table.snapshot().replicas) == [(0, 0)]
    assert list(table.snapshot().bad) == [other.key]
    assert not table.replace(listing(7, good, nonsense), 3.0)
    assert ids(table.apply(batch(PutEvent(item(0, 1, 8, created=4))), 4.0).added) == [(0, 1, 4)]
    assert not table.snapshot().bad


def test_a_record_under_another_replicas_key_is_bad() -> None:
    table = ReplicaTable(NS)
    misplaced = dataclasses.replace(item(0, 1, 3), key=keys.replica_key(NS, 0, 2))
    assert [bad.key for bad in table.replace(listing(5, misplaced), 1.0).bad] == [misplaced.key]


def test_an_unknown_key_is_left_alone_but_not_among_the_records() -> None:
    table = ReplicaTable(NS)
    future = KeyValue(f"{keys.namespace_prefix(NS)}novelty/1", b"?", 1, 1)
    stray = KeyValue(f"{keys.replicas_prefix(NS)}zero/one", b"{}", 2, 2)
    assert [bad.key for bad in table.replace(listing(5, future, stray), 1.0).bad] == [stray.key]


def test_hubs_and_pipeline_are_told_apart_from_replicas() -> None:
    table = ReplicaTable(NS)
    pipeline = KeyValue(keys.pipeline_key(NS), b'{"stages": []}', 4, 4)
    delta = table.replace(listing(5, hub_item("h1", 3), pipeline), 1.0)
    assert (delta.hubs_changed, delta.pipeline_changed, delta.added) == (True, True, ())
    assert (list(table.snapshot().hubs), table.snapshot().pipeline) == (["h1"], b'{"stages": []}')
    delta = table.apply(batch(DeleteEvent(pipeline.key, 6)), 2.0)
    assert (delta.hubs_changed, delta.pipeline_changed) == (False, True)
    assert table.snapshot().pipeline is None
    assert table.apply(batch(DeleteEvent(keys.hub_key(NS, "h1"), 7)), 3.0).hubs_changed
    assert not table.snapshot().hubs


def test_a_snapshot_never_moves() -> None:
    table = ReplicaTable(NS)
    table.replace(listing(5, item(0, 0, 3)), 1.0)
    view = table.snapshot()
    table.replace(listing(6), 2.0)
    assert list(view.replicas) == [(0, 0)]
    with pytest.raises(TypeError):
        view.replicas[1, 1] = view.replicas[0, 0]  # type: ignore[index]


def test_stale_is_marked_once_keeps_the_table_and_ends_with_the_next_list() -> None:
    table = ReplicaTable(NS)
    table.replace(listing(5, item(0, 0, 3)), 1.0)
    assert table.mark_stale(7.0)
    assert not table.mark_stale(8.0)
    assert (table.snapshot().stale_since_s, list(table.snapshot().replicas)) == (7.0, [(0, 0)])
    table.replace(listing(5, item(0, 0, 3)), 9.0)
    assert table.snapshot().stale_since_s is None
    assert table.snapshot().changed_at == 1.0


def test_a_wiped_registry_counts_from_one_again_and_is_taken_as_it_is() -> None:
    table = ReplicaTable(NS)
    table.replace(listing(500, item(0, 0, 400)), 1.0)
    delta = table.replace(listing(1, cluster_id=2), 2.0)
    assert ids(delta.removed) == [(0, 0, 400)]
    assert ids(table.apply(batch(PutEvent(item(0, 0, 2))), 3.0).added) == [(0, 0, 2)]
    assert (table.snapshot().revision, table.snapshot().cluster_id) == (2, 2)


def test_a_namespace_that_can_not_be_a_key_is_refused() -> None:
    with pytest.raises(ConfigError):
        ReplicaTable("a/b")


def apply_delta(replicas: dict[tuple[int, int], ReplicaInfo], delta: Delta) -> None:
    for info in delta.removed:
        assert replicas.pop((info.stage_id, info.replica_id)).epoch == info.epoch
    for info in delta.added:
        assert (info.stage_id, info.replica_id) not in replicas
        replicas[info.stage_id, info.replica_id] = info
    for info in delta.updated:
        assert replicas[info.stage_id, info.replica_id].epoch == info.epoch
        replicas[info.stage_id, info.replica_id] = info


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_deltas_applied_one_by_one_give_the_view_whatever_is_listed_and_watched(seed: int, rounds: int) -> None:
    """A random history is played as batches, some twice, some skipped and healed by a relist."""
    chance = random.Random(seed)
    truth: dict[str, KeyValue] = {}
    table, mirror, revision = ReplicaTable(NS), {}, 1  # type: ReplicaTable, dict[tuple[int, int], ReplicaInfo], int
    apply_delta(mirror, table.replace(listing(revision), 0.0))
    for _ in range(rounds):
        events: list[WatchEvent] = []
        for _ in range(chance.randint(1, 4)):
            revision += 1
            key = keys.replica_key(NS, 0, chance.randint(0, 3))
            if key in truth and chance.random() < 0.4:
                del truth[key]
                events.append(DeleteEvent(key, revision))
                continue
            created = truth[key].create_revision if key in truth else revision
            number = int(key.rpartition("/")[2])
            new = item(0, number, revision, created=created, queue_length=chance.randint(0, 3))
            if chance.random() < 0.1:
                new = dataclasses.replace(new, value=b"nonsense")
            truth[key] = new
            events.append(PutEvent(new))
        if chance.random() < 0.3:
            apply_delta(mirror, table.replace(listing(revision, *truth.values()), 0.0))
        for _ in range(chance.randint(1, 2)):
            apply_delta(mirror, table.apply(batch(*events), 0.0))
        assert dict(table.snapshot().replicas) == mirror
        good = {key for key, kv in truth.items() if kv.value != b"nonsense"}
        assert {keys.replica_key(NS, *replica_id) for replica_id in mirror} == good


def control_item(hub_id: str, revision: int, value: bytes) -> KeyValue:
    return KeyValue(keys.hub_control_key(NS, hub_id), value, revision, revision)


def test_revoked_hubs_are_in_the_view_and_their_changes_are_news() -> None:
    """1. listed: a is revoked, b explicitly not; 2. b is revoked; 3. a's key is deleted"""
    table = ReplicaTable(NS)
    first = (hub_item("a", 1), control_item("a", 2, b'{"revoked": true}'), control_item("b", 3, b'{"revoked": false}'))
    assert table.replace(listing(5, *first), 100.0).revoked_changed
    assert table.snapshot().revoked == {"a"}
    delta = table.apply(batch(PutEvent(control_item("b", 6, b'{"revoked": true}'))), 101.0)
    assert (delta.revoked_changed, delta.hubs_changed, bool(delta)) == (True, False, True)
    assert table.snapshot().revoked == {"a", "b"}
    table.apply(batch(DeleteEvent(keys.hub_control_key(NS, "a"), 7)), 102.0)
    assert table.snapshot().revoked == {"b"}
    assert not table.apply(batch(PutEvent(hub_item("c", 8))), 103.0).revoked_changed


def test_a_hubs_control_key_that_turns_to_nonsense_leaves_in_force_what_was() -> None:
    table = ReplicaTable(NS)
    table.replace(listing(5, control_item("a", 2, b'{"revoked": true}'), control_item("b", 3, b"?")), 100.0)
    assert table.snapshot().revoked == {"a"}
    delta = table.apply(batch(PutEvent(control_item("a", 6, b'{"revoked": "yes"}'))), 101.0)
    assert (table.snapshot().revoked, delta.revoked_changed) == ({"a"}, False)
    assert "right would be true or false" in delta.bad[0].reason
    table.apply(batch(DeleteEvent(keys.hub_control_key(NS, "a"), 7)), 102.0)
    assert table.snapshot().revoked == frozenset()


def test_a_key_among_the_hubs_controls_that_names_no_hub_is_somebodys_mistake() -> None:
    table = ReplicaTable(NS)
    table.replace(listing(5, control_item("not/one", 2, b'{"revoked": true}')), 100.0)
    assert table.snapshot().revoked == frozenset()
    assert list(table.snapshot().bad) == [keys.hub_control_key(NS, "not/one")]


def test_live_hubs_are_those_that_are_registered_and_not_revoked_and_at_least_the_one_that_asks() -> None:
    table = ReplicaTable(NS)
    assert live_hubs(table.snapshot()) == 1
    table.replace(listing(5, hub_item("a", 1), hub_item("b", 2), hub_item("c", 3)), 100.0)
    assert live_hubs(table.snapshot()) == 3
    table.apply(batch(PutEvent(control_item("c", 6, b'{"revoked": true}'))), 101.0)
    table.apply(batch(PutEvent(control_item("away", 7, b'{"revoked": true}'))), 102.0)
    assert live_hubs(table.snapshot()) == 2


def test_a_table_shows_itself() -> None:
    table = ReplicaTable(NS)
    table.replace(listing(5, item(0, 0, 2), item(0, 1, 3), hub_item("h", 4)), 1.0)
    assert repr(table) == "ReplicaTable(default, replicas=2, hubs=1, bad=0, revision=5)"
    table.mark_stale(1_700_000_000.25)
    assert repr(table).endswith("revision=5, stale since 2023-11-14T22:13:20.250Z)")


def test_a_list_that_nobody_announced_is_compared_as_any_other() -> None:
    table = ReplicaTable(NS)
    table.replace(listing(5, item(0, 0, 2)), 1.0)
    delta, missed = table.reconcile(listing(6, item(0, 0, 2), item(0, 1, 6)), 2.0)
    assert (ids(delta.added), missed) == ([(0, 1, 6)], 0)


@pytest.mark.attack("V2")
def test_what_processes_wait_for_is_neither_kept_nor_saved() -> None:
    """Whoever may write ``waits/`` may write gigabytes there, and no hub has a use for it."""
    long = KeyValue(keys.wait_key(NS, "a"), bytes(90_000), 1, 1, 7)
    table = ReplicaTable(NS)
    table.replace(listing(2, item(0, 0, 2), long), 1.0)
    table.apply(batch(PutEvent(KeyValue(keys.wait_key(NS, "b"), bytes(90_000), 3, 3, 7))), 2.0)
    assert [each.key for each in table.listing().items] == [keys.replica_key(NS, 0, 0)]
    assert sum(len(row.item.value) for row in table._rows.values()) < 1000
    assert table.summary().count == 3
    assert not table.replace(listing(3, item(0, 0, 2), long), 3.0)
