"""``--api vllm-omni``: vLLM-Omni's own OpenAI server in front of the hub.

Importing it and reading the model's config and tokenizer take long: ``OmniFrontend`` does both before the hub's loop
runs. No weights are loaded here, and no device is needed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.pooling.base.serving import PoolingServing
from vllm.exceptions import VLLMError
from vllm_omni.config.endpoint_policy import shutdown_unsupported_routes
from vllm_omni.entrypoints.openai import api_server as peer
from vllm_omni.entrypoints.openai import serving_chat
from vllm_omni.entrypoints.serve.utils.routes import remove_route_from_app

from hub.api.vllm.bounds.error_texts import look_through_short_texts
from hub.api.vllm.bounds.fan_out import begin_by_turns
from hub.api.vllm.bounds.log_lines import bound_warnings
from hub.api.vllm.bounds.pacing import may_pace
from hub.api.vllm.bounds.reading import bound_required, bound_tool_parser
from hub.api.vllm.bounds.texts import serve_by_turns
from hub.api.vllm.errors import AnsweredErrors
from hub.api.vllm.flags import parse_flags
from hub.api.vllm.hub_routes import hub_routes
from hub.api.vllm.omni.answers import HubAnswers
from hub.api.vllm.omni.client import PipelineClient
from hub.api.vllm.omni.errors import blame_wrong_values
from hub.api.vllm.omni.pipeline import read_pipeline
from hub.api.vllm.served_routes import close_unknown_routes, describe_aside
from hub.api.vllm.validation import shorten_errors, stop_at_first_errors, stop_in_routes
from omni_discovery.errors import ConfigError
from omni_discovery.logs.setup import kept_log_levels
from omni_discovery.text import essence

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from hub.async_omni import AsyncOmni
    from omni_discovery.deploy.document import DeployConfig

#: Routes of vLLM's server that vLLM-Omni has its own for.
_THEIR_OWN: Final = (
    ("/v1/chat/completions", "POST"),
    ("/v1/chat/completions/batch", "POST"),
    ("/v1/models", "GET"),
    ("/health", "GET"),
)
#: A single one: a log handler must not have it twice if several applications are built.
_ANSWERED_ERRORS: Final = AnsweredErrors()


class OmniFrontend:
    """vLLM-Omni's server with its flags. Raise ConfigError if the pipeline or the flags don't fit it."""

    def __init__(self, deploy: DeployConfig, flags: str) -> None:
        self._arguments = parse_flags(flags)
        if self._arguments.lora_modules:
            raise ConfigError("--api-args: --lora-modules are for --api vllm; these stages take no adapters")
        self._pipeline = read_pipeline(deploy)
        first = deploy.stages[0]
        self._arguments.model = first.model or deploy.served_name
        self._arguments.served_model_name = [deploy.served_name]
        reasoning = str(first.engine_args.get("reasoning_parser", ""))
        self._arguments.structured_outputs_config.reasoning_parser = reasoning
        try:
            validate_api_server_args(self._arguments)  # type: ignore[no-untyped-call, unused-ignore]
        except KeyError as error:
            raise ConfigError(f"--api-args: {error.args[0]}") from error

    async def build(self, omni: AsyncOmni) -> ASGIApp:
        """The web application over one AsyncOmni."""
        client = PipelineClient(omni, self._pipeline)
        client.paces_calls = may_pace(self._arguments.tool_call_parser)
        tasks: Any = self._pipeline.tasks
        stop_at_first_errors()
        look_through_short_texts()
        begin_by_turns(OpenAIServingCompletion, PoolingServing)
        with kept_log_levels():
            app: Any = build_app(self._arguments, tasks)
        shorten_errors(app)
        blame_wrong_values(app)
        for path, method in _THEIR_OWN:
            remove_route_from_app(app, path, {method})
        app.include_router(peer.router)
        stop_in_routes(app)
        app.router.routes[:0] = hub_routes(omni)
        try:
            await peer.omni_init_app_state(client, app.state, self._arguments)
        except OSError as error:
            raise ConfigError(
                f"vLLM-Omni's server can't make its folder ({error}): set SPEAKER_SAMPLES_DIR to one that it may write"
            ) from error
        except (ValueError, VLLMError) as error:
            raise ConfigError(f"--api-args: {essence(error)}") from error
        bound_tool_parser(self._arguments.tool_call_parser)
        bound_required(serving_chat)
        of_speech = getattr(getattr(app.state, "openai_serving_speech", None), "_tts_executor", None)
        if of_speech is not None:
            serve_by_turns(of_speech)
        # /invocations would find it, too.
        app.state.serving_generative_scoring = None
        close_unknown_routes(app)
        describe_aside(app)
        bound_warnings()
        shutdown_unsupported_routes(app, client.endpoint_restrictions)
        # vLLM's loggers, and vLLM-Omni's below them, have a handler of their own.
        for handler in (*logging.getLogger().handlers, *logging.getLogger("vllm").handlers):
            handler.addFilter(_ANSWERED_ERRORS)
        return HubAnswers(app, omni, self._pipeline, self._arguments.root_path or "")
