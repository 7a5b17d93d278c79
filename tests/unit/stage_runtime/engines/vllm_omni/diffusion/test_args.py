"""What is refused of a diffusion stage before vLLM-Omni is imported."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from stage_runtime.engines.vllm_omni.diffusion.args import check_pipeline, split_diffusion_args
from stage_runtime.engines.vllm_omni.diffusion.engine import OmniDiffusion, engine_for


def stage(**engine_args: Any) -> StageConfig:
    return StageConfig(
        stage_id=3, engine="vllm-omni", model="/models/qwen-image", engine_args=engine_args, final_output="image"
    )


def test_own_arguments_are_taken_and_all_others_are_vllm_omnis() -> None:
    own, given = split_diffusion_args(stage(max_side_px=512, max_num_seqs=2, async_chunk=False))
    assert (own.max_side_px, own.untested_pipeline) == (512, False)
    assert given == {"max_num_seqs": 2}
    assert split_diffusion_args(stage(parallel_config={"tensor_parallel_size": 1}))[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("cfg_parallel_size", 2),
        ("ulysses_degree", 2),
        ("num_gpus", 2),
        ("distributed_executor_backend", "mp"),
        ("step_execution", True),
        ("streaming_output", True),
        ("async_chunk", True),
    ],
)
def test_what_does_not_work_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"stage 3: engine_args\.{name} is {value!r}; engine 'vllm-omni' works with"):
        split_diffusion_args(stage(**{name: value}))


def test_a_size_within_the_parallel_config_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"engine_args\.parallel_config\.ring_degree is 2"):
        split_diffusion_args(stage(parallel_config={"ring_degree": 2}))


@pytest.mark.parametrize("bad", [{"max_side_px": 4}, {"untested_pipeline": "yes"}])
def test_a_wrong_value_of_an_own_argument_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="stage 3: engine_args"):
        split_diffusion_args(stage(**bad))


def test_a_pipeline_that_was_not_run_is_loaded_only_where_the_document_wants_it() -> None:
    own, _ = split_diffusion_args(stage())
    check_pipeline(stage(), "QwenImagePipeline", own)
    with pytest.raises(ConfigError, match=r"'FluxPipeline' was not run with this engine.*untested_pipeline: true"):
        check_pipeline(stage(), "FluxPipeline", own)
    check_pipeline(stage(), "FluxPipeline", split_diffusion_args(stage(untested_pipeline=True))[0])


def test_a_version_that_was_not_tested_is_refused_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_runtime.engines.vllm_omni.args._found", lambda *_: "0.31.0")
    with pytest.raises(ConfigError, match=r"0\.30 alone, and 0\.31\.0 is installed: pip install 'omni-discovery"):
        engine_for(stage())


def test_a_stage_that_shows_pictures_is_one_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stage gets vLLM-Omni's engine of tokens; both want the tested versions first."""
    monkeypatch.setattr("stage_runtime.engines.vllm_omni.diffusion.engine.check_versions", lambda _: None)
    assert isinstance(engine_for(stage(max_num_seqs=2)), OmniDiffusion)
    assert engine_for(stage(max_num_seqs=2)).capacity == 2


def test_a_stage_that_would_show_videos_is_refused() -> None:
    with pytest.raises(ConfigError, match="stage 3: final_output is video, which engine 'vllm-omni' does not make yet"):
        engine_for(replace(stage(), final_output="video"))
