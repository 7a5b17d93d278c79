"""Loads one stage of a vLLM-Omni pipeline: resolves its settings as vLLM-Omni does, and builds its EngineCore here."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from omni_discovery.text import essence
from stage_runtime.engines.base import Report
from stage_runtime.engines.draws import give_draws_of_runner_back
from stage_runtime.engines.errors import lacks_memory
from stage_runtime.engines.process_group import seal_single_rank_groups
from stage_runtime.engines.vllm_omni import connector
from stage_runtime.engines.vllm_omni.args import RUN, OmniArgs, is_deterministic
from stage_runtime.engines.vllm_omni.determinism import make_deterministic
from stage_runtime.engines.vllm_omni.mailbox import Mailbox
from stage_runtime.engines.vllm_omni.mending import mend_model
from stage_runtime.engines.vllm_omni.talker import THINKERS

#: Settings of every stage here, over vLLM-Omni's own deploy file and the document.
_ALWAYS: Final = {"async_scheduling": False, "distributed_executor_backend": "uni"}
#: Stages that take the requests of a batch for one, by pipeline and name.
_ONE_AT_A_TIME: Final = (("qwen2_5_omni", "code2wav"),)
_ITEM_KINDS: Final = ("image", "audio", "video")
#: Rows of a resolved stage's parallel settings that have to be 1.
_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage that is ready to be stepped. Everything but ``mailbox`` is vLLM's or vLLM-Omni's."""

    core: Any
    #: Turns the core's outputs into text and sound.
    processor: Any
    #: Makes requests of prompts; None but in the first stage.
    inputs: Any
    vllm_config: Any
    #: What vLLM-Omni's pipeline says of the stage.
    metadata: Any
    #: Sampling parameters of the pipeline and of its deploy file, by name.
    defaults: Mapping[str, Any]
    #: The last stage of the pipeline.
    last_stage: int
    mailbox: Mailbox
    #: The model type of vLLM-Omni's pipeline.
    kind: str = ""
    #: How messages become a prompt; None but in the first stage, and where the model has no such template.
    chat_template: str | None = None
    #: See DeterministicEngine.
    is_deterministic: bool = False
    #: What may come beside a prompt: image, audio, video; empty but in the first stage of a model that takes them.
    item_kinds: frozenset[str] = frozenset()

    @property
    def hf_config(self) -> Any:
        """The model's ``config.json``."""
        return self.vllm_config.model_config.hf_config

    @property
    def is_first(self) -> bool:
        """Whether its input is the client's."""
        return self.inputs is not None

    def close(self) -> None:
        """End the engine, and the threads that would outlive it."""
        adapter = getattr(self.core.scheduler, "chunk_transfer_adapter", None)
        if adapter is not None:
            adapter.shutdown()
        _runner_of(self.core).shutdown_omni_connectors()
        self.core.shutdown()


def load_stage(stage: StageConfig, args: OmniArgs, given: Mapping[str, Any], report: Report) -> LoadedStage:
    """Load it. Raise ConfigError where the operator must act; lack of memory is raised as it comes."""
    report("importing vllm-omni", 0.05)
    from vllm_omni.engine.arg_utils import register_omni_models_to_vllm

    # Before anything else of it: else vLLM would look for the model's class in vain, for seconds.
    register_omni_models_to_vllm()
    connector.register()
    seal_single_rank_groups()
    report("loading the model", 0.4)
    try:
        return _load(stage, args, given)
    except (ValueError, OSError, KeyError, TypeError) as error:
        if lacks_memory(error):
            raise
        raise ConfigError(
            f"stage {stage.stage_id}: vLLM-Omni refuses model or engine_args: {essence(error)}"
        ) from error


def _load(stage: StageConfig, args: OmniArgs, given: Mapping[str, Any]) -> LoadedStage:
    from vllm.platforms import current_platform
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.engine.core import EngineCore
    from vllm_omni.engine import stage_init_utils
    from vllm_omni.outputs.output_processor import MultimodalOutputProcessor

    plan = _resolve(stage, args, given)
    config = _stage_of(plan, stage, args)
    metadata = stage_init_utils.extract_stage_metadata_from_omni_stage_config(config)
    spec = _connector_spec(plan, stage, args)
    mailbox = connector.open_mailbox(stage.stage_id)
    arguments = stage_init_utils.build_engine_args_dict_from_omni_stage_config(
        config, stage.model, stage_connector_spec=spec
    )
    vllm_config, executor = stage_init_utils.build_vllm_config(
        config, stage.model, stage_connector_spec=spec, engine_args_dict=arguments
    )
    stage_init_utils.maybe_apply_cfg_scheduler_patches(vllm_config)
    model_config = vllm_config.model_config
    tokenizer = None
    if not model_config.skip_tokenizer_init:
        tokenizer = cached_tokenizer_from_config(model_config=model_config)
    core = EngineCore(vllm_config, executor, log_stats=False)
    kind = str(getattr(plan.pipeline_config, "model_type", ""))
    is_first = not config.input_sources
    mend_model(kind, metadata.model_stage, _runner_of(core))
    give_draws_of_runner_back(_runner_of(core))
    return LoadedStage(
        core=core,
        processor=MultimodalOutputProcessor(
            tokenizer, log_stats=False, engine_core_output_type=metadata.engine_output_type
        ),
        inputs=stage_init_utils.build_stage0_input_processor(vllm_config) if is_first else None,
        vllm_config=vllm_config,
        metadata=metadata,
        defaults=dict(config.model_config.default_sampling_params or {}),
        last_stage=max(each.stage_id for each in plan.stage_configs),
        mailbox=mailbox,
        kind=kind,
        chat_template=_chat_template(tokenizer, model_config) if is_first and tokenizer is not None else None,
        is_deterministic=make_deterministic(kind, metadata.model_stage, _runner_of(core))
        and is_deterministic(kind, current_platform.device_type, spec["extra"], in_pieces=args.async_chunk),
        item_kinds=_item_kinds(model_config) if is_first and kind in THINKERS else frozenset(),
    )


