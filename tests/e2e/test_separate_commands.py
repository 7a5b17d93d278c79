"""Hubs and replicas as separate commands around one etcd, in an order that a head would not forgive."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.support.hub import ECHO_PAIR, Hub
from tests.support.processes import Child, wait_for
from tests.support.registry import etcdctl

pytestmark = pytest.mark.e2e


@pytest.fixture
def endpoint() -> Iterator[str]:
    with EmbeddedEtcd() as etcd:
        yield etcd.endpoint


class TwoHubs:
    """Two replicas of each stage started headless, then two hubs that run nothing themselves."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.children: list[Child] = []
        self.registry = ["--etcd-endpoints", endpoint, "--namespace", "test"]
        for stage in ("0", "1"):
            arguments = ["serve", "--headless", "--stage-id", stage, "--omni-dp-size-local", "2", *self.registry]
            self.children.append(Child(arguments, folder, f"stage{stage}"))
        self.hubs = [self.start_hub(folder / name, endpoint) for name in ("a", "b")]

    def start_hub(self, folder: Path, endpoint: str) -> Hub:
        folder.mkdir()
        hub = Hub.of_yaml(folder, ECHO_PAIR, "--hub-only", "--etcd-endpoints", endpoint)
        self.children.append(hub)
        return hub

    def stop(self) -> list[int]:
        return [pid for child in reversed(self.children) for pid in child.stop()]


@pytest.fixture
def two_hubs(tmp_path: Path, endpoint: str) -> Iterator[TwoHubs]:
    running = TwoHubs(tmp_path, endpoint)
    try:
        yield running
    finally:
        left = running.stop()
    assert left == []


def test_replicas_may_come_first_and_any_hub_may_go(two_hubs: TwoHubs, tmp_path: Path) -> None:
    """1. two headless supervisors wait for a pipeline that nobody has published
    2. two hubs without replicas of their own start: both serve with the same four replicas
    3. one hub is killed with SIGKILL: the other does not notice
    4. a third hub joins, without a file: etcd has the document
    """
    first, second = (hub.wait_ready() for hub in two_hubs.hubs)
    for hub in (first, second):
        status, body = hub.ask("a b c")
        assert status == 200, body
        assert len(body["choices"]) == 2
    assert first.stop(signal.SIGKILL) == []
    assert all(second.ask(f"still {index}")[0] == 200 for index in range(5))
    third = Hub(tmp_path, ["--hub-only", "--etcd-endpoints", two_hubs.registry[1]])
    two_hubs.children.append(third)
    assert third.wait_ready().ask("hello")[0] == 200


def test_a_hub_without_a_file_needs_a_pipeline_in_force(tmp_path: Path, endpoint: str) -> None:
    arguments = ["serve", "--hub-only", "--port", "0", "--etcd-endpoints", endpoint, "--namespace", "nobodys"]
    for more in ([], ["--dry-run"]):
        child = Child([*arguments, *more], tmp_path, "early")
        assert child.process.wait(30) == 2, child.text
        last = child.text.splitlines()[-1]
        assert last.startswith("omni: namespace 'nobodys' has no pipeline yet: give --deploy-config YAML, or "), last


def test_another_pipeline_in_the_same_namespace_is_refused_with_the_difference(
    two_hubs: TwoHubs, tmp_path: Path
) -> None:
    two_hubs.hubs[0].wait_ready()
    other = tmp_path / "other.yaml"
    other.write_text(ECHO_PAIR.replace("capacity: 8", "capacity: 9"))
    arguments = ["serve", "--deploy-config", str(other), "--port", "0", "--hub-only", *two_hubs.registry]
    child = Child(arguments, tmp_path, "other")
    assert child.process.wait(30) == 2
    assert "stage 0.engine_args.capacity: 9 here, 8 in force" in child.text


def test_a_pipeline_that_was_deleted_or_wiped_is_put_back_by_a_running_hub(two_hubs: TwoHubs) -> None:
    two_hubs.hubs[0].wait_ready()
    endpoint, key = two_hubs.registry[1], "/omni/v1/test/pipeline"
    assert etcdctl(endpoint, "get", key)
    etcdctl(endpoint, "del", key)
    wait_for("the document to be back", lambda: etcdctl(endpoint, "get", key), 20)


def test_a_pipeline_that_can_not_run_does_not_stay_in_the_way_of_its_correction(tmp_path: Path, endpoint: str) -> None:
    """An engine that does not exist is found out by the supervisor, when the hub has claimed the namespace already."""
    registry = ["--etcd-endpoints", endpoint]
    wrong = Hub.of_yaml(tmp_path, ECHO_PAIR.replace("engine: echo", "engine: nope", 1), *registry)
    assert wrong.process.wait(30) == 2
    assert wrong.stop() == []
    assert "'nope'" in wrong.text
    right = Hub.of_yaml(tmp_path, ECHO_PAIR, *registry)
    try:
        assert right.wait_ready().ask("hello")[0] == 200
    finally:
        assert right.stop() == []


def test_a_stream_that_is_open_when_the_hub_stops_is_told_so(tmp_path: Path) -> None:
    """1. an answer of a thousand words begins to stream, which would take half a minute
    2. Ctrl-C: after the grace the stream ends with an error that says why, and with its end mark
    """
    hub = Hub.of_yaml(
        tmp_path, "stages: [{stage_id: 0, engine: echo, engine_args: {delay_s: 0.03}, final_output: text}]"
    )
    try:
        url = f"{hub.wait_ready().url}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "word " * 1000}], "stream": True}
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            hub.process.send_signal(signal.SIGINT)
            events = [line for line in lines if line]
    finally:
        assert hub.stop() == []
    assert events[-1] == "data: [DONE]"
    assert "stopping" in events[-2]
    assert hub.process.returncode == 0
    assert "Traceback" not in hub.text


def test_a_stage_without_replicas_answers_503_and_names_the_stage(tmp_path: Path, endpoint: str) -> None:
    hub = Hub.of_yaml(tmp_path, ECHO_PAIR, "--hub-only", "--etcd-endpoints", endpoint)
    try:
        hub.url = wait_for("the hub to listen", hub._listening)
        assert hub.get("/health")[0] == 200
        status, text = hub.get("/ready")
        assert status == 503
        assert "work of stage 0 (none is registered), stage 1 (none is registered)" in text
        status, body = hub.ask("anyone?", timeout=1.5)
        assert status in {503, 504}
        assert "stage 0" in body["error"]["message"].lower()
    finally:
        assert hub.stop() == []
