"""Who may speak as whom to a replica, and hear what: real sockets, real keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from omni_discovery import wire
from omni_discovery.curve import KeyPair
from stage_runtime.engine_loop.jobs import OutputChunk
from tests.support.local_replica import LocalReplica
from tests.support.quiet import soon_s
from tests.support.replica_hub import RawHub, eventually

A, B = KeyPair.generate(), KeyPair.generate()
TOKEN = "0123456789abcdef"
HUBS = {A.public: "hub-a", B.public: "hub-b"}


@pytest.fixture
def replica() -> Iterator[LocalReplica]:
    with LocalReplica(HUBS, capacity=4, delay_s=0.02) as running:
        yield running


@pytest.fixture
def hubs(replica: LocalReplica) -> Iterator[list[RawHub]]:
    opened: list[RawHub] = []
    yield opened
    for hub in opened:
        hub.close()


def words(count: int) -> str:
    return " ".join(f"secret{number}" for number in range(count))


def said_to(hub: RawHub, for_s: float = 0.5) -> list[Any]:
    """Everything that comes to a hub's two sockets for a while."""
    until_s = time.monotonic() + for_s
    said: list[Any] = []
    while (left_s := until_s - time.monotonic()) > 0:
        for socket in (hub.input, hub.output):
            if socket.poll(max(1, int(500 * min(left_s, 0.1)))):
                said += wire.decode_from_replica(socket.recv_multipart())[0]
    return said


def test_another_hub_can_neither_speak_as_a_hub_nor_hear_what_it_is_told(
    replica: LocalReplica, hubs: list[RawHub]
) -> None:
    """1. hub a streams; 2. hub b, which has a good key of its own, connects in a's name in every way it can think of
    3. it hears nothing, stops nothing, and a gets every word
    """
    a = replica.raw_hub("hub-a", A)
    hubs.append(a)
    a.hello()
    a.submit("r1", words(40))
    a.acknowledged()
    counters = replica.server.counters
    for routing_id in ("hub-a", "hub-a/", f"hub-a/{TOKEN}"):
        thief = replica.raw_hub("hub-a", B, routing_id)
        hubs.append(thief)
        before = counters["foreign_identity"]
        hello = wire.encode(wire.Hello(hub_id="hub-a", epoch=thief.epoch, session=1))
        for socket in (thief.input, thief.output):
            socket.send(hello)
        thief.send(wire.Abort(epoch=thief.epoch, request_id="r1"))
        thief.submit("r2", "mine")
        assert eventually(lambda before=before: counters["foreign_identity"] == before + 4)  # type: ignore[misc]
        assert thief.hears_nothing(0.1)
    chunks, done, _ = a.collect("r1")
    assert "".join(chunk.text for chunk in chunks) == words(40)
    assert done.finish_reason == "stop"
    assert [key.partition("/")[0] for key in replica.engine.begun] == ["hub-a"]


def test_a_hub_that_greets_in_another_s_name_is_not_welcomed(replica: LocalReplica, hubs: list[RawHub]) -> None:
    liar = replica.raw_hub("hub-b", B)
    hubs.append(liar)
    for socket in (liar.input, liar.output):
        socket.send(wire.encode(wire.Hello(hub_id="hub-a", epoch=liar.epoch)))
    assert eventually(lambda: replica.server.counters["foreign_identity"] == 2)
    assert liar.hears_nothing(0.1)
    liar.hello()


def test_output_that_waits_for_a_hub_goes_to_nobody_else(replica: LocalReplica, hubs: list[RawHub]) -> None:
    """1. hub a streams and is cut off; 2. hub b takes its place under a's id and a token of its own: it hears nothing
    3. a comes back under its own routing id and goes on where it was
    """
    a = replica.raw_hub("hub-a", A)
    hubs.append(a)
    a.hello()
    a.submit("r1", words(60))
    a.acknowledged()
    a.output.disconnect(replica.info.output_addr)
    thief = replica.raw_hub("hub-a", B, f"hub-a/{TOKEN}")
    hubs.append(thief)
    thief.output.send(wire.encode(wire.Hello(hub_id="hub-a", epoch=thief.epoch)))
    assert thief.hears_nothing(0.5)
    a.output.connect(replica.info.output_addr)
    a.output.send(wire.encode(wire.Hello(hub_id="hub-a", epoch=a.epoch)))
    ends = [message for message in said_to(a, 2.5) if isinstance(message, wire.StageDone)]
    assert [end.request_id for end in ends] == ["r1"]


