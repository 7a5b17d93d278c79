"""Pictures, sound and videos in messages, as ``data:`` URLs: they come with the request, nothing is fetched. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError

#: The pixels of all pictures of a request: pictures are held unpacked, and a small file may unpack to any size.
MAX_PIXELS: Final = 64 << 20
#: The formats of pictures that are opened at all, by Pillow's names: it has dozens, and clients need no others.
PICTURE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")

_BEGINS: Final = "data:image/"
_ENCODED: Final = ";base64,"
#: The type and its parameters have to end within so many characters.
_HEAD_CHARS: Final = 64


#: The parts of messages that hold a file, by their types.
FILE_PARTS: Final = {"image_url": "pictures", "input_audio": "sound", "audio_url": "sound", "video_url": "videos"}


def file_parts(messages: Any) -> list[Mapping[str, Any]]:
    """Return the parts of ``messages`` that hold a file, in order; none if that is no list of messages."""
    found: list[Mapping[str, Any]] = []
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list) else ()
        found += [part for part in parts if isinstance(part, Mapping) and part.get("type") in tuple(FILE_PARTS)]
    return found


def picture_parts(messages: Any) -> list[Any]:
    """Return the values of the ``image_url`` parts of ``messages`` in order; none if that is no list of messages."""
    return [part.get("image_url") for part in file_parts(messages) if part["type"] == "image_url"]


def picture_url(part: Any) -> str:
    """Return the URL of an ``image_url`` part, after checking its head. Raise InvalidRequestError if it is no picture.

    ``part`` is ``{"url": "data:image/png;base64,..."}`` or that URL.
    """
    url = part.get("url") if isinstance(part, Mapping) else part
    if not isinstance(url, str) or not url.startswith(_BEGINS) or _ENCODED not in url[:_HEAD_CHARS]:
        raise InvalidRequestError(
            "image_url: give the picture itself, its file in base64, as data:image/png;base64,...; nothing is fetched"
        )
    return url


def media_url(part: Any, medium: str) -> str:
    """Return the URL of an ``audio_url`` or ``video_url`` part, after checking its head; ``medium`` is audio or video.

    ``part`` is ``{"url": "data:audio/wav;base64,..."}`` or that URL. Raise InvalidRequestError for any other.
    """
    url = part.get("url") if isinstance(part, Mapping) else part
    if not isinstance(url, str) or not url.startswith(f"data:{medium}/") or _ENCODED not in url[:_HEAD_CHARS]:
        example = {"audio": "wav", "video": "mp4"}[medium]
        raise InvalidRequestError(
            f"{medium}_url: give the {medium} itself, its file in base64, as data:{medium}/{example};base64,...; "
            "nothing is fetched"
        )
    return url


def read_picture(part: Any) -> tuple[str, bytes]:
    """Return the media type of a picture in an ``image_url`` part, such as ``image/png``, and its file's bytes.

    Raise InvalidRequestError if it is not base64 in a ``data:`` URL. The file itself is not checked.
    """
    return _read_url("image_url", "picture", picture_url(part))


def read_file(part: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the media type of the file in one of ``file_parts``, and its bytes. Raise InvalidRequestError."""
    kind = part["type"]
    value = part.get(kind)
    match kind:
        case "image_url":
            return read_picture(value)
        case "input_audio":
            heard = value if isinstance(value, Mapping) else {}
            return f"audio/{heard.get('format')}", _decoded(kind, "sound", str(heard.get("data", "")))
    medium = kind.removesuffix("_url")
    return _read_url(kind, medium, media_url(value, medium))


def _read_url(kind: str, what: str, url: str) -> tuple[str, bytes]:
    head, _, body = url.partition(",")
    return head.removeprefix("data:").partition(";")[0], _decoded(kind, what, body)


def _decoded(kind: str, what: str, body: str) -> bytes:
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{kind}: the {what} can't be read: {error}") from error
