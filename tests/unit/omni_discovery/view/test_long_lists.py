"""A long list is read beside the loop, be it the first one or one that repairs what the watch has missed."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from omni_discovery.kv import KeyValue, Listing, PutEvent, WatchBatch
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.view.long_lists import fill, reconcile
from omni_discovery.view.table import Delta, ReplicaTable

NS = "default"


def item(replica_id: int, revision: int, longer: int = 80_000, **fields: Any) -> KeyValue:
    record = ReplicaRecord(
        stage_id=0, replica_id=replica_id, input_addr="i", output_addr="o", status=ReplicaStatus.UP, **fields
    )
    return KeyValue(keys.replica_key(NS, 0, replica_id), encode_record(record) + b" " * longer, 5, revision, 7)


@pytest.mark.attack("Z12")
async def test_a_long_list_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item(number, 5) for number in range(30)]
    replaces, turns = ReplicaTable.replace, list[int]()

    def slow(*arguments: Any) -> Delta:
        time.sleep(0.3)
        return replaces(*arguments)

    monkeypatch.setattr(ReplicaTable, "replace", slow)

    async def others() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0.01)

    beside = asyncio.create_task(others())
    assert len((await fill(ReplicaTable(NS), Listing(5, 1, tuple(items)), 0.0)).added) == 30
    assert len(turns) > 3
    beside.cancel()


@pytest.mark.attack("Z12")
@pytest.mark.parametrize("longer", [80_000, 0], ids=["long", "short"])
async def test_what_a_watch_has_missed_is_read_beside_the_loop_while_batches_come(
    monkeypatch: pytest.MonkeyPatch, longer: int
) -> None:
    """1. a list has thirty replicas that no batch brought  2. while it is read, a newer record of one of them comes"""
    table, reads = ReplicaTable(NS), ReplicaTable._meaning
    table.replace(Listing(5, 1, ()), 0.0)
    table.begin_reconcile()
    readers: list[str] = []
    has_come = threading.Event()

    def read(self: ReplicaTable, each: KeyValue) -> Any:
        readers.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            assert has_come.wait(30.0)
        return reads(self, each)

    monkeypatch.setattr(ReplicaTable, "_meaning", read)
    listing = Listing(8, 1, tuple(item(number, 6, longer) for number in range(30)))
    repairing = asyncio.create_task(reconcile(table, listing, lambda: 1.0))
    await asyncio.sleep(0.05)
    newest = item(3, 9, 0, model="new")
    delta = table.apply(WatchBatch(9, (PutEvent(newest),)), 1.0)
    has_come.set()
    assert len(delta.added or delta.updated) == 1
    delta, missed = await repairing
    assert len(table.snapshot().replicas) == 30
    assert table.snapshot().replicas[0, 3].model == "new"
    assert (missed, sum(name.startswith("view") for name in readers)) == ((29, 30) if longer else (0, 0))
    assert len(readers) == 31, "nothing was read twice"
