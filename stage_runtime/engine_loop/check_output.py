"""Checks an engine's outputs, whose fields may hold anything, and splits them into chunks for the client. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any, Final

from omni_discovery.errors import REFUSALS
from omni_discovery.wire import (
    MAX_LOGPROBS,
    MAX_PARTIAL_IMAGES,
    MAX_TOOL_CALLS,
    FailureKind,
    ToolAnswer,
    ToolCall,
)
from stage_runtime.engine_loop.jobs import OutputChunk
from stage_runtime.engines.base import EngineOutput

#: How many prompt tokens one chunk has log probabilities of. Constant, so that another attempt cuts at the same places.
#: With ``MAX_LOGPROBS`` at each token, a chunk is about half a megabyte.
PROMPT_PLACES: Final = 1024
#: Longest text, in characters, that a stop reason may be.
MAX_STOP_REASON: Final = 256

#: Longest name, in characters, of a function that is called, and how many its arguments and the words beside may have.
MAX_CALLED_NAME: Final = 256
MAX_CALLED: Final = 1 << 19

#: Optional fields, and the type of those that are not None.
_IF_THERE: Final = {
    "image_png": bytes,
    "audio_wav": bytes,
    "pooled_npy": bytes,
    "video_mp4": bytes,
    "finish_reason": str,
    "handoff": Mapping,
    "handoff_piece": Mapping,
}


def flaw_of(output: Any) -> str:
    """Why an EngineOutput can't be used, in one line; empty if it can."""
    if not isinstance(output.text, str):
        return _wrong("text", output.text)
    for name, kind in _IF_THERE.items():
        value = getattr(output, name)
        if value is not None and not isinstance(value, kind):
            return _wrong(name, value)
    flaw = _flaw_of_ids("token_ids", output.token_ids) or _flaw_of_ids("prompt_token_ids", output.prompt_token_ids)
    flaw = flaw or _flaw_of_logprobs(output) or _flaw_of_partial(output)
    if flaw:
        return flaw
    has_more = output.usage or any(each is not None for each in (output.error, output.stop_reason, output.called))
    return _flaw_of_end(output) if has_more or not isinstance(output.usage, Mapping) else ""


def _flaw_of_ids(name: str, token_ids: Any) -> str:
    if not isinstance(token_ids, tuple | list):
        return _wrong(name, token_ids)
    for token_id in token_ids:
        if type(token_id) is not int:
            return _wrong(f"{name} with", token_id)
    return ""


def _flaw_of_partial(output: Any) -> str:
    number = output.partial_image
    if number is None:
        return ""
    if type(number) is not int or not 0 <= number < MAX_PARTIAL_IMAGES:
        return _wrong("partial_image", number)
    if output.image_png is None or output.finished:
        return "the engine gave partial_image without a picture, or with its end"
    return ""


def _flaw_of_end(output: Any) -> str:
    usage, error = output.usage, output.error
    if not isinstance(usage, Mapping):
        return _wrong("usage", usage)
    for name, count in usage.items():
        if not isinstance(name, str) or type(count) is not int:
            return _wrong(f"usage with {name!r} as", count)
    stop_reason = output.stop_reason
    is_word = isinstance(stop_reason, str) and len(stop_reason) <= MAX_STOP_REASON
    if not (stop_reason is None or is_word or (type(stop_reason) is int and stop_reason >= 0)):
        return _wrong("stop_reason", stop_reason)
    if not (output.called is None or _is_called(output.called)):
        return _wrong("called", output.called)
    if error is None:
        return ""
    is_error = isinstance(error, tuple) and len(error) in (2, 3)
    if not (is_error and isinstance(error[0], FailureKind) and isinstance(error[1], str)):
        return _wrong("error", error)
    if len(error) == 3 and not (type(error[2]) is int and error[2] in REFUSALS):
        return f"{_wrong('error with the status', error[2])}: there are {', '.join(map(str, REFUSALS))}"
    return ""


def _is_called(called: Any) -> bool:
    if not isinstance(called, ToolAnswer):
        return False
    content: Any = called.content
    calls: Any = called.calls
    if not (isinstance(content, str) and isinstance(calls, tuple) and len(calls) <= MAX_TOOL_CALLS):
        return False
    return all(map(_is_call, calls)) and len(content) + sum(len(each.arguments) for each in calls) <= MAX_CALLED


def _is_call(call: Any) -> bool:
    if not isinstance(call, ToolCall):
        return False
    name: Any = call.name
    arguments: Any = call.arguments
    return isinstance(name, str) and 0 < len(name) <= MAX_CALLED_NAME and isinstance(arguments, str)


def _flaw_of_logprobs(output: Any) -> str:
    logprobs, of_prompt = output.logprobs, output.prompt_logprobs
    if logprobs == () == of_prompt:
        return ""
    tokens = len(output.token_ids)
    if isinstance(logprobs, tuple | list) and logprobs and len(logprobs) != tokens:
        return f"the engine gave logprobs of {len(logprobs)} tokens where there are {tokens}"
    return _flaw_of_places("logprobs", logprobs) or _flaw_of_places("prompt_logprobs", of_prompt)


def _flaw_of_places(name: str, places: Any) -> str:
    if not isinstance(places, tuple | list):
        return _wrong(name, places)
    for place in places:
        if not isinstance(place, tuple | list) or not 1 <= len(place) <= MAX_LOGPROBS + 1:
            return _wrong(f"{name} with", place)
        for each in place:
            if not _is_logprob(each):
                return _wrong(f"{name} with", each)
    return ""


def _is_logprob(each: Any) -> bool:
    if not isinstance(each, tuple | list) or len(each) != 4:
        return False
    token_id, logprob, rank, text = each
    is_counted = type(token_id) is int and type(rank) is int and min(token_id, rank) >= 0
    # NaN can't be written as JSON.
    return is_counted and type(logprob) is float and not isnan(logprob) and isinstance(text, str)


def pieces_of(output: EngineOutput, modality: str) -> list[OutputChunk]:
    """An output as chunks for the client, in order: files, log probabilities of the prompt, then text and tokens."""
    pieces: list[OutputChunk] = []
    if output.image_png is not None:
        number = output.partial_image
        png = OutputChunk(output.key, "image", mime="image/png", attachment=output.image_png, partial_image=number)
        pieces.append(png)
    if output.audio_wav is not None:
        pieces.append(OutputChunk(output.key, "audio", mime="audio/wav", attachment=output.audio_wav))
    if output.pooled_npy is not None:
        pieces.append(OutputChunk(output.key, "embedding", mime="application/x-npy", attachment=output.pooled_npy))
    if output.video_mp4 is not None:
        pieces.append(OutputChunk(output.key, "video", mime="video/mp4", attachment=output.video_mp4))
    prompt_logprobs = tuple(output.prompt_logprobs)
    pieces += [
        OutputChunk(output.key, modality, prompt_logprobs=prompt_logprobs[start : start + PROMPT_PLACES])
        for start in range(0, len(prompt_logprobs), PROMPT_PLACES)
    ]
    if output.text or output.token_ids:
        token_ids, logprobs, prompt = tuple(output.token_ids), tuple(output.logprobs), tuple(output.prompt_token_ids)
        chunk = OutputChunk(output.key, modality, output.text, token_ids, logprobs=logprobs, prompt_token_ids=prompt)
        pieces.append(chunk)
    return pieces


def _wrong(name: str, value: object) -> str:
    return f"the engine gave {name} {type(value).__name__} {value!r:.100}"
