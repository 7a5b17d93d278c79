"""The automatic connector: which way a hand-off goes, and that there is always one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.connectors import AutoConnector
from tests.support.connector_peer import intact, payload

Make = Callable[..., AutoConnector]
KEEP = {"consume": False}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[AutoConnector] = []

    def build(folder: str = "here", **extra: Any) -> AutoConnector:
        directory = tmp_path / folder
        if folder:
            directory.mkdir(exist_ok=True)
        made.append(AutoConnector({"directory": str(directory), "shm_threshold_bytes": 0, "namespace": "n", **extra}))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


def fetched(consumer: AutoConnector, metadata: dict[str, Any] | None, seed: int) -> tuple[int, int]:
    """Get it, check it, and say how often each way was taken so far: shared memory, network."""
    got = consumer.get("0", "1", "key", {**(metadata or {}), **KEEP})
    assert got is not None
    assert got[0]["seed"] == seed
    assert intact(got[0])
    health = consumer.health()
    return health["by_shared_memory"], health["by_network"]


def test_on_one_host_it_is_shared_memory_and_else_the_network(make: Make) -> None:
    """The consumers beside it and apart from it fetch one hand-off, stored once."""
    producer, beside, apart = make(), make(), make("there")
    metadata = producer.put("0", "1", "key", payload(300_000, 3))[2]
    assert fetched(beside, metadata, 3) == (1, 0)
    assert fetched(apart, metadata, 3) == (0, 1)
    assert producer.health()["segments_made"] == 1


def test_a_segment_of_that_name_on_another_machine_is_not_taken_for_it(make: Make) -> None:
    """Another start of a machine has another boot id; what a folder that both see holds is not asked then."""
    producer, consumer = make(), make()
    metadata = dict(producer.put("0", "1", "key", payload(300_000, 3))[2] or {})
    metadata["boot_id"] = "another"
    assert fetched(consumer, metadata, 3) == (0, 1)


def test_what_another_user_stored_comes_by_network(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = make(), make()
    metadata = producer.put("0", "1", "key", payload(300_000, 3))[2]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert fetched(consumer, metadata, 3) == (0, 1)


def test_without_room_in_shared_memory_it_waits_in_the_producers_own(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose /dev/shm is small: what is too large for it goes over the network."""
    producer, consumer = make(), make()
    allocate = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if str(tmp_path) in str(Path(f"/proc/self/fd/{descriptor}").readlink()) and offset + size > 200_000:
            raise OSError(28, "No space left on device")
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    metadata = producer.put("0", "1", "key", payload(300_000, 3))[2]
    assert metadata is not None
    assert "shm" not in metadata
    assert fetched(consumer, metadata, 3) == (0, 1)
    assert fetched(consumer, producer.put("0", "1", "key", payload(100_000, 4))[2], 4) == (1, 1)
    producer.cleanup("key")
    assert producer.health()["pending"] == 0


def test_without_a_folder_for_it_there_is_the_network(make: Make) -> None:
    producer, consumer = make(directory="/no/such/folder"), make()
    assert fetched(consumer, producer.put("0", "1", "key", payload(300_000, 3))[2], 3) == (0, 1)


def test_where_nobody_can_listen_there_is_shared_memory(make: Make) -> None:
    """192.0.2.1 is kept free for examples: no machine can listen there."""
    producer, consumer, apart = make(bind_host="192.0.2.1"), make(), make("there")
    metadata = producer.put("0", "1", "key", payload(300_000, 3))[2]
    assert fetched(consumer, metadata, 3) == (1, 0)
    assert apart.get("0", "1", "key", {**(metadata or {}), **KEEP}) is None
    nowhere = make(bind_host="192.0.2.1", directory="/no/such/folder")
    assert nowhere.put("0", "1", "key", payload(300_000)) == (False, 0, None)
    assert nowhere.health()["pending"] == 0


def test_a_replica_registers_where_it_hands_over_and_nothing_where_it_can_not_listen(make: Make) -> None:
    connector = make()
    metadata = connector.put("0", "1", "key", payload(300_000))[2]
    assert metadata is not None
    assert connector.endpoint() == {"host": metadata["source_host"], "port": metadata["source_port"]}
    assert make(bind_host="203.0.113.1").endpoint() == {}


def test_nobody_listens_before_there_is_something_to_offer(make: Make) -> None:
    small = make(shm_threshold_bytes=65536, by_key=False)
    small.put("0", "1", "key", {"a": 1})
    assert small.health()["transfers"] == {}
    assert small._tcp._server is None
