"""What only the connector over Yuanrong's datasystem does, against a real one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stage_runtime.connectors import TransferCancelledError, TransferError
from stage_runtime.connectors.store.layout import key_digest
from stage_runtime.connectors.yuanrong.store import YuanrongConnector, payload_name
from tests.support.connector_peer import Peer, intact, payload
from tests.support.processes import wait_for
from tests.support.yuanrong import Datasystem, require_yuanrong, yuanrong

pytestmark = pytest.mark.long

KEEP = {"consume": False}


@pytest.fixture
def settings(namespace: str) -> dict[str, Any]:
    return {**yuanrong().settings, "namespace": namespace, "shm_threshold_bytes": 0}


@pytest.fixture
def producer(settings: dict[str, Any]) -> Iterator[YuanrongConnector]:
    with YuanrongConnector(settings) as connector:
        yield connector


@pytest.fixture
def consumer(settings: dict[str, Any]) -> Iterator[YuanrongConnector]:
    with YuanrongConnector({**settings, "get_sub_timeout_ms": 20_000}) as connector:
        yield connector


def names_of(namespace: str, key: str, metadata: dict[str, Any]) -> list[str]:
    return [payload_name(key_digest(namespace, "0", "1", key), metadata["generation"])]


def test_the_key_alone_finds_the_newest_and_is_waited_for(
    producer: YuanrongConnector, consumer: YuanrongConnector
) -> None:
    """1. a fetch begins before anything is stored, and ends with what is
    2. the key is stored anew: the fetch finds that, and consumes it
    """
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(consumer.get, "0", "1", "key", KEEP)
        time.sleep(0.1)
        assert producer.put("0", "1", "key", payload(1000, 1))[0]
        first = waiting.result(20)
    assert first is not None
    assert first[0]["seed"] == 1
    assert producer.put("0", "1", "key", payload(1000, 2))[0]
    second = consumer.get("0", "1", "key")
    assert second is not None
    assert second[0]["seed"] == 2
    assert consumer.get("0", "1", "key", {"timeout_s": 0.05}) is None


def test_a_fetch_that_waits_lets_others_run_and_can_be_cancelled(consumer: YuanrongConnector) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(consumer.get, "0", "1", "never")
        wait_for("the fetch", lambda: bool(consumer._fetches._fetches))
        consumer.cancel("never")
        with pytest.raises(TransferCancelledError):
            waiting.result(5)


def test_two_namespaces_do_not_meet(settings: dict[str, Any], producer: YuanrongConnector) -> None:
    _, _, metadata = producer.put("0", "1", "key", {"a": 1})
    with YuanrongConnector({**settings, "namespace": "another"}) as other:
        assert other.get("0", "1", "key") is None
        assert other.get("0", "1", "key", metadata) is None


def test_nothing_stays_in_the_datasystem_but_what_is_kept(
    namespace: str, producer: YuanrongConnector, consumer: YuanrongConnector
) -> None:
    """Consumed, cleaned up, stored anew, closed: each takes the hand-off out of the datasystem."""
    names: list[str] = []
    for key in ("consumed", "cleaned", "renewed", "renewed", "closed"):
        _, _, metadata = producer.put("0", "1", key, payload(1000))
        assert metadata is not None
        names += names_of(namespace, key, metadata)
    assert consumer.get("0", "1", "consumed") is not None
    producer.cleanup("cleaned")
    there = consumer._datasystem.exist(names)
    assert there == [False, False, False, True, True]
    producer.close()
    assert not any(consumer._datasystem.exist(names))


def test_what_a_killed_producer_left_goes_after_its_time(
    namespace: str, settings: dict[str, Any], consumer: YuanrongConnector
) -> None:
    """1. it is killed: what it stored can still be had; 2. a second or two later it is gone"""
    peer = Peer("YuanrongConnector", **settings, ttl_s=1, request_timeout_s=20)
    _, _, metadata = peer.call("put", "key", 100_000, 5)
    peer.kill()
    got = consumer.get("0", "1", "key", metadata | KEEP)
    if got is not None:
        assert intact(got[0])
    names = names_of(namespace, "key", metadata)
    wait_for("the end of its time", lambda: not any(consumer._datasystem.exist(names)), 20.0)


def test_a_datasystem_that_stands_still_is_an_answer_and_serves_again(settings: dict[str, Any]) -> None:
    """1. it is stopped: put says so, get raises, health is bad, and only the first call has to wait for that
    2. meanwhile what travels in the metadata still goes; 3. it goes on: so do the connectors
    """
    process = yuanrong().process
    with YuanrongConnector({**settings, "request_timeout_s": 0.5}) as connector:
        _, _, metadata = connector.put("0", "1", "before", payload(1000, 7))
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert connector.put("0", "1", "key", {"a": 1}) == (False, 0, None)
            assert "is it running" in connector.last_error
            with pytest.raises(TransferError, match="is it running"):
                connector.get("0", "1", "before", metadata)
            said = connector.health()
            assert (said["status"], said["failures"]) == ("unhealthy", 1)
            assert "is it running" in said["reason"]
        finally:
            os.kill(process.pid, signal.SIGCONT)
        wait_for("an answer", lambda: connector.health()["status"] == "healthy", 20.0)
        got = connector.get("0", "1", "before", metadata)
        assert got is not None
        assert intact(got[0])


@pytest.mark.skipif(not os.environ.get("OMNI_LONG"), reason="takes long: OMNI_LONG=1")
def test_two_datasystems_of_one_etcd_hand_over_to_each_other(namespace: str) -> None:
    """As on two hosts: each connector knows only its own. Of two that would consume, one gets it, a hundred times."""
    require_yuanrong()
    here = Datasystem(memory_mib=512)
    try:
        here.wait()
        there = Datasystem(memory_mib=512, etcd=here.etcd)
        try:
            there.wait()
            more = {"namespace": namespace, "shm_threshold_bytes": 0}
            with YuanrongConnector(here.settings | more) as producer, YuanrongConnector(there.settings | more) as far:
                for number in range(100):
                    _, _, metadata = producer.put("0", "1", f"k{number}", payload(1 << 20, number))
                    assert metadata is not None
                    begin = threading.Barrier(2)

                    def fetch(one: YuanrongConnector, key: str, metadata: dict[str, Any], begin: Any) -> Any:
                        begin.wait(10)
                        return one.get("0", "1", key, metadata)

                    with ThreadPoolExecutor(2) as threads:
                        each = [threads.submit(fetch, one, f"k{number}", metadata, begin) for one in (producer, far)]
                        got = [found for found in (one.result(20) for one in each) if found is not None]
                    assert [found[0]["seed"] for found in got] == [number]
                    assert intact(got[0][0])
        finally:
            there.close()
    finally:
        here.close()
