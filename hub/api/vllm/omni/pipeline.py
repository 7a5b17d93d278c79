"""The pipeline as vLLM-Omni's server sees it: the kinds of its stages, their defaults, the first model's tokenizer.

Stages of vLLM-Omni's models are resolved as vLLM-Omni does; of any other stage the deploy document says enough. Nothing
is computed here: no weights are read, and no device is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm_omni.config.resolver import resolve_omni_config
from vllm_omni.engine import stage_init_utils
from vllm_omni.engine.arg_utils import OmniEngineArgs, register_omni_models_to_vllm
from vllm_omni.entrypoints.openai.tts_adapters import all_tts_stage_keys
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from hub.api.chat.messages import NO_LINKS
from hub.api.vllm.bounds.texts import bound_tokenizers
from hub.api.vllm.omni.errors import noted
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.inputs.media_links import MediaLinks, links_of
from omni_discovery.text import essence

if TYPE_CHECKING:
    from omni_discovery.deploy.document import DeployConfig, StageConfig

#: The engine whose stages vLLM-Omni resolves itself.
OMNI_ENGINE: Final = "vllm-omni"
#: Engines that read a prompt as text and need no tokenizer in the hub.
_PAINTERS: Final = frozenset({"diffusion", "painter"})
_LLM, _DIFFUSION = "llm", "diffusion"
_USUAL_CONTEXT: Final = 32768
_NOTHING: Final = {"image": 0, "audio": 0, "video": 0}
#: Not a host name: no link is allowed, and the error message shows this text.
_NO_DOMAIN: Final = "none: links are not followed here"


@dataclass(frozen=True, slots=True)
class ServedPipeline:
    """What the server asks of its engine client about the stages, in the order of their ids."""

    stage_ids: tuple[int, ...]
    #: vLLM-Omni's own, or objects with the attributes of them that the server reads.
    stage_configs: list[Any]
    default_params: list[Any]
    #: What each stage puts out; None for nothing.
    outputs: tuple[str | None, ...]
    #: Those of the first stage; None where it makes pictures of text.
    vllm_config: Any
    input_processor: Any
    #: Whether the first stage says a text, so that it wants the text itself.
    speaks: bool
    restrictions: tuple[Any, ...] = ()
    #: What the messages of a chat may name by a link, for the first stage's replica to fetch.
    links: MediaLinks = NO_LINKS

    @property
    def reads_messages(self) -> bool:
        """Whether the first stage writes its own prompt of a chat with pictures, sound or videos, or refuses them."""
        return self.input_processor is not None and not self.speaks

    @property
    def most_tokens(self) -> int:
        """The context of the first stage's model; a usual one where it has no tokenizer."""
        return _USUAL_CONTEXT if self.vllm_config is None else int(self.vllm_config.model_config.max_model_len)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks for which the server offers routes."""
        spoken = ("speech",) if "audio" in self.outputs else ()
        return ("generate", *spoken)


def read_pipeline(deploy: DeployConfig) -> ServedPipeline:
    """Read it from the deploy document and the models that it names. Raise ConfigError."""
    stages = list(deploy.stages)
    theirs = [stage for stage in stages if stage.engine == OMNI_ENGINE]
    resolved = _resolve(theirs[0], async_chunk=deploy.async_chunk) if theirs else None
    configs = [_config_of(deploy, stage, resolved) for stage in stages]
    first = stages[0]
    is_text = configs[0].stage_type == _LLM
    config = processor = None
    if is_text:
        config, processor = _read_model(first, configs[0])
    return ServedPipeline(
        stage_ids=tuple(stage.stage_id for stage in stages),
        stage_configs=configs,
        default_params=[_defaults(stage, each) for stage, each in zip(stages, configs, strict=True)],
        outputs=tuple(None if stage.final_output == "none" else stage.final_output for stage in stages),
        vllm_config=config,
        input_processor=processor,
        speaks=first.engine == OMNI_ENGINE and _kind(configs[0]) in all_tts_stage_keys(),
        restrictions=tuple(resolved.endpoint_restrictions) if resolved is not None else (),
        links=links_of(first.engine, first.engine_args),
    )


def _resolve(stage: StageConfig, *, async_chunk: bool) -> Any:
    """A model's pipeline by vLLM-Omni; ``async_chunk`` is the document's. Raise ConfigError."""
    # First of all: else vLLM looks for the model's class in vain, for seconds.
    register_omni_models_to_vllm()
    try:
        return resolve_omni_config(
            stage.model,
            trust_remote_code=bool(stage.engine_args.get("trust_remote_code", False)),
            deploy_config_path=None,
            cli_overrides={
                "async_chunk": bool(stage.engine_args.get("async_chunk", async_chunk)),
                "use_v2_model_runner": False,
            },
            stage_overrides={},
            strategy_config_path=None,
        )
    except (ValueError, OSError, KeyError, TypeError) as error:
        reason = f"vLLM-Omni can't read the model {stage.model}: {essence(error)}"
        raise ConfigError(f"stage {stage.stage_id}: {reason}") from error


def _config_of(deploy: DeployConfig, stage: StageConfig, resolved: Any) -> Any:
    if stage.engine == OMNI_ENGINE and stage.stage_id in {each.stage_id for each in resolved.stage_configs}:
        return resolved.stage_by_id(stage.stage_id)
    is_picture = stage.engine in _PAINTERS or stage.final_output == "image"
    return SimpleNamespace(
        stage_id=stage.stage_id,
        stage_type=_DIFFUSION if is_picture else _LLM,
        # The stage whose parameters a chat sets.
        is_comprehension=not is_picture and not deploy.inputs_of(stage.stage_id),
        final_output=stage.final_output != "none",
        final_output_type=stage.final_output,
        model_stage=None,
        engine_args=SimpleNamespace(model=stage.model),
    )


def _kind(config: Any) -> str | None:
    """What vLLM-Omni calls a stage of its pipelines."""
    return getattr(getattr(config, "stage_pipeline_config", None), "model_stage", None)


def _defaults(stage: StageConfig, config: Any) -> Any:
    if config.stage_type == _DIFFUSION:
        # The replica has the document's; whatever differs from these was asked for.
        return OmniDiffusionSamplingParams()
    given = {**_pipeline_defaults(config), **stage.default_sampling_params}
    known = {name: value for name, value in given.items() if name in SamplingParams.__struct_fields__}
    try:
        return SamplingParams(**known)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"stage {stage.stage_id}: default_sampling_params: {essence(error)}") from error


def _pipeline_defaults(config: Any) -> dict[str, Any]:
    return dict(getattr(getattr(config, "model_config", None), "default_sampling_params", None) or {})


def _read_model(stage: StageConfig, config: Any) -> tuple[Any, Any]:
    """The config of the first stage's model, and what makes prompts for it. Raise ConfigError."""
    if not stage.model:
        raise ConfigError(
            f"--api vllm-omni reads the tokenizer of stage {stage.stage_id}: name its model, or serve with --api omni"
        )
    given = _engine_args(stage, config)
    try:
        model = OmniEngineArgs(**given).create_model_config()
        # As in a server without an engine: nothing is computed here.
        model.quantization = None
        vllm_config = VllmConfig(model_config=model)
        processor = stage_init_utils.build_stage0_input_processor(vllm_config)
        bound_tokenizers(processor.renderer)
        _note_refusals(processor.renderer)
        return vllm_config, processor
    except (TypeError, ValueError, OSError) as error:
        reason = f"vLLM-Omni can't read the model {stage.model}: {essence(error)}"
        raise ConfigError(f"stage {stage.stage_id}: {reason}") from error


