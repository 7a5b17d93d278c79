"""Deploy documents that were written for vLLM-Omni: what is taken over, and what is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.deploy.dialect import ENGINE_KEYS
from omni_discovery.deploy.document import DeployConfig, parse_deploy, read_deploy
from omni_discovery.errors import ConfigError

#: As its files have it today: what the engine takes stands beside the stage's own keys.
FLAT = """
async_chunk: false
trust_remote_code: true
stages:
  - stage_id: 0
    engine: vllm
    model: thinker
    max_num_seqs: 3
    gpu_memory_utilization: 0.45
    devices: "0,1"
    num_replicas: 2
    engine_extras: {additional_config: {a: 1}}
    default_sampling_params: {temperature: 0.4}
    final_output: true
    final_output_type: text
    output_connectors: {to_stage_1: shared}
  - stage_id: 1
    engine: diffusion
    model: painter
    devices: 2
    final_output: true
    final_output_type: image
    input_connectors: {from_stage_0: shared}
connectors:
  shared: {name: SharedMemoryConnector}
"""
#: As its files had it before.
NESTED = """
stage_args:
  - stage_id: 0
    stage_type: llm
    engine_args: {model: unused, max_num_seqs: 3}
    model: thinker
    runtime: {process: true, devices: "0"}
    final_output: false
  - stage_id: 1
    stage_type: diffusion
    model: painter
    engine_input_source: [0]
    final_output: true
    final_output_type: image
runtime:
  enabled: true
  connectors: {shared: {name: SharedMemoryConnector}}
  edges: [{from: 0, to: 1, connector: shared, window_size: -1}]
