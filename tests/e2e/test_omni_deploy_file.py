"""vLLM-Omni's own deploy file and flags, unchanged, on three hosts that share an etcd; and the second hub's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub import Hub
from tests.support.omni_cluster import NAMESPACE, PYTHON, THEIRS, Cluster, speak, write_model
from tests.support.processes import Child, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    # CI makes it: there, its absence is an error.
    pytest.mark.skipif(
        not (PYTHON.exists() or "CI" in os.environ), reason="vLLM-Omni has an environment of its own: make setup-omni"
    ),
]
#: The hub resolves first; then six processes import vLLM-Omni, on machines with other work.
_START_S = 600.0
_READY_S = 180.0
_TOKENS = 160
#: Each time one of two is killed, and nobody knows which of them has the request.
_MOST_KILLS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("omni"), model)
    try:
        running.hub.wait_ready(_START_S)
        yield running
    finally:
        left = running.stop()
    assert not left, running.text


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_their_file_serves_on_hosts_without_a_hub_and_survives_a_killed_decoder(cluster: Cluster) -> None:
    """1. each host has two replicas of its stage, forks of a zygote of its own in the Python that its flag names
    2. a request is heard the same twice
    3. the decoder that makes a request's sound is killed: what the client hears is the same, sample by sample
    """
    hub = cluster.hub
    wait_for("two replicas of each stage", lambda: [len(cluster.replicas(n)) for n in (0, 1)] == [2, 2], _READY_S)
    zygotes = [{parent_of(pid) for pid in cluster.replicas(stage)} for stage in (0, 1)]
    assert [len(each) for each in zygotes] == [1, 1]
    assert zygotes[0] != zygotes[1]
    for pid in (*cluster.replicas(0), *cluster.replicas(1), *zygotes[0], *zygotes[1]):
        assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(str(PYTHON).encode())
    for told in ("deploy.resolved pipeline=qwen3_tts", "deploy.left_out trust_remote_code of stages 0, 1"):
        assert told in hub.text
    expected = speak(hub.url, _TOKENS)
    assert len(set(expected)) > 100, "that is silence"
    assert speak(hub.url, _TOKENS) == expected
    for number in range(_MOST_KILLS):
        wait_for("both decoders", lambda: len(cluster.replicas(1)) == 2, _READY_S)
        killed = cluster.replicas(1)[number % 2]
        assert speak(hub.url, _TOKENS, on_piece=lambda: os.kill(killed, signal.SIGKILL)) == expected  # noqa: B023
        if "replica.lost_at_work replica=1/" in hub.text:
            break
    assert "replica.lost_at_work replica=1/" in hub.text
    assert "request.failed" not in hub.text


def test_a_hub_without_vllm_omni_takes_the_resolved_pipeline_from_etcd(
    cluster: Cluster, model: str, tmp_path: Path
) -> None:
    """1. the same command without a Python of vLLM-Omni serves what the first hub has resolved
    2. for another model it says what is in force
    """
    registry = ["--etcd-endpoints", cluster.etcd.endpoint, "--hub-only"]
    second = Hub.of_yaml(tmp_path, THEIRS, model, "--omni", *registry)
    try:
        second.wait_ready(_READY_S)
        assert "deploy.in_force" in second.text
        assert speak(second.url, 24) == speak(cluster.hub.url, 24)
    finally:
        assert not second.stop()
    words = ["serve", "other/model", "--omni", "--namespace", NAMESPACE, *registry, "--port", "0"]
    other = Child(words, tmp_path, "other")
    assert other.process.wait(_READY_S) == 2, other.text
    assert f"serves {model}, not other/model: give this hub a --namespace of its own" in other.text
