"""The stages of a pipeline that vLLM's and vLLM-Omni's servers need to know, by the deploy document alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from omni_discovery.deploy.document import DeployConfig, StageConfig


def serving_stage(deploy: DeployConfig) -> StageConfig:
    """The stage that answers: the first that puts out text or embeddings. Raise ConfigError if vLLM's server can't."""
    stage = next((stage for stage in deploy.stages if stage.final_output in ("text", "embedding")), None)
    if stage is None:
        raise ConfigError(
            "--api vllm serves text and embeddings, and no stage of this pipeline has final_output: text or embedding"
        )
    if stage.engine != "vllm":
        raise ConfigError(f"--api vllm needs a vLLM stage; stage {stage.stage_id} is {stage.engine}")
    runner = stage.engine_args.get("runner", "auto")
    if runner != "auto" and (runner == "pooling") is not pools(stage):
        raise ConfigError(
            f"--api vllm: stage {stage.stage_id} has runner: {runner} and final_output: {stage.final_output}; "
            "what pools has final_output: embedding"
        )
    if not all(_only_prefills(deploy, each, stage) for each in deploy.inputs_of(stage.stage_id)):
        raise ConfigError(
            f"--api vllm needs a stage that reads prompts; stage {stage.stage_id} takes the hand-off of another"
        )
    return stage


def stages_read_here(deploy: DeployConfig, api: str) -> tuple[int, ...]:
    """The stages whose models' configs and tokenizers the server of this API reads in the hub. Raise ConfigError."""
    if api == "vllm":
        return (serving_stage(deploy).stage_id,)
    if api != "vllm-omni":
        return ()
    theirs = [stage.stage_id for stage in deploy.stages if stage.engine == "vllm-omni"]
    return tuple(sorted({deploy.stages[0].stage_id, *theirs[:1]}))


def pools(stage: StageConfig) -> bool:
    """Whether the stage makes an embedding or scores of a prompt, instead of tokens."""
    return stage.final_output == "embedding"


def _only_prefills(deploy: DeployConfig, stage_id: int, stage: StageConfig) -> bool:
    """Whether a stage only prefills for another one: prefill and decode of one model in two stages."""
    before = deploy.stage(stage_id)
    is_entry = not deploy.inputs_of(stage_id)
    return is_entry and before.engine_args.get("pd") == "prefill" and before.model == stage.model
