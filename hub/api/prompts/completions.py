"""POST /v1/completions: prompts in, text out, whole or as server-sent events, in the shapes of OpenAI's clients."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from starlette.responses import Response

from hub.api.generation.body import AnswerSize, decode_body, encode_body, encode_event
from hub.api.generation.fields import (
    MOST_ANSWERS,
    TextFields,
    check_neutral,
    logprobs_asked,
    stage_params,
    with_seed,
)
from hub.api.generation.running import Ask, Came, Generation, Route, event_of
from hub.api.generation.timings import shown_timings
from hub.api.generation.usage import Usage
from omni_discovery.errors import InvalidRequestError, OmniError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from hub.api.generation.resumption import Progress
    from hub.async_omni import AsyncOmni
    from hub.request.outputs import OmniOutput
    from omni_discovery.deploy.document import DeployConfig
    from omni_discovery.wire import TokenLogprobs

#: The parts of an answer that a client may have had.
_TEXT: Final = "t"
_END: Final = "e"
#: Token ids of one body: as many as fit into it with five digits each.
MOST_TOKEN_IDS: Final = 1 << 19
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class CompletionRequest(TextFields, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The body of POST /v1/completions. ``prompt`` is a text, its token ids, or a list of either."""

    # That numbers are not mixed with the others is checked in `prompts`.
    prompt: str | list[_TokenId | str | list[_TokenId]]
    logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None

    # Not served here: `check_neutral` checks that they ask for nothing.
    best_of: Any = None
    echo: Any = None
    suffix: Any = None

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        """The inputs of each prompt. Raise InvalidRequestError."""
        prompt = self.prompt
        # Of a long list, the interpreter's own loop goes through the types.
        is_one = isinstance(prompt, str) or set(map(type, prompt)) == {int}
        listed: list[Any] = [prompt] if is_one else list(prompt)
        if not listed or [] in listed or int in set(map(type, listed)):
            raise InvalidRequestError("'prompt' is a text, a list of token ids, or a list of either, and not empty")
        _check_answers(len(listed))
        token_ids = sum(len(each) for each in listed if isinstance(each, list))
        if token_ids > MOST_TOKEN_IDS:
            raise InvalidRequestError(f"'prompt' has {token_ids} token ids; {MOST_TOKEN_IDS} are the most")
        return [{"prompt": each} if isinstance(each, str) else {"prompt_token_ids": each} for each in listed]


#: The neutral values of each field, in addition to null.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {"best_of": (1,), "echo": (False,), "suffix": ("",)}

_decoder = msgspec.json.Decoder(CompletionRequest)


def parse_completion(body: bytes) -> CompletionRequest:
    """Read and check a request body. Raise InvalidRequestError that names the field."""
    request = decode_body(_decoder, body)
    check_neutral(request, NEUTRAL)
    _check_answers(len(request.prompts) * (request.n or 1))
    return request


def _check_answers(answers: int) -> None:
    if answers > MOST_ANSWERS:
        raise InvalidRequestError(f"{answers} answers were asked for, 'n' for each prompt; {MOST_ANSWERS} are the most")


