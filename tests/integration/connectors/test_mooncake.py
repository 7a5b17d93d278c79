"""What only Mooncake's connectors do; all that every connector does is in the contract suite."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_discovery.errors import ConfigError
from stage_runtime.connectors import (
    ConnectorSpec,
    OmniConnectorFactory,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from stage_runtime.connectors.mooncake import store
from stage_runtime.connectors.mooncake.engine import check_devices, host_of
from stage_runtime.connectors.mooncake.offers import OfferServer
from stage_runtime.connectors.mooncake.store import MooncakeStoreConnector
from stage_runtime.connectors.mooncake.store_client import StoreClient, StoreConfig
from stage_runtime.connectors.mooncake.transfer import MooncakeTransferEngineConnector
from stage_runtime.connectors.store.layout import key_digest
from stage_runtime.connectors.store.memory import ReceivePool
from stage_runtime.connectors.store.registered import ManagedBuffer
from tests.support.connector_peer import Peer, intact, payload
from tests.support.mooncake import mooncake_host, mooncake_master, require_mooncake
from tests.support.netns import Host, Network
from tests.support.processes import wait_for
from tests.support.quiet import soon_s
from tests.support.yuanrong import require_yuanrong

TRANSFER = "MooncakeTransferEngineConnector"
KEEP = {"consume": False}
POOL = 64 << 20

Make = Callable[..., MooncakeTransferEngineConnector]


@pytest.fixture
def host() -> Iterator[Host]:
    with mooncake_host().inside():
        yield mooncake_host()


@pytest.fixture
def make(host: Host) -> Iterator[Make]:
    made: list[MooncakeTransferEngineConnector] = []

    def build(**extra: Any) -> MooncakeTransferEngineConnector:
        settings = {"shm_threshold_bytes": 0, "memory_pool_size": POOL}
        made.append(MooncakeTransferEngineConnector(settings | extra))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


def put(connector: MooncakeTransferEngineConnector, key: str, value: Any) -> dict[str, Any]:
    stored, _, metadata = connector.put("0", "1", key, value)
    assert stored, connector.last_error
    assert metadata is not None
    return metadata


def free_bytes(connector: MooncakeTransferEngineConnector) -> int:
    return int(connector.health()["pool_free_bytes"])


BEHIND_YUANRONG = """
import yr.datasystem
from omni_discovery.errors import ConfigError
from stage_runtime.connectors.mooncake.engine import load
for module in ("engine", "store"):
    try:
        load(module)
    except ConfigError as error:
        print(error)
"""


def test_where_yuanrongs_library_is_loaded_already_mooncakes_is_refused() -> None:
    """As in a stage of vLLM-Omni, which imports it: both have glog in them, and the process would get a SIGSEGV."""
    require_mooncake()
    require_yuanrong()
    ended = subprocess.run(
        [sys.executable, "-c", BEHIND_YUANRONG], check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("pip uninstall openyuanrong-datasystem in this Python, or name another connector") == 2


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"bytes" * 1000,
        torch.arange(30).reshape(5, 6).T.bfloat16(),
        torch.ones(3, dtype=torch.complex64),
    ],
    ids=["nothing", "bytes", "tensor", "complex"],
)
def test_bytes_and_tensors_come_as_they_are(make: Make, value: Any) -> None:
    """1. the content is a buffer of the consumer's pool; 2. the buffer gives it back, or the connector does"""
    producer, consumer = make(), make()
    metadata = put(producer, "key", value)
    for release in (lambda buffer: buffer.release(), consumer.release):
        got = consumer.get("0", "1", "key", metadata | KEEP)
        assert got is not None
        buffer, size_bytes = got
        assert isinstance(buffer, ManagedBuffer)
        if isinstance(value, bytes):
            assert (buffer.to_bytes(), size_bytes) == (value, len(value))
        else:
            assert torch.equal(buffer.as_tensor(value.dtype, value.shape), value)
        before = free_bytes(consumer)
        release(buffer)
        assert free_bytes(consumer) >= before
    assert consumer.health()["lent"] == 0


