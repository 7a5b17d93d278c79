"""A registered replica that sends far more than anybody can keep, and what its hub holds of that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.flooding_replica import CHUNKS, HEADS, PICTURE_BYTES, PICTURES
from tests.support.hub import Hub
from tests.support.processes import most_mib, wait_for

DRAWS = "stages: [{stage_id: 0, engine: echo, final_output: image}]"


@pytest.mark.attack("A22", "A25")
def test_an_answer_that_nobody_can_keep_is_cut_as_it_comes(endpoint: str, namespace: str, tmp_path: Path) -> None:
    """1. 1.5 GB of pictures for one answer; 2. it ends with an error, the hub held a fraction; 3. it serves on
    4. an answer with sixty thousand timings has headers that a client takes
    """
    hub = Hub(
        tmp_path, ["--deploy-config", str(_document(tmp_path)), "--hub-only", "--etcd-endpoints", endpoint], namespace
    )
    command = [sys.executable, "-m", "tests.support.flooding_replica", endpoint, namespace]
    replica = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        hub.wait_ready()
        assert hub.ask("hello")[0] == 200
        before_mib = most_mib(hub.process.pid)
        status, body = hub.ask("flood")
        assert (status, "longer than 128 MiB: ask for it with 'stream': true" in str(body)) == (500, True), body
        assert PICTURES * PICTURE_BYTES > 1400 << 20
        assert most_mib(hub.process.pid) - before_mib < 600
        status, body = hub.ask("timings", include_timings=True)
        assert (status, len(body.get("timings_s", ())) <= 256) == (200, True), body
        wait_for("an answer", lambda: hub.ask("hello")[0] == 200)
    finally:
        hub.stop()
        replica.communicate()


@pytest.mark.attack("E1")
def test_heads_that_take_long_to_read_leave_the_hub_to_others(endpoint: str, namespace: str, tmp_path: Path) -> None:
    """1. a replica sends its hub 480 MB of what nobody asked for, which takes it many seconds to decode
    2. requests that another replica answers are through before half of it is read; 3. little of it was in memory
    """
    document = _document(tmp_path)
    hub = Hub(tmp_path, ["--deploy-config", str(document), "--hub-only", "--etcd-endpoints", endpoint], namespace)
    honest = _replica(endpoint, namespace, "1")
    hostile = _replica(endpoint, namespace, "0")
    try:
        hub.wait_ready()
        wait_for("both", lambda: hub.metric("omni_hub_replicas_registered") == 2)
        assert hub.ask("hello")[0] == 200
        before_mib = most_mib(hub.process.pid)
        assert hostile.stdin is not None
        hostile.stdin.write(b"flood\n")
        hostile.stdin.flush()
        wait_for("the flood", lambda: hub.metric('omni_hub_dropped_frames_total{reason="stale"}') > 0)
        assert hub.ask("hello")[0] == 200
        assert hub.metric('omni_hub_dropped_frames_total{reason="stale"}') < HEADS * CHUNKS / 2
        assert most_mib(hub.process.pid) - before_mib < 400
    finally:
        hub.stop()
        honest.communicate()
        hostile.communicate()


def _replica(endpoint: str, namespace: str, weight: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.support.flooding_replica", endpoint, namespace, weight]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def _document(folder: Path) -> Path:
    file = folder / "deploy.yaml"
    file.write_text(DRAWS)
    return file
