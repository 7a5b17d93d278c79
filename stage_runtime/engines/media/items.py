"""Takes the pictures, sound and videos out of a request's inputs, for a model that takes them beside its prompt.

They come with the request, in messages or beside a prompt; ``fetch`` has put files in place of links where it may.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from omni_discovery.data_urls import read_picture
from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.media.pictures import open_picture
from stage_runtime.engines.media.sounds import Sound, read_sound
from stage_runtime.engines.media.video_process import read_video_apart
from stage_runtime.engines.media.videos import MAX_VIDEO_PIXELS, Video

#: The inputs that hold items beside a prompt with placeholders for them, and what each of them is to the model.
BESIDE: Final[Mapping[str, str]] = {"images": "image", "audios": "audio", "videos": "video"}
#: The kinds of a model that sees, and does nothing else.
PICTURES: Final = frozenset(("image",))
#: The parts of messages, as OpenAI and vLLM have them.
_PARTS: Final[Mapping[str, str]] = {
    "image_url": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}
#: The longest head of a ``data:`` URL.
_HEAD_CHARS: Final = 64


@dataclass(slots=True)
class _Items:
    """What was found so far, by kind."""

    kinds: Collection[str]
    with_sound: bool
    image: list[Any] = field(default_factory=list)
    audio: list[Sound] = field(default_factory=list)
    video: list[Video] = field(default_factory=list)

    def take(self, part: str, kind: str, given: Any) -> None:
        if kind not in self.kinds:
            raise InvalidRequestError(f"{part}: this stage's model takes none")
        match kind:
            case "image":
                file = given if isinstance(given, bytes) else read_picture(given)[1]
                self.image.append(open_picture(file, self.image))
            case "audio":
                self.audio.append(read_sound(_file(part, given, "audio"), self.audio))
            case _:
                room = MAX_VIDEO_PIXELS - sum(video.decoded for video in self.video)
                file = _file(part, given, "video")
                self.video.append(read_video_apart(file, with_sound=self.with_sound, room_pixels=room))

    def found(self) -> dict[str, Any] | None:
        """As vLLM has them in ``multi_modal_data``."""
        audio = list(self.audio)
        if self.with_sound:
            if audio or not self.video:
                raise InvalidRequestError("use_audio_in_video: give videos with their sound, and no other sound")
            audio = [video.sound for video in self.video if video.sound is not None]
        made = {"image": self.image, "audio": audio, "video": [(video.frames, video.metadata) for video in self.video]}
        return {kind: items for kind, items in made.items() if items} or None


def has_items(inputs: Mapping[str, Any]) -> bool:
    """Whether there is anything to take out."""
    return any(inputs.get(name) for name in BESIDE) or any(
        isinstance(part, Mapping) and part.get("type") in _PARTS for part in _parts_of(inputs.get("messages"))
    )


def take_items(
    inputs: Mapping[str, Any], kinds: Collection[str], *, with_sound: bool = False
) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """The inputs with each ``image_url``, sound and video part of ``messages`` as ``{"type": "image"}``, and the items.

    A ``prompt``, or ``prompt_token_ids``, may have them beside it: lists ``images``, ``audios`` and ``videos``, as the
    bytes of their files or as ``data:`` URLs. The items are None without any. ``with_sound``: the sound of videos is
    taken too. Raise InvalidRequestError for what can't be read, is too much, or is of a kind that is not in ``kinds``.
    """
    messages = inputs.get("messages")
    items = _Items(kinds, with_sound)
    for name, kind in BESIDE.items():
        beside = inputs.get(name)
        if beside is None:
            continue
        if messages is not None or not isinstance(beside, list | tuple):
            raise InvalidRequestError(f"{name}: a list of files, beside a prompt; messages hold theirs in parts")
        for given in beside:
            items.take(name, kind, given)
    kept = {name: value for name, value in inputs.items() if name not in BESIDE}
    if isinstance(messages, list):
        kept["messages"] = [_without_items(message, items) for message in messages]
    found = items.found()
    return (inputs, None) if kept == inputs and found is None else (kept, found)


def _parts_of(messages: Any) -> list[Any]:
    found: list[Any] = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        found += content if isinstance(content, list) else []
    return found


def _without_items(message: Any, items: _Items) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        kind = _PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
        if kind is None:
            parts.append(part)
            continue
        items.take(part["type"], kind, part.get(part["type"]))
        parts.append({"type": kind})
    return {**message, "content": parts}


def _file(part: str, given: Any, kind: str) -> bytes:
    """The bytes of a sound or a video. Raise InvalidRequestError if they did not come with the request."""
    if isinstance(given, bytes):
        return given
    if part == "input_audio":
        return _decoded(part, given.get("data") if isinstance(given, Mapping) else None)
    url = given.get("url") if isinstance(given, Mapping) else given
    head, comma, body = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not comma or len(head) > _HEAD_CHARS or not head.startswith(f"data:{kind}/") or not head.endswith(";base64"):
        raise InvalidRequestError(
            f"{part}: give the {kind} itself, its file in base64, as data:{kind}/{_EXAMPLES[kind]};base64,...;"
            " nothing is fetched"
        )
    return _decoded(part, body)


_EXAMPLES: Final = {"audio": "wav", "video": "mp4"}


def _decoded(part: str, encoded: Any) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise InvalidRequestError(f"{part}: the file can't be read: {error}") from error
