"""The TCP connector against peers that lie, dawdle, hang up or push in; and with TLS, and over IPv6."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.errors import ConfigError
from stage_runtime.connectors import TcpConnector, TransferCancelledError, TransferError, TransferTimeoutError
from stage_runtime.connectors.tcp.frames import (
    ANSWER_BYTES,
    REQUEST_BYTES,
    Status,
    pack_answer,
    pack_request,
    parse_answer,
)
from tests.support.certificates import Certificates, make_certificates
from tests.support.connector_peer import intact, payload
from tests.support.processes import wait_for
from tests.support.quiet import soon_s
from tests.support.tls_client import TlsClient

Make = Callable[..., TcpConnector]
KEEP = {"consume": False}
QUICK = {"request_timeout_s": 0.4, "stall_timeout_s": 0.4}


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[TcpConnector] = []

    def build(**extra: Any) -> TcpConnector:
        made.append(TcpConnector({"shm_threshold_bytes": 0, **extra}))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


def offer(producer: TcpConnector, key: str = "key", size_bytes: int = 100_000, seed: int = 1) -> dict[str, Any]:
    metadata = producer.put("0", "1", key, payload(size_bytes, seed))[2]
    assert metadata is not None, producer.last_error
    return metadata | KEEP


def fetched(consumer: TcpConnector, metadata: dict[str, Any], key: str = "key") -> int:
    """The seed of what was got, whole."""
    got = consumer.get("0", "1", key, metadata)
    assert got is not None
    assert intact(got[0])
    return int(got[0]["seed"])


def dial(metadata: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection((metadata["source_host"], metadata["source_port"]), timeout=5)
    connection.settimeout(5)
    return connection


def hung_up(connection: socket.socket) -> bool:
    """Whether the other side closes without another word."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def counted(producer: TcpConnector, kind: str, count: int = 1) -> None:
    wait_for(f"{count} of {kind}", lambda: producer.health()["transfers"].get(kind, 0) >= count, 5.0)


def request(metadata: dict[str, Any], *, consume: bool = False) -> bytes:
    return pack_request(metadata["generation"], metadata["token"], consume=consume)


@pytest.mark.attack("C11")
def test_a_wrong_token_opens_nothing_and_each_hand_off_has_its_own(make: Make) -> None:
    """1. a token with one bit changed; 2. the right token of another hand-off; 3. the right one"""
    producer, consumer = make(), make()
    one, other = offer(producer, "one", seed=1), offer(producer, "other", seed=2)
    changed = bytes([one["token"][0] ^ 1]) + one["token"][1:]
    for wrong in (changed, other["token"], bytes(32)):
        with pytest.raises(TransferError, match="hung up"):
            consumer.get("0", "1", "one", {**one, "token": wrong})
    counted(producer, "refused_token", 3)
    assert one["token"] != other["token"]
    assert (fetched(consumer, one), fetched(consumer, other)) == (1, 2)


@pytest.mark.attack("C11")
@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(REQUEST_BYTES, b" "), bytes(REQUEST_BYTES), b"\xff" * (1 << 20)],
    ids=["http", "zeros", "much"],
)
def test_garbage_is_hung_up_on_and_counted(make: Make, garbage: bytes) -> None:
    producer = make()
    metadata = offer(producer)
    with dial(metadata) as connection:
        # It may be hung up on before all is said.
        with contextlib.suppress(ConnectionError):
            connection.sendall(garbage)
        assert hung_up(connection)
    counted(producer, "refused_garbage")
    assert fetched(make(), metadata) == 1


@pytest.mark.attack("C11")
def test_who_asks_slower_than_the_time_for_it_is_hung_up_on(make: Make) -> None:
    """A byte now and then does not lengthen the time; others are served meanwhile."""
    producer = make(**QUICK)
    metadata = offer(producer)
    with dial(metadata) as connection:
        begun_s = time.monotonic()
        for byte in request(metadata)[:6]:
            try:
                connection.send(bytes([byte]))
            except ConnectionError:
                break
            assert fetched(make(), metadata) == 1
            time.sleep(0.1)
        assert hung_up(connection)
        assert time.monotonic() - begun_s < soon_s(2)
    counted(producer, "timed_out")