def test_a_buffer_of_the_pool_is_put_without_a_copy_and_may_be_handed_on(make: Make) -> None:
    """1. filled in the pool, put, released by who filled it: it stays for the consumers, under two keys
    2. what a consumer got, it puts itself; 3. when all is dropped, all of the pool is free
    """
    producer, middle, last = make(), make(), make()
    assert (producer.pool.data_ptr(), len(producer.pool)) == (producer.base_ptr, POOL)
    buffer = producer.allocate(5000)
    buffer.tensor[:] = 9
    first, second = put(producer, "one", buffer), put(producer, "two", buffer)
    buffer.release()
    got = middle.get("0", "1", "one", first)
    assert got is not None
    onward = put(middle, "again", got[0])
    got[0].release()
    for connector, key, metadata in ((last, "again", onward), (last, "two", second)):
        found = connector.get("0", "1", key, metadata)
        assert found is not None
        assert found[0].to_bytes() == b"\x09" * 5000
        found[0].release()
    wait_for("the pools", lambda: all(free_bytes(each) == POOL for each in (producer, middle)), 5.0)


def test_many_consumers_read_one_hand_off_at_once(make: Make, host: Host) -> None:
    """Four threads, and another process, of which each gets all of it; then its producer drops it."""
    producer = make()
    metadata = put(producer, "key", payload(4 << 20, 5)) | KEEP
    consumers = [make() for _ in range(4)]
    other = Peer(TRANSFER, host, shm_threshold_bytes=0, memory_pool_size=POOL)
    try:
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda one: one.get("0", "1", "key", metadata), consumers * 2))
        assert all(one is not None and intact(one[0]) for one in got)
        assert other.call("get", "key", metadata)[:2] == (True, 5)
    finally:
        other.kill()
    assert producer.health()["transfers"]["sent"] == 9
    producer.cleanup("key")
    assert free_bytes(producer) == POOL
    assert producer.endpoint()["session"] == f"127.0.0.1:{producer.rpc_port}"
    assert producer.zmq_port == metadata["source_port"]


