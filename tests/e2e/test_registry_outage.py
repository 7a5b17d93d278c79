"""etcd dies, is wiped, and the hub dies, too: whoever asks gets an answer, and is told how old the hub's view is."""

from __future__ import annotations

import json
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_discovery.view.saved_view import SavedView
from tests.support.hub import Hub
from tests.support.processes import Child, wait_for
from tests.support.registry import EtcdServer

pytestmark = pytest.mark.e2e

ONE_STAGE = "stages: [{stage_id: 0, engine: echo, engine_args: {capacity: 8}, final_output: text}]"
STALE = "x-omni-view-stale-s"


class House:
    """An etcd, two headless replicas and a hub, each to be killed alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = EtcdServer(folder)
        self.server.start()
        registry = ["--etcd-endpoints", self.server.endpoint, "--omni-heartbeat-timeout", "2"]
        self._hub_flags = ["--hub-only", *registry]
        self.hub = Hub.of_yaml(folder, ONE_STAGE, *self._hub_flags)
        arguments = ["serve", "--headless", "--stage-id", "0", "--omni-dp-size-local", "2", "--namespace", "test"]
        self.replicas = Child([*arguments, *registry], folder, "replicas")
        self.hub.wait_ready()
        wait_for("both replicas", lambda: self.registered() == (2, 2))

    def registered(self) -> tuple[int, int]:
        """How many replicas are listed, and how many are picked."""
        stage = json.loads(self.hub.get("/ready")[1])["stages"]["0"]
        return stage["registered"], stage["pickable"]

    def stale(self) -> str | None:
        """The header of one answered request."""
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
        request = urllib.request.Request(
            self.hub.url + "/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            assert "hello" in response.read().decode()
            return response.headers.get(STALE)

    def saved(self) -> int:
        """How many replicas are up in the saved view."""
        for file in self.folder.glob("state/omni/*/hub-0/view"):
            found = SavedView(file, "test", self.server.endpoint).load()
            return sum(b'"up"' in item.value for item in found[0].items) if found else 0
        return 0

    def metric(self, name: str) -> float:
        lines = self.hub.get("/metrics")[1].splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))

    def restart_hub(self) -> None:
        self.hub.stop(signal.SIGKILL)
        self.hub = Hub.of_yaml(self.folder, ONE_STAGE, *self._hub_flags)
        self.hub.wait_ready()

    def stop(self) -> list[int]:
        left = [pid for child in (self.hub, self.replicas) for pid in child.stop()]
        self.server.kill()
        return left


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    try:
        yield house
    finally:
        left = house.stop()
    assert left == []


def test_a_hub_killed_while_etcd_is_away_starts_and_serves_from_its_saved_view(house: House) -> None:
    """1. a fresh view says nothing of its age
    2. etcd dies: requests are answered, marked stale, and /ready and the metric say so
    3. the hub dies, too, and starts again: it says where its view is from, gets in to both replicas, and serves
    4. etcd is back: fresh, with the same replicas
    """
    assert house.stale() is None
    assert house.metric("omni_hub_view_stale_seconds") == 0
    wait_for("a saved view", lambda: house.saved() == 2)
    house.server.kill()
    wait_for("a stale view", house.stale)
    assert "not been proved fresh" in house.hub.get("/ready")[1]
    assert house.metric("omni_hub_view_stale_seconds") > 0
    house.restart_hub()
    assert "hub.started_from_saved_view replicas=2" in house.hub.text
    wait_for("both sessions", lambda: house.registered() == (2, 2), 10.0)
    assert float(house.stale() or 0) > 0
    house.server.start()
    wait_for("a fresh view", lambda: house.stale() is None)
    assert house.registered() == (2, 2)


def test_a_wiped_etcd_costs_no_answer(house: House) -> None:
    """1. etcd dies and comes back empty
    2. at no moment are there fewer than both replicas to pick; they put themselves back
    """
    house.server.kill()
    shutil.rmtree(house.folder / "data")
    house.server.start()
    picked: set[int] = set()

    def is_back() -> bool:
        registered, pickable = house.registered()
        picked.add(pickable)
        house.stale()
        return registered == 2 and house.stale() is None

    wait_for("both replicas to be listed again", is_back)
    assert min(picked) >= 1
    assert "replica.kept" in house.hub.text or picked == {2}


def test_an_etcd_that_hangs_for_longer_than_the_leases_costs_no_answer(house: House) -> None:
    """1. etcd is stopped for twice the TTL: when it goes on, it may end all leases before anybody can renew
    2. every request is answered meanwhile, and in the end all is as it was
    """
    house.server.signal(signal.SIGSTOP)
    until_s = time.monotonic() + 4.0
    while time.monotonic() < until_s:
        house.stale()
        time.sleep(0.1)
    house.server.signal(signal.SIGCONT)

    def is_well() -> bool:
        return house.stale() is None and house.registered() == (2, 2)

    wait_for("a fresh view of both replicas", is_well)
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        house.stale()
        time.sleep(0.05)
    wait_for("both replicas to stay", is_well)
