"""The messages of a chat, checked as far as a hub can: roles, kinds of parts, and where their files come from. Pure.

Pictures, sound and videos come with the request, or by links on the first stage's allow-list. They are neither fetched
nor decoded here: the first stage's replica gets them as they are, bounded by the size of the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from omni_discovery.data_urls import media_url, picture_url
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.containers import MAX_OBJECTS
from omni_discovery.inputs.media_links import MediaLinks, check_link, link_in

#: Pictures, sounds and videos of one request; their size together is bounded by the body's.
MAX_PICTURES: Final = 16
MAX_SOUNDS: Final = 16
MAX_VIDEOS: Final = 4
_MOST: Final = {"pictures": MAX_PICTURES, "sounds": MAX_SOUNDS, "videos": MAX_VIDEOS}
_KINDS: Final = {"image_url": "pictures", "input_audio": "sounds", "audio_url": "sounds", "video_url": "videos"}

NO_LINKS: Final = MediaLinks()
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
#: The formats of sound that OpenAI's clients may name, and others that decoders read.
_SOUND_FORMATS: Final = ("wav", "mp3", "flac", "opus", "ogg", "aac", "m4a", "webm", "pcm16")


def check_messages(messages: Sequence[Mapping[str, Any]], links: MediaLinks = NO_LINKS) -> None:
    """Raise InvalidRequestError, with the place, for content that no stage reads. Files are not decoded here.

    ``links``: what may be named by a link, for the first stage's replica to fetch.
    """
    if not messages:
        raise InvalidRequestError("'messages' is empty; send at least one user message")
    _check_number(messages)
    counts = dict.fromkeys(_MOST, 0)
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidRequestError(f"{where}.role must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}")
        if role == "assistant":
            _check_answer(where, message)
        if role == "tool" and not isinstance(message.get("tool_call_id"), str):
            raise InvalidRequestError(f"{where}: what a tool has said needs the 'tool_call_id' that it answers")
        # An answer that only called tools has no content.
        if not (role == "assistant" and message.get("content") is None and message.get("tool_calls")):
            _check_content(f"{where}.content", message.get("content"), counts, links)
    for what, most in _MOST.items():
        if counts[what] > most:
            raise InvalidRequestError(f"{counts[what]} {what} are in 'messages'; one request may show {most}")
    # A tool may have nothing to say.
    if messages[-1].get("role") != "tool" and not _has_content(messages[-1].get("content")):
        raise InvalidRequestError("the last message is empty; write a question into its 'content'")


def _check_number(messages: Sequence[Mapping[str, Any]]) -> None:
    # A model's chat template goes through them one by one.
    lists = (message.get(name) for message in messages for name in ("content", "tool_calls"))
    objects = len(messages) + sum(len(each) for each in lists if isinstance(each, list))
    if objects > MAX_OBJECTS:
        raise InvalidRequestError(
            f"'messages' has {objects} messages, parts and calls, and {MAX_OBJECTS} are the most: send less of the chat"
        )


def _check_answer(where: str, message: Mapping[str, Any]) -> None:
    if message.get("audio") is not None:
        raise InvalidRequestError(
            f"{where}.audio: the sound of earlier answers is not kept here; send its transcript as 'content'"
        )
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise InvalidRequestError(f"{where}.tool_calls must be a list of objects")


def _check_content(where: str, content: Any, counts: dict[str, int], links: MediaLinks) -> None:
    """Count the files in the content of a message. Raise InvalidRequestError for parts of an unknown kind."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of parts: text, {', '.join(_KINDS)}")
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        place = f"{where}[{position}]"
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InvalidRequestError(f"{place}: a part is one of text, {', '.join(_KINDS)}")
        try:
            _CHECKS[kind](part, part.get(kind), links)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{place}: {error}") from error
        counts[_KINDS[kind]] += 1


def _check_picture(part: Mapping[str, Any], shown: Any, links: MediaLinks) -> None:
    _refuse_unknown(part, {"type", "image_url"})
    if isinstance(shown, dict):
        _refuse_unknown(shown, {"url", "detail"})
        if shown.get("detail") not in (None, "auto"):
            raise InvalidRequestError("'detail' can't be chosen, the model decides; leave it out")
    if not _is_allowed_link("image_url", shown, links):
        picture_url(shown)


def _check_sound(part: Mapping[str, Any], heard: Any, links: MediaLinks) -> None:
    del links
    _refuse_unknown(part, {"type", "input_audio"})
    if not isinstance(heard, dict) or not isinstance(heard.get("data"), str) or not heard["data"]:
        raise InvalidRequestError('input_audio: give the sound itself: {"data": its file in base64, "format": "wav"}')
    _refuse_unknown(heard, {"data", "format"})
    if heard["data"].startswith(("http:", "https:", "file:", "data:")):
        raise InvalidRequestError("input_audio: 'data' is the file in base64, not a URL; nothing is fetched")
    if not isinstance(heard.get("format"), str) or heard["format"] not in _SOUND_FORMATS:
        raise InvalidRequestError(f"input_audio: 'format' is one of {', '.join(_SOUND_FORMATS)}")


def _check_audio_url(part: Mapping[str, Any], heard: Any, links: MediaLinks) -> None:
    _check_url(part, heard, "audio", links)


def _check_video_url(part: Mapping[str, Any], shown: Any, links: MediaLinks) -> None:
    _check_url(part, shown, "video", links)


def _check_url(part: Mapping[str, Any], value: Any, medium: str, links: MediaLinks) -> None:
    _refuse_unknown(part, {"type", f"{medium}_url"})
    if isinstance(value, dict):
        _refuse_unknown(value, {"url"})
    if not _is_allowed_link(f"{medium}_url", value, links):
        media_url(value, medium)


def _is_allowed_link(kind: str, value: Any, links: MediaLinks) -> bool:
    """Whether this is a link that the first stage's replica may fetch. Raise InvalidRequestError for any other link."""
    url = link_in(value) if links else None
    if url is None:
        return False
    try:
        check_link(url, links)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{kind}: {error}") from error
    return True


_CHECKS: Final[dict[str, Callable[[Mapping[str, Any], Any, MediaLinks], None]]] = {
    "image_url": _check_picture,
    "input_audio": _check_sound,
    "audio_url": _check_audio_url,
    "video_url": _check_video_url,
}


def _refuse_unknown(given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted({*given} - known)
    if unknown:
        raise InvalidRequestError(f"{unknown[0]!r} is not known here; leave it out")


def _has_content(content: Any) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(part["type"] != "text" or part["text"].strip() for part in content or ())
