"""Pictures in messages: ``data:`` URLs, so that they come with the request and nothing is ever fetched. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError

#: Of the pictures of a request together: small files may claim to be pictures of any size, and are held unpacked.
MAX_PIXELS: Final = 64 << 20

_BEGINS: Final = "data:image/"
_ENCODED: Final = ";base64,"
#: A type and its parameters are no longer than that.
_HEAD_CHARS: Final = 64


def picture_parts(messages: Any) -> list[Any]:
    """What the ``image_url`` parts of ``messages`` hold, in order; nothing of what is no list of messages."""
    found: list[Any] = []
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list) else ()
        shown = (part for part in parts if isinstance(part, Mapping) and part.get("type") == "image_url")
        found += [part.get("image_url") for part in shown]
    return found


def picture_url(given: Any) -> str:
    """The URL in an ``image_url`` part, read no further than its head. Raise InvalidRequestError if it is no picture.

    ``given`` is ``{"url": "data:image/png;base64,..."}`` or that URL.
    """
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url.startswith(_BEGINS) or _ENCODED not in url[:_HEAD_CHARS]:
        raise InvalidRequestError(
            "image_url: give the picture itself, its file in base64, as data:image/png;base64,...; nothing is fetched"
        )
    return url


def read_picture(given: Any) -> tuple[str, bytes]:
    """The type of a picture in an ``image_url`` part, such as ``image/png``, and its file as the client sent it.

    Raise InvalidRequestError if it is none in a ``data:`` URL. Whether the file can be shown is not looked at.
    """
    head, _, body = picture_url(given).partition(",")
    try:
        file = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"image_url: the picture can't be read: {error}") from error
    return head.removeprefix("data:").partition(";")[0], file
