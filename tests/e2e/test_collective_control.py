"""An operator's collective calls, through the front door: two stages of two replicas each."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.hub import Hub
from tests.support.processes import wait_for

pytestmark = pytest.mark.e2e

PIPELINE = """
model: echo-pair
stages:
  - stage_id: 0
    engine: echo
    engine_args: {capacity: 8, allow_rpc: [pid]}
    runtime: {num_replicas: 2}
    final_output: text
  - stage_id: 1
    engine: echo
    engine_args: {modality: image, allow_rpc: [pid]}
    runtime: {num_replicas: 2}
    final_output: image
"""


def call(hub: Hub, method: str, **body: Any) -> list[Any]:
    url, token = (re.search(pattern, hub.text) for pattern in (r"hub\.admin url=(\S+)", r"admin_token file=([^:]+):"))
    assert url is not None
    assert token is not None
    headers = {"Authorization": f"Bearer {Path(token[1]).read_text().strip()}"}
    answer = httpx.post(url[1] + method, json={"timeout_s": 30, **body}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, list)
    return found


def test_a_stage_is_put_to_sleep_and_woken_and_a_replica_that_dies_is_one_entry(tmp_path: Path) -> None:
    """1. every replica answers with the pid that its record has
    2. stage 0 sleeps: not ready, its records say so, and a request finds nobody; it wakes up: all is served again
    3. a replica of stage 1 is killed: its entry says that it is gone, or is not there any more, and the others answer
    """
    hub = Hub.of_yaml(tmp_path, PIPELINE, "--admin-api")
    try:
        hub.wait_ready()
        wait_for("all four", lambda: len(call(hub, "is_sleeping")) == 4 and all_up(hub))
        pids = {(entry["stage_id"], entry["replica_id"]): entry["result"] for entry in rpc(hub)}
        assert pids == {(record["stage_id"], record["replica_id"]): record["pid"] for record in hub.replicas()}
        assert [entry["ok"] for entry in call(hub, "sleep", args=[1], stage_ids=[0])] == [True, True]
        wait_for("the hub to know", lambda: hub.get("/ready")[0] == 503)
        asleep = [record for record in hub.replicas() if record["stage_id"] == 0]
        assert [(record["status"], record["phase"]) for record in asleep] == [("starting", "asleep")] * 2
        assert [entry["ok"] for entry in call(hub, "wake_up", stage_ids=[0])] == [True, True]
        wait_for("every stage to be ready", lambda: hub.get("/ready")[0] == 200)
        assert {record["phase"] for record in hub.replicas()} == {"ready"}
        assert hub.ask("good morning")[0] == 200
        os.kill(pids[1, 0], signal.SIGKILL)
        entries = rpc(hub)
        assert [entry["ok"] for entry in entries if entry["stage_id"] == 0] == [True, True]
        assert [entry["result"] for entry in entries if (entry["stage_id"], entry["replica_id"]) == (1, 1)] == [
            pids[1, 1]
        ]
        assert all(entry["error"] for entry in entries if entry["result"] == pids[1, 0])
    finally:
        left = hub.stop()
    assert not left, hub.text[-3000:]


def rpc(hub: Hub) -> list[Any]:
    return call(hub, "collective_rpc", args=["pid"])


def all_up(hub: Hub) -> bool:
    return [record["status"] for record in hub.replicas()] == ["up"] * 4
