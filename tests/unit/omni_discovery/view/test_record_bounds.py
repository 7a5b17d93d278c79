"""More records of replicas than are read: which of them are, in the bounds alone and in a table."""

from __future__ import annotations

import random
from typing import Any

import pytest

from omni_discovery.kv import DeleteEvent, KeyValue, PutEvent, WatchBatch
from omni_discovery.records import keys
from omni_discovery.view import table as tables
from omni_discovery.view.record_bounds import Most, RecordBounds, memory_bytes
from omni_discovery.view.table import ReplicaTable, View
from tests.unit.omni_discovery.view.test_table import NS, batch, hub_item, ids, item, listing

pytestmark = pytest.mark.attack("P3")

#: A record of ten parts is the largest that takes one share.
THREE = Most(3, 4096)


def written(name: str, created: int, *, at: int = 0, lease_id: int = 1, parts: int = 0) -> KeyValue:
    return KeyValue(name, b"," * parts, created, at or created, lease_id)


def read_of(bounds: RecordBounds, *names: str) -> str:
    return "".join(name for name in names if bounds.is_read(name))


def test_the_oldest_are_read_and_one_that_goes_gives_its_place_to_the_next() -> None:
    bounds = RecordBounds(THREE)
    for number, name in enumerate("abcde"):
        bounds.put(written(name, number + 1))
    assert (read_of(bounds, *"abcde"), bounds.refused_count) == ("abc", 2)
    bounds.moved.clear()
    bounds.remove("b")
    assert (read_of(bounds, *"acde"), list(bounds.moved)) == ("acd", ["d"])
    bounds.put(written("a", 9))
    assert read_of(bounds, *"acde") == "cde"


def test_one_without_a_lease_gives_its_place_to_any_with_one() -> None:
    bounds = RecordBounds(THREE)
    for number, name in enumerate("abc"):
        bounds.put(written(name, number + 1, lease_id=0))
    bounds.put(written("z", 50))
    assert (read_of(bounds, *"abcz"), list(bounds.moved)) == ("abz", ["c"])


def test_one_that_is_larger_counts_as_several() -> None:
    bounds = RecordBounds(THREE)
    assert [THREE.shares(b"," * parts) for parts in (0, 10, 11, 20, 21)] == [1, 1, 2, 2, 3]
    assert memory_bytes(b"," * 20) == 20 * 131
    for number, name in enumerate("abc"):
        bounds.put(written(name, number + 1, parts=20 if name == "b" else 10))
    assert read_of(bounds, *"abc") == "ab"
    bounds.put(written("b", 2, at=4, parts=1))
    assert read_of(bounds, *"abc") == "abc"


@pytest.mark.attack("Q40")
def test_one_that_grows_takes_nobodys_place() -> None:
    """1. a, the oldest, grows: it is read while there is room, behind those that came before that
    2. the others come into its place; it grows within its share: nothing changes; 3. it shrinks: it is still the last
    """
    bounds = RecordBounds(THREE)
    for number, name in enumerate("abc"):
        bounds.put(written(name, number + 1))
    bounds.moved.clear()
    bounds.put(written("a", 1, at=4, parts=11))
    assert (read_of(bounds, *"abc"), list(bounds.moved)) == ("bc", ["a"])
    bounds.put(written("d", 5))
    assert read_of(bounds, *"abcd") == "bc"
    bounds.put(written("a", 1, at=6))
    assert read_of(bounds, *"abcd") == "abc"
    bounds.put(written("b", 2, at=7, parts=10))
    assert read_of(bounds, *"abcd") == "abc"
    bounds.remove("a")
    assert read_of(bounds, *"bcd") == "bcd"


@pytest.mark.attack("Q40")
def test_one_that_gets_a_lease_takes_nobodys_place() -> None:
    bounds = RecordBounds(THREE)
    for number, name in enumerate("abc"):
        bounds.put(written(name, number + 1, lease_id=number))
    bounds.put(written("d", 4))
    assert read_of(bounds, *"abcd") == "bcd"
    bounds.put(written("a", 1, at=5))
    assert read_of(bounds, *"abcd") == "bcd"