def _runner_of(core: Any) -> Any:
    """The object that runs the model, in this process."""
    return core.model_executor.driver_worker.worker.model_runner


def _item_kinds(model_config: Any) -> frozenset[str]:
    """The kinds of items that the model takes, and that the operator has not set to 0 in ``limit_mm_per_prompt``."""
    config = model_config.multimodal_config
    return frozenset(kind for kind in _ITEM_KINDS if config is not None and config.get_limit_per_prompt(kind))


def _chat_template(tokenizer: Any, model_config: Any) -> str | None:
    """The model's chat template, which omni models have with their processor; found as vLLM's own server finds it."""
    from vllm.renderers.hf import resolve_chat_template

    try:
        return resolve_chat_template(tokenizer, None, None, model_config=model_config)
    except (ValueError, OSError):
        return None


def _resolve(stage: StageConfig, args: OmniArgs, given: Mapping[str, Any]) -> Any:
    """The model's pipeline by vLLM-Omni's own deploy file, with the document's settings over it.

    With ``pipeline`` the document's settings are all, and the deploy file names the pipeline alone.
    """
    from vllm_omni.config.resolver import resolve_omni_config

    # Its own deploy files allow the code that comes with a model; here the document has to.
    trusted = bool(given.get("trust_remote_code", False))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(json.dumps({"pipeline": args.pipeline, "stages": []}))
        file.flush()
        return resolve_omni_config(
            stage.model,
            trust_remote_code=trusted,
            deploy_config_path=file.name if args.pipeline else None,
            cli_overrides={"async_chunk": args.async_chunk, "use_v2_model_runner": False},
            stage_overrides={str(stage.stage_id): {**given, **_ALWAYS, "trust_remote_code": trusted}},
            strategy_config_path=None,
        )


def _stage_of(plan: Any, stage: StageConfig, args: OmniArgs) -> Any:
    """The stage's part of a resolved pipeline. Raise ConfigError for what does not work here."""
    from vllm_omni.config.omni_config import VllmOmniDiffusionStageConfig

    where = f"stage {stage.stage_id}"
    ids = [each.stage_id for each in plan.stage_configs]
    if stage.stage_id not in ids:
        known = ", ".join(map(str, ids))
        raise ConfigError(f"{where}: vLLM-Omni's pipeline for {stage.model} has the stages {known}; give it their ids")
    config = plan.stage_by_id(stage.stage_id)
    if isinstance(config, VllmOmniDiffusionStageConfig):
        raise ConfigError(
            f"{where}: a diffusion stage of vLLM-Omni; engine 'vllm-omni' does not run these yet. Engine 'diffusion'"
            " runs pipelines of diffusers"
        )
    kind = getattr(plan.pipeline_config, "model_type", None)
    if kind not in RUN and not args.untested_pipeline:
        raise ConfigError(
            f"{where}: vLLM-Omni's pipeline {kind!r} was not run with this engine, so it is not known whether a second"
            f" replica repeats the first one's answers; run were {', '.join(RUN)}. engine_args.untested_pipeline: true"
            " loads it all the same"
        )
    if (kind, config.model_stage) in _ONE_AT_A_TIME and (most := config.scheduler_config.max_num_seqs) != 1:
        raise ConfigError(
            f"{where}: engine_args.max_num_seqs is {most}; vLLM-Omni's {config.model_stage} of this model makes one"
            " sound of all that runs together: set 1, and run more replicas"
        )
    for name in _SIZES:
        if (size := getattr(config.parallel_config, name, 1) or 1) != 1:
            raise ConfigError(
                f"{where}: vLLM-Omni's deploy file has {name}: {size} for this stage, and engine 'vllm-omni' runs it in"
                f" one process: set engine_args.{name}: 1"
            )
    return config


def _connector_spec(plan: Any, stage: StageConfig, args: OmniArgs) -> dict[str, Any]:
    """Our connector, with the settings of the one that vLLM-Omni's deploy file names: its processors read them."""
    from vllm_omni.engine import stage_init_utils

    file = None if args.pipeline else plan.config_path
    transfer = stage_init_utils.load_omni_transfer_config_for_model(stage.model, file)
    spec = stage_init_utils.get_stage_connector_spec(transfer, stage.stage_id, args.async_chunk)
    is_first = not plan.stage_by_id(stage.stage_id).input_sources
    extra = {**spec.get("extra", {}), **args.connector_extra, "role": "sender" if is_first else "receiver"}
    return {"name": connector.NAME, "extra": extra}
