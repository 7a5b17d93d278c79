"""etcd is away for many TTLs, and comes back with its data or without; nobody who talks is cut off meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hub import Hub
from tests.support.processes import Child, wait_for
from tests.support.registry import EtcdServer

pytestmark = pytest.mark.long

TTL_S = 2.0
#: ``OMNI_OUTAGE_TTLS=10`` is the long form.
TTLS = float(os.environ.get("OMNI_OUTAGE_TTLS", "3"))
ONE_STAGE = "stages: [{stage_id: 0, engine: echo, engine_args: {capacity: 8}, final_output: text}]"


@pytest.mark.parametrize("is_wiped", [False, True], ids=["lost", "wiped"])
def test_an_etcd_that_is_away_for_many_ttls_breaks_no_session_and_keeps_no_hub_out(
    tmp_path: Path, is_wiped: bool
) -> None:
    """1. two hubs and two replicas; requests go through the second all the time; etcd dies, with or without its data
    2. in the middle the first hub is killed and started again: the replicas know it, and it serves from its saved view
    3. etcd is back after many TTLs: every request was answered, no connection was lost, the same processes serve
    """
    folders = [tmp_path / name for name in ("etcd", "replicas", "first", "second")]
    for folder in folders:
        folder.mkdir()
    server = EtcdServer(folders[0])
    server.start()
    registry = ["--etcd-endpoints", server.endpoint, "--omni-heartbeat-timeout", str(TTL_S)]
    flags = ["--hub-only", *registry]
    first, second = (Hub.of_yaml(folder, ONE_STAGE, *flags) for folder in folders[2:])
    headless = ["serve", "--headless", "--stage-id", "0", "--omni-dp-size-local", "2", "--namespace", "test"]
    replicas = Child([*headless, *registry], folders[1], "replicas")
    try:
        for hub in (first, second):
            hub.wait_ready()
            wait_for("both replicas", lambda hub=hub: registered(hub) == (2, 2))
        wait_for("a saved view", lambda: any(folders[2].glob("state/omni/*/hub-*/view")))
        tree = replicas.tree()
        time.sleep(TTL_S)
        with asking(second) as statuses:
            server.kill()
            if is_wiped:
                shutil.rmtree(folders[0] / "data")
            time.sleep(TTLS * TTL_S / 2)
            first.stop(signal.SIGKILL)
            first = Hub.of_yaml(folders[2], ONE_STAGE, *flags).wait_ready()
            wait_for("its sessions", lambda: registered(first) == (2, 2), 10.0)
            assert first.ask("hello")[0] == 200
            time.sleep(TTLS * TTL_S / 2)
            server.start()
            for hub in (first, second):
                wait_for("a fresh view", lambda hub=hub: is_fresh(hub) and registered(hub) == (2, 2), 20.0)
            time.sleep(2 * TTL_S)
        assert len(statuses) > 20
        assert set(statuses) == {200}
        # Also where an etcd without its data makes new lives of the processes, greeted on the same connections.
        assert session_losses(second) == 0
        assert "its connection was lost" not in second.text
        assert first.ask("hello")[0] == 200
        assert replicas.tree() == tree
        assert [registered(hub) for hub in (first, second)] == [(2, 2)] * 2
    finally:
        left = [pid for child in (first, second, replicas) for pid in child.stop()]
        server.kill()
    assert left == []


def registered(hub: Hub) -> tuple[int, int]:
    """How many replicas a hub lists, and how many it picks."""
    stage = json.loads(hub.get("/ready")[1])["stages"]["0"]
    return stage["registered"], stage["pickable"]


def is_fresh(hub: Hub) -> bool:
    return "not been proved fresh" not in hub.get("/ready")[1]


def session_losses(hub: Hub) -> float:
    """How often the way to a replica was lost."""
    lines = hub.get("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("omni_hub_session_losses_total"))


@contextmanager
def asking(hub: Hub) -> Iterator[list[int]]:
    """A client that asks one thing after the other; the status of each answer."""
    statuses: list[int] = []
    enough = threading.Event()

    def ask() -> None:
        while not enough.wait(0.05):
            statuses.append(hub.ask("hello")[0])

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield statuses
    finally:
        enough.set()
        client.join(60.0)
