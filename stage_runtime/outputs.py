"""What an engine says of a request, looked at before it is believed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_discovery.wire import FailureKind
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


def pieces_of(output: EngineOutput, modality: str) -> list[Piece]:
    """What the client is to be shown."""
    pieces: list[Piece] = []
    if output.image_png is not None:
        pieces.append(Piece(output.key, "image", mime="image/png", attachment=output.image_png))
    if output.audio_wav is not None:
        pieces.append(Piece(output.key, "audio", mime="audio/wav", attachment=output.audio_wav))
    if output.text or output.token_ids:
        pieces.append(Piece(output.key, modality, text=output.text, token_ids=tuple(output.token_ids)))
    return pieces


def _wrong(name: str, value: object) -> str:
    return f"the engine gave {name} {type(value).__name__} {value!r:.100}"