class Completions:
    """The endpoint, over one AsyncOmni."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig) -> None:
        self._route = Route(omni, deploy, "cmpl")

    async def respond(self, request: Request) -> Response:
        """Answer one request."""
        return await self._route.answer(request, parse_completion, self._answer)

    async def _answer(self, asked: CompletionRequest, came: Came) -> Response:
        answers, modalities = asked.n or 1, ("text",)
        with self._route.omni.rejections.counted():
            more = logprobs_asked(self._route.deploy, modalities, asked.logprobs) if asked.logprobs is not None else {}
            params = stage_params(self._route.deploy, asked, asked.text_params(), more, answers * len(asked.prompts))
        asks = [Ask(each, with_seed(params, k), modalities) for each in asked.prompts for k in range(answers)]
        usage = Usage([each.stage_id for each in self._route.deploy.stages], answers)
        answer = _Completion(self._route.deploy, came, usage, asked)
        can_resume = bool(asked.stream) and asked.logprobs is None
        generation = self._route.generation(came, asked, asks, can_resume=can_resume)
        if not asked.stream:
            return await self._whole(answer, generation)
        return await self._route.streamed(generation, _events(answer, generation))

    async def _whole(self, answer: _Completion, generation: Generation) -> Response:
        texts: defaultdict[int, list[OmniOutput]] = defaultdict(list)
        size, received_at_s = AnswerSize("'stream': true"), 0.0
        try:
            async for number, output in generation:
                received_at_s = max(received_at_s, output.received_at_s)
                if answer.note(number, output):
                    shown = answer.shown(output)
                    size.add(shown.size_bytes)
                    texts[number].append(shown)
        finally:
            await generation.close()
        if generation.has_left:
            return generation.left_response
        body = await encode_body(partial(answer.whole, texts), size.size_bytes)
        return self._route.whole(body, received_at_s, answer.timings_s)


class _Completion:
    """What whole and streamed answers share."""

    def __init__(self, deploy: DeployConfig, came: Came, usage: Usage, asked: CompletionRequest) -> None:
        self.asked = asked
        self.usage = usage
        self.exchange = came.exchange
        self.timings_s: Mapping[str, float] = {}
        self.head = {
            "id": came.exchange.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": deploy.served_name,
        }
        #: The stage whose text is the answer: the first that puts one out.
        self._stage_id = next((each.stage_id for each in deploy.stages if each.final_output == "text"), None)
        #: How many characters of each answer were shown.
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def note(self, number: int, output: OmniOutput) -> bool:
        """Take in an output of the request with this number; return whether it is a part of the answer."""
        self.exchange.note_output(output)
        if output.is_summary:
            self.timings_s = output.timings_s
            return False
        self.usage.add(number, output)
        return output.stage_id == self._stage_id

    def shown(self, output: OmniOutput) -> OmniOutput:
        """An output without log probabilities if the client has not asked for them."""
        is_asked = self.asked.logprobs is not None
        return output if is_asked or not output.logprobs else msgspec.structs.replace(output, logprobs=())

    def whole(self, texts: Mapping[int, Sequence[OmniOutput]]) -> dict[str, Any]:
        """The body, of the outputs by the numbers of their requests."""
        choices = [self.choice(number, texts[number]) for number in sorted(texts)]
        return {**self.head, "choices": choices, "usage": self.usage.shown(), **self.timings()}

    def choice(self, number: int, outputs: Sequence[OmniOutput]) -> dict[str, Any]:
        """The choice of an answer, or a part of it."""
        offset = self._offsets[number]
        text = "".join(output.text for output in outputs)
        self._offsets[number] += len(text)
        places = [place for output in outputs for place in output.logprobs]
        return {
            "index": number,
            "text": text,
            "logprobs": _logprobs(places, self.asked.logprobs or 0, offset) if places else None,
            "finish_reason": next((each.finish_reason for each in outputs if each.finish_reason is not None), None),
        }

    def piece(self, number: int, output: OmniOutput, progress: Progress | None, *, counts_each: bool) -> dict[str, Any]:
        """The body of the event of an output, with the token counts so far if ``counts_each``."""
        counts = {"usage": self.usage.shown()} if counts_each else {}
        return {**self.head, "choices": [self.choice(number, [output])], **counts, **_reached(progress)}

    def timings(self) -> dict[str, Any]:
        """``timings_s``, if they are asked for."""
        return {"timings_s": shown_timings(self.timings_s)} if self.asked.include_timings else {}


async def _events(answer: _Completion, generation: Generation) -> AsyncGenerator[bytes, None]:
    options, progress = answer.asked.stream_options, generation.progress
    counts_each = options is not None and options.continuous_usage_stats
    try:
        async for number, came in generation.outputs():
            output = answer.shown(came)
            if not answer.note(number, output):
                continue
            if progress is not None:
                output = _not_had(progress, number, output)
            if output.text or output.logprobs or output.finish_reason is not None:
                yield await encode_event(
                    partial(answer.piece, number, output, progress, counts_each=counts_each), output.size_bytes
                )
        if progress is not None and not generation.has_left:
            progress.check_end()
        if (options is not None and options.include_usage) or answer.asked.include_timings:
            counts = {"usage": answer.usage.shown()} if options is not None and options.include_usage else {}
            yield event_of({**answer.head, "choices": [], **counts, **answer.timings(), **_reached(progress)})
    except OmniError as error:
        yield generation.event_of_error(error)
    yield b"data: [DONE]\n\n"


def _not_had(progress: Progress, number: int, output: OmniOutput) -> OmniOutput:
    """An output without what the client has had of it. Raise RetryConflictError."""
    if output.text:
        output = msgspec.structs.replace(output, text=progress.pass_text(number, _TEXT, output.text))
    if output.finish_reason is not None and not progress.pass_whole(number, _END, b"\1"):
        output = msgspec.structs.replace(output, finish_reason=None)
    return output


def _reached(progress: Progress | None) -> dict[str, str]:
    return {} if progress is None else {"resume": progress.shown}


def _logprobs(places: Sequence[TokenLogprobs], top: int, offset: int) -> dict[str, Any]:
    """Log probabilities as completions have them. ``offset``: the characters of the answer before these."""
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for place in places:
        drawn = place[0]
        shown["tokens"].append(drawn.text)
        shown["token_logprobs"].append(drawn.logprob)
        shown["top_logprobs"].append({each.text: each.logprob for each in place if each.rank <= top or each is drawn})
        shown["text_offset"].append(offset)
        offset += len(drawn.text)
    return shown
