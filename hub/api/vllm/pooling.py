"""The engine client of vLLM's own server for a stage that pools: embeddings, classes and scores, no tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from starlette.responses import Response
from starlette.routing import Route
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.pooling.scoring import io_processor
from vllm.outputs import PoolingOutput, PoolingRequestOutput
from vllm.utils.async_utils import make_async
from vllm.utils.serial_utils import binary2tensor

from hub.api.errors import error_response
from hub.api.vllm.bounds.fan_out import announce, count_pooled, one_at_a_time
from hub.api.vllm.bounds.texts import beginning, counted_once, serve_by_turns
from hub.api.vllm.bounds.wrapping import wrapped_once
from hub.api.vllm.client import TASKS, OmniEngineClient, check_prompt, vllm_errors
from omni_discovery.errors import EngineFailedError, InvalidRequestError

if TYPE_CHECKING:
    from starlette.datastructures import State
    from starlette.requests import Request

    from hub.async_omni import AsyncOmni

#: Sent to the stage by vLLM's names; the document's defaults for them are kept in vLLM's pooler config.
_CARRIED: Final = ("task", "dimensions", "use_activation")
#: Settled by each replica's vLLM itself, the last two by the stage's ``pooler_config``.
_OURS: Final = frozenset(
    {"output_kind", "requires_token_ids", "skip_reading_prefix_cache", "step_tag_id", "returned_token_ids"}
)
#: The entry of ``extra_kwargs`` that is sent to the stage.
_TYPES: Final = "compressed_token_type_ids"
#: Routes that only a stage that makes tokens serves, and routes that only one that pools serves.
_OF_TOKENS: Final[tuple[str, ...]] = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_OF_NUMBERS: Final[tuple[str, ...]] = (
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
)
#: It can't succeed: it reads the log probabilities of named tokens, which no stage is asked for.
_NOT_HERE: Final = ("/generative_scoring",)
#: vLLM's own, which are replaced by ``score_beside_the_loop``.
_server: Final[Any] = PoolingBaseServing
_pairs: Final[Any] = io_processor
_prepares: Final = _server._preprocessing  # noqa: SLF001
_cuts: Final = _pairs.truncate_text_to_tokens
#: Texts of a request that are given to the renderer at once: the loop gives each some 0.1 ms.
_AT_ONCE: Final = 256
_compares: Final = _pairs.compute_maxsim_score
#: Tokens of a query that are compared with all of a document's at once: each with each is 4 bytes.
_COMPARED_AT_ONCE: Final = 256
#: A single one: the texts of one request after the other's, and not in the thread that reads prompts.
_thread: Final = ThreadPoolExecutor(1, "Pairs")


class PoolingClient(OmniEngineClient):
    """The engine client for a stage that pools; ``generate`` raises NotImplementedError."""

    def __init__(self, omni: AsyncOmni, stage_id: int, vllm_config: Any, renderer: Any) -> None:
        super().__init__(omni, stage_id, vllm_config, renderer)
        self._tasks: tuple[Any, ...] = tasks_of(vllm_config.model_config)

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        """The tasks that vLLM's server may serve."""
        return self._tasks

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Raise NotImplementedError: the stage makes no tokens."""
        raise NotImplementedError("this pipeline's stage pools and makes no tokens")

    def encode(
        self,
        prompt: Any,
        pooling_params: Any,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Any = None,
        reasoning_ended: Any = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Start a request with one output, the pooled array. Raise VLLMError for a wrong one, here or once it is read.

        The last two parameters have no effect: the prompt is tokens already, and a stage that pools does not reason.
        """
        with vllm_errors():
            check_prompt(prompt, None, None)
            self._omni.client_bounds.check_asked(None, priority)
            announce(1)
        more = {"priority": priority, "trace_headers": trace_headers}
        return self._pooled(request_id, prompt, pooling_params, lora_request, more)

    async def _pooled(
        self, request_id: str, prompt: Any, pooling_params: Any, lora_request: Any, more: Mapping[str, Any]
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        # The server asks for all texts of a request in one turn of the loop, which the check would hold for seconds.
        async with one_at_a_time():
            with vllm_errors():
                token_ids = self._checked_tokens(request_id, prompt, pooling_params, self._tasks, lora_request)
                params = self.adapters.params(stage_params(pooling_params), lora_request, prompt.get("cache_salt"))
        inputs = {"prompt_token_ids": token_ids}
        made, reason = None, None
        with self._registered(request_id, 1) as (inner_id,), vllm_errors():
            async with aclosing(self._stage_outputs(inner_id, inputs, params, more)) as outputs:
                async for output in outputs:
                    made = output.embedding if output.data else made
                    reason = output.finish_reason
            # An aborted request has no output.
            if made is None and reason not in (None, "abort"):
                raise EngineFailedError(f"stage {self._stage_id} pooled nothing")
        if made is not None:
            # A bytearray: torch warns of memory that is read-only.
            numbers: Any = bytearray(made)
            with vllm_errors():
                count_pooled(len(numbers))
            yield PoolingRequestOutput(
                request_id=request_id,
                outputs=PoolingOutput(binary2tensor(numbers, made.shape, "float32", "native")),
                prompt_token_ids=token_ids,
                num_cached_tokens=0,
                finished=True,
            )


def tasks_of(model_config: Any) -> tuple[str, ...]:
    """The pooling tasks of a model by its config, without its weights. The stage may refuse one.

    ``pooler_config: {task: ...}`` in the stage's engine_args overrides it.
    """
    task = model_config.pooler_config.task if model_config.pooler_config is not None else None
    names = " ".join(model_config.architectures)
    if task is not None:
        return (task,)
    if "ForTokenClassification" in names or (model_config.convert_type == "none" and "Reward" in names):
        return ("token_classify",)
    if model_config.convert_type == "classify" or "Classification" in names:
        return ("classify", "token_classify")
    return ("token_embed",) if model_config.score_type == "late-interaction" else ("embed", "token_embed")


def stage_params(asked: Any) -> dict[str, Any]:
    """The parameters of one request. Raise InvalidRequestError that names a field which no stage takes."""
    params: dict[str, Any] = {}
    for name in asked.__struct_fields__:
        value = getattr(asked, name)
        if value is None or name in _OURS:
            continue
        if name == "extra_kwargs" and set(value) <= {_TYPES}:
            params.update(value)
        elif name in _CARRIED:
            params[name] = value
        else:
            raise InvalidRequestError(f"{name} can't be asked of a stage; leave it out")
    return params


def set_defaults(model_config: Any, document: Mapping[str, Any]) -> None:
    """Make a stage's ``default_sampling_params`` the defaults of vLLM's server. Raise ValueError."""
    defaults = {name: document[name] for name in _CARRIED if document.get(name) is not None}
    model_config.pooler_config = replace(model_config.pooler_config, **defaults)


def refusing_routes(tasks: tuple[str, ...]) -> list[Route]:
    """Routes of the tasks that the stage has not: they answer with the routes of those that it has."""
    if tasks == TASKS:
        paths = _OF_NUMBERS
        reason = "makes text and no embeddings or scores: ask /v1/chat/completions or /v1/completions"
    else:
        there = ["/v1/embeddings"] if "embed" in tasks else ["/classify"] if "classify" in tasks else []
        paths, reason = _OF_TOKENS, f"makes no text, it pools: ask {' or '.join([*there, '/pooling'])}"
    scores = "no stage scores texts by the probabilities of tokens; ask for log probabilities, or a stage that pools"
    reasons = {**dict.fromkeys(paths, f"this pipeline {reason}"), **dict.fromkeys(_NOT_HERE, scores)}
    return [Route(path, _refusing(each), methods=["POST"]) for path, each in reasons.items()]


def _refusing(reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(_: Request) -> Response:
        return error_response(InvalidRequestError(reason))

    return refuse


def score_beside_the_loop() -> None:
    """Have vLLM's server prepare the pairs of a request in a thread, and cut their texts at little cost.

    It cuts the texts of ``/score`` and ``/rerank`` to some tokens in the hub's loop, and tokenizes all of a text for
    that, several times. With each pair of embeddings it keeps the tokens of both texts, for nobody, and it compares all
    tokens of one text with all of the other at once.
    """
    serve_by_turns(_thread)
    _server._preprocessing = _preprocess  # noqa: SLF001
    _pairs.truncate_text_to_tokens = _cut_text
    _pairs.compute_maxsim_score = _compare_in_parts
    for kind in (_pairs.BiEncoderIOProcessor, _pairs.LateInteractionIOProcessor):
        kind._post_process = wrapped_once(kind._post_process, _without_tokens)  # noqa: SLF001


def compare_apart(state: State) -> None:
    """Have an application compare texts in the thread that prepares them: it takes seconds for two long ones."""
    server = getattr(state, "serving_scores", None)
    if server is not None:
        server._postprocessing_async = make_async(server._postprocessing, executor=_thread)  # noqa: SLF001


def _compare_in_parts(query: Any, document: Any) -> Any:
    return sum(_compares(part, document) for part in query.split(_COMPARED_AT_ONCE))


async def _preprocess(self: Any, processor: Any, ctx: Any) -> None:
    context, loop = copy_context(), asyncio.get_running_loop()
    made = await loop.run_in_executor(_thread, context.run, processor.get_request_factory_online, ctx)
    read: list[Any] = []
    # Of none, the server says what is wrong.
    for start in range(0, len(made) or 1, _AT_ONCE):
        some = SimpleNamespace(
            get_request_factory_online=partial(_same, made[start : start + _AT_ONCE]),
            render_async=processor.render_async,
        )
        await _prepares(self, some, ctx)
        read += ctx.engine_inputs
    ctx.engine_inputs = read


def _same(made: Sequence[Any], _: Any) -> Sequence[Any]:
    return made


def _without_tokens(pair: Any) -> Callable[..., Any]:
    """A method that compares embeddings in pairs: a query has one with each of thousands of documents."""

    def pair_without_tokens(self: Any, outputs: Sequence[PoolingRequestOutput], n_queries: int) -> Any:
        for output in outputs:
            output.prompt_token_ids = []
        return pair(self, outputs, n_queries)

    return pair_without_tokens


def _cut_text(text: str, tokenizer: Any, max_tokens: int) -> str:
    begin = beginning(tokenizer, text, max_tokens)
    with counted_once(begin):
        return str(_cuts(begin, tokenizer, max_tokens))
