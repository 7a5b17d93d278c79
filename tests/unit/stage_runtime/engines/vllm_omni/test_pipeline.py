"""What vLLM-Omni's resolver says becomes a deploy document of ours; what can't run is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from omni_discovery.deploy.document import DeployConfig, read_deploy
from omni_discovery.errors import ConfigError
from stage_runtime.engines.vllm_omni.args import RUN, split_args
from stage_runtime.engines.vllm_omni.pipeline import ResolvedPipeline, document_of
from tests.support.resolved_pipelines import CONFIGS, MODEL, recorded

UNTESTED: dict[int, dict[str, Any]] = {0: {"engine_args": {"untested_pipeline": True}}}


def deploy_of(resolved: ResolvedPipeline, **said: Any) -> DeployConfig:
    """As the hub reads it."""
    made = document_of(resolved, "tiny", **{"overrides": UNTESTED, **said})
    return read_deploy(msgspec.json.decode(msgspec.json.encode(made.document)), "the test")


def test_qwen3_tts_is_a_talker_and_a_decoder_with_the_settings_of_the_shipped_file() -> None:
    deploy = deploy_of(recorded("qwen3_tts"), overrides=None)
    talker, decoder = deploy.stages
    assert (deploy.served_name, deploy.async_chunk, deploy.edges, deploy.connectors) == ("tiny", True, (), {})
    assert {(stage.engine, stage.model) for stage in deploy.stages} == {("vllm-omni", MODEL)}
    assert (talker.final_output, decoder.final_output) == ("none", "audio")
    assert (deploy.inputs_of(0), deploy.inputs_of(1)) == ((), (0,))
    assert (talker.runtime.devices, talker.runtime.num_replicas) == ("0", 1)
    own, given = split_args(talker)
    assert (own.async_chunk, own.pipeline) == (True, "qwen3_tts")
    assert own.connector_extra["codec_chunk_frames"] == 25
    assert given == {
        "subtalker_sampling_params": {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 1.0},
        "gpu_memory_utilization": 0.3,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_model_len": 4096,
        "enable_prefix_caching": False,
    }
    assert talker.default_sampling_params["min_tokens"] == 2
    assert split_args(decoder)[0].connector_extra == own.connector_extra
    assert split_args(decoder)[1]["max_model_len"] == 65536


@pytest.mark.parametrize(("name", "in_pieces"), [("qwen2_5_omni", False), ("qwen3_omni_moe", True)])
def test_a_thinker_shows_text_and_the_decoder_behind_its_talker_sound(name: str, in_pieces: bool) -> None:
    deploy = deploy_of(recorded(name))
    assert [stage.final_output for stage in deploy.stages] == ["text", "none", "audio"]
    assert [deploy.inputs_of(stage.stage_id) for stage in deploy.stages] == [(), (0,), (1,)]
    assert [stage.runtime.devices for stage in deploy.stages] == (["0", "1", "1"] if in_pieces else ["0", "1", "0"])
    assert deploy.async_chunk is in_pieces
    assert {split_args(stage)[0].async_chunk for stage in deploy.stages} == {in_pieces}
    assert deploy.stages[1].default_sampling_params["seed"] == 42


def test_what_the_document_does_not_hold_is_told() -> None:
    left = document_of(recorded("qwen3_tts"), "tiny").left_out
    assert [each.split(" (")[0] for each in left] == [
        "model_runner: v2",
        "async_scheduling of stages 0, 1",
        "trust_remote_code of stages 0, 1",
    ]
    may = document_of(recorded("qwen3_tts"), "tiny", may_run_code=True)
    assert [each for each in may.left_out if "trust" in each] == []
    assert [stage["engine_args"]["trust_remote_code"] for stage in may.document["stages"]] == [True, True]


def test_an_executor_with_processes_of_its_own_is_left_out_and_told() -> None:
    """As vLLM-Omni's file for a thinker alone says it; a stage here is one process."""
    resolved = recorded("qwen2_5_omni")
    first, *others = resolved.stages
    settings = {**first.settings, "distributed_executor_backend": "mp"}
    made = document_of(replace(resolved, stages=(replace(first, settings=settings), *others)), "tiny")
    assert "distributed_executor_backend of stage 0 (a replica is one process)" in made.left_out
    assert "distributed_executor_backend" not in made.document["stages"][0]["engine_args"]


