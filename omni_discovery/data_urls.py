"""Pictures in messages, as ``data:`` URLs: they come with the request, and nothing is fetched. Pure."""

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


def picture_parts(messages: Any) -> list[Any]:
    """Return the values of the ``image_url`` parts of ``messages`` in order; none if that is no list of messages."""
    found: list[Any] = []
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list) else ()
        shown = (part for part in parts if isinstance(part, Mapping) and part.get("type") == "image_url")
        found += [part.get("image_url") for part in shown]
    return found


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


def read_picture(part: Any) -> tuple[str, bytes]:
    """Return the media type of a picture in an ``image_url`` part, such as ``image/png``, and its file's bytes.

    Raise InvalidRequestError if it is not base64 in a ``data:`` URL. The file itself is not checked.
    """
    head, _, body = picture_url(part).partition(",")
    try:
        file = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"image_url: the picture can't be read: {error}") from error
    return head.removeprefix("data:").partition(";")[0], file
