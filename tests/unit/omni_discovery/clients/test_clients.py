"""The clients where no etcd is needed, or none answers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage, base
from omni_discovery.clients.stage import create_stage_coord_client
from omni_discovery.errors import ConfigError, RegistryUnavailableError
from omni_discovery.loop_thread import LoopThread
from omni_discovery.records.schema import ReplicaStatus
from tests.support.quiet import soon_s

#: The discard port of this machine: valid, and nobody listens.
NOBODY = "127.0.0.1:9"


def stage(**options: Any) -> OmniCoordClientForStage:
    return OmniCoordClientForStage(NOBODY, "tcp://h:1", "tcp://h:2", 0, **options)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("omni-registry")}


@pytest.mark.parametrize("endpoint", ["nonsense", "", "etcd:0", "http://"])
def test_an_endpoint_that_can_not_be_one_is_named_at_once(endpoint: str) -> None:
    with pytest.raises(RuntimeError, match=endpoint or "no etcd endpoint"):
        OmniCoordClientForHub(endpoint)
    with pytest.raises(RuntimeError, match=endpoint or "no etcd endpoint"):
        OmniCoordClientForStage(endpoint, "in", "out", 0)


def test_the_old_name_of_the_endpoints_is_taken_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each client by keywords alone, as code that was written for a coordinator does."""
    base._log_once.clear()
    addresses: Any = {"input_addr": "tcp://h:1", "output_addr": "tcp://h:2", "stage_id": 0}
    makers: list[Callable[..., Any]] = [
        OmniCoordClientForHub,
        lambda **named: OmniCoordClientForStage(**named, **addresses),
        lambda **named: create_stage_coord_client(**named, **addresses, queue_length_getter=lambda: 0),
    ]
    for make in makers:
        with make(coord_zmq_addr=NOBODY) as client:
            assert client._config.endpoints == ("127.0.0.1:9",)
        with make(endpoints=NOBODY) as client:
            assert client._config.endpoints == ("127.0.0.1:9",)
        with pytest.raises(TypeError, match="endpoints or coord_zmq_addr, not both"):
            make(coord_zmq_addr=NOBODY, endpoints=NOBODY)
        with pytest.raises(RuntimeError, match=r"tcp://10\.0\.0\.9:5555"):
            make(coord_zmq_addr="tcp://10.0.0.9:5555")
    assert caplog.text.count("client.old_name coord_zmq_addr means etcd's endpoints here") == 1


def test_nobody_answers_and_making_a_client_takes_no_time() -> None:
    began_s = time.monotonic()
    with OmniCoordClientForHub(NOBODY) as hub, stage() as replica:
        assert time.monotonic() - began_s < soon_s(1.0)
        assert hub.get_replica_list().replicas == []
        assert hub.get_replica_list().timestamp == 0.0
        assert hub.get_replicas_for_stage(0).replicas == []
        with pytest.raises(TimeoutError):
            hub.wait_synced(0.01)
        with pytest.raises(TimeoutError):
            replica.wait_registered(0.01)
        replica.update_info(queue_length=1)
    assert time.monotonic() - began_s < soon_s(3.0)


def test_a_call_that_needs_an_answer_says_that_none_came() -> None:
    with OmniCoordClientForHub(NOBODY, ttl_s=1.0) as hub, pytest.raises(RegistryUnavailableError):
        hub.get_pipeline()


def test_the_second_close_is_an_error_and_leaving_the_context_twice_is_not() -> None:
    for client in (OmniCoordClientForHub(NOBODY), stage()):
        with client:
            client.close()
            with pytest.raises(RuntimeError, match="Client already closed"):
                client.close()
        with client:
            pass
    assert threads() == set()


def test_nothing_is_updated_after_close() -> None:
    replica = stage()
    replica.close()
    with pytest.raises(RuntimeError, match="Client already closed"):
        replica.update_info(status=ReplicaStatus.UP)
    hub = OmniCoordClientForHub(NOBODY)
    hub.close()
    with pytest.raises(RuntimeError, match="Client already closed"):
        hub.create_pipeline(b"{}")


def test_an_update_while_the_client_closes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. the record is being withdrawn, which may take a while; 2. updates and a second close are refused meanwhile"""
    begun, may_end = threading.Event(), threading.Event()
    replica = stage()
    withdraw = replica._close_on_loop

    async def slowly() -> None:
        begun.set()
        await asyncio.to_thread(may_end.wait, 30.0)
        await withdraw()

    monkeypatch.setattr(replica, "_close_on_loop", slowly)
    closing = threading.Thread(target=replica.close)
    closing.start()
    try:
        assert begun.wait(30.0)
        with pytest.raises(RuntimeError, match=r"^Client is closing$"):
            replica.update_info(queue_length=1)
        with pytest.raises(RuntimeError, match="Client already closed"):
            replica.close()
    finally:
        may_end.set()
        closing.join(30.0)
    with pytest.raises(RuntimeError, match="Client already closed"):
        replica.update_info(queue_length=1)


def test_an_update_of_nothing_names_both_arguments() -> None:
    with stage() as replica, pytest.raises(ValueError, match=r"status.*queue_length"):
        replica.update_info()


@pytest.mark.parametrize("wrong", [{"queue_length": -1}, {"capacity": 0}, {"colour": "red"}, {"progress": 2.0}])
def test_a_value_that_no_hub_would_read_is_refused(wrong: dict[str, Any]) -> None:
    with stage() as replica, pytest.raises(ConfigError):
        replica.describe(**wrong)


def test_a_record_that_is_longer_than_hubs_read_is_refused_with_what_to_shorten() -> None:
    too_many = {f"label-{number}": "x" * 100 for number in range(1000)}
    with pytest.raises(
        ConfigError, match=r"has more than 98304 bytes, and no hub would read it: .*fewer or shorter labels"
    ):
        stage(fields={"labels": too_many})
    assert threads() == set()


@pytest.mark.parametrize("arguments", [("", "out", 0), ("in", "", 0), ("in", "out", -1)])
def test_a_replica_that_no_hub_could_reach_is_refused(arguments: tuple[str, str, int]) -> None:
    with pytest.raises(ConfigError):
        OmniCoordClientForStage(NOBODY, *arguments)
    assert threads() == set()


def _use_in_child(thread: LoopThread, answer: Any) -> None:
    try:
        thread.call(print)
    except RuntimeError as error:
        answer.send(str(error))
    else:
        answer.send("it worked")
    os._exit(0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_is_told_that_the_thread_stayed_behind() -> None:
    thread = LoopThread("omni-test-loop")
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_use_in_child, args=(thread, theirs))
    child.start()
    assert ours.poll(10.0)
    assert "does not survive a fork" in ours.recv()
    child.join(10.0)
    thread.close()
    ours.close()
    theirs.close()


def test_a_loop_thread_refuses_to_wait_for_itself() -> None:
    thread = LoopThread("omni-test-loop")

    async def answer() -> int:
        return 42

    async def wait_for_self() -> int:
        return thread.run(answer(), 1.0)

    try:
        assert thread.run(answer(), 5.0) == 42
        with pytest.raises(RuntimeError, match="can't be made on that thread"):
            thread.run(wait_for_self(), 5.0)
    finally:
        thread.close()
        thread.close()