def test_a_revoked_hub_is_cut_off_within_a_second_and_let_in_again_when_that_is_taken_back(
    replica: LocalReplica, hubs: list[RawHub]
) -> None:
    """1. hubs a and b have sessions, a streams; 2. a is revoked: its work ends, it hears nothing more, b goes on
    3. a new connection of a is refused; 4. revoked no more, a is greeted on the connection that it has
    """
    a, b = replica.raw_hub("hub-a", A), replica.raw_hub("hub-b", B)
    hubs += [a, b]
    a.hello()
    b.hello()
    a.submit("r1", words(1000))
    a.acknowledged()
    a.receive(a.output, wire.Chunk)
    asked_s = time.monotonic()
    replica.server.set_revoked_hubs(frozenset({"hub-a"}))
    assert eventually(lambda: replica.server.queue_length == 0 and not replica.engine.has_unfinished(), 2.0)
    while not a.hears_nothing(0.2):
        said_to(a, 0.05)
    assert time.monotonic() - asked_s < soon_s(1.0)
    a.submit("r2", "still me")
    assert eventually(lambda: replica.server.counters["revoked"] == 1)
    again = replica.raw_hub("hub-a", A)
    hubs.append(again)
    again.input.send(wire.encode(wire.Hello(hub_id="hub-a", epoch=again.epoch)))
    assert eventually(lambda: replica.server.counters["refused_handshakes"] > 0)
    assert a.hears_nothing(0.3)
    assert again.hears_nothing(0.1)
    b.submit("r3", "fine")
    assert isinstance(b.acknowledged(), wire.Accepted)
    assert b.collect("r3")[1].finish_reason == "stop"
    replica.server.set_revoked_hubs(frozenset())
    a.hello()
    a.submit("r4", "back")
    assert isinstance(a.acknowledged(), wire.Accepted)


def test_without_encryption_hubs_are_who_they_say(hubs: list[RawHub]) -> None:
    with LocalReplica(encrypted=False) as replica:
        hub = replica.raw_hub("anybody", None)
        hubs.append(hub)
        hub.hello()
        hub.submit("r1", "a b")
        assert isinstance(hub.acknowledged(), wire.Accepted)
        chunks, done, _ = hub.collect("r1")
        assert ([chunk.text for chunk in chunks], done.finish_reason) == (["a ", "b"], "stop")
        hub.output.send(wire.encode(wire.Hello(hub_id="somebody", epoch=hub.epoch)))
        assert eventually(lambda: replica.server.counters["foreign_identity"] == 1)


def test_a_batch_of_requests_is_answered_in_few_frames(hubs: list[RawHub]) -> None:
    """1. 64 requests in one frame; 2. their answers come in far fewer multiparts than there are messages, in order."""
    with LocalReplica(HUBS, capacity=64) as replica:
        hub = replica.raw_hub("hub-a", A)
        hubs.append(hub)
        hub.hello()
        batch = [
            wire.Submit(epoch=hub.epoch, request_id=f"r{number}", inputs={"prompt": f"w{number}"})
            for number in range(64)
        ]
        hub.input.send(wire.encode(batch))
        messages: list[Any] = []
        multiparts = 0
        while sum(isinstance(message, wire.StageDone) for message in messages) < 64:
            assert hub.output.poll(5000)
            messages += wire.decode_from_replica(hub.output.recv_multipart(zmq.NOBLOCK))[0]
            multiparts += 1
        assert multiparts <= 16
        for number in range(64):
            mine = [message for message in messages if getattr(message, "request_id", "") == f"r{number}"]
            assert [type(message) for message in mine] == [wire.Chunk, wire.StageDone]


@pytest.mark.parametrize("size_bytes", [1000, 64 << 10, 8 << 20])
def test_an_attachment_of_any_size_comes_as_it_was_sent(
    replica: LocalReplica, hubs: list[RawHub], size_bytes: int
) -> None:
    """Long ones are given to ZMQ without a copy."""
    hub = replica.raw_hub("hub-a", A)
    hubs.append(hub)
    hub.hello()
    hub.submit("r1", words(1000))
    hub.acknowledged()
    assert eventually(lambda: bool(replica.engine.begun))
    picture = bytes(number % 251 for number in range(1000)) * (size_bytes // 1000)
    replica.server.emit([OutputChunk("hub-a/r1/0#1", "image", mime="image/png", attachment=picture)])
    while hub.receive(hub.output, wire.Chunk).mime != "image/png":
        continue
    assert hub.attachments == [picture]
