"""Whole answers of vLLM's server with log probabilities, or lists of tokens: made and written as JSON in turns.

That server makes an object of each log probability, and JSON of all of them, in one turn of the hub's loop: twenty
seconds for the most that an answer may have. Here it does so for the first token of each answer only; the others follow
when the answer is sent, some at a time, in a thread, and no more objects are kept than of those.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import JSONResponse

from hub.api.vllm.bounds.wrapping import wrapped_once

if TYPE_CHECKING:
    from starlette.datastructures import State
    from starlette.routing import BaseRoute
    from starlette.types import Receive, Scope, Send

#: Values that are made and written at once: some 20 ms of log probabilities.
AT_ONCE: Final = 1024
#: Fewer are written in the loop, in a turn of their own: to ask the thread takes longer.
_FEW: Final = 64
#: A single one, which has the answers' parts as they are asked for: two would take the loop's time from it twice as
#: often.
_thread: Final = ThreadPoolExecutor(1, "WholeAnswers")

#: The servers, as the state of their application names them.
_SERVERS: Final = (
    *("openai_serving_chat", "openai_serving_chat_batch", "openai_serving_completion"),
    *("openai_serving_responses", "serving_tokens"),
)
#: Their routes, and what is answered there.
_PATHS: Final = (
    *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/inference/v1/generate"),
    *("/v1/responses", "/v1/responses/{response_id}"),
)
_ANSWERS: Final = (
    *("ChatCompletionResponse", "CompletionResponse", "ResponsesResponse"),
    *("GenerateResponse", "GenerateResponseBase"),
)
#: What may be long in an answer, or in one of its choices.
_LONG: Final = ("logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids")

_is_whole: Final[ContextVar[bool]] = ContextVar("is_whole", default=False)


def write_in_turns(routes: Iterable[BaseRoute], state: State) -> None:
    """Have the servers of an application make and write their whole answers as above. Idempotent."""
    for server in filter(None, (getattr(state, name, None) for name in _SERVERS)):
        _wrap_methods(type(server))
    for route in routes:
        if getattr(route, "path", "") in _PATHS:
            module: Any = sys.modules[route.endpoint.__module__]  # type: ignore[attr-defined]
            module.JSONResponse = InTurns
            for kind in filter(None, (getattr(module, name, None) for name in _ANSWERS)):
                kind.model_dump = wrapped_once(kind.model_dump, _without_long)


def _wrap_methods(kind: Any) -> None:
    """Wrap those that make whole answers, and those that make log probabilities, of whole answers and of pieces."""
    if hasattr(kind, "chat_completion_full_generator"):
        kind.chat_completion_full_generator = wrapped_once(kind.chat_completion_full_generator, _noted)
        kind._create_chat_logprobs = wrapped_once(kind._create_chat_logprobs, _made_later)  # noqa: SLF001
    if hasattr(kind, "chat_completion_full_generator_batch"):
        kind.chat_completion_full_generator_batch = wrapped_once(kind.chat_completion_full_generator_batch, _noted)
    if hasattr(kind, "request_output_to_completion_response"):
        kind.request_output_to_completion_response = wrapped_once(kind.request_output_to_completion_response, _noted)
        kind._create_completion_logprobs = wrapped_once(kind._create_completion_logprobs, _made_later)  # noqa: SLF001
    if hasattr(kind, "responses_full_generator"):
        kind.responses_full_generator = wrapped_once(kind.responses_full_generator, _noted)
        kind._create_response_logprobs = wrapped_once(kind._create_response_logprobs, _made_later)  # noqa: SLF001
    if hasattr(kind, "serve_tokens_full_generator"):
        kind.serve_tokens_full_generator = wrapped_once(kind.serve_tokens_full_generator, _noted)
        kind._create_tokens_logprobs = wrapped_once(kind._create_tokens_logprobs, _made_later)  # noqa: SLF001
    # Not in each version.
    if hasattr(kind, "_create_text_logprobs"):
        kind._create_text_logprobs = wrapped_once(kind._create_text_logprobs, _made_later)  # noqa: SLF001


def _noted(make: Any) -> Callable[..., Any]:
    """A method that makes a whole answer, which the methods below find noted. A stream uses one of them at its end."""

    def is_streamed(given: tuple[Any, ...], more: Mapping[str, Any]) -> bool:
        return any(getattr(each, "stream", False) is True for each in (*given, *more.values()))

    async def make_noted(self: Any, *given: Any, **more: Any) -> Any:
        was = _is_whole.set(not is_streamed(given, more))
        try:
            return await make(self, *given, **more)
        finally:
            _is_whole.reset(was)

    def make_at_once(self: Any, *given: Any, **more: Any) -> Any:
        was = _is_whole.set(not is_streamed(given, more))
        try:
            return make(self, *given, **more)
        finally:
            _is_whole.reset(was)

    return make_noted if iscoroutinefunction(make) else make_at_once


def _made_later(make: Any) -> Callable[..., Any]:
    """A method that makes log probabilities: in a whole answer those of the first token, which remember the others."""

    def make_first(self: Any, *given: Any, **asked: Any) -> Any:
        # Of these methods one has the most that it is to show by the name that the others have for the values.
        name = "logprobs" if "logprobs" in asked else "top_logprobs"
        if given or not _is_whole.get() or not asked["token_ids"] or asked[name] is None:
            return make(self, *given, **asked)
        likely = _Likely(lambda more: make(self, **{**asked, **more}), asked["token_ids"], asked[name], name)
        first = likely.part(0, 1)
        (first[0] if isinstance(first, list) else first).__dict__["omni_likely"] = likely
        return first

    return make_first


class _Likely:
    """The log probabilities of one answer, which the server makes in parts."""

    def __init__(self, make: Callable[[dict[str, Any]], Any], token_ids: Any, places: Any, name: str) -> None:
        self._make, self._token_ids, self._places, self._name = make, token_ids, places, name

    def part(self, start: int, end: int, offset: int = 0) -> Any:
        """Those of some tokens. ``offset``: of their text in that of the answer, for completions."""
        asked = {"token_ids": self._token_ids[start:end], self._name: self._places[start:end]}
        return self._make({**asked, "initial_text_offset": offset} if offset else asked)

    async def written(self, turn: _PartTurn) -> msgspec.Raw:
        """All of them as JSON: a list, or an object of lists."""
        # Before the first token of a prompt is nothing.
        each = len(self._places[-1] or ()) + 1
        step = max(1, AT_ONCE // each)
        lists: dict[str, list[bytes]] = {}
        is_list, offset = False, 0
        for start in range(0, len(self._token_ids), step):
            end = min(start + step, len(self._token_ids))
            is_list, written, offset = await turn(lambda: self._written_part(start, end, offset), each * (end - start))  # noqa: B023 - it is awaited here
            for name, values in written.items():
                lists.setdefault(name, []).append(values)
        parts = {name: b"[%b]" % b",".join(values) for name, values in lists.items()}
        if is_list:
            return msgspec.Raw(parts[""])
        return msgspec.Raw(msgspec.json.encode({name: msgspec.Raw(values) for name, values in parts.items()}))

    def _written_part(self, start: int, end: int, offset: int) -> tuple[bool, dict[str, bytes], int]:
        made = self.part(start, end, offset)
        if isinstance(made, list):
            return True, {"": _listed(made)}, 0
        fields = made.__dict__
        if "text_offset" in fields:
            offset = fields["text_offset"][-1] + len(fields["tokens"][-1])
        return False, {name: _listed(values) for name, values in fields.items()}, offset


class _Values(list[Any]):
    """Tokens, or what was likely in the places of a prompt."""

    async def written(self, turn: _PartTurn) -> msgspec.Raw:
        """All of them as JSON."""
        # In the places of a prompt are some each, and in its first none.
        each = len(self[-1]) if self and isinstance(self[-1], dict) else 1
        step = max(1, 8 * AT_ONCE // (each or 1))
        parts = [
            await turn(lambda: _listed(self[start : start + step]), each * min(step, len(self) - start))  # noqa: B023 - it is awaited here
            for start in range(0, len(self), step)
        ]
        return msgspec.Raw(b"[%b]" % b",".join(parts))


def _listed(values: list[Any]) -> bytes:
    """The values as JSON, without the brackets."""
    return msgspec.json.encode(values, enc_hook=_plain)[1:-1]


def _plain(model: Any) -> dict[str, Any]:
    """The fields of one of the server's models of log probabilities: all of them are written by their names."""
    fields: dict[str, Any] = model.__dict__
    return fields


