"""Strangers at the ZMQ ports of replicas that `omni serve` started: none is let in, and clients notice nothing."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zmq

from omni_discovery import wire
from omni_discovery.curve import KeyPair
from tests.support.hub import ECHO_PAIR, Hub
from tests.support.processes import wait_for
from tests.support.replica_hub import RawHub

pytestmark = pytest.mark.e2e

Record = dict[str, Any]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    running = Hub.of_yaml(tmp_path_factory.mktemp("attacked"), ECHO_PAIR)
    try:
        yield running.wait_ready()
        assert "Traceback" not in running.text
    finally:
        left = running.stop()
    assert not left, running.text[-3000:]


@pytest.fixture(scope="module")
def record(hub: Hub) -> Record:
    """Of one replica, as everybody may read it who may read the registry."""
    return next(each for each in hub.replicas() if each["stage_id"] == 0)


def assert_serves(hub: Hub) -> None:
    """Both replicas of the stage get their turn."""
    for number in range(4):
        status, body = hub.ask(f"number {number}", modalities=["text"])
        assert (status, body["choices"][0]["message"]["content"]) == (200, f"number {number}")


def raw_hub(record: Record, keys: KeyPair | None, replica_public: str) -> RawHub:
    addresses = (record["input_addr"], record["output_addr"])
    return RawHub("hub-1", keys, *addresses, replica_public, record["epoch"])


def with_password(record: Record) -> RawHub:
    """One that asks for the mechanism PLAIN."""
    plain = raw_hub(record, None, "")
    for each in (plain.input, plain.output):
        each.disconnect(each.last_endpoint)
        each.plain_username, each.plain_password = b"admin", b"admin"
    plain.input.connect(record["input_addr"])
    plain.output.connect(record["output_addr"])
    return plain


@pytest.mark.attack("C1")
def test_who_is_no_registered_hub_hears_nothing_however_it_asks(hub: Hub, record: Record) -> None:
    """Without encryption, by password, with a key that nobody registered, and with another server's key."""
    public = record["curve_public_key"]
    strangers = {
        "NULL": raw_hub(record, None, ""),
        "PLAIN": with_password(record),
        "unknown key": raw_hub(record, KeyPair.generate(), public),
        "wrong server key": raw_hub(record, KeyPair.generate(), KeyPair.generate().public),
    }
    try:
        for stranger in strangers.values():
            stranger.input.setsockopt(zmq.SNDTIMEO, 0)
            hello = wire.Hello(hub_id="hub-1", epoch=record["epoch"])
            submit = wire.Submit(epoch=record["epoch"], request_id="r", inputs={"prompt": "let me in"})
            for message in (hello, submit):
                # Queued for a connection that never comes about, or refused where libzmq has given it up already.
                with suppress(zmq.Again):
                    stranger.input.send(wire.encode(message))
        assert_serves(hub)
        for name, stranger in strangers.items():
            assert stranger.hears_nothing(0.5), name
    finally:
        for stranger in strangers.values():
            stranger.close()
    asked = sum(each["queue_length"] for each in hub.replicas())
    assert asked == 0


def port_of(record: Record) -> int:
    return int(record["input_addr"].rpartition(":")[2])


def greeting(mechanism: bytes, major: int = 3) -> bytes:
    """The first 64 bytes of ZMTP 3."""
    return b"\xff" + bytes(7) + b"\x01\x7f" + bytes([major, 0]) + mechanism.ljust(20, b"\0") + bytes(32)


_HELLO = b"\x05HELLO\x01\x00" + bytes(72) + Random(3).randbytes(32) + bytes(8) + Random(5).randbytes(80)
TALKS = {
    "1.0": b"\x01\x00",
    "2.0": b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00",
    "3.0 without encryption": greeting(b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    "3.0 with a password": greeting(b"PLAIN") + b"\x04\x0e\x05HELLO\x03a:b\x03a:b",
    "an unknown mechanism": greeting(b"GSSAPI"),
    "a forged hello": greeting(b"CURVE") + b"\x04" + bytes([len(_HELLO)]) + _HELLO,
    "a command of 2^62 bytes": greeting(b"CURVE") + b"\x06" + (1 << 62).to_bytes(8, "big") + bytes(5000),
    "a message before the handshake": greeting(b"CURVE") + b"\x00\x05hello",
    "noise": b"\xff" + Random(1).randbytes(5000),
    "HTTP": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    "TLS": b"\x16\x03\x01\x02\x00\x01" + Random(2).randbytes(506),
}


@pytest.mark.attack("C2")
def test_an_older_or_a_forged_protocol_is_no_way_in(hub: Hub, record: Record) -> None:
    """1. strangers speak older releases of the protocol, other mechanisms, forged handshakes, other protocols
    2. none is told more than the replica's own greeting; each is hung up on, also those that wait for more
    """
    with ExitStack() as stack:
        open_ones = {}
        for name, talk in TALKS.items():
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(record)), 5.0))
            stranger.sendall(talk)
            open_ones[name] = stranger
        assert_serves(hub)
        for name, stranger in open_ones.items():
            # libzmq gives a handshake 30 s.
            stranger.settimeout(45.0)
            assert b"READY" not in said_by(stranger), name
    assert_serves(hub)


def said_by(stranger: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    said = b""
    try:
        while part := stranger.recv(4096):
            said += part
            assert len(said) < 1000, said
    except ConnectionError:
        pass
    return said


@pytest.mark.attack("C3")
def test_two_thousand_half_open_handshakes_cost_little_and_nobody(hub: Hub, record: Record) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    before = memory_of(hub)
    try:
        with ExitStack() as stack:
            for _ in range(2000):
                stranger = socket.create_connection(("127.0.0.1", port_of(record)), 5.0)
                stack.enter_context(closing(stranger))
                stranger.sendall(greeting(b"CURVE"))
            assert_serves(hub)
            assert memory_of(hub) - before < 100 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_for("the hub to serve on", lambda: hub.get("/ready")[0] == 200)
    assert_serves(hub)


def memory_of(hub: Hub) -> int:
    """Resident bytes of the hub and of all its replicas."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in hub.tree()]
    return sum(pages) * resource.getpagesize()
