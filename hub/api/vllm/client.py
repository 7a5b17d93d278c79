"""The engine client of vLLM's own server, whose engine is one stage with all of its replicas."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from vllm.engine.protocol import EngineClient
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor

from hub.api.exchange import current_exchange
from hub.api.vllm.bounds.body import asked_now
from hub.api.vllm.bounds.fan_out import announce, answer_size, in_flight, merged
from hub.api.vllm.bounds.pacing import TextPace
from hub.api.vllm.control import StageAdapters, StageControl
from hub.api.vllm.errors import OmniHttpError, as_vllm_error
from hub.api.vllm.forms import without_form
from hub.api.vllm.params import Logprobs, PromptLogprobs, answers_with_prompt, check_prompt_logprobs, params_of_choices
from hub.api.vllm.pictures import split
from hub.api.vllm.serving import ServingHub
from hub.request.outputs import logprobs_bytes
from omni_discovery.errors import InvalidRequestError, OmniError, RequestError, StageUnavailableError

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni
    from hub.request.outputs import OmniOutput

logger = logging.getLogger(__name__)

#: The tasks of a stage that makes tokens.
TASKS: Final = ("generate",)

_MAX_ID: Final = 128


class OmniEngineClient(ServingHub, StageControl, EngineClient):
    """The part of vLLM's engine protocol that its server needs; the rest raises NotImplementedError, a 501."""

    def __init__(self, omni: AsyncOmni, stage_id: int, vllm_config: Any, renderer: Any) -> None:
        super().__init__(omni, stage_id)
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer
        self.input_processor = InputProcessor(vllm_config, renderer)
        self.adapters = StageAdapters(omni, stage_id, takes=vllm_config.lora_config is not None)
        #: The only modality of requests that come this way.
        self._modality = omni.graph.deploy.stage(stage_id).final_output
        #: Whether calls are read by a parser that may get them in larger pieces than they came in.
        self.paces_calls = False
        self._numbers = itertools.count()
        #: The hub's ids of each request in flight, one for each of its ``n`` answers.
        self._running: dict[str, list[str]] = {}

    @property
    def dead_error(self) -> BaseException:
        """The error of requests while ``errored``."""
        return OmniHttpError(self._trouble() or StageUnavailableError(self._stage_id, "the hub is stopping"))

    def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        kv_hints: Any = None,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Start a request. Raise VLLMError for a wrong one at once, so that a stream gets a status, too.

        The session id and the state of reasoning are not passed on: they only save an engine work.
        """
        with vllm_errors():
            prompt, pictures = split(prompt)
            check_prompt(prompt, data_parallel_rank, kv_hints)
            self._omni.client_bounds.check_asked(None, priority)
            # First, because vLLM's own check below fills in fields.
            asked_of_all = asked_now()
            choices = params_of_choices(sampling_params, asked_of_all.prompts)
            announce(len(choices))
            token_ids = self._checked_tokens(request_id, prompt, sampling_params, TASKS, lora_request)
            check_prompt_logprobs(sampling_params, len(token_ids))
            answer = _Answer(
                request_id,
                prompt.get("prompt"),
                token_ids,
                sampling_params,
                is_paced=self.paces_calls and asked_of_all.has_tools,
                shows_prompt=asked_of_all.shows_prompts,
            )
        inputs = {"prompt_token_ids": answer.token_ids} | ({"images": pictures} if pictures else {})
        asked = [self.adapters.params(params, lora_request, prompt.get("cache_salt")) for params in choices]
        return self._outputs(answer, inputs, asked, {"priority": priority, "trace_headers": trace_headers})

    async def _outputs(
        self,
        answer: _Answer,
        inputs: Mapping[str, Any],
        choices: list[dict[int, Mapping[str, Any]]],
        more: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        with self._registered(answer.request_id, len(choices)) as ids, vllm_errors():
            each = zip(ids, choices, strict=True)
            streams = [self._stage_outputs(inner_id, inputs, params, more) for inner_id, params in each]
            async with aclosing(merged(streams)) as outputs:
                async for index, output in outputs:
                    made = answer.add(index, output)
                    if made is not None:
                        yield made

    def _checked_tokens(self, request_id: str, prompt: Any, params: Any, tasks: Any, lora_request: Any) -> list[int]:
        bare = without_form(params)
        checked = self.input_processor.process_inputs(request_id, prompt, bare, tasks, lora_request=lora_request)
        if not checked.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty, or not of tokens")
        return list(checked.prompt_token_ids)

    @contextmanager
    def _registered(self, request_id: str, count: int) -> Iterator[list[str]]:
        """The hub's ids of a request's answers, which ``abort`` finds while the block runs."""
        number = next(self._numbers)
        # Two requests of clients may have the same id; the hub's ids must differ.
        self._running[f"{request_id}#{number}"] = ids = [
            f"{request_id[:_MAX_ID]}-{number}-{index}" for index in range(count)
        ]
        try:
            yield ids
        finally:
            del self._running[f"{request_id}#{number}"]

    async def _stage_outputs(
        self, request_id: str, inputs: Mapping[str, Any], params: dict[int, Mapping[str, Any]], more: Mapping[str, Any]
    ) -> AsyncGenerator[OmniOutput, None]:
        exchange = current_exchange()
        outputs = self._omni.generate(
            inputs,
            request_id=request_id,
            label=exchange.label,
            key=exchange.key,
            client=exchange.client,
            modalities=[self._modality],
            params=params,
            **more,
        )
        try:
            async with in_flight(), aclosing(outputs):
                async for output in outputs:
                    exchange.note_output(output)
                    if output.stage_id == self._stage_id:
                        yield output
        except RequestError as error:
            exchange.note_error(error)
            raise

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests, by the ids that ``generate`` got. Does nothing for unknown ids."""
        wanted = {request_id} if isinstance(request_id, str) else set(request_id)
        running = list(self._running.items())
        try:
            await self._omni.abort([each for key, ids in running if key.rpartition("#")[0] in wanted for each in ids])
        except RequestError as error:
            # vLLM's server aborts in tasks that it does not look at again.
            logger.warning("request.abort_unconfirmed %s", error)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the hub can't serve; a stage without replicas is no reason to restart a hub."""
        if self.errored:
            raise EngineDeadError

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        """The tasks that vLLM's server may serve."""
        return TASKS

    async def get_tokenizer(self) -> Any:
        """The tokenizer of the stage's model, as servers before 0.32 ask for it."""
        return self.renderer.get_tokenizer()

    def encode(self, *_: Any, **__: Any) -> Any:
        """Raise NotImplementedError: the stage makes tokens; PoolingClient is for stages that pool."""
        raise NotImplementedError("this pipeline's stage makes no embeddings")

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Do nothing: no KV cache is kept for a request that was not admitted."""

    async def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter for requests to name. Raise VLLMError if a replica can't load it."""
        return await self.adapters.add(lora_request)

    async def reset_mm_cache(self) -> None:
        """Do nothing: the hub has no such cache."""

    async def _not_here(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("this hub speaks for many replicas, which have no such call")

    release_kv_cache_memory = reset_encoder_cache = pause_generation = resume_generation = _not_here


class _Answer:
    """The answers of one request so far, in the pieces that vLLM's server wants.

    Raise InvalidRequestError where the prompt is shown in each of them and they get too long by that.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: list[int],
        params: Any,
        *,
        is_paced: bool = False,
        shows_prompt: bool = False,
    ) -> None:
        self.request_id = request_id
        self.token_ids = token_ids
        self._prompt = prompt
        self._kind = params.output_kind
        self._with_text = params.detokenize
        self._answers: list[CompletionOutput] = [_completion(index) for index in range(params.n)]
        #: Their lists of token ids, by answer.
        self._token_ids: list[list[int]] = [[] for _ in self._answers]
        for so_far, token_ids in zip(self._answers, self._token_ids, strict=True):
            so_far.token_ids = token_ids
        self._logprobs = [Logprobs() for _ in self._answers] if params.logprobs is not None else None
        with_prompt = range(answers_with_prompt(params)) if params.prompt_logprobs is not None else ()
        #: By answer.
        self._of_prompt = {index: PromptLogprobs() for index in with_prompt}
        self._open = set(range(params.n))
        #: Their texts in pieces, until they have ended.
        self._texts: list[list[str]] = [[] for _ in self._answers]
        self._size = answer_size(is_streamed=self._kind == RequestOutputKind.DELTA)
        # A beam search is many requests, and shows its few answers once.
        if shows_prompt and self._kind == RequestOutputKind.FINAL_ONLY:
            self._count_prompt(params.n)
        #: Where calls are read out of their pieces: by answer, what waits to go on.
        self._paces = [TextPace() for _ in self._answers] if is_paced else []
        self._waiting: list[CompletionOutput | None] = [None] * params.n

    def add(self, index: int, output: OmniOutput) -> RequestOutput | None:
        """Add one output of an answer; return the output for vLLM's server, None if it waits for more.

        Raise EngineFailedError if all answers together are too long, or log probabilities are missing.
        """
        self._count(output)
        if output.finish_reason is not None:
            self._open.discard(index)
        if output.prompt_token_ids:
            self.token_ids = list(output.prompt_token_ids)
        if index in self._of_prompt and not self._of_prompt[index].add(output, len(self.token_ids)):
            return None
        piece = _completion(index, output.text if self._with_text else "", output.token_ids, output.finish_reason)
        piece.stop_reason = output.stop_reason
        logprobs = self._logprobs[index] if self._logprobs is not None else None
        if logprobs is not None:
            piece.logprobs, piece.cumulative_logprob = logprobs.add(output, self._kind), logprobs.total
        if self._kind == RequestOutputKind.DELTA:
            due = self._due(index, piece) if self._paces else piece
            return None if due is None else self._made(index, [due])
        so_far = self._answers[index]
        if logprobs is not None:
            so_far.logprobs, so_far.cumulative_logprob = logprobs.places, logprobs.total
        self._texts[index].append(piece.text)
        self._token_ids[index].extend(piece.token_ids)
        so_far.finish_reason, so_far.stop_reason = piece.finish_reason, piece.stop_reason
        if self._kind == RequestOutputKind.CUMULATIVE or piece.finish_reason is not None:
            so_far.text = "".join(self._texts[index])
        if self._kind == RequestOutputKind.CUMULATIVE:
            shown = so_far.logprobs[:] if so_far.logprobs is not None else None
            return self._made(index, [replace(so_far, token_ids=so_far.token_ids[:], logprobs=shown)])
        return None if self._open else self._made(index, self._answers)

    def _due(self, index: int, piece: CompletionOutput) -> CompletionOutput | None:
        """What goes on now, a new piece and what waited before it; None if it is to wait."""
        waiting = self._waiting[index]
        if waiting is not None:
            piece.text = waiting.text + piece.text
            piece.token_ids = [*waiting.token_ids, *piece.token_ids]
            if piece.logprobs is not None and waiting.logprobs is not None:
                piece.logprobs = [*waiting.logprobs, *piece.logprobs]
        characters = len(piece.text) - (len(waiting.text) if waiting is not None else 0)
        is_due = self._paces[index].is_due(characters, time.monotonic()) or piece.finish_reason is not None
        self._waiting[index] = None if is_due else piece
        return piece if is_due else None

    def _count(self, output: OmniOutput) -> None:
        """Count what is kept of an output: log probabilities of the prompt even if all else is passed on."""
        kept_bytes = logprobs_bytes(output.prompt_logprobs) if self._of_prompt else 0
        if self._kind != RequestOutputKind.DELTA:
            kept_bytes += len(output.text) + 8 * len(output.token_ids)
            kept_bytes += logprobs_bytes(output.logprobs) if self._logprobs is not None else 0
        self._size.add(kept_bytes)

    def _count_prompt(self, answers: int) -> None:
        shown_bytes = answers * (len(self._prompt or "") + 8 * len(self.token_ids))
        if not self._size.has_room(shown_bytes):
            raise InvalidRequestError(
                f"a prompt of {len(self.token_ids)} tokens that is shown in each of {answers} answers is too long for "
                "one answer: ask for fewer, or with 'stream': true"
            )
        self._size.add(shown_bytes)

    def _made(self, index: int, outputs: list[CompletionOutput]) -> RequestOutput:
        of_prompt = self._of_prompt.get(index) or self._of_prompt.get(0)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.token_ids,
            prompt_logprobs=of_prompt.shown(self._kind) if of_prompt is not None else None,
            outputs=outputs,
            finished=not self._open,
        )


def _completion(
    index: int, text: str = "", token_ids: Iterable[int] = (), finish_reason: str | None = None
) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=list(token_ids),
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=finish_reason,
    )


def check_prompt(prompt: Any, data_parallel_rank: Any, kv_hints: Any) -> None:
    """Raise InvalidRequestError for fields of a request that no stage takes."""
    if isinstance(prompt, dict) and prompt.get("type") == "multimodal":
        raise InvalidRequestError(
            "what the model would read of items can't be told to a stage; give pictures in messages"
        )
    if not isinstance(prompt, dict) or prompt.get("type", "token") != "token":
        raise InvalidRequestError("this pipeline reads text only")
    if data_parallel_rank is not None:
        raise InvalidRequestError("a data parallel rank can't be chosen: the hub picks the replica")
    if kv_hints is not None:
        raise InvalidRequestError("kv_hints can't be asked of a stage; leave it out")


@contextmanager
def vllm_errors() -> Iterator[None]:
    """Raise the hub's errors as vLLM's."""
    try:
        yield
    except OmniError as error:
        raise as_vllm_error(error) from error
