"""What is asked of a Ray cluster, and how wrong flags are told; the cluster itself is in the integration tests."""

from __future__ import annotations

import argparse
import sys

import msgspec
import pytest

from omni_discovery.commands.flags import add_backend_options, check_backend
from omni_discovery.deploy.document import StageConfig, parse_deploy
from omni_discovery.errors import ConfigError
from stage_runtime.supervisor.ray_launcher import RayLauncher, bundle_of

STAGES = "stages: [{{stage_id: 0, engine: vllm, model: m, final_output: text, {rest}}}]"


def stage(rest: str = "") -> StageConfig:
    return parse_deploy(STAGES.format(rest=rest), "test").stage(0)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_backend_options(parser)
    return parser.parse_args(words, argparse.Namespace(omni_replica_address=None))


@pytest.mark.parametrize(
    ("rest", "bundle"),
    [
        ("", {"CPU": 1.0}),
        ("runtime: {devices: '0'}", {"CPU": 1.0, "GPU": 1.0}),
        ("runtime: {devices: '0,1'}, engine_args: {tensor_parallel_size: 2}", {"CPU": 1.0, "GPU": 2.0}),
        ("runtime: {ray: {num_cpus: 0, num_gpus: 0.5, resources: {h100: 1}}}", {"GPU": 0.5, "h100": 1.0}),
    ],
)
def test_a_replica_takes_what_its_stage_says_else_the_devices_that_it_spans(
    rest: str, bundle: dict[str, float]
) -> None:
    assert bundle_of(stage(rest)) == bundle


def test_a_replica_that_would_take_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stage 0: runtime\.ray asks for nothing"):
        bundle_of(stage("runtime: {ray: {num_cpus: 0}}"))


@pytest.mark.parametrize("wrong", ["{strategy: ANY}", "{num_gpus: -1}", "{gpus: 1}", "{resources: {h100: 0}}"])
def test_a_wrong_word_in_the_document_is_told(wrong: str) -> None:
    with pytest.raises(ConfigError, match="ray"):
        stage(f"runtime: {{ray: {wrong}}}")


def test_a_document_that_does_not_speak_of_ray_is_written_as_ever() -> None:
    assert b"ray" not in msgspec.json.encode(stage())


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="--worker-backend ray"):
        check_backend(parsed("--ray-address", "10.0.0.1:6379"))
    arguments = parsed("--worker-backend", "ray")
    arguments.omni_replica_address = "10.0.0.5"
    with pytest.raises(ConfigError, match="leave it out"):
        check_backend(arguments)


def test_where_ray_is_not_installed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"omni-discovery\[ray\]"):
        RayLauncher(stage(), 1, "", 1.0)
