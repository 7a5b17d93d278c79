"""What clients of vLLM-Omni's server may ask and a hub can't do: refused, with the reason, before that server sees it.

Some of it the server would do by itself, at a price: it fetches any address that a request names, and keeps uploads.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

_ONE_HUB: Final = "it would be known to this hub alone, and every hub has to answer alike"
_OPERATORS: Final = "replicas are controlled by their operators (--admin-api), not by clients of the API"
_NO_SOUND: Final = "no stage of this pipeline reads sound or pictures piece by piece"
_NO_VIDEO: Final = "no stage here makes videos"
#: By the begin of the path; the longest that fits counts. An empty reason: it is served.
_PATHS: Final[Mapping[str, str]] = {
    "/v1/videos": _NO_VIDEO,
    "/v1/realtime": _NO_SOUND,
    "/v1/duplex": _NO_SOUND,
    "/v1/video/": _NO_SOUND,
    "/v1/images/edits": "no stage of this pipeline takes pictures; /v1/images/generations draws from text",
    "/v1/audio/generate": "no stage here makes sound by diffusion; /v1/audio/speech says a text",
    "/v1/omni/": _OPERATORS,
    "/start_profile": _OPERATORS,
    "/stop_profile": _OPERATORS,
}
#: Fields of a request, or of a part of one, that name a file or an address.
_FILES: Final = (
    *("ref_audio", "speaker_embedding", "image", "images", "input_image", "reference_image", "reference_images"),
    *("image_url", "input_audio", "audio_url", "video_url", "audio", "video", "file", "image_embeds", "audio_embeds"),
)
#: Of those, what is an option of the answer at the top of a request.
_OPTIONS: Final = frozenset({"audio"})


def refusal_of_path(method: str, path: str) -> str:
    """Why nothing is served at a path; empty if it may be."""
    if path.startswith("/v1/audio/voices") and method != "GET":
        return f"a voice can't be kept here: {_ONE_HUB}"
    fitting = [begin for begin in _PATHS if path.startswith(begin)]
    return _PATHS[max(fitting, key=len)] if fitting else ""


def refusal_of_body(body: bytes) -> str:
    """Why a request in JSON can't be served, by what it brings along; empty if nothing of it is a file or a link."""
    try:
        asked = msgspec.json.decode(body.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The server says what is wrong with it.
        return ""
    if not isinstance(asked, dict):
        return ""
    for name in _brought(asked):
        return f"{name}: no stage of this pipeline takes sound, pictures or other files; send text"
    return ""


def _brought(asked: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name in _FILES if name not in _OPTIONS and asked.get(name) is not None)
    for item in _mappings(asked.get("items")):
        yield from (name for name in _FILES if item.get(name) is not None)
    for message in _mappings(asked.get("messages")):
        for part in _mappings(message.get("content")):
            kind = part.get("type", "text")
            yield from (name for name in _FILES if part.get(name) is not None)
            if kind not in ("text", "input_text", "refusal", "output_text", "thinking"):
                yield str(kind)


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    yield from (each for each in (value if isinstance(value, list) else ()) if isinstance(each, dict))
