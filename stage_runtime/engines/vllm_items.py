"""Pictures in a client's messages, for a model that looks at them. They come with the request: nothing is fetched."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError
from omni_discovery.picture_urls import read_picture

#: A small file may claim to be a picture of any size.
_MAX_PIXELS: Final = 64 << 20


def take_pictures(inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """The inputs with each ``image_url`` part of ``messages`` as ``{"type": "image"}``, and the pictures as items.

    None if there are none. Raise InvalidRequestError for what is no picture in a ``data:`` URL.
    """
    messages = inputs.get("messages")
    if not isinstance(messages, list):
        return inputs, None
    pictures: list[Any] = []
    kept = [_without_pictures(message, pictures) for message in messages]
    return ({**inputs, "messages": kept}, {"image": pictures}) if pictures else (inputs, None)


def _without_pictures(message: Any, pictures: list[Any]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            pictures.append(_picture(part.get("image_url")))
            parts.append({"type": "image"})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _picture(given: Any) -> Any:
    from PIL import Image

    _, file = read_picture(given)
    try:
        picture = Image.open(io.BytesIO(file))
        is_small = picture.width * picture.height <= _MAX_PIXELS
        pixels = picture.convert("RGB") if is_small else None
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequestError(f"image_url: the picture can't be read: {error}") from error
    if pixels is None:
        raise InvalidRequestError(f"image_url: a picture of {picture.width} x {picture.height} is too large")
    return pixels
