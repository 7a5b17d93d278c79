"""What a message of a chat may hold: text, and pictures that come with it. Checked here, carried as it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from omni_discovery.data_urls import picture_url
from omni_discovery.errors import InvalidRequestError

#: How many pictures one request may show; how large they may be together, the longest body says.
MAX_PICTURES: Final = 16

#: What an image_url may say.
_KNOWN: Final = frozenset({"url", "detail"})


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidRequestError, with its place, for what no stage would read. Pictures are not decoded here."""
    pictures = 0
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if message.get("role") not in {"system", "developer", "user", "assistant"}:
            raise InvalidRequestError(f"{where}.role must be system, developer, user or assistant")
        pictures += _check_content(f"{where}.content", message.get("content"))
    if pictures > MAX_PICTURES:
        raise InvalidRequestError(f"{pictures} pictures are in 'messages'; one request may show {MAX_PICTURES}")
    if not _says_something(messages[-1]["content"]):
        raise InvalidRequestError("the last message is empty; write a question into its 'content'")


def _check_content(where: str, content: Any) -> int:
    """How many pictures are in the content of a message. Raise InvalidRequestError if it is not text and pictures."""
    if isinstance(content, str):
        return 0
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of text and image_url parts")
    return sum(_check_part(f"{where}[{position}]", part) for position, part in enumerate(content))


def _check_part(where: str, part: Any) -> bool:
    """Whether it is a picture; if not, it is text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return False
    if kind != "image_url":
        raise InvalidRequestError(f"{where}: this pipeline reads text and image_url parts only")
    shown = part.get("image_url")
    unknown = sorted({*part} - {"type", "image_url"}) or (sorted({*shown} - _KNOWN) if isinstance(shown, dict) else [])
    if unknown:
        raise InvalidRequestError(f"{where}: {unknown[0]!r} is not known here; leave it out")
    if isinstance(shown, dict) and shown.get("detail") not in (None, "auto"):
        raise InvalidRequestError(f"{where}: 'detail' can't be chosen, the model decides; leave it out")
    try:
        picture_url(shown)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error}") from error
    return True


def _says_something(content: str | list[dict[str, Any]]) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(part["type"] == "image_url" or part["text"].strip() for part in content)
