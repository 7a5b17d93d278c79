"""``--api vllm``: vLLM's own OpenAI server in front of the hub, with all that ``vllm serve`` offers for a text stage.

Importing vLLM and reading the model's config and tokenizer take long: ``VllmFrontend`` does both before the hub's loop
runs. No weights are loaded here, and no device is needed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from vllm import AsyncEngineArgs
from vllm.config import LoRAConfig, VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.entrypoints.openai.chat_completion import batch_serving
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.pooling.base import serving as pooling_serving
from vllm.exceptions import VLLMError

from hub.api.served_stage import pools, serving_stage
from hub.api.vllm.bounds.beams import bound_beams
from hub.api.vllm.bounds.error_texts import look_through_short_texts
from hub.api.vllm.bounds.fan_out import begin_by_turns, merge_in
from hub.api.vllm.bounds.log_lines import bound_warnings, remember_little
from hub.api.vllm.bounds.numbers import write_numbers
from hub.api.vllm.bounds.pacing import may_pace
from hub.api.vllm.bounds.reading import bound_custom_calls, bound_parsers
from hub.api.vllm.bounds.whole_answers import write_in_turns
from hub.api.vllm.client import OmniEngineClient
from hub.api.vllm.errors import AnsweredErrors, HubHeaders
from hub.api.vllm.flags import parse_flags
from hub.api.vllm.hub_routes import hub_routes
from hub.api.vllm.params import default_overrides
from hub.api.vllm.pictures import open_pictures_only, picture_args, read_few_formats, renderer_of
from hub.api.vllm.pooling import PoolingClient, compare_apart, refusing_routes, score_beside_the_loop, set_defaults
from hub.api.vllm.served_routes import close_unknown_routes, describe_aside
from hub.api.vllm.validation import shorten_errors, stop_at_first_errors, stop_in_routes
from omni_discovery.errors import ConfigError
from omni_discovery.logs.setup import kept_log_levels
from omni_discovery.text import essence

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from hub.async_omni import AsyncOmni
    from omni_discovery.deploy.document import DeployConfig

if not hasattr(AsyncEngineArgs, "create_structured_outputs_config"):
    raise ImportError("the server of the installed vLLM is an older one")

#: A single one: a log handler must not have it twice if several applications are built.
_ANSWERED_ERRORS: Final = AnsweredErrors()


class VllmFrontend:
    """vLLM's server with its flags and model config. Raise ConfigError if the pipeline or the flags don't fit it."""

    def __init__(self, deploy: DeployConfig, flags: str) -> None:
        self._stage = serving_stage(deploy)
        self._reads_prefilled = bool(deploy.inputs_of(self._stage.stage_id))
        self._arguments = parse_flags(flags)
        self._config = self._read_model()
        if self._arguments.lora_modules and self._config.lora_config is None:
            raise ConfigError("--api-args: --lora-modules needs enable_lora: true in the stage's engine_args")
        self._arguments.model = self._stage.model
        self._arguments.served_model_name = [deploy.served_name]
        # It would need the same replica for a query and for the texts that are compared with it.
        self._arguments.enable_flash_late_interaction = False
        # The reasoning parser is set by the stage's engine_args only.
        self._arguments.structured_outputs_config = self._config.structured_outputs_config
        try:
            validate_api_server_args(self._arguments)  # type: ignore[no-untyped-call, unused-ignore]
        except KeyError as error:
            raise ConfigError(f"--api-args: {error.args[0]}") from error
        read_few_formats()
        open_pictures_only()
        remember_little()
        look_through_short_texts()
        score_beside_the_loop()
        self._renderer = renderer_of(self._config)

    async def build(self, omni: AsyncOmni) -> ASGIApp:
        """The web application over one AsyncOmni."""
        kind = PoolingClient if pools(self._stage) else OmniEngineClient
        client = kind(omni, self._stage.stage_id, self._config, self._renderer)
        client.paces_calls = may_pace(self._arguments.tool_call_parser)
        tasks = await client.get_supported_tasks()
        stop_at_first_errors()
        with kept_log_levels():
            app = build_app(self._arguments, tasks, self._config.model_config)
        stop_in_routes(app)
        shorten_errors(app)
        merge_in((batch_serving, completion_serving, pooling_serving))
        bound_parsers()
        bound_custom_calls()
        bound_beams(completion_serving.OpenAIServingCompletion)
        begin_by_turns(completion_serving.OpenAIServingCompletion, pooling_serving.PoolingServing)
        app.router.routes[:0] = [*hub_routes(omni), *refusing_routes(tasks)]
        try:
            await init_app_state(client, app.state, self._arguments, tasks)
        except (RuntimeError, TypeError, ValueError, VLLMError) as error:
            # A parser raises what it likes where a tokenizer does not fit it.
            raise ConfigError(f"--api-args: {essence(error)}") from error
        bound_warnings()
        write_in_turns(app.router.routes, app.state)
        write_numbers(app.state)
        compare_apart(app.state)
        # /invocations would find it, too.
        app.state.serving_generative_scoring = None
        close_unknown_routes(app)
        describe_aside(app)
        client.adapters.loads = True
        for handler in logging.getLogger().handlers:
            handler.addFilter(_ANSWERED_ERRORS)
        return HubHeaders(app, omni, self._config.model_config.max_model_len)

    def _read_model(self) -> Any:
        stage = self._stage
        # The KV transfer concerns the engine only, and its check may need a device.
        known = AsyncEngineArgs.__dataclass_fields__.keys() - {"kv_transfer_config"}
        given = {name: value for name, value in stage.engine_args.items() if name in known}
        of_document = default_overrides(stage.default_sampling_params)
        overrides = {**(given.get("override_generation_config") or {}), **of_document}
        given |= {"model": stage.model, "override_generation_config": overrides}
        given |= picture_args(given, taken=not pools(stage) and not self._reads_prefilled)
        if pools(stage):
            given["runner"] = "pooling"
        try:
            arguments = AsyncEngineArgs(**{**given, "disable_log_stats": True})
            model = arguments.create_model_config()
            # As in vLLM's own server without an engine: nothing is computed here.
            model.quantization = None
            if pools(stage):
                set_defaults(model, stage.default_sampling_params)
            # The hub needs only the adapters' names and paths, which it sends to replicas.
            adapters = LoRAConfig(default_mm_loras=arguments.default_mm_loras) if arguments.enable_lora else None
            return VllmConfig(
                model_config=model,
                structured_outputs_config=arguments.create_structured_outputs_config(),
                lora_config=adapters,
            )
        except (TypeError, ValueError, OSError) as error:
            reason = f"vLLM can't read the model {stage.model}: {essence(error)}"
            raise ConfigError(f"stage {stage.stage_id}: {reason}") from error