def _without_long(dump: Any) -> Callable[..., Any]:
    """The ``model_dump`` of an answer that leaves what is long in it as it is."""

    def model_dump(self: Any, *given: Any, **asked: Any) -> Any:
        models = list(_models(self))
        long = [
            (place, name, value)
            for place, model in enumerate(models)
            for name in _LONG
            if (value := model.__dict__.get(name))
        ]
        try:
            for place, name, _ in long:
                models[place].__dict__[name] = None
            dumped = dump(self, *given, **asked)
        finally:
            for place, name, value in long:
                models[place].__dict__[name] = value
        shown = list(_models(dumped))
        for place, name, value in long:
            shown[place][name] = _to_write(value)
        return _WholeAnswer(dumped) if long else dumped

    return model_dump


def _to_write(value: Any) -> Any:
    first = value[0] if isinstance(value, list) else value
    likely = getattr(first, "__dict__", {}).get("omni_likely")
    return likely or (_Values(value) if isinstance(value, list) else value)


def _models(answer: Any) -> Iterator[Any]:
    """An answer, and its parts that may have what is long; the same of one that is dumped."""
    yield answer
    yield from _field(answer, "choices")
    for item in _field(answer, "output"):
        # Of reasoning and calls there is no such list.
        yield from (part for part in _field(item, "content") if not isinstance(part, str))


