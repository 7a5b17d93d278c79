"""Who gets nothing from a replica: hubs in another's name, of another namespace, revoked ones; and what others feel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_discovery import wire
from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.curve import KeyPair
from omni_discovery.records.schema import HubRecord
from tests.support.local_replica import LocalReplica
from tests.support.replica_hub import eventually
from tests.support.replica_stage import Deployment, echo_stages

A, B = KeyPair.generate(), KeyPair.generate()
HUBS = {A.public: "a", B.public: "b"}
#: The promise for a revocation.
WITHIN_S = 1.0


def words(count: int) -> str:
    return " ".join(["word"] * count)


@pytest.fixture
def replica() -> Iterator[LocalReplica]:
    with LocalReplica(HUBS, delay_s=0.02) as replica:
        yield replica


@pytest.mark.attack("C5")
@pytest.mark.parametrize("routing_id", ["a", "a/", "a/0123456789abcdef", "a/" + "f" * 200, "/0123456789abcdef", "A/x"])
def test_a_registered_hub_that_takes_anothers_name_gets_nothing_and_takes_nothing_away(
    replica: LocalReplica, routing_id: str
) -> None:
    """1. a has an answer on its way; b, with its own good key, connects under a's name and asks, greets, and aborts
    2. b hears nothing, all of it was counted; a's answer comes whole
    """
    a = replica.raw_hub("a", A)
    a.hello()
    a.submit("r", words(40))
    a.acknowledged()
    thief = replica.raw_hub("a", B, routing_id)
    hello = wire.encode(wire.Hello(hub_id="a", epoch=thief.epoch, session=9))
    for socket in (thief.input, thief.output):
        socket.send(hello)
    thief.send(wire.Abort(epoch=thief.epoch, request_id="r"))
    thief.submit("mine", "now")
    assert thief.hears_nothing(0.5)
    assert eventually(lambda: replica.server.counters["foreign_identity"] >= 4)
    chunks, done, _ = a.collect("r")
    assert (len(chunks), done.finish_reason) == (40, "stop")
    assert replica.engine.begun == ["a/r/0"]
    a.submit("r2", "still me")
    a.acknowledged()
    assert a.collect("r2")[1].finish_reason == "stop"
    a.close()
    thief.close()


@pytest.mark.attack("C5")
def test_a_hub_can_neither_greet_nor_stop_nor_release_in_anothers_name(replica: LocalReplica) -> None:
    """Under its own routing id, b says that it is a, and names a's request: nothing of a's changes."""
    a, b = replica.raw_hub("a", A), replica.raw_hub("b", B)
    a.hello()
    b.hello()
    a.submit("r", words(30))
    a.acknowledged()
    b.input.send(wire.encode(wire.Hello(hub_id="a", epoch=b.epoch, session=5)))
    b.send(wire.Abort(epoch=b.epoch, request_id="r"))
    assert not b.receive(b.input, wire.Aborted).running
    b.send(wire.ReleasePayloads(epoch=b.epoch, request_id="r"))
    chunks, done, _ = a.collect("r")
    assert (len(chunks), done.finish_reason) == (30, "stop")
    assert replica.server.counters["foreign_identity"] == 1
    a.close()
    b.close()


@pytest.mark.attack("H4")
def test_a_copy_of_a_hubs_record_under_another_id_shuts_that_hub_out_of_nothing(replica: LocalReplica) -> None:
    """1. zz's record has a's public key: a, on a new connection, is greeted and served
    2. a's own record is gone for a while: on a new connection it is not heard; 3. it is back, zz's is gone: that
       connection is a's, and is served; 4. the holder of another key is neither
    """
    b = {"b": B.public}
    replica.server.set_allowed_hubs({"a": A.public, **b, "zz": A.public})
    first = replica.raw_hub("a", A)
    first.hello(30.0)
    first.submit("r", "hello")
    assert isinstance(first.acknowledged(30.0), wire.Accepted)
    assert first.collect("r", 30.0)[1].finish_reason == "stop"
    first.close()
    replica.server.set_allowed_hubs({**b, "zz": A.public})
    second = replica.raw_hub("a", A)
    hello = wire.encode(wire.Hello(hub_id="a", epoch=second.epoch))
    for socket in (second.input, second.output):
        socket.send(hello)
    assert eventually(lambda: replica.server.counters["foreign_identity"] == 2, 30.0)
    replica.server.set_allowed_hubs({"a": A.public, **b})
    second.hello(30.0)
    second.submit("r2", "hello")
    assert isinstance(second.acknowledged(30.0), wire.Accepted)
    assert second.collect("r2", 30.0)[1].finish_reason == "stop"
    replica.server.set_allowed_hubs({"a": A.public, **b, "zz": A.public})
    for name in ("a", "zz"):
        thief = replica.raw_hub(name, B)
        thief.submit("mine", "now")
        assert thief.hears_nothing(0.3)
        thief.close()
    assert eventually(lambda: replica.server.counters["foreign_identity"] == 4, 30.0)
    second.close()


@pytest.mark.attack("C6")
def test_a_hub_calls_what_has_a_name_for_it_and_no_other_method_of_an_engine() -> None:
    """Neither as a control method, nor by way of `collective_rpc`, with one method that the operator allows."""
    with LocalReplica(HUBS, allow_rpc=["say"]) as replica:
        a = replica.raw_hub("a", A)
        a.hello()
        names = ["__init__", "__class__", "__reduce__", "add", "abort", "_slowly", "close", "begun.clear", "os.system"]
        calls: list[tuple[str, tuple[Any, ...]]] = [(name, ()) for name in names]
        calls += [("collective_rpc", (name,)) for name in [*names, "__getattribute__"]]
        calls += [("collective_rpc", ()), ("collective_rpc", (7,)), ("collective_rpc", ("list_loras", ["x"]))]
        for number, (method, args) in enumerate(calls):
            a.send(wire.Control(epoch=a.epoch, call_id=f"c{number}", method=method, args=args))
            answer = a.receive(a.output, wire.ControlResult)
            assert (answer.call_id, answer.ok) == (f"c{number}", False), (method, args, answer)
        a.submit("r", "still here")
        a.acknowledged()
        assert a.collect("r")[1].finish_reason == "stop"
        a.close()


@pytest.mark.attack("C1")
def test_a_hub_of_another_namespace_gets_nothing(endpoint: str, namespace: str, tmp_path: Path) -> None:
    """1. two namespaces in one etcd, a hub registered in each; both know the replica's addresses and its key
    2. the one of the replica's namespace is served; the other one hears nothing, under whatever name
    """
    keys = KeyPair.generate()
    record = HubRecord(hub_id="hub-9", curve_public_key=keys.public)
    with (
        Deployment(endpoint, namespace, echo_stages({}), tmp_path) as deployment,
        OmniCoordClientForHub(endpoint, namespace=f"{namespace}-other", ttl_s=5.0, hub=record) as other,
    ):
        deployment.start()
        (replica,) = deployment.wait_up()
        assert eventually(lambda: "hub-9" in other.view().hubs)
        for name in ("hub-9", "hub-1"):
            stranger = deployment.hub(replica, keys, name)
            stranger.input.send(wire.encode(wire.Hello(hub_id=name, epoch=replica.epoch)))
            stranger.output.send(wire.encode(wire.Hello(hub_id=name, epoch=replica.epoch)))
            stranger.submit("r", "let me in")
            assert stranger.hears_nothing(1.0)
        own = deployment.session(replica)
        own.submit("r", "hello")
        assert isinstance(own.acknowledged(), wire.Accepted)
        assert own.collect("r")[1].finish_reason == "stop"


@pytest.mark.attack("C8")
def test_a_revoked_hub_is_deaf_and_dumb_within_a_second_and_its_slots_are_others(replica: LocalReplica) -> None:
    """1. a and b have requests at work; b is revoked: its work ends, nothing more comes to it, nothing it says counts
    2. a's answer comes whole; 3. b is allowed again: it greets, and is served, on the same connection
    """
    a, b = replica.raw_hub("a", A), replica.raw_hub("b", B)
    a.hello()
    b.hello()
    a.submit("r", words(80))
    for number in range(8):
        b.submit(f"r{number}", words(1000))
        b.acknowledged()
    a.acknowledged()
    replica.server.set_revoked_hubs(frozenset({"b"}))
    asked_s = time.monotonic()
    assert eventually(lambda: replica.server.queue_length == 1, WITHIN_S)
    assert eventually(lambda: len(replica.engine._speeches) == 1, WITHIN_S)
    assert time.monotonic() - asked_s < WITHIN_S
    time.sleep(0.2)
    while b.output.poll(0) or b.input.poll(0):
        (b.output if b.output.poll(0) else b.input).recv_multipart()
    b.submit("more", "hello?")
    b.send(wire.Abort(epoch=b.epoch, request_id="r0"))
    b.input.send(wire.encode(wire.Hello(hub_id="b", epoch=b.epoch, session=2)))
    b.output.send(wire.encode(wire.Hello(hub_id="b", epoch=b.epoch, session=2)))
    assert b.hears_nothing(0.5)
    assert replica.server.counters["revoked"] >= 4
    chunks, done, _ = a.collect("r")
    assert (len(chunks), done.finish_reason) == (80, "stop")
    replica.server.set_revoked_hubs(frozenset())
    assert eventually(lambda: replica.server._revoked == frozenset())
    b.hello()
    b.submit("again", "here again")
    assert isinstance(b.acknowledged(), wire.Accepted)
    assert b.collect("again")[1].finish_reason == "stop"
    assert "b/more/0" not in replica.engine.begun
    a.close()
    b.close()