@pytest.mark.attack("Q40")
def test_one_that_has_grown_comes_last_too_for_who_begins_to_watch() -> None:
    late = RecordBounds(THREE)
    late.fill([written("a", 1, at=9, parts=11), written("b", 2), written("c", 8)])
    assert read_of(late, *"abc") == "bc"


def test_after_a_gap_those_that_were_there_keep_their_places() -> None:
    """One that was written again, as large as before, and one that has grown meanwhile."""
    bounds = RecordBounds(THREE)
    bounds.fill([written("a", 1, at=2, parts=20), written("b", 3)])
    bounds.fill([written("a", 1, at=9, parts=20), written("b", 3), written("c", 8)])
    assert read_of(bounds, *"abc") == "ab"
    bounds.fill([written("a", 1, at=9, parts=20), written("b", 3, at=10, parts=11), written("c", 8)])
    assert read_of(bounds, *"abc") == "ac"


@pytest.mark.attack("Q40")
def test_no_record_with_a_lease_is_pushed_out_by_what_happens_to_others() -> None:
    """And no put or removal moves more than the largest record counts as."""
    chance = random.Random(7)
    most = Most(12, 12 * 1365)
    there: dict[str, KeyValue] = {}
    bounds = RecordBounds(most)
    refused = 0
    for revision in range(1, 3000):
        name = chance.choice("abcdefghijklmnopqrstuvwxyz")
        kept = {each for each, item in there.items() if item.lease_id and each != name and bounds.is_read(each)}
        bounds.moved.clear()
        if chance.random() < 0.2:
            there.pop(name, None)
            bounds.remove(name)
        else:
            created = there[name].create_revision if name in there else revision
            parts, lease_id = chance.choice((0, 5, 9, 15, 30)), int(chance.random() < 0.8)
            there[name] = written(name, created, at=revision, lease_id=lease_id, parts=parts)
            bounds.put(there[name])
        assert all(bounds.is_read(each) for each in kept)
        assert len(bounds.moved) <= 2 * most.shares(b"," * 30)
        assert sum(most.shares(there[each].value) for each in there if bounds.is_read(each)) <= 12
        refused += bounds.refused_count > 0
    assert refused > 1000


def test_whatever_the_way_all_hubs_read_the_same() -> None:
    """One that has followed each change, and one that has only seen the end; of records that stay as they came."""
    chance = random.Random(7)
    there: dict[str, KeyValue] = {}
    followed = RecordBounds(THREE)
    for revision in range(1, 600):
        name = chance.choice("abcdefgh")
        if name in there and chance.random() < 0.5:
            there.pop(name, None)
            followed.remove(name)
        elif name in there:
            # As large as it was: one that takes more than a share is written once.
            before = there[name]
            parts = chance.randrange(11) if len(before.value) <= 10 else len(before.value)
            at = revision if parts <= 10 else before.mod_revision
            there[name] = written(name, before.create_revision, at=at, lease_id=before.lease_id, parts=parts)
            followed.put(there[name])
        else:
            there[name] = written(name, revision, lease_id=chance.randrange(2), parts=chance.randrange(25))
            followed.put(there[name])
        late = RecordBounds(THREE)
        late.fill(there.values())
        assert read_of(late, *there) == read_of(followed, *there)
        assert late.refused_count == followed.refused_count


