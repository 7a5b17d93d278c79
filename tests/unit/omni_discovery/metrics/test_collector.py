"""The metrics that Prometheus gets of one host's replicas and supervisors."""

from __future__ import annotations

import platform
import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from omni_discovery import __version__
from omni_discovery.metrics.collector import REPLICA_FAMILIES, SUPERVISOR_FAMILIES, HostCollector, add_build_info
from omni_discovery.metrics.samples import GpuMemory, HostSamples, ReplicaSample, SupervisorSample

SUPERVISOR = SupervisorSample(namespace="prod", stage_id=0, wanted=2, restarts=3, replica_ids=(0, 1))
BUSY = ReplicaSample(
    stage_id=0,
    replica_id=1,
    is_up=True,
    in_flight=5,
    slots=8,
    credits_used=5,
    credits_lent=2,
    credits_by_hub={"hub-a": 2},
    hubs=2,
    lease_left_s=7.5,
    engine_steps=100,
    prompt_tokens=70,
    completion_tokens=30,
    outcomes={"ok": 9, "engine": 1},
    events={"refused_handshakes": 4},
    engine={"requests_running": 4.0, "requests_waiting": 1.0, "kv_cache_usage": 0.25},
    gpus=(GpuMemory(0, 5, 9),),
    about={"engine": "vllm", "model": "m", "vllm": "0.32", "pid": "7"},
)
#: Of an engine that tells nothing, on a host without GPU, which is still loading.
LOADING = ReplicaSample(stage_id=0, replica_id=0)


def samples(*replicas: ReplicaSample, supervisor: SupervisorSample | None = SUPERVISOR) -> HostSamples:
    found = {(sample.stage_id, sample.replica_id): sample for sample in replicas}
    return HostSamples({} if supervisor is None else {supervisor.stage_id: supervisor}, found)


def exposed(shown: HostSamples) -> dict[str, float]:
    """The samples by name and labels, through the text that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(HostCollector(lambda: shown))
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def key(name: str, **labels: str) -> str:
    return f"{name}{sorted(labels.items())}"


def test_a_replica_is_called_as_tables_and_errors_call_it() -> None:
    found = exposed(samples(BUSY))
    place = {"stage": "0", "replica": "0/1"}
    expected = {
        key("omni_replica_up", **place): 1,
        key("omni_replica_requests_in_flight", **place): 5,
        key("omni_replica_requests_running", **place): 4,
        key("omni_replica_requests_waiting", **place): 1,
        key("omni_replica_kv_cache_usage_ratio", **place): 0.25,
        key("omni_replica_requests_total", **place, outcome="ok"): 9,
        key("omni_replica_requests_total", **place, outcome="engine"): 1,
        key("omni_replica_tokens_total", **place, type="prompt"): 70,
        key("omni_replica_tokens_total", **place, type="completion"): 30,
        key("omni_replica_engine_steps_total", **place): 100,
        key("omni_replica_slots", **place): 8,
        key("omni_replica_credits_used", **place): 5,
        key("omni_replica_credits_lent", **place): 2,
        key("omni_replica_hub_credits", **place, hub="hub-a"): 2,
        key("omni_replica_lease_seconds", **place): 7.5,
        key("omni_replica_server_events_total", **place, event="refused_handshakes"): 4,
        key("omni_replica_gpu_memory_used_bytes", **place, gpu="0"): 5,
        key("omni_replica_gpu_memory_bytes", **place, gpu="0"): 9,
    }
    info = {"engine": "vllm", "model": "m", "device": "", "version": "", "vllm": "0.32", "torch": "", "pid": "7"}
    expected[key("omni_replica_info", **place, **info)] = 1
    assert {name: value for name, value in found.items() if name.startswith("omni_replica_")} == expected


def test_what_is_not_known_is_absent_and_not_zero() -> None:
    names = {name.partition("[")[0] for name in exposed(samples(LOADING))}
    assert "omni_replica_up" in names
    assert not names & {
        "omni_replica_requests_running",
        "omni_replica_requests_waiting",
        "omni_replica_kv_cache_usage_ratio",
        "omni_replica_gpu_memory_used_bytes",
        "omni_replica_gpu_memory_bytes",
        "omni_supervisor_hubs",
    }


def test_a_supervisor_tells_what_it_should_keep_up_and_what_is_up() -> None:
    """Of two replicas one is loading. They see two hubs; a third, which hangs, has no sample."""
    found = exposed(samples(LOADING, BUSY))
    place = {"namespace": "prod", "stage": "0"}
    assert found[key("omni_supervisor_replicas_wanted", **place)] == 2
    assert found[key("omni_supervisor_replicas_up", **place)] == 1
    assert found[key("omni_supervisor_restarts_total", **place)] == 3
    assert found[key("omni_supervisor_hubs", **place)] == 2


def test_a_supervisor_that_waits_for_its_first_replica_has_none_up() -> None:
    found = exposed(samples())
    assert found[key("omni_supervisor_replicas_up", namespace="prod", stage="0")] == 0
    assert not [name for name in found if name.startswith("omni_replica_")]


@pytest.mark.parametrize("family", [*REPLICA_FAMILIES, *SUPERVISOR_FAMILIES], ids=lambda family: family.name)
def test_names_keep_to_the_rules_of_prometheus(family: object) -> None:
    name, text = family.name, family.text  # type: ignore[attr-defined]
    assert re.fullmatch(r"omni_(replica|supervisor)_[a-z][a-z_]*[a-z]", name)
    assert not name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert text.endswith(".")


def test_the_build_of_whoever_answers_is_told() -> None:
    registry = CollectorRegistry()
    add_build_info(registry, "supervisor")
    labels = {"component": "supervisor", "version": __version__, "python": platform.python_version()}
    assert registry.get_sample_value("omni_build_info", labels) == 1
