"""How long a lease really lives: what is asked for, what the server makes of it, and what is refused at the door."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_discovery.clients import OmniCoordClientForStage
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.store import EtcdKV
from stage_runtime.config import ReplicaConfig
from tests.support.processes import Child, wait_for
from tests.support.quiet import soon_s
from tests.support.registry import EtcdServer, etcdctl


@pytest.fixture
def slow_server(tmp_path: Path) -> Iterator[EtcdServer]:
    """Elections take 3 s, so no lease is shorter than 5."""
    server = EtcdServer(tmp_path, flags=["--heartbeat-interval=300", "--election-timeout=3000"])
    server.start()
    yield server
    server.kill()


def test_a_ttl_that_the_server_raises_is_kept_as_granted_and_said_with_both_numbers(
    slow_server: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Renewals follow the granted TTL: half as many as the one asked for would bring, and the key stays."""
    caplog.set_level(logging.INFO)
    endpoint = slow_server.endpoint
    with OmniCoordClientForStage(endpoint, "tcp://h:1", "tcp://h:2", 0, ttl_s=2.0) as replica:
        before = replica.wait_registered(10.0)
        time.sleep(6.0)
        assert replica.wait_registered(0.1) == before
        assert etcdctl(endpoint, "get", "--prefix", "--keys-only", "/omni/v1/default/replicas/").strip()
    raised = [record.getMessage() for record in caplog.records if "lease.ttl_raised" in record.getMessage()]
    assert raised == ["lease.ttl_raised asked_s=2 granted_s=5 by=etcd"]


@pytest.mark.parametrize("ttl_s", [0.5, 0.0, -1.0, 4000.0, float("nan")])
def test_a_ttl_that_can_not_be_is_refused_with_both_numbers(ttl_s: float) -> None:
    with pytest.raises(ConfigError, match=rf"{ttl_s!r}; right would be from 1 to 3600"):
        OmniCoordClientForStage("127.0.0.1:9", "tcp://h:1", "tcp://h:2", 0, ttl_s=ttl_s)
    with pytest.raises(ConfigError):
        ReplicaConfig(stage_id=0, endpoints="127.0.0.1:9", namespace="n", ttl_s=ttl_s)


@pytest.mark.parametrize("kind", [["--headless", "--stage-id", "0"], ["some-model"]])
def test_the_commands_refuse_it_too_before_they_start_anything(tmp_path: Path, kind: list[str]) -> None:
    flags = ["--etcd-endpoints", "127.0.0.1:9", "--omni-heartbeat-timeout", "0.5"]
    child = Child(["serve", *kind, *flags], tmp_path)
    assert child.process.wait(20.0) == 2
    assert "ttl_s (--omni-heartbeat-timeout) is 0.5; right would be from 1 to 3600" in child.text


def test_the_commands_refuse_a_ttl_below_the_servers_shortest(slow_server: EtcdServer, tmp_path: Path) -> None:
    """A hub with 2 s is refused; one with 5 s starts; then a supervisor with 2 s is refused."""
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text("stages: [{stage_id: 0, engine: echo, final_output: text}]")
    registry = ["--etcd-endpoints", slow_server.endpoint, "--omni-heartbeat-timeout"]
    hub = ["serve", "--deploy-config", str(deploy), "--port", "0", "--hub-only", *registry]
    child = Child([*hub, "2"], tmp_path)
    assert child.process.wait(20.0) == 2
    assert "a TTL of 2 s is too short" in child.text
    assert "--omni-heartbeat-timeout 5" in child.text
    started = Child([*hub, "5"], tmp_path, "hub")
    try:
        wait_for("the hub to listen", lambda: "hub.listening" in started.text)
        headless = Child(["serve", "--headless", "--stage-id", "0", *registry, "2"], tmp_path, "headless")
        assert headless.process.wait(20.0) == 2
        assert "a TTL of 2 s is too short" in headless.text
    finally:
        assert started.stop() == []


async def test_a_call_that_is_being_retried_ends_at_once_when_it_is_cancelled() -> None:
    kv = EtcdKV("127.0.0.1:9", try_timeout_s=5.0, call_timeout_s=30.0)
    for delay_s in (0.05, 0.4, 1.1):
        call = asyncio.create_task(kv.get("/"))
        await asyncio.sleep(delay_s)
        assert not call.done()
        call.cancel()
        began_s = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - began_s < soon_s(0.2)
    await kv.close()