def _field(model: Any, name: str) -> Iterable[Any]:
    found = model.get(name) if isinstance(model, dict) else getattr(model, name, None)
    return found if isinstance(found, list) else ()


class _WholeAnswer(dict[str, Any]):
    """A whole answer that is dumped, but for what is long in it."""

    async def written(self, turn: _PartTurn) -> bytes:
        for model in list(_models(self)):
            for name in _LONG:
                if isinstance(value := model.get(name), _Likely | _Values):
                    model[name] = await value.written(turn)
        written: bytes = await turn(lambda: msgspec.json.encode(self), AT_ONCE)
        return written


class _GoneError(Exception):
    """The client has gone, and nobody waits for the answer."""


class _PartTurn:
    """Calls a function beside the loop, or in the loop if it has few values to write. Raise _GoneError."""

    def __init__(self, listening: asyncio.Task[None]) -> None:
        self._listening = listening

    async def __call__(self, call: Callable[[], Any], values: int) -> Any:
        if self._listening.done():
            raise _GoneError
        if values > _FEW:
            return await asyncio.get_running_loop().run_in_executor(_thread, call)
        await asyncio.sleep(0)
        return call()


class InTurns(JSONResponse):
    """JSON as ever, but for an answer with what is long: that is written once it is to be sent."""

    def __init__(self, content: Any, *given: Any, **more: Any) -> None:
        self._answer = content if isinstance(content, _WholeAnswer) else None
        super().__init__(None if self._answer is not None else content, *given, **more)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if self._answer is not None:
            listening = asyncio.create_task(_listen(receive))
            try:
                self.body = await self._answer.written(_PartTurn(listening))
            except _GoneError:
                return
            finally:
                listening.cancel()
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


async def _listen(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