@pytest.mark.attack("A8")
def test_connections_that_ask_for_nothing_keep_no_place_from_a_consumer(make: Make) -> None:
    """Many more than there are places, and new ones all the time: each drops the oldest silent one."""
    producer, consumer = make(), make()
    metadata = offer(producer)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(dial(metadata))
        assert [fetched(consumer, metadata) for _ in range(10)] == [1] * 10
        counted(producer, "crowded_out", 136)
        ending = threading.Event()

        def crowd_in() -> None:
            while not ending.is_set():
                stack.enter_context(dial(metadata))
                time.sleep(0.002)

        crowd = threading.Thread(target=crowd_in)
        crowd.start()
        try:
            assert [fetched(consumer, metadata) for _ in range(50)] == [1] * 50
        finally:
            ending.set()
            crowd.join()


@pytest.mark.attack("A8")
def test_silent_connections_of_one_address_crowd_out_none_of_another(make: Make) -> None:
    producer = make(max_connections=8)
    metadata = offer(producer)
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(dial(metadata))
        address = (metadata["source_host"], metadata["source_port"])
        for _ in range(20):
            there = socket.create_connection(address, 30, source_address=("127.0.0.2", 0))
            stack.enter_context(there)
        counted(producer, "crowded_out", 16)
        here.sendall(request(metadata))
        assert parse_answer(here.recv(ANSWER_BYTES, socket.MSG_WAITALL)) == (Status.HERE, metadata["data_size"])


@pytest.mark.attack("A8")
def test_a_consumer_without_a_place_comes_again_and_gives_up_at_its_deadline(make: Make) -> None:
    """1. two others have asked and do not read on: they keep their places, and the third consumer finds none
    2. it gives up in time; 3. another waits until one of both leaves
    """
    producer, consumer = make(max_connections=2), make()
    metadata = offer(producer, size_bytes=64 << 20)
    readers = []
    try:
        for _ in range(2):
            readers.append(dial(metadata))
            readers[-1].sendall(request(metadata))
            assert readers[-1].recv(ANSWER_BYTES, socket.MSG_WAITALL)
        with pytest.raises(TransferError):
            consumer.get("0", "1", "key", {**metadata, "timeout_s": 1.0})
        refused = producer.health()["transfers"]["refused_full"]
        assert refused > 1
        got: list[int] = []
        late = threading.Thread(target=lambda: got.append(fetched(consumer, metadata)))
        late.start()
        wait_for("it to be refused", lambda: producer.health()["transfers"]["refused_full"] > refused, 30.0)
        readers.pop().close()
        late.join(30)
        assert got == [1]
    finally:
        for reader in readers:
            reader.close()


def test_a_consumer_that_waits_for_a_place_can_be_given_up(make: Make) -> None:
    producer, consumer = make(max_connections=1), make()
    metadata = offer(producer, size_bytes=64 << 20)
    with dial(metadata) as reader:
        reader.sendall(request(metadata))
        assert reader.recv(ANSWER_BYTES, socket.MSG_WAITALL)

        def give_up() -> None:
            wait_for("it to be refused", lambda: producer.health()["transfers"].get("refused_full"), 30.0)
            consumer.cancel("key")

        other = threading.Thread(target=give_up)
        other.start()
        with pytest.raises(TransferCancelledError):
            consumer.get("0", "1", "key", metadata)
        other.join()