def _note_refusals(renderer: Any) -> None:
    """Have what a renderer refuses of a chat be the client's mistake: the server would answer with 500."""
    render = renderer.render_chat_async

    async def render_noted(*given: Any, **options: Any) -> Any:
        try:
            return await render(*given, **options)
        except VLLMValidationError as error:
            refusal = InvalidRequestError(str(error))
        except RecursionError:
            # Arguments of earlier calls are JSON in a text, which vLLM reads itself. The stack is of no use.
            refusal = InvalidRequestError("a text of JSON in the messages is nested too deep: send less of it")
        raise noted(refusal) from refusal

    renderer.render_chat_async = render_noted


def _engine_args(stage: StageConfig, config: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if stage.engine == OMNI_ENGINE:
        given = stage_init_utils.build_engine_args_dict_from_omni_stage_config(config, stage.model)
    # Some are for the scheduler, or our engine's own.
    known = OmniEngineArgs.__dataclass_fields__.keys()
    given = {name: value for name, value in {**given, **stage.engine_args}.items() if name in known}
    return {
        **given,
        "model": stage.model,
        # Nothing is fetched, and no file of this machine is read.
        "allowed_media_domains": [_NO_DOMAIN],
        "allowed_local_media_path": "",
        "limit_mm_per_prompt": _NOTHING,
        "structured_outputs_config": OmniEngineArgs.__dataclass_fields__["structured_outputs_config"].default_factory(),
    }
