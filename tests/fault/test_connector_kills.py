"""Connectors whose processes are killed at any moment: nothing stays behind, and nobody waits for the dead."""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.connectors import ConnectorSpec, OmniConnectorBase, OmniConnectorFactory, TransferError
from stage_runtime.connectors.store.layout import key_digest
from stage_runtime.connectors.yuanrong.store import YuanrongConnector, payload_name
from tests.support.connector_peer import Peer, intact, payload
from tests.support.mooncake import mooncake_host, mooncake_master
from tests.support.netns import Host
from tests.support.processes import wait_for
from tests.support.yuanrong import yuanrong

pytestmark = pytest.mark.long

#: Requests of the leak test: some hundred in each run, ten thousand in the long form.
REQUESTS = 10_000 if os.environ.get("OMNI_LONG") else 300
KEEP = {"consume": False}
KINDS = ["SharedMemoryConnector", "TcpConnector", "AutoConnector"]
if os.environ.get("OMNI_LONG"):
    KINDS += ["YuanrongConnector", "MooncakeTransferEngineConnector", "MooncakeStoreConnector"]
#: What killed producers left in a store that is not theirs goes after that time.
LEFT_S = 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in real shared memory."""
    folder = Path(tempfile.mkdtemp(prefix="omni-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest) -> Iterator[Host | None]:
    """Where the connector may run: here, or on a host of its own."""
    kind = request.node.callspec.params["kind"] if hasattr(request.node, "callspec") else ""
    if not kind.startswith("Mooncake"):
        yield None
        return
    mooncake_master()
    with mooncake_host().inside():
        yield mooncake_host()


def settings(kind: str, folder: Path) -> dict[str, Any]:
    extra: dict[str, Any] = {"shm_threshold_bytes": 0, "pool_bytes": 64 << 20}
    if kind == "YuanrongConnector":
        return extra | yuanrong().settings | {"namespace": str(folder), "ttl_s": LEFT_S}
    if kind == "MooncakeTransferEngineConnector":
        return extra | {"memory_pool_size": 64 << 20}
    if kind == "MooncakeStoreConnector":
        return extra | {"segment": 64 << 20}
    return extra if kind == "TcpConnector" else extra | {"directory": str(folder)}


def build(kind: str, folder: Path) -> OmniConnectorBase:
    return OmniConnectorFactory.create_connector(ConnectorSpec(kind, settings(kind, folder)))


class Pair:
    """A producer and a consumer in processes of their own, replaced when they are killed."""

    def __init__(self, kind: str, home: Host | None, folder: Path, chance: random.Random) -> None:
        self._kind, self._home, self._extra, self._chance = kind, home, settings(kind, folder), chance
        self.producer, self.consumer = self._peer(), self._peer()
        self.whole = self.lost = self.kills = 0
        self.stored: list[tuple[str, dict[str, Any]]] = []

    def request(self, number: int) -> None:
        """One hand-off; in one of twenty, one of the two is killed somewhere on its way."""
        key, size = f"r{number}", self._chance.choice([100, 70_000, 500_000, 3_000_000])
        killed = self._chance.choice(["storing", "stored", "fetching", "looking"]) if number % 20 == 19 else ""
        if killed == "storing":
            self.producer._pipe.send(("put", key, size, number))
            self._replace("producer")
            return
        stored, _, metadata = self.producer.call("put", key, size, number)
        assert stored
        self.stored.append((key, metadata))
        if killed == "fetching":
            assert self.consumer.call("begin", key, metadata | KEEP) == "begun"
            self._replace("consumer")
        if killed == "looking":
            assert self.consumer.call("hold", key, metadata | KEEP)
            self._replace("consumer")
        if killed == "stored":
            self._replace("producer")
            self._fetch_from_the_dead(key, metadata, number)
            return
        consume = self._chance.random() < 0.3
        assert self.consumer.call("get", key, metadata | {"consume": consume})[:2] == (True, number)
        self.whole += 1
        self.producer.call("cleanup", key)

    def _fetch_from_the_dead(self, key: str, metadata: dict[str, Any], number: int) -> None:
        # The new producer has swept it, or there is nobody to send it: an answer comes all the same.
        with OmniConnectorFactory.create_connector(ConnectorSpec(self._kind, self._extra)) as reader:
            try:
                got = reader.get("0", "1", key, metadata | KEEP)
            except TransferError:
                got = None
        assert got is None or (got[0]["seed"] == number and intact(got[0]))
        self.lost += got is None

    def _replace(self, which: str) -> None:
        time.sleep(self._chance.random() * 0.003)
        getattr(self, which).kill()
        setattr(self, which, self._peer())
        self.kills += 1

    def _peer(self) -> Peer:
        return Peer(self._kind, self._home, **self._extra)

    def close(self) -> None:
        self.producer.kill()
        self.consumer.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_after_many_requests_and_kills_nothing_is_left(kind: str, home: Host | None, folder: Path) -> None:
    """1. hundreds of hand-offs of all sizes; in one of twenty the producer or the consumer is killed on its way
    2. what is fetched is whole; the living hold nothing: no hand-off, no view, no connection
    3. all are killed: the next start leaves the folder empty
    """
    pair = Pair(kind, home, folder, random.Random(7))
    try:
        for number in range(REQUESTS):
            pair.request(number)
        assert pair.kills == REQUESTS // 20
        assert pair.whole > REQUESTS * 0.8
        produced = wait_for("the producer to be idle", lambda: idle(pair.producer.call("health")))
        consumed = pair.consumer.call("health")
        assert (produced["pending"], produced["inflight_bytes"], consumed["lent"]) == (0, 0, 0)
        assert produced["pool_free_bytes"] <= 64 << 20
    finally:
        pair.close()
    with build(kind, folder) as reader:
        if isinstance(reader, YuanrongConnector):
            names = [
                payload_name(key_digest(str(folder), "0", "1", key), metadata["generation"])
                for key, metadata in pair.stored
            ]
            datasystem = reader._datasystem
            wait_for("what was left to go", lambda: not any(datasystem.exist(names)), 3 * LEFT_S)
    assert list(folder.iterdir()) == []


def idle(health: dict[str, Any]) -> dict[str, Any] | None:
    return health if health["pending"] == 0 else None


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_leaks_neither_descriptors_nor_maps(kind: str, folder: Path) -> None:
    """A thousand hand-offs through one producer and one consumer; then both are as they were after the first ten."""
    with build(kind, folder) as producer, build(kind, folder) as consumer:

        def go(number: int) -> None:
            _, _, metadata = producer.put("0", "1", "key", payload(100_000 + number % 7 * 30_000, number))
            got = consumer.get("0", "1", "key", (metadata or {}) | KEEP)
            assert got is not None
            assert got[0]["seed"] == number
            producer.cleanup("key")

        def held() -> tuple[int, int]:
            gc.collect()
            maps = Path("/proc/self/maps").read_text().count("omni-")
            return len(list(Path("/proc/self/fd").iterdir())), maps

        for number in range(20):
            go(number)
        before = held()
        for number in range(1000):
            go(number)
        # Others in this process, a channel that connects for one, open and close descriptors of their own.
        wait_for("no more to be held", lambda: all(now <= then + 2 for now, then in zip(held(), before, strict=True)))
    assert list(folder.iterdir()) == []


def test_a_producer_that_is_killed_while_it_sends_is_noticed_at_once(folder: Path) -> None:
    """The consumer has some of 400 MB when the producer dies: an error, long before any deadline."""
    producer = Peer("TcpConnector", **settings("TcpConnector", folder))
    _, _, metadata = producer.call("put", "key", 400 << 20, 1)
    with build("TcpConnector", folder) as consumer:
        outcome: list[Any] = []

        def fetch() -> None:
            try:
                outcome.append(consumer.get("0", "1", "key", metadata | KEEP))
            except TransferError as error:
                outcome.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        time.sleep(0.03)
        producer.kill()
        thread.join(5)
        assert not thread.is_alive()
        assert isinstance(outcome[0], TransferError)


def test_a_consumer_that_is_killed_while_it_receives_gives_the_segment_back(folder: Path) -> None:
    """Three consumers are killed in the middle of 200 MB; the producer then has one segment, and it is free."""
    with build("TcpConnector", folder) as producer:
        _, _, metadata = producer.put("0", "1", "key", payload(200 << 20, 1))
        ended = 0
        delay_s = 0.02
        while ended < 3:
            consumer = Peer("TcpConnector", **settings("TcpConnector", folder))
            consumer.call("begin", "key", (metadata or {}) | KEEP)
            time.sleep(delay_s)
            consumer.kill()
            time.sleep(0.5)
            if sum(producer.health()["transfers"].values()) == ended:
                # It was killed before it had asked.
                delay_s *= 2
                assert delay_s < 5
            ended = sum(producer.health()["transfers"].values())
        producer.cleanup("key")
        producer.put("0", "1", "next", payload(200 << 20, 2))
        assert producer.health()["segments_made"] <= 2
        assert producer.health()["pending"] == 1


def test_a_hand_off_that_was_half_written_is_never_found(folder: Path) -> None:
    """1. producers are killed while they store 60 MB; 2. nobody finds it, and the next start sweeps all of it"""
    extra = settings("SharedMemoryConnector", folder)
    with build("SharedMemoryConnector", folder) as reader:
        for delay_s in (0.0, 0.005, 0.01, 0.02, 0.04):
            producer = Peer("SharedMemoryConnector", **extra)
            producer._pipe.send(("put", "key", 60 << 20, 1))
            time.sleep(delay_s)
            producer.kill()
            got = reader.get("0", "1", "key", KEEP)
            assert got is None or intact(got[0])
            del got
            build("SharedMemoryConnector", folder).close()
            assert list(folder.iterdir()) == []