def test_who_does_not_take_what_he_asked_for_is_hung_up_on(make: Make) -> None:
    """1. a consumer asks for 64 MB and reads nothing; meanwhile the hand-off is dropped and others are stored
    2. it is hung up on, and its segment is free again
    """
    producer = make(**QUICK)
    metadata = offer(producer, size_bytes=64 << 20)
    with dial(metadata) as connection:
        connection.sendall(request(metadata))
        time.sleep(0.1)
        producer.cleanup("key")
        offer(producer, "next", size_bytes=64 << 20)
        assert producer.health()["segments_made"] == 2
        counted(producer, "timed_out")
    producer.cleanup("next")
    for key in ("a", "b"):
        offer(producer, key, size_bytes=64 << 20)
    assert producer.health()["segments_made"] == 2


def test_a_consumer_that_does_not_say_it_received_has_not_consumed(make: Make) -> None:
    """It hangs up, says nothing in time, or says something else: the hand-off is there for the next one."""
    producer, consumer = make(**QUICK), make()
    metadata = offer(producer)
    for last_word in (None, b"", b"no"):
        with dial(metadata) as connection:
            connection.sendall(request(metadata, consume=True))
            left = ANSWER_BYTES + metadata["data_size"]
            while left:
                left -= len(connection.recv(min(left, 1 << 16)))
            assert consumer.get("0", "1", "key", metadata) is None
            if last_word is not None:
                connection.sendall(last_word)
                assert last_word == b"" or hung_up(connection)
            elif hung_up(connection):
                counted(producer, "timed_out")
        wait_for("the claim to end", lambda: consumer.get("0", "1", "key", metadata), 5.0)
    assert fetched(consumer, {**metadata, "consume": True}) == 1
    assert consumer.get("0", "1", "key", metadata) is None
    wait_for("the producer to know", lambda: producer.health()["pending"] == 0, 5.0)


class Liar:
    """Listens as a producer would, and does to the first who comes what the test says."""

    def __init__(self, behave: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.metadata = {
            "source_host": "127.0.0.1",
            "source_port": self._listener.getsockname()[1],
            "data_size": 1000,
            "generation": bytes(16),
            "token": bytes(32),
            "tls": False,
            **KEEP,
        }
        self._behave = behave
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            self._behave(connection)

    def close(self) -> None:
        self._thread.join(10)
        self._listener.close()


@pytest.fixture
def lying() -> Iterator[Callable[[Callable[[socket.socket], None]], dict[str, Any]]]:
    made: list[Liar] = []

    def build(behave: Callable[[socket.socket], None]) -> dict[str, Any]:
        made.append(Liar(behave))
        return made[-1].metadata

    yield build
    for liar in made:
        liar.close()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "hung up after 0"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no producer"),
        (pack_answer(Status.HERE, 1 << 62), "were announced"),
        (pack_answer(Status.HERE, 999), "were announced"),
        (pack_answer(Status.HERE, 1000) + bytes(500), "hung up after 500 of 1000"),
    ],
    ids=["nothing", "http", "huge", "other size", "half"],
)
def test_a_producer_that_lies_is_an_error(make: Make, lying: Any, said: bytes, reason: str) -> None:
    def behave(connection: socket.socket) -> None:
        connection.recv(REQUEST_BYTES)
        connection.sendall(said)

    with pytest.raises(TransferError, match=reason):
        make().get("0", "1", "key", lying(behave))


@pytest.mark.parametrize("drip", [False, True], ids=["silent", "drips"])
def test_the_deadline_holds_whatever_the_producer_does(make: Make, lying: Any, drip: bool) -> None:
    def behave(connection: socket.socket) -> None:
        connection.settimeout(5)
        connection.sendall(pack_answer(Status.HERE, 1000))
        for _ in range(100):
            time.sleep(0.02)
            try:
                connection.sendall(b"x" if drip else b"")
            except OSError:
                return

    begun_s = time.monotonic()
    with pytest.raises(TransferTimeoutError):
        make().get("0", "1", "key", {**lying(behave), "timeout_s": 0.4})
    assert 0.3 < time.monotonic() - begun_s < soon_s(1.5)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_fetch_can_be_given_up_by_another_thread(make: Make, lying: Any, how: str) -> None:
    there = threading.Event()

    def behave(connection: socket.socket) -> None:
        there.set()
        connection.sendall(pack_answer(Status.HERE, 1000))
        connection.settimeout(10)
        connection.recv(REQUEST_BYTES)
        hung_up(connection)

    consumer, metadata = make(), lying(behave)

    def give_up() -> None:
        there.wait(5)
        time.sleep(0.1)
        consumer.cancel("another")
        consumer.cancel("key") if how == "cancel" else consumer.close()

    thread = threading.Thread(target=give_up)
    thread.start()
    begun_s = time.monotonic()
    with pytest.raises(TransferCancelledError):
        consumer.get("0", "1", "key", metadata)
    assert time.monotonic() - begun_s < soon_s(5)
    thread.join()