def test_a_table_reads_no_more_than_that_however_the_records_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. of five in a list, three are in the view; 2. one comes, and one goes: the next is read
    3. a list after a gap has the same; 4. refused ones are not saved
    """
    monkeypatch.setattr(tables, "MOST_REPLICAS", Most(3, 1 << 20))
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
    monkeypatch.setattr(tables, "MOST_REPLICAS", Most(3, 1 << 20))
    table = ReplicaTable(NS)
    table.replace(listing(9, *(item(0, number, 2 + number) for number in range(4))), 1.0)
    assert not table.apply(batch(PutEvent(item(0, 3, 10, created=5, queue_length=7))), 2.0)
    table.apply(WatchBatch(11, [DeleteEvent(keys.replica_key(NS, 0, 0), 11)]), 3.0)
    view: View = table.snapshot()
    assert view.replicas[0, 3].queue_length == 7
    assert view.refused_count == 0


def test_what_was_read_for_once_may_go_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. one goes, and another is read in its place; 2. that one goes, too, and nothing is looked at that is gone"""
    monkeypatch.setattr(tables, "MOST_REPLICAS", Most(3, 1 << 20))
    table = ReplicaTable(NS)
    table.replace(listing(9, *(item(0, number, 2 + number) for number in range(4))), 1.0)
    for revision, number in ((10, 0), (11, 3), (12, 1)):
        table.apply(WatchBatch(revision, [DeleteEvent(keys.replica_key(NS, 0, number), revision)]), 2.0)
    assert list(table.snapshot().replicas) == [(0, 2)]


@pytest.mark.attack("Q41")
def test_records_of_hubs_are_bounded_like_those_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. of five in a list the first three are hubs; 2. one grows beyond its share: the next takes its place
    3. one goes; one more that comes changes nothing; replicas are bounded by themselves
    """
    monkeypatch.setattr(tables, "MOST_HUBS", Most(3, 3 * 2048))
    table = ReplicaTable(NS)
    table.replace(listing(9, *(hub_item(f"h{number}", 2 + number) for number in range(5))), 1.0)
    view = table.snapshot()
    assert (sorted(view.hubs), view.refused_hubs, view.refused_count) == (["h0", "h1", "h2"], 2, 0)
    grown = KeyValue(keys.hub_key(NS, "h0"), b'{"hub_id":"h0","address":"' + b"a" * 900 + b'"}', 2, 10, 1)
    assert table.apply(batch(PutEvent(grown)), 2.0).hubs_changed
    assert sorted(table.snapshot().hubs) == ["h1", "h2", "h3"]
    assert table.apply(batch(DeleteEvent(keys.hub_key(NS, "h2"), 11)), 3.0).hubs_changed
    assert not table.apply(batch(PutEvent(hub_item("h9", 12)), PutEvent(item(0, 0, 13))), 4.0).hubs_changed
    view = table.snapshot()
    assert (sorted(view.hubs), view.refused_hubs, len(view.replicas)) == (["h1", "h3", "h4"], 2, 1)
    assert [each.key for each in table.listing().items] == [
        *(keys.hub_key(NS, hub_id) for hub_id in ("h1", "h3", "h4")),
        keys.replica_key(NS, 0, 0),
    ]


@pytest.mark.attack("Q41")
def test_one_put_reads_no_other_hubs_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 2000 that are there 1024 are read; a table that looked at all of them at each put kept a core busy."""
    table = ReplicaTable(NS)
    table.replace(listing(9, *(hub_item(f"h{number}", 2 + number) for number in range(2000))), 1.0)
    assert (len(table.snapshot().hubs), table.snapshot().refused_hubs) == (1024, 976)
    rows = _CountingRows(table._rows)
    monkeypatch.setattr(table, "_rows", rows)
    for number in range(100):
        other = KeyValue(keys.hub_key(NS, "h5"), b'{"hub_id":"h5","pid":%d}' % (number + 1), 7, 5000 + number, 1)
        assert table.apply(batch(PutEvent(other)), 2.0).hubs_changed
    assert rows.reads < 1000
    assert table.snapshot().hubs["h5"].pid == 100


class _CountingRows(dict[str, Any]):
    """Counts the rows that are read, one by one or all at once."""

    reads = 0

    def __getitem__(self, key: str) -> Any:
        self.reads += 1
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += 1
        return super().get(key, default)

    def values(self) -> Any:
        self.reads += len(self)
        return super().values()

    def items(self) -> Any:
        self.reads += len(self)
        return super().items()