def test_a_pipeline_that_was_not_run_is_refused_by_name_and_with_the_way_to_load_it() -> None:
    strange = replace(recorded("qwen3_tts"), name="bagel")
    assert "bagel" not in RUN
    with pytest.raises(ConfigError, match=r"'bagel' was not run with this engine; .*untested_pipeline"):
        document_of(strange, "tiny")
    assert document_of(strange, "tiny", overrides=UNTESTED).pipeline == "bagel"


def with_stage(resolved: ResolvedPipeline, index: int, **changes: Any) -> ResolvedPipeline:
    stages = list(resolved.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(resolved, stages=tuple(stages))


def test_all_that_can_not_run_is_refused_at_once() -> None:
    """Arguments by the engine's own rules, sessions, and an environment that no document carries."""
    tts = recorded("qwen3_tts")
    odd = with_stage(tts, 0, settings={"tensor_parallel_size": 2}, env={"NCCL_DEBUG": "INFO"})
    with pytest.raises(ConfigError) as refused:
        document_of(replace(odd, session_mode="duplex"), "tiny")
    for words in ("tensor_parallel_size is 2", "session_mode is 'duplex'", "stage 0 says env", "NCCL_DEBUG=INFO"):
        assert words in str(refused.value)
    one = {0: {"engine_args": {"tensor_parallel_size": 1}}}
    mended = document_of(with_stage(tts, 0, settings={"tensor_parallel_size": 2}), "tiny", overrides=one)
    assert mended.document["stages"][0]["engine_args"]["tensor_parallel_size"] == 1


def test_a_connector_other_than_shared_memory_joins_the_same_stages_here() -> None:
    """Its settings for the model's code go to the engine, all others to the connector; bounds of edges stay."""
    extra = {"codec_chunk_frames": 7, "zmq_port": 50051, "protocol": "tcp"}
    changed = replace(
        recorded("qwen3_tts"),
        connectors={"connector_of_shared_memory": {"name": "MooncakeTransferEngineConnector", "extra": extra}},
        edges=({"from": 0, "to": 1, "window_size": -1, "max_inflight": 1},),
    )
    deploy = deploy_of(changed, overrides=None)
    (edge,) = deploy.edges
    assert (edge.window_size, edge.max_inflight) == (-1, 1)
    connector = deploy.connectors[edge.connector]
    assert (connector.name, connector.extra) == (
        "MooncakeTransferEngineConnector",
        {"zmq_port": 50051, "protocol": "tcp"},
    )
    assert [split_args(stage)[0].connector_extra for stage in deploy.stages] == [{"codec_chunk_frames": 7}] * 2


def test_a_stage_may_keep_to_whole_hand_offs_and_have_replicas() -> None:
    changed = with_stage(recorded("qwen3_tts"), 1, async_chunk=False, num_replicas=3, devices="1,2,3")
    deploy = deploy_of(changed, overrides=None)
    assert not deploy.async_chunk_of(0, 1)
    assert (deploy.stage(1).runtime.num_replicas, deploy.stage(1).runtime.devices) == (3, "1,2,3")


@pytest.mark.parametrize("name", CONFIGS)
def test_overrides_of_the_command_line_win(name: str) -> None:
    said = {0: {"engine_args": {"max_num_seqs": 3, "untested_pipeline": True}, "default_sampling_params": {"top_k": 2}}}
    first = deploy_of(recorded(name), overrides=said).stages[0]
    assert (first.engine_args["max_num_seqs"], first.default_sampling_params["top_k"]) == (3, 2)
    assert first.engine_args["max_num_batched_tokens"] == recorded(name).stages[0].settings["max_num_batched_tokens"]