"""


def test_a_flat_file_loads_with_each_key_where_it_belongs_here() -> None:
    deploy = parse_deploy(FLAT, "flat.yaml")
    thinker, painter = deploy.stages
    assert thinker.engine_args == {
        "trust_remote_code": True,
        "max_num_seqs": 3,
        "gpu_memory_utilization": 0.45,
        "additional_config": {"a": 1},
    }
    assert (thinker.runtime.devices, thinker.runtime.num_replicas, thinker.final_output) == ("0,1", 2, "text")
    assert (painter.engine_args, painter.runtime.devices, painter.final_output) == ({}, "2", "image")
    assert deploy.connector_of(0, 1).name == "SharedMemoryConnector"


def test_an_older_file_loads_too() -> None:
    deploy = parse_deploy(NESTED, "nested.yaml")
    assert [stage.engine for stage in deploy.stages] == ["vllm", "diffusion"]
    assert [stage.final_output for stage in deploy.stages] == ["none", "image"]
    assert deploy.inputs_of(1) == (0,)
    assert deploy.connector_of(0, 1).name == "SharedMemoryConnector"
    assert deploy.connector_of(0, 1).extra == {"window_size": -1}


def test_a_connector_that_is_described_on_the_spot_gets_a_name() -> None:
    text = FLAT.replace("from_stage_0: shared", "from_stage_0: {name: TcpConnector, extra: {host: h}}")
    deploy = parse_deploy(text.replace("    output_connectors: {to_stage_1: shared}\n", ""), "f")
    assert (deploy.connector_of(0, 1).name, deploy.connector_of(0, 1).extra) == ("TcpConnector", {"host": "h"})


@pytest.mark.parametrize(
    ("other", "there", "here"),
    [
        ("other", "shared", "other"),
        ("{name: TcpConnector}", "shared", "TcpConnector"),
    ],
)
def test_two_ends_of_an_edge_that_name_different_connectors_are_refused_with_both(
    other: str, there: str, here: str
) -> None:
    said = (
        f"stage 1.input_connectors names connector '{here}' for the edge from 0 to 1, and stage 0.output_connectors"
        f" names '{there}'; right would be the same at both ends"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_deploy(FLAT.replace("from_stage_0: shared", f"from_stage_0: {other}"), "f")


def test_two_ends_that_describe_different_connectors_on_the_spot_are_refused_and_alike_ones_are_not() -> None:
    """The description that comes last holds, as before."""
    text = FLAT.replace("to_stage_1: shared", "to_stage_1: {name: TcpConnector}")
    with pytest.raises(ConfigError, match=r"names connector 'SharedMemoryConnector' .* names 'TcpConnector'; right"):
        parse_deploy(text.replace("from_stage_0: shared", "from_stage_0: {name: SharedMemoryConnector}"), "f")
    alike = text.replace("from_stage_0: shared", "from_stage_0: {name: TcpConnector, extra: {host: h}}")
    assert parse_deploy(alike, "f").connector_of(0, 1).extra == {"host": "h"}


def test_all_that_has_no_meaning_here_is_told_at_once_with_its_place_and_what_to_do() -> None:
    text = FLAT.replace("async_chunk: false", "pipeline: bagel\nbase_config: b.yaml\nplatforms: {}")
    text = text.replace("    devices: 2\n", "    devices: 2\n    env: {A: b}\n    max_num_seq: 3\n    engin: x\n")
    text = text.replace("SharedMemoryConnector}", "SharedMemoryConnector, extras: {}}")
    text = text.replace("engine_extras: {", "engine_extras: {model_stage: thinker, ")
    with pytest.raises(ConfigError) as raised:
        parse_deploy(text, "flat.yaml")
    head, *told = str(raised.value).splitlines()
    assert head == "flat.yaml: 8 keys are wrong:"
    assert [line.split(" is not known")[0].strip() for line in told] == [
        "flat.yaml:2: pipeline",
        "flat.yaml:3: base_config",
        "flat.yaml:4: platforms",
        "flat.yaml:14: stage 0.engine_args.model_stage",
        "flat.yaml:23: stage 1.env",
        "flat.yaml:24: stage 1.max_num_seq",
        "flat.yaml:25: stage 1.engin",
        "flat.yaml:30: connectors.shared.extras",
    ]
    assert all(": " in line or "did you mean" in line for line in told)
    assert "did you mean 'engine'" in told[6]
    assert "did you mean 'extra'" in told[7]


def test_a_stage_without_an_engine_is_told_which_there_are() -> None:
    """vLLM-Omni takes it from the pipeline that its own package knows by name."""
    with pytest.raises(ConfigError, match=r"^f:\d+: stage 1\.engine is missing: say vllm, diffusion, echo"):
        parse_deploy(FLAT.replace("    engine: diffusion\n", ""), "f")


@pytest.mark.parametrize(
    "document",
    [
        {"stages": 5},
        {"stages": [5, {"stage_id": [0], "engine": "echo"}]},
        {"stages": [{"stage_id": 0, "engine": "vllm", "engine_args": [], "runtime": 1, "input_connectors": 3}]},
        {"stages": [{"stage_id": 0, "engine": "echo", "input_connectors": {1: "a", "from_stage_x": "b"}}]},
        {"stages": [{"stage_id": 0, "engine": "echo", "final_output": True}], "edges": 1, "connectors": []},
        {"stages": [{"stage_id": 0, "engine": {}, "stage_type": [], "devices": {}}], "runtime": []},
        {"stage_args": [], "stages": [], "runtime": {"edges": 3}},
    ],
)
def test_nonsense_is_one_clear_error(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^d: "):
        read_deploy(document, "d")


def test_our_own_documents_stay_what_they_are() -> None:
    stage = {"stage_id": 0, "engine": "echo", "engine_args": {"capacity": 2}, "final_output": "text"}
    deploy = read_deploy({"stages": [stage], "async_chunk": True}, "d")
    assert isinstance(deploy, DeployConfig)
    assert (deploy.stages[0].engine_args, deploy.async_chunk) == ({"capacity": 2}, True)


def test_the_page_lists_the_arguments_that_may_stand_beside_a_stages_own_keys() -> None:
    page = (Path(__file__).parents[4] / "docs/deploy.md").read_text(encoding="utf-8")
    listed = page.rpartition("all others go in `engine_args`:\n")[2]
    assert re.findall(r"`(\w+)`", listed) == sorted(ENGINE_KEYS)
