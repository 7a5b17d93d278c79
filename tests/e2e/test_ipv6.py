"""Everything over IPv6: etcd, records, sessions, HTTP."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub import Hub
from tests.support.loopback import HAS_IPV6
from tests.support.processes import Child, wait_for
from tests.support.registry import EtcdServer, quiet_port

pytestmark = pytest.mark.e2e

ONE_STAGE = "stages: [{stage_id: 0, engine: echo, final_output: text}]"


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """An etcd that listens on ::1 for its clients (its IPv4 port serves the fixture's own look whether it is up)."""
    endpoint = f"[::1]:{quiet_port()}"
    server = EtcdServer(tmp_path)
    url = f"http://{endpoint},http://{server.endpoint}"
    server._flags = (f"--listen-client-urls={url}", f"--advertise-client-urls=http://{endpoint}")
    server.start()
    yield endpoint
    server.kill()


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1")
def test_a_request_through_hub_and_replica_that_know_each_other_by_ipv6_alone(tmp_path: Path, endpoint: str) -> None:
    """1. hub and replica are told etcd's address, [::1], and nothing else
    2. the record says [::1]; a request over HTTP on [::1] is answered; what is drained withdraws
    """
    hub = Hub.of_yaml(tmp_path, ONE_STAGE, "--hub-only", "--etcd-endpoints", endpoint, "--host", "::1")
    headless = ["serve", "--headless", "--stage-id", "0", "--namespace", "test", "--etcd-endpoints", endpoint]
    replica = Child(headless, tmp_path, "replica")
    try:
        hub.wait_ready()
        assert hub.url.startswith("http://[::1]:")
        (record,) = hub.replicas("--etcd-endpoints", endpoint)
        assert record["input_addr"].startswith("tcp://[::1]:")
        assert record["output_addr"].startswith("tcp://[::1]:")
        status, answer = hub.ask("over six")
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "over six")
        replica.process.send_signal(signal.SIGTERM)
        assert replica.process.wait(30) == 0, replica.text
        wait_for("the replica to be gone", lambda: hub.get("/ready")[0] == 503)
    finally:
        assert replica.stop() + hub.stop() == []