@pytest.mark.attack("A19")
def test_no_more_than_the_bound_is_fetched_whatever_was_announced(make: Make) -> None:
    """Nobody is connected to for more: the size is known before."""
    producer, careful = make(), make(max_fetch_bytes=200_000)
    assert fetched(careful, offer(producer, "small", size_bytes=100_000), "small") == 1
    metadata = offer(producer, size_bytes=300_000)
    with pytest.raises(TransferError, match="max_fetch_bytes is 200000"):
        careful.get("0", "1", "key", metadata)
    counted(producer, "sent")
    assert producer.health()["transfers"] == {"sent": 1}
    with pytest.raises(TransferError, match="bytes are announced"):
        make().get("0", "1", "key", {**metadata, "data_size": 1 << 60})


def test_a_server_that_died_listens_again_where_it_was(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica's record names its address, and hubs refuse hand-offs at any other."""
    producer, consumer = make(), make()
    address = producer.endpoint()
    metadata = offer(producer)
    assert address == {"host": metadata["source_host"], "port": metadata["source_port"]}
    server = producer._tcp._server
    assert server is not None
    monkeypatch.setattr(server, "_serve", lambda _: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with dial(metadata) as connection:
        connection.sendall(request(metadata))
        wait_for("the server to die", lambda: not server.alive, 30.0)
    assert producer.endpoint() == address
    assert fetched(consumer, metadata) == 1


def test_nobody_there_is_an_error_at_once(make: Make) -> None:
    producer = make()
    metadata = offer(producer)
    producer.close()
    begun_s = time.monotonic()
    with pytest.raises(TransferError, match="refused"):
        make().get("0", "1", "key", metadata)
    assert time.monotonic() - begun_s < soon_s(2)


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_ipv6_and_the_address_for_others(make: Make) -> None:
    """1. bound and advertised on the loopback of IPv6, with brackets or without
    2. only advertised: then it listens on all addresses, those of IPv4 as well
    """
    for host in ("::1", "[::1]"):
        metadata = offer(make(bind_host=host, advertise_host=host))
        assert metadata["source_host"] == "::1"
        assert fetched(make(), metadata) == 1
    metadata = offer(make(advertise_host="::1"))
    assert fetched(make(), metadata) == 1
    assert fetched(make(), {**metadata, "source_host": "127.0.0.1"}) == 1
    metadata = offer(make(advertise_host="localhost"))
    assert (metadata["source_host"], fetched(make(), metadata)) == ("localhost", 1)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def tls_of(certificates: Certificates, side: str = "server") -> dict[str, str]:
    return {
        "cert": getattr(certificates, f"{side}_cert"),
        "key": getattr(certificates, f"{side}_key"),
        "ca": certificates.ca,
    }


def test_with_tls_it_is_all_the_same_and_not_readable_on_the_way(make: Make, certificates: Certificates) -> None:
    producer, consumer = make(tls=tls_of(certificates)), make(tls=tls_of(certificates, "client"))
    metadata = offer(producer, size_bytes=20 << 20, seed=5)
    assert fetched(consumer, metadata) == 5
    assert fetched(consumer, {**metadata, "consume": True}) == 5
    assert consumer.get("0", "1", "key", metadata) is None
    plain = offer(producer)
    with dial(plain) as connection:
        connection.sendall(request(plain))
        try:
            said = connection.recv(ANSWER_BYTES)
        except ConnectionError:
            said = b""
        assert parse_answer(said.ljust(ANSWER_BYTES, b"\0")) is None
    counted(producer, "broken")


def test_with_tls_only_certificates_of_the_authority_are_served(make: Make, certificates: Certificates) -> None:
    """1. a consumer without TLS; 2. one with a stranger's certificate; 3. a producer with a stranger's"""
    stranger = {"cert": certificates.strange_cert, "key": certificates.strange_key}
    producer = make(tls=tls_of(certificates))
    metadata = offer(producer)
    with pytest.raises(TransferError, match="one side of the edge has TLS"):
        make().get("0", "1", "key", metadata)
    with pytest.raises(TransferError):
        make(tls={**stranger, "ca": certificates.ca}).get("0", "1", "key", metadata)
    strange = offer(make(tls={**stranger, "ca": certificates.strange_ca}))
    with pytest.raises(TransferError):
        make(tls=tls_of(certificates, "client")).get("0", "1", "key", strange)
    assert fetched(make(tls=tls_of(certificates, "client")), metadata) == 1


def test_a_silent_client_of_tls_is_hung_up_on_too(make: Make, certificates: Certificates) -> None:
    producer = make(tls=tls_of(certificates), **QUICK)
    with dial(offer(producer)) as connection:
        assert hung_up(connection)
    counted(producer, "timed_out")


@pytest.mark.attack("Z10")
def test_new_keys_without_end_are_cut_off(make: Make, certificates: Certificates) -> None:
    """A peer with a certificate sends thousands of KeyUpdates: before its request, and before it says "received".

    Those of the last are as long as whole messages.
    """
    producer, consumer = make(tls=tls_of(certificates)), make(tls=tls_of(certificates, "client"))
    metadata = offer(producer, size_bytes=2 << 20) | {"consume": True}
    asked = request(metadata, consume=True)
    for number, (said, padding) in enumerate([(b"", 0), (asked, 0), (b"", 1024), (asked, 1024)], 1):
        url = f"https://{metadata['source_host']}:{metadata['source_port']}"
        client = TlsClient(url, certificate=(certificates.client_cert, certificates.client_key), padding=padding)
        try:
            client.send(client.records(said) if said else b"")
            with contextlib.suppress(ConnectionError):
                client.send(client.key_updates(5000))
                client.answer()
        finally:
            client.close()
        counted(producer, "broken", number)
    assert fetched(consumer, metadata) == 1


def test_a_fetch_over_tls_can_be_given_up(make: Make, certificates: Certificates) -> None:
    """The other side shakes hands and then says nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server_cert, certificates.server_key)

    def behave(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(REQUEST_BYTES)
            hung_up(secured)

    liar = Liar(behave)
    consumer = make(tls=tls_of(certificates, "client"))
    thread = threading.Timer(0.5, consumer.cancel, args=("key",))
    thread.start()
    with pytest.raises(TransferCancelledError):
        consumer.get("0", "1", "key", {**liar.metadata, "tls": True})
    thread.join()
    liar.close()


@pytest.mark.parametrize("wrong", [{"cert": "x"}, "yes", {"cert": "/none", "key": "/none", "ca": "/none"}], ids=str)
def test_tls_that_can_not_be_is_refused_at_the_start(make: Make, tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="tls"):
        make(tls=wrong)


def test_frames_say_what_they_say() -> None:
    """The bytes on the wire are fixed: processes of two versions talk to each other."""
    assert pack_request(b"g" * 16, b"t" * 32, consume=True) == b"OMNIGET1\1" + bytes(7) + b"g" * 16 + b"t" * 32
    assert pack_answer(Status.GONE, 5) == b"OMNIGOT1\1" + bytes(7) + struct.pack("<Q", 5)
    assert parse_answer(b"OMNIGOT1\7" + bytes(15)) is None
