"""A consumer believes a producer's offer only as far as it is safe to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from stage_runtime.connectors.errors import TransferError, TransferTimeoutError
from stage_runtime.connectors.mooncake.engine import ProducerReads
from stage_runtime.connectors.mooncake.offers import FetchRequest, Offer, receive_offered
from stage_runtime.connectors.store.registered import STAMP_BYTES, Block, ManagedPool
from stage_runtime.connectors.tcp.client import Fetch
from stage_runtime.connectors.tcp.frames import Status, pack_answer

SIZE = 1 << 16


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A consumer's connection to a producer on 127.0.0.1, and the producer's end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        consumer = socket.create_connection(listener.getsockname())
        producer, _ = listener.accept()
    with consumer, producer:
        yield consumer, producer


def session_read(connected: tuple[socket.socket, socket.socket], session: str, host: str) -> list[str]:
    """The engines that are read from where a producer at ``host`` offers that session."""
    consumer, producer = connected
    producer.sendall(pack_answer(Status.HERE, 100) + Offer(session, 0, bytes(STAMP_BYTES), is_raw=False).pack())
    pool = ManagedPool(SIZE)
    read: list[str] = []

    def fail(session: str, _address: int, _size_bytes: int, _block: Block) -> Future[int]:
        read.append(session)
        future: Future[int] = Future()
        future.set_result(1)
        return future

    asked = FetchRequest(bytes(16), bytes(32), consume=False, size_bytes=100, host=host, producer="0/1")
    deadline_s = time.monotonic() + 5.0
    with pytest.raises(TransferError):
        receive_offered(consumer, Fetch("key"), asked, deadline_s, pool, fail, ProducerReads())
    assert pool.free_bytes == SIZE
    return read


@pytest.mark.attack("Z20")
@pytest.mark.parametrize(
    "session",
    [
        "10.255.255.1:12345",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "127.0.0.1:00065536",
        "127.0.0.1",
        "127.0.0.1:-1",
        "",
        ":",
    ],
)
def test_no_engine_is_read_from_but_the_producers_own(
    connected: tuple[socket.socket, socket.socket], session: str
) -> None:
    """Else a registered producer would have its consumers connect anywhere."""
    assert session_read(connected, session, "127.0.0.1") == []


@pytest.mark.attack("Z20")
@pytest.mark.parametrize(
    ("session", "host"),
    [("127.0.0.1:15000", "127.0.0.1"), ("node-b:15000", "node-b"), ("127.0.0.1:15000", "node-b")],
    ids=["its address", "its name", "the address of its name"],
)
def test_the_producers_engine_may_go_by_name_and_by_address(
    connected: tuple[socket.socket, socket.socket], session: str, host: str
) -> None:
    assert session_read(connected, session, host) == [session]


@pytest.mark.attack("Z20")
def test_a_sender_that_the_operator_names_may_have_its_engine_elsewhere(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    assert session_read(connected, "10.255.255.1:12345", "") == ["10.255.255.1:12345"]


@pytest.mark.attack("Z20")
def test_a_producer_whose_reads_do_not_end_gets_no_other() -> None:
    """1. seven fetches are cancelled, and their large reads go on: the producer is asked again all the same
    2. an eighth read does not end: nothing more is read there, but from others
    3. one of them ends
    """
    now_s = 0.0
    late = ProducerReads(lambda: now_s)
    readings: list[Future[int]] = [Future() for _ in range(8)]
    for reading in readings[1:]:
        late.watch("0/1", reading)
    now_s = 2.0
    late.check_producer("0/1")
    late.watch("0/1", readings[0])
    late.check_producer("0/1")
    now_s = 4.0
    with pytest.raises(TransferError, match="0/1: 8 earlier reads there do not end"):
        late.check_producer("0/1")
    late.check_producer("0/2")
    readings[3].set_result(1)
    late.check_producer("0/1")


def test_late_reads_that_end_while_their_producer_is_checked_are_no_error() -> None:
    """They end in the engine's threads, at any moment: here while the clock is read."""
    readings: list[Future[int]] = []

    def clock() -> float:
        for reading in readings:
            reading.set_result(1)
        return 0.0

    late = ProducerReads(clock)
    ending: list[Future[int]] = [Future() for _ in range(8)]
    for reading in ending:
        late.watch("0/1", reading)
    readings += ending
    late.check_producer("0/1")
    assert all(reading.done() for reading in ending)


def test_reads_of_one_producer_hold_half_of_the_pool_until_they_end() -> None:
    """1. of 100 bytes, a read of 51 is refused; those of 30 and 20 are begun, another one waits in vain
    2. another producer's read of 50 is begun; 3. one of the first two ends, and the next is begun
    """
    reads = ProducerReads()
    with pytest.raises(TransferError, match=r"51 bytes are offered, .* at most half of the pool, 50 bytes"):
        reads.begin("0/1", 51, 100, time.monotonic())
    reads.begin("0/1", 30, 100, time.monotonic())
    reads.begin("0/1", 20, 100, time.monotonic())
    with pytest.raises(TransferTimeoutError, match="0/1: earlier reads there take 50 of 50 bytes"):
        reads.begin("0/1", 1, 100, time.monotonic() + 0.05)
    reads.begin("0/2", 50, 100, time.monotonic())
    threading.Timer(0.05, reads.end, ("0/1", 20)).start()
    reads.begin("0/1", 20, 100, time.monotonic() + 20.0)
    for producer, size_bytes in (("0/1", 30), ("0/1", 20), ("0/2", 50)):
        reads.end(producer, size_bytes)


@pytest.mark.attack("Z60")
def test_a_read_holds_its_room_until_it_ends_behind_its_fetch(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    """1. a producer offers half of the pool, and the read there does not end within the fetch
    2. until it does, the others have the other half, and this producer has nothing more
    """
    consumer, producer = connected
    pool, reads, reading = ManagedPool(SIZE), ProducerReads(), Future[int]()
    offered = SIZE // 2 - 4096
    producer.sendall(pack_answer(Status.HERE, offered) + Offer("127.0.0.1:1", 0, bytes(STAMP_BYTES), False).pack())
    asked = FetchRequest(bytes(16), bytes(32), consume=False, size_bytes=None, host="127.0.0.1", producer="0/1")
    with pytest.raises(TransferTimeoutError):
        receive_offered(consumer, Fetch("key"), asked, time.monotonic() + 0.1, pool, lambda *_: reading, reads)
    assert pool.free_bytes >= SIZE // 2
    with pytest.raises(TransferTimeoutError):
        reads.begin("0/1", offered, SIZE, time.monotonic())
    reading.set_result(1)
    reads.begin("0/1", offered, SIZE, time.monotonic())
    assert pool.free_bytes == SIZE
