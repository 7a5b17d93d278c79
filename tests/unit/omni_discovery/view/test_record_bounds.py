"""More records of replicas than are read: which of them are, in the bounds alone and in a table."""

from __future__ import annotations

import random

import pytest

from omni_discovery.kv import DeleteEvent, KeyValue, PutEvent, WatchBatch
from omni_discovery.records import keys
from omni_discovery.view import record_bounds
from omni_discovery.view.record_bounds import RecordBounds, memory_bytes
from omni_discovery.view.table import ReplicaTable, View
from tests.unit.omni_discovery.view.test_table import NS, batch, ids, item, listing

pytestmark = pytest.mark.attack("P3")


@pytest.fixture(autouse=True)
def _three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_bounds, "MOST_RECORDS", 3)
    monkeypatch.setattr(record_bounds, "MOST_MEMORY_BYTES", 4096)


def written(name: str, created: int, *, lease_id: int = 1, parts: int = 0) -> KeyValue:
    return KeyValue(name, b"," * parts, created, created, lease_id)


def read_of(bounds: RecordBounds, *names: str) -> str:
    return "".join(name for name in names if bounds.is_read(name))


def test_the_oldest_are_read_and_one_that_goes_gives_its_place_to_the_next() -> None:
    bounds = RecordBounds()
    for number, name in enumerate("abcde"):
        bounds.put(written(name, number + 1))
    assert (read_of(bounds, *"abcde"), bounds.refused_count) == ("abc", 2)
    bounds.moved.clear()
    bounds.remove("b")
    assert (read_of(bounds, *"acde"), list(bounds.moved)) == ("acd", ["d"])
    bounds.put(written("a", 9))
    assert read_of(bounds, *"acde") == "cde"


def test_one_without_a_lease_gives_its_place_to_any_with_one() -> None:
    bounds = RecordBounds()
    for number, name in enumerate("abc"):
        bounds.put(written(name, number + 1, lease_id=0))
    bounds.put(written("z", 50))
    assert (read_of(bounds, *"abcz"), list(bounds.moved)) == ("abz", ["c"])


def test_what_they_may_take_of_memory_bounds_them_too() -> None:
    bounds = RecordBounds()
    assert memory_bytes(b"," * 20) == 20 * 131
    for number, name in enumerate("abc"):
        bounds.put(written(name, number + 1, parts=20 if name == "b" else 10))
    assert read_of(bounds, *"abc") == "ab"
    bounds.put(written("a", 1, parts=12))
    assert read_of(bounds, *"abc") == "a"
    bounds.put(written("b", 2, parts=1))
    assert read_of(bounds, *"abc") == "abc"


def test_whatever_the_way_all_hubs_read_the_same() -> None:
    """One that has followed each change, and one that has only seen the end."""
    chance = random.Random(7)
    there: dict[str, KeyValue] = {}
    followed = RecordBounds()
    for revision in range(1, 600):
        name = chance.choice("abcdefgh")
        if chance.random() < 0.3:
            there.pop(name, None)
            followed.remove(name)
        else:
            created = there[name].create_revision if name in there else revision
            there[name] = written(name, created, lease_id=chance.randrange(2), parts=chance.randrange(25))
            followed.put(there[name])
        late = RecordBounds()
        late.fill(there.values())
        assert read_of(late, *there) == read_of(followed, *there)
        assert late.refused_count == followed.refused_count


def test_a_table_reads_no_more_than_that_however_the_records_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. of five in a list, three are in the view; 2. one comes, and one goes: the next is read
    3. a list after a gap has the same; 4. refused ones are not saved
    """
    monkeypatch.setattr(record_bounds, "MOST_MEMORY_BYTES", 1 << 20)
    table = ReplicaTable(NS)
    items = [item(0, number, 2 + number) for number in range(5)]
    delta = table.replace(listing(9, *items), 1.0)
    assert ids(delta.added) == [(0, 0, 2), (0, 1, 3), (0, 2, 4)]
    assert (table.snapshot().refused_count, dict(table.snapshot().bad)) == (2, {})
    delta = table.apply(batch(PutEvent(item(1, 7, 10))), 2.0)
    assert not delta
    assert table.snapshot().refused_count == 3
    delta = table.apply(batch(DeleteEvent(keys.replica_key(NS, 0, 1), 11)), 3.0)
    assert (ids(delta.removed), ids(delta.added)) == ([(0, 1, 3)], [(0, 3, 5)])
    seen = table.snapshot()
    again = ReplicaTable(NS)
    again.replace(listing(11, items[0], *items[2:], item(1, 7, 10)), 3.0)
    assert again.snapshot().replicas == seen.replicas
    assert (again.snapshot().refused_count, seen.refused_count) == (2, 2)
    assert [each.key for each in table.listing().items] == [keys.replica_key(NS, 0, number) for number in (0, 2, 3)]
    assert table.summary().count == 5


def test_one_that_is_rewritten_while_it_is_not_read_is_read_as_it_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_bounds, "MOST_MEMORY_BYTES", 1 << 20)
    table = ReplicaTable(NS)
    table.replace(listing(9, *(item(0, number, 2 + number) for number in range(4))), 1.0)
    assert not table.apply(batch(PutEvent(item(0, 3, 10, created=5, queue_length=7))), 2.0)
    table.apply(WatchBatch(11, [DeleteEvent(keys.replica_key(NS, 0, 0), 11)]), 3.0)
    view: View = table.snapshot()
    assert view.replicas[0, 3].queue_length == 7
    assert view.refused_count == 0


def test_what_was_read_for_once_may_go_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. one goes, and another is read in its place; 2. that one goes, too, and nothing is looked at that is gone"""
    monkeypatch.setattr(record_bounds, "MOST_MEMORY_BYTES", 1 << 20)
    table = ReplicaTable(NS)
    table.replace(listing(9, *(item(0, number, 2 + number) for number in range(4))), 1.0)
    for revision, number in ((10, 0), (11, 3), (12, 1)):
        table.apply(WatchBatch(revision, [DeleteEvent(keys.replica_key(NS, 0, number), revision)]), 2.0)
    assert list(table.snapshot().replicas) == [(0, 2)]