def test_one_receiver_asks_many_senders_by_key(make: Make) -> None:
    """1. with an address in the metadata, or a rank's, or the one that is meant without; 2. with the sender's token"""
    senders = [make() for _ in range(3)]
    receiver = make()
    for rank, sender in enumerate(senders):
        put(sender, "key", {"rank": rank})
        info = sender.get_connection_info()
        receiver.update_sender_info(info["host"], info["zmq_port"], rank, info["sender_token"])
    info = senders[2].get_connection_info()
    where = {"source_host": info["host"], "source_port": info["zmq_port"]}
    for rank in range(2):
        assert receiver.get("0", "1", "key", {"sender_rank": rank, **KEEP})[0] == {"rank": rank}  # type: ignore[index]
    # Nobody is meant, and an address alone opens nothing.
    assert receiver.get("0", "1", "key") is None
    assert receiver.get("0", "1", "key", where) is None
    assert receiver.get("0", "1", "other", {**where, "sender_token": info["sender_token"]}) is None
    got = receiver.get("0", "1", "key", {**where, "sender_token": info["sender_token"]})
    assert got is not None
    assert got[0] == {"rank": 2}
    receiver.update_sender_info(info["host"], info["zmq_port"], sender_token=info["sender_token"])
    assert receiver.get("0", "1", "key") is None, "it was consumed"
    put(senders[2], "key", {"rank": 2})
    assert receiver.get("0", "1", "key", {**where, "sender_token": bytes(32)}) is None


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("127.0.0.1", None, "sender_zmq_port is None; the sender's port is wanted, from 1 to 65535"),
        ("127.0.0.1", 0, "sender_zmq_port is 0"),
        ("127.0.0.1", "7000", "sender_zmq_port is '7000'"),
        ("127.0.0.1", True, "sender_zmq_port is True"),
        (None, 7000, "sender_host is None; the sender's address is wanted"),
        ("", 7000, "sender_host is ''"),
    ],
)
def test_a_senders_place_that_can_be_none_is_refused_at_once(make: Make, host: Any, port: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make().update_sender_info(host, port)


def test_both_sides_may_be_given_one_secret_and_a_place_by_hand(make: Make) -> None:
    sender = make(sender_token="a long secret of theirs", role="sender")
    put(sender, "key", {"a": 1})
    info = sender.endpoint()
    given = {"sender_host": info["host"], "sender_zmq_port": info["zmq_port"], "role": "receiver"}
    receiver = make(sender_token="a long secret of theirs", **given)
    assert receiver.get("0", "1", "key", KEEP) is not None
    assert make(sender_token="another one", **given).get("0", "1", "key", KEEP) is None
    assert receiver.put("0", "1", "key", {"a": 1}) == (False, 0, None)
    assert "receiver" in receiver.last_error


def test_with_the_insecure_setting_host_and_port_are_enough(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """1. by ``update_sender_info``, by metadata with an address alone, and by settings; 2. a sender without the
    setting tells such a receiver nothing; 3. both sides say in their logs that they are open
    """
    sender, guarded = make(insecure_by_key=True), make()
    assert caplog.text.count("connector.insecure") == 1
    host, port = sender.get_connection_info()["host"], sender.zmq_port
    put(sender, "key", {"a": 1})
    put(guarded, "key", {"a": 2})
    receiver = make(insecure_by_key=True)
    assert (receiver.sender_host, receiver.sender_zmq_port) == (None, None)
    receiver.update_sender_info(host, port)
    assert (receiver.sender_host, receiver.sender_zmq_port) == (host, port)
    receiver.update_sender_info(host, port, 3)
    for metadata in (KEEP, {"source_host": host, "source_port": port, **KEEP}, {"sender_rank": 3, **KEEP}):
        assert receiver.get("0", "1", "key", metadata)[0] == {"a": 1}  # type: ignore[index]
    given = make(insecure_by_key=True, sender_host=host, sender_zmq_port=port)
    assert given.get("0", "1", "key", KEEP) is not None
    closed = {"source_host": host, "source_port": guarded.zmq_port}
    assert receiver.get("0", "1", "key", closed) is None
    assert guarded.health()["pending"] == 1
    with pytest.raises(ConfigError, match="insecure_by_key is true beside a sender_token"):
        make(insecure_by_key=True, sender_token="a secret")


def test_a_receiver_without_the_senders_token_says_so_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = make(), make()
    put(sender, "key", {"a": 1})
    receiver.update_sender_info("127.0.0.1", sender.zmq_port)
    for _ in range(3):
        assert receiver.get("0", "1", "key") is None
    assert caplog.text.count("connector.no_sender_token") == 1


def test_a_taken_zmq_port_is_not_the_end_of_the_second_replica(make: Make, host: Host) -> None:
    """Connectors of one document, in this process and in another: each listens, and each one's metadata say where."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        wanted = free.getsockname()[1]
    first, second, consumer = make(zmq_port=wanted), make(zmq_port=wanted), make(zmq_port="auto")
    found = [put(each, "key", {"of": number}) for number, each in enumerate((first, second))]
    assert found[0]["source_port"] == wanted
    assert found[1]["source_port"] > wanted
    assert second.endpoint()["zmq_port"] == second.zmq_port == found[1]["source_port"]
    for number, metadata in enumerate(found):
        assert consumer.get("0", "1", "key", metadata)[0] == {"of": number}  # type: ignore[index]
    other = Peer(TRANSFER, host, zmq_port=wanted, memory_pool_size=POOL)
    try:
        stored, _, metadata = other.call("put", "key", 5000, 9)
        assert stored
        assert metadata["source_port"] not in (0, *(each["source_port"] for each in found))
        got = consumer.get("0", "1", "key", metadata)
        assert got is not None
        assert got[0]["seed"] == 9
        assert intact(got[0])
    finally:
        other.kill()
    with pytest.raises(ConfigError, match="zmq_port is 99999; a port is wanted"):
        make(zmq_port=99999)


def test_small_objects_go_through_the_pool_too_where_they_are_found_by_key(make: Make) -> None:
    """Their metadata have all that the metadata of large ones have; ``cleanup`` by edge and key frees them."""
    sender, receiver = make(shm_threshold_bytes=65536), make()
    for value, is_fast in ((b"raw", True), (torch.ones(3), True), ({"a": 1}, False)):
        metadata = put(sender, "key", value)
        assert metadata["is_fast_path"] is is_fast
        assert {"source_host", "source_port", "data_size"} <= metadata.keys()
        assert free_bytes(sender) < POOL
        sender.cleanup("key", from_stage="0", to_stage="2")
        assert free_bytes(sender) < POOL
        sender.cleanup("key", from_stage="0", to_stage="1")
        assert free_bytes(sender) == POOL
        assert receiver.get("0", "1", "key", metadata) is None
    # Another transport's metadata, and none at all, mean the key at the sender that is known.
    put(sender, "key", {"a": 1})
    info = sender.get_connection_info()
    receiver.update_sender_info(info["host"], info["zmq_port"], sender_token=info["sender_token"])
    every: list[Any] = ["text", {}, {"shm": "psm_1", "size": 3}, {"key": {"size": 3}}]
    for foreign in every:
        assert receiver.get("0", "1", "key", foreign) is not None
        put(sender, "key", {"a": 1})


def test_a_transfer_engines_parts_are_there_by_name(make: Make) -> None:
    connector = make()
    assert connector.allocator.free_bytes == POOL
    buffer = connector.allocate(5000)
    assert connector.allocator.free_bytes == POOL - 8192
    buffer.release()
    assert connector.engine.get_rpc_port() == connector.rpc_port > 0
    assert len(connector.engine_id) == 36
    assert connector.engine_id != make().engine_id
    assert not connector.zmq_ctx.closed


def test_the_host_auto_is_this_machines_address(host: Host) -> None:
    """On a host with a route to others; a replica's own address goes before it."""
    assert host_of({"host": "auto", "advertise_host": "10.1.2.3"}) == "10.1.2.3"
    assert host_of({"host": "10.9.9.9", "advertise_host": "10.1.2.3"}) == "10.9.9.9"
    assert host_of({}) == ""
    assert host_of({"host": "auto"}) in ("", host.address)


def test_a_wrong_token_is_refused_and_counted_and_the_hand_off_stays(make: Make) -> None:
    producer, consumer = make(), make()
    metadata = put(producer, "key", {"a": 1})
    with pytest.raises(TransferError):
        consumer.get("0", "1", "key", metadata | {"token": bytes(32)})
    wait_for("the count", lambda: producer.health()["transfers"].get("refused_token"), 5.0)
    with pytest.raises(TransferError, match="7 were announced"):
        consumer.get("0", "1", "key", metadata | {"data_size": 7})
    assert consumer.get("0", "1", "key", metadata) is not None
    wait_for("the consumer's pool", lambda: free_bytes(consumer) == POOL, 5.0)


def test_what_does_not_lie_where_it_was_offered_is_no_hand_off(make: Make) -> None:
    """The stamp before it is another one, as if another process had its address: nothing is taken for it."""
    producer, consumer = make(), make()
    metadata = put(producer, "key", payload(10_000))
    producer._engine.pool.tensor[:4096] = 0
    with pytest.raises(TransferError, match="could not read from"):
        consumer.get("0", "1", "key", metadata)
    assert producer.health()["pending"] == 1


@pytest.mark.attack("Z20")
def test_a_producer_can_not_send_its_consumers_to_other_engines(make: Make) -> None:
    """Records name where it hands over; its answer names the engine."""
    producer, consumer = make(), make()
    metadata = put(producer, "key", payload(10_000)) | KEEP
    server = producer._offers._server
    assert isinstance(server, OfferServer)
    server._session = "10.255.255.1:12345"
    with pytest.raises(TransferError, match=r"the engine is said to be at '10\.255\.255\.1'"):
        consumer.get("0", "1", "key", metadata)
    assert free_bytes(consumer) == POOL


@pytest.mark.attack("Z20")
def test_reads_that_do_not_end_are_not_added_to(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. a client goes away during a read: its producer is read from all the same
    2. each late read holds a thread and a block: of one producer there are eight at most, and others are read from
    """
    producer, other, consumer = make(), make(), make()
    metadata, of_other = put(producer, "key", payload(10_000)), put(other, "key", payload(10_000))
    monkeypatch.setattr("stage_runtime.connectors.mooncake.engine._LATE_S", 0.0)
    readings: list[Future[int]] = [Future() for _ in range(8)]
    for reading in readings:
        with monkeypatch.context() as stuck:
            stuck.setattr(consumer._engine, "read", lambda *_, reading=reading: reading)
            with pytest.raises(TransferTimeoutError):
                consumer.get("0", "1", "key", metadata | KEEP | {"timeout_s": soon_s(0.2)})
        if reading is readings[0]:
            assert consumer.get("0", "1", "key", metadata | KEEP) is not None
    with pytest.raises(TransferError, match="8 earlier reads there do not end"):
        consumer.get("0", "1", "key", metadata | KEEP)
    assert consumer.get("0", "1", "key", of_other | KEEP) is not None
    for reading in readings:
        reading.set_result(1)
    assert consumer.get("0", "1", "key", metadata | KEEP) is not None


def test_a_producer_that_stands_still_holds_nobody_up_for_long(make: Make, host: Host) -> None:
    """1. its process is stopped: the deadline ends one fetch, ``cancel`` the other; 2. it is killed: an error
    3. the consumer's memory is its own again
    """
    producer, consumer = Peer(TRANSFER, host, shm_threshold_bytes=0, memory_pool_size=POOL), make()
    _, _, metadata = producer.call("put", "key", 4 << 20, 1)
    assert consumer.get("0", "1", "key", metadata | KEEP) is not None
    os.kill(producer.process.pid or 0, signal.SIGSTOP)
    with pytest.raises(TransferTimeoutError):
        consumer.get("0", "1", "key", metadata | {"timeout_s": 0.3})
    timer = threading.Timer(0.3, consumer.cancel, ["key"])
    timer.start()
    with pytest.raises(TransferCancelledError):
        consumer.get("0", "1", "key", metadata)
    timer.join()
    producer.kill()
    with pytest.raises(TransferError):
        consumer.get("0", "1", "key", metadata)
    wait_for("its pool", lambda: free_bytes(consumer) == POOL, 60.0)


def test_a_transfer_that_stands_still_ends_and_its_memory_waits_for_the_engine(make: Make, host: Host) -> None:
    """The producer is stopped while the engine reads: the fetch ends in time, the block goes back later."""
    producer, consumer = Peer(TRANSFER, host, shm_threshold_bytes=0, memory_pool_size=POOL), make()
    _, _, metadata = producer.call("put", "key", 4 << 20, 1)
    pid = producer.process.pid or 0
    read = consumer._engine.read
    taken: list[int] = []

    def stop_first(*arguments: Any) -> Any:
        os.kill(pid, signal.SIGSTOP)
        future = read(*arguments)
        taken.append(consumer._engine.pool.free_bytes)
        return future

    consumer._engine.read = stop_first  # type: ignore[method-assign]
    with pytest.raises(TransferTimeoutError):
        consumer.get("0", "1", "key", metadata | {"timeout_s": 0.5})
    assert consumer._engine.pool.free_bytes == taken[0] < POOL
    producer.kill()
    wait_for("the block", lambda: consumer._engine.pool.free_bytes == POOL, 60.0)


def test_two_hosts_hand_over_to_each_other() -> None:
    """All that they have in common is a network; each is told its own address and nothing of the other."""
    mooncake_host()
    with Network("left", "right") as network:
        left, right = (
            Peer(TRANSFER, host, shm_threshold_bytes=0, memory_pool_size=POOL, advertise_host=host.address)
            for host in network.hosts.values()
        )
        try:
            for seed, (producer, consumer) in enumerate(((left, right), (right, left))):
                _, _, metadata = producer.call("put", "key", 4 << 20, seed)
                assert consumer.call("get", "key", metadata)[:2] == (True, seed)
        finally:
            left.kill()
            right.kill()


def test_a_full_pool_is_said_on_either_side(make: Make) -> None:
    producer, small = make(), make(memory_pool_size=1 << 16)
    metadata = put(producer, "key", payload(1 << 20))
    with pytest.raises(TransferError, match="raise memory_pool_size"):
        small.get("0", "1", "key", metadata)
    assert small.put("0", "1", "key", payload(1 << 20)) == (False, 0, None)
    assert "raise memory_pool_size" in small.last_error


@pytest.mark.parametrize("kind", ["MooncakeStoreConnector", TRANSFER])
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"protocol": "ucx"}, "tcp, rdma"),
        ({"protocol": "rdma", "device_name": "mlx9_9"}, "mlx9_9 is not here; there are: .*; or use tcp"),
        ({"host": "fd00::1"}, "IPv4 only"),
        ({"timeout_s": -1}, "timeout_s"),
    ],
    ids=str,
)
def test_what_mooncake_can_not_do_is_refused_at_the_start(
    host: Host, kind: str, wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        OmniConnectorFactory.create_connector(ConnectorSpec(kind, wrong))


def test_rdma_needs_the_devices_that_it_is_to_use(tmp_path: Path) -> None:
    """The library would take TCP without a word."""
    for names in ("", "mlx5_0"):
        with pytest.raises(ConfigError, match="there are: none"):
            check_devices("rdma", names, tmp_path / "nothing")
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()
    for names in ("", "mlx5_1", "mlx5_0, mlx5_1"):
        check_devices("rdma", names, tmp_path)
    with pytest.raises(ConfigError, match="mlx5_0,mlx5_7 is not here; there are: mlx5_0, mlx5_1"):
        check_devices("rdma", "mlx5_0,mlx5_7", tmp_path)
    check_devices("tcp", "mlx5_7", tmp_path)


@pytest.mark.parametrize("kind", ["MooncakeConnector", TRANSFER])
def test_without_the_package_it_is_said_what_to_install(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr("stage_runtime.connectors.mooncake.engine.importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"omni-discovery\[mooncake\].*libibverbs1.*libibverbs.so.1"):
        OmniConnectorFactory.create_connector(ConnectorSpec(kind, {"master": "127.0.0.1:1"}))


def test_without_a_master_the_store_says_so_and_nothing_waits(host: Host) -> None:
    with MooncakeStoreConnector({"master": "127.0.0.1:9", "shm_threshold_bytes": 0}) as connector:
        begun_s = time.monotonic()
        assert connector.put("0", "1", "key", payload(1000)) == (False, 0, None)
        assert "no Mooncake master at 127.0.0.1:9: start mooncake_master" in connector.last_error
        with pytest.raises(TransferError, match="no Mooncake master"):
            connector.get("0", "1", "key", {"mooncake_key": f"omni-{bytes(32).hex()}"})
        assert time.monotonic() - begun_s < soon_s(20)
        told = connector.health()
        assert (told["status"], "start mooncake_master" in told["reason"]) == ("unhealthy", True)


class FakeStore:
    """The library's client, where putting fails so often with what a dead process's segment answers."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self.tried: list[Any] = []
        self.answer = 0
        self.closed = False

    def setup(self, *_: Any) -> int:
        return 0

    def get_hostname(self) -> str:
        return "127.0.0.1:12345"

    def put_parts(self, name: str, *parts: bytes, config: Any) -> int:
        self.tried.append(getattr(config, "preferred_segment", "anywhere"))
        return -800 if len(self.tried) <= self._failures else self.answer

    def remove(self, name: str, force: bool) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


def fake_client(monkeypatch: pytest.MonkeyPatch, *stores: FakeStore) -> StoreClient:
    left = list(stores)
    library = SimpleNamespace(MooncakeDistributedStore=lambda: left.pop(0), ReplicateConfig=SimpleNamespace)
    monkeypatch.setattr("stage_runtime.connectors.mooncake.store_client.load", lambda _: library)
    monkeypatch.setattr(
        "stage_runtime.connectors.mooncake.store_client.socket.create_connection", lambda *_: FakeStore(0)
    )
    return StoreClient(StoreConfig("127.0.0.1", "P2PHANDSHAKE", 1, 1, "tcp", "", "127.0.0.1:1"))


def test_a_process_that_is_taken_for_a_dead_one_comes_under_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [FakeStore(2), FakeStore(1), FakeStore(0)]
    fake_client(monkeypatch, *stores).put("name", [b"x"], time.monotonic() + 5)
    assert [store.closed for store in stores] == [True, True, False]
    with pytest.raises(TransferError, match="takes this process for others"):
        fake_client(monkeypatch, *(FakeStore(1) for _ in range(9))).put("name", [b"x"], time.monotonic() + 5)


def test_a_put_that_met_the_segment_of_a_dead_process_is_tried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own is full, say. The library can't move it twice; then it goes anywhere. If it never can, that is said."""
    store = FakeStore(0)
    client = fake_client(monkeypatch, store)
    client.put("first", [b"x"], time.monotonic() + 5)
    store.tried, store._failures = [], 2
    client.put("name", [b"x"], time.monotonic() + 5)
    assert store.tried == ["127.0.0.1:12345", "127.0.0.1:12345", "anywhere"]
    store.tried, store._failures = [], 9
    with pytest.raises(TransferError, match="answers -800"):
        client.put("name", [b"x"], time.monotonic() + 5)


def test_a_master_that_does_not_answer_is_not_asked_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. a call takes its seconds to fail; 2. those behind it fail at once, for the same reason; 3. then it is asked"""
    store = FakeStore(0)
    client = fake_client(monkeypatch, store)
    client.put("name", [b"x"], time.monotonic() + 5)
    store.answer = -900
    asked = len(store.tried)
    for _ in range(3):
        with pytest.raises(TransferError, match=r"master at 127\.0\.0\.1:1 does not answer"):
            client.put("name", [b"x"], time.monotonic() + 5)
    assert len(store.tried) == asked + 1
    store.answer = 0
    client._asked_again_at_s = 0.0
    client.put("name", [b"x"], time.monotonic() + 5)


@pytest.mark.attack("Z61")
def test_objects_of_a_silent_owner_keep_nobody_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. eight reads do not end, long behind their deadlines, which are not said to be the master's alone
    2. meanwhile others are stored, looked for and read
    """
    store, ends = FakeStore(0), threading.Event()
    handle = SimpleNamespace(size=lambda: 0, ptr=lambda: 1)

    def get_buffer(name: str) -> Any:
        assert name == "good" or ends.wait(60)
        return handle

    monkeypatch.setattr(store, "get_buffer", get_buffer, raising=False)
    monkeypatch.setattr(store, "is_exist", lambda _: 1, raising=False)
    client = fake_client(monkeypatch, store)
    memory = ReceivePool(1 << 20)
    try:
        for _ in range(8):
            with pytest.raises(TransferTimeoutError, match="the owner of the object, or Mooncake's master"):
                client.get("silent", memory, time.monotonic() + 0.01)
        soon_s = time.monotonic() + 20
        client.put("name", [b"x"], soon_s)
        assert client.is_there("name", soon_s)
        assert client.get("good", memory, soon_s) is not None
    finally:
        ends.set()


def test_the_store_finds_hand_offs_by_their_keys(host: Host) -> None:
    """1. of any size, from another process, in the latest version; 2. gone from the store with the hand-off: by a
    consumer, by ``cleanup``, and as a later one takes its place; 3. a replica makes no such entries
    """
    mooncake_master()
    settings: dict[str, Any] = {"segment": 32 << 20, "localbuf": 32 << 20, "namespace": "by-key"}
    peer = Peer("MooncakeStoreConnector", host, **settings)
    try:
        with MooncakeStoreConnector(settings) as connector:
            assert (connector.store, connector.pin) == (None, None)
            for size_bytes in (100, 1 << 20):
                connector.put("0", "1", "key", payload(size_bytes, 6))
                assert connector.put("0", "1", "key", payload(size_bytes, 7))[0]
                assert peer.call("get", "key", KEEP)[:2] == (True, 7)
                assert peer.call("get", "key", "not a mapping")[:2] == (True, 7)
                assert peer.call("get", "key", None) is None
            assert connector.store is not None
            assert connector.pin.with_hard_pin
            connector.put("0", "1", "key", payload(100, 8))
            index = store._index_name(key_digest("by-key", "0", "1", "key"))
            assert connector.store.is_exist(index) == 1
            connector.cleanup("key", "0", "1")
            assert connector.store.is_exist(index) == 0
            assert peer.call("get", "key", None) is None
            with MooncakeStoreConnector(settings | {"by_key": False, "shm_threshold_bytes": 0}) as replicas:
                assert replicas.put("0", "1", "key", payload(100, 9))[0]
                assert connector.store.is_exist(index) == 0
    finally:
        peer.kill()


def test_the_store_refuses_what_is_too_large_for_it(host: Host) -> None:
    """Larger than this process's segment, or than its buffer."""
    mooncake_master()
    settings = {"shm_threshold_bytes": 0, "segment": 16 << 20, "localbuf": 64 << 20}
    with MooncakeStoreConnector(settings) as connector:
        assert connector.put("0", "1", "key", payload(96 << 20)) == (False, 0, None)
        assert "raise 'localbuf'" in connector.last_error
        assert connector.put("0", "1", "key", payload(1 << 20))[0]
        assert connector.health()["pending"] == 1
