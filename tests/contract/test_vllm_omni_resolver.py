"""vLLM-Omni's own resolver: what it says of three models, and of deploy files as its users write them.

Runs in the environment that `make setup-omni` makes. The models are folders with a ``config.json`` alone.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni has an environment of its own: make omni-test", allow_module_level=True)

import msgspec

from omni_discovery.deploy.document import read_deploy
from omni_discovery.deploy.resolution import ResolveRequest
from omni_discovery.errors import ConfigError
from stage_runtime.engines.vllm_omni.args import split_args
from stage_runtime.engines.vllm_omni.pipeline import document_of
from stage_runtime.engines.vllm_omni.resolver import resolve, resolve_document
from tests.support.resolved_pipelines import CONFIGS, recorded, resolve_now, write_config

pytestmark = [
    pytest.mark.vllm,
    # Of the libraries, about each other.
    pytest.mark.filterwarnings("ignore"),
]

BASE = """
async_chunk: true
model_runner: v1
connectors:
  between: {name: MooncakeTransferEngineConnector, extra: {protocol: tcp, zmq_port: 50051, codec_chunk_frames: 7}}
stages:
  - {stage_id: 0, max_num_seqs: 8, output_connectors: {to_stage_1: between}}
  - {stage_id: 1, max_num_seqs: 8, input_connectors: {from_stage_0: between}, devices: "1", num_replicas: 2}
platforms:
  cpu: {stages: [{stage_id: 0, enforce_eager: true}]}
  npu: {stages: [{stage_id: 0, max_num_seqs: 1}]}
"""
OVER = """
base_config: base.yaml
pipeline: qwen3_tts
dtype: bfloat16
stages:
  - {stage_id: 1, engine_args: {max_num_seqs: 2}, default_sampling_params: {temperature: 0.0}}
"""


@pytest.mark.parametrize("name", CONFIGS)
def test_the_resolver_says_what_is_recorded(name: str, tmp_path: Path) -> None:
    """If vLLM-Omni says something else now: ``python -m tests.support.resolved_pipelines``."""
    assert resolve_now(name, tmp_path) == recorded(name)


def test_a_file_with_a_base_a_platform_and_a_pipeline_is_resolved_as_their_users_mean_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "over.yaml").write_text(OVER)
    flags: dict[str, Any] = {"max_model_len": 512}
    resolved = resolve_now("qwen3_tts", tmp_path, deploy_file=str(tmp_path / "over.yaml"), engine_args=flags)
    deploy = read_deploy(document_of(resolved, "m").document, "the test")
    (_, talker), (_, decoder) = (split_args(stage) for stage in deploy.stages)
    assert talker == {"max_num_seqs": 8, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 512}
    assert decoder == {"max_num_seqs": 2, "dtype": "bfloat16", "max_model_len": 512}
    assert (deploy.stage(1).runtime.devices, deploy.stage(1).runtime.num_replicas) == ("1", 2)
    connector = deploy.connector_of(0, 1)
    assert (connector.name, connector.extra) == (
        "MooncakeTransferEngineConnector",
        {"protocol": "tcp", "zmq_port": 50051},
    )
    assert [stage.engine_args["connector_extra"] for stage in deploy.stages] == [{"codec_chunk_frames": 7}] * 2


def test_a_file_that_ships_with_it_is_found_by_its_name_and_async_chunk_by_the_flag(tmp_path: Path) -> None:
    shipped = resolve_now("qwen3_tts", tmp_path, deploy_file="qwen3_tts.yaml", async_chunk=False)
    assert not shipped.async_chunk
    assert msgspec.structs.replace(shipped, async_chunk=True) == recorded("qwen3_tts")


@pytest.mark.parametrize(
    ("model", "file", "said"),
    [
        ("llama", "", r"can't resolve .*llama: .*without --omni serves a text model"),
        ("qwen3_tts", "gone.yaml", r"can't resolve .* with gone\.yaml: Deploy config not found"),
        ("qwen3_tts", "model_runner: v3", "model_runner must be one of"),
        ("qwen3_tts", "pipeline: nothing", "'nothing' from deploy config is not registered"),
        ("bagel", "", "'bagel' was not run with this engine"),
        ("qwen3_tts", "session_mode: duplex", "session_mode"),
        ("qwen3_tts", "stages: [{stage_id: 0, tensor_parallel_size: 2}]", "tensor_parallel_size is 2"),
    ],
)
def test_what_can_not_be_served_is_refused_by_name(tmp_path: Path, model: str, file: str, said: str) -> None:
    if ":" in file:
        (tmp_path / "file.yaml").write_text(file)
        file = str(tmp_path / "file.yaml")
    if model in CONFIGS:
        folder = write_config(tmp_path, model)
    else:
        folder = tmp_path / model
        folder.mkdir()
        (folder / "config.json").write_text(f'{{"model_type": "{model}", "architectures": ["ForCausalLM"]}}')
    with pytest.raises(ConfigError, match=said):
        resolve_document(ResolveRequest(model=str(folder), deploy_file=file))


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    """Their YAML is the operator's own, and still no tag of it makes an object."""
    (tmp_path / "f.yaml").write_text(f"stages: !!python/object/apply:os.system ['touch {tmp_path}/made']")
    with pytest.raises(ConfigError, match=r"f\.yaml"):
        resolve(ResolveRequest(model=str(write_config(tmp_path, "qwen3_tts")), deploy_file=str(tmp_path / "f.yaml")))
    assert not (tmp_path / "made").exists()
