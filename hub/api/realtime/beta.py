"""Events as clients of OpenAI's beta know them: other names, and sessions and responses without levels. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: What a client of the beta sends to be one: a header, or in a browser a subprotocol.
BETA_HEADER: Final = "realtime=v1"
BETA_SUBPROTOCOL: Final = "openai-beta.realtime-v1"
_NAMES: Final[Mapping[str, str]] = {
    "response.output_text.": "response.text.",
    "response.output_audio.": "response.audio.",
    "response.output_audio_transcript.": "response.audio_transcript.",
    "conversation.item.added": "conversation.item.created",
}
#: It says once that there is an item.
_UNKNOWN: Final = "conversation.item.done"
_PARTS: Final[Mapping[str, str]] = {"output_text": "text", "output_audio": "audio"}


def as_beta(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same event for a client of the beta; None if it knows no such event."""
    name: str = event["type"]
    if name == _UNKNOWN:
        return None
    old = next((new + name.removeprefix(now) for now, new in _NAMES.items() if name.startswith(now)), name)
    changed: dict[str, Any] = {**event, "type": old}
    for field, change in (("session", _session), ("response", _response), ("item", _item)):
        if field in event:
            changed[field] = change(event[field])
    return changed


def _session(session: Mapping[str, Any]) -> dict[str, Any]:
    heard, said = session["audio"]["input"], session["audio"]["output"]
    kept = {name: session[name] for name in ("id", "object", "model", "expires_at", "instructions")}
    return {
        **kept,
        **{name: session[name] for name in ("tools", "tool_choice")},
        "modalities": _modalities(session["output_modalities"]),
        "voice": said["voice"],
        "speed": said["speed"],
        "input_audio_format": "pcm16",
        "output_audio_format": "pcm16",
        "input_audio_transcription": heard["transcription"],
        "turn_detection": heard["turn_detection"],
        "max_response_output_tokens": session["max_output_tokens"],
    }


def _response(response: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in response.items() if name not in {"audio", "output_modalities", "output"}}
    return {
        **kept,
        "output": [_item(item) for item in response["output"]],
        "modalities": _modalities(response["output_modalities"]),
        "voice": response["audio"]["output"]["voice"],
        "output_audio_format": "pcm16",
    }


def _modalities(now: list[str]) -> list[str]:
    """Sound has a transcript, which the beta calls text."""
    return ["text", "audio"] if "audio" in now else now


def _item(item: Mapping[str, Any]) -> dict[str, Any]:
    if "content" not in item:
        return dict(item)
    return {**item, "content": [{**part, "type": _PARTS.get(part["type"], part["type"])} for part in item["content"]]}
