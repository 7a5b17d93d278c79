"""A long answer of a watch comes in batches, so that others have their turn between them."""

from __future__ import annotations

from omni_discovery.etcd.watch import split_by_revision
from omni_discovery.kv import DeleteEvent, KeyValue, PutEvent


def put(revision: int, size_bytes: int) -> PutEvent:
    return PutEvent(KeyValue(f"k{revision}", bytes(size_bytes), revision, revision, 0))


def test_parts_have_about_so_many_bytes_and_hold_revisions_whole() -> None:
    sizes = [(1, 600), (2, 600), (2, 600), (2, 600)]
    events = [*(put(*each) for each in sizes), DeleteEvent("k", 3), put(4, 3000), put(5, 1), put(6, 1)]
    parts = list(split_by_revision(events, 1000))
    assert [event for part in parts for event in part] == events
    assert [len(part) for part in parts] == [4, 2, 2]
    assert list(split_by_revision([], 1000)) == []
    deletes = [DeleteEvent("k", revision) for revision in range(100)]
    assert [len(part) for part in split_by_revision(deletes, 1000)] == [8] * 12 + [4]
