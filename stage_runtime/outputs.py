"""What an engine says of a request, looked at before it is believed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any, Final

from omni_discovery.wire import MAX_LOGPROBS, FailureKind
from stage_runtime.engines.base import EngineOutput
from stage_runtime.jobs import Piece

#: What may be None, and else has to be this.
_IF_THERE: Final = {
    "image_png": bytes,
    "audio_wav": bytes,
    "finish_reason": str,
    "handoff": Mapping,
    "handoff_piece": Mapping,
}


def flaw_of(output: Any) -> str:
    """What keeps an EngineOutput from being used, whose fields may hold anything; empty if nothing does."""
    if not isinstance(output.text, str):
        return _wrong("text", output.text)
    if not isinstance(output.token_ids, tuple | list):
        return _wrong("token_ids", output.token_ids)
    for token_id in output.token_ids:
        if type(token_id) is not int:
            return _wrong("token_ids with", token_id)
    for name, kind in _IF_THERE.items():
        value = getattr(output, name)
        if value is not None and not isinstance(value, kind):
            return _wrong(name, value)
    if type(output.logprobs) is not tuple or output.logprobs:
        flaw = _flaw_of_logprobs(output)
        if flaw:
            return flaw
    has_more = output.usage or output.error is not None or not isinstance(output.usage, Mapping)
    return _flaw_of_end(output) if has_more else ""


def _flaw_of_end(output: Any) -> str:
    usage, error = output.usage, output.error
    if not isinstance(usage, Mapping):
        return _wrong("usage", usage)
    for name, count in usage.items():
        if not isinstance(name, str) or type(count) is not int:
            return _wrong(f"usage with {name!r} as", count)
    if error is None:
        return ""
    is_pair = isinstance(error, tuple) and len(error) == 2
    if not (is_pair and isinstance(error[0], FailureKind) and isinstance(error[1], str)):
        return _wrong("error", error)
    return ""


def _flaw_of_logprobs(output: Any) -> str:
    logprobs, tokens = output.logprobs, len(output.token_ids)
    if not isinstance(logprobs, tuple | list):
        return _wrong("logprobs", logprobs)
    if len(logprobs) != tokens:
        return f"the engine gave logprobs of {len(logprobs)} tokens where there are {tokens}"
    for place in logprobs:
        if not isinstance(place, tuple | list) or not 1 <= len(place) <= MAX_LOGPROBS + 1:
            return _wrong("logprobs with", place)
        for each in place:
            if not _is_logprob(each):
                return _wrong("logprobs with", each)
    return ""


def _is_logprob(each: Any) -> bool:
    if not isinstance(each, tuple | list) or len(each) != 4:
        return False
    token_id, logprob, rank, text = each
    is_counted = type(token_id) is int and type(rank) is int and min(token_id, rank) >= 0
    # What is no number at all can't be written as JSON.
    return is_counted and type(logprob) is float and not isnan(logprob) and isinstance(text, str)


def pieces_of(output: EngineOutput, modality: str) -> list[Piece]:
    """What the client is to be shown."""
    pieces: list[Piece] = []
    if output.image_png is not None:
        pieces.append(Piece(output.key, "image", mime="image/png", attachment=output.image_png))
    if output.audio_wav is not None:
        pieces.append(Piece(output.key, "audio", mime="audio/wav", attachment=output.audio_wav))
    if output.text or output.token_ids:
        token_ids, logprobs = tuple(output.token_ids), tuple(output.logprobs)
        pieces.append(Piece(output.key, modality, text=output.text, token_ids=token_ids, logprobs=logprobs))
    return pieces


def _wrong(name: str, value: object) -> str:
    return f"the engine gave {name} {type(value).__name__} {value!r:.100}"
