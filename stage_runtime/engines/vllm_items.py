"""Pictures in a client's messages, for a model that looks at them. They come with the request: nothing is fetched."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from omni_discovery.data_urls import MAX_PIXELS, read_picture
from omni_discovery.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

#: What Pillow gives to other programs to read, or can't read.
_NOT_READ: Final = frozenset({"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG"})
#: Beside a prompt that has left places for them: pictures as their files.
IMAGES: Final = "images"


def take_pictures(inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """The inputs with each ``image_url`` part of ``messages`` as ``{"type": "image"}``, and the pictures as items.

    A ``prompt``, or ``prompt_token_ids``, may have them in a list ``images`` beside it, as the bytes of their files or
    as ``data:`` URLs. None if there are none. Raise InvalidRequestError for what is no picture.
    """
    messages, beside = inputs.get("messages"), inputs.get(IMAGES)
    pictures: list[Image] = []
    if beside is not None:
        if messages is not None or not isinstance(beside, list | tuple):
            raise InvalidRequestError(f"{IMAGES}: a list of pictures, beside a prompt; messages hold theirs in parts")
        kept = {name: value for name, value in inputs.items() if name != IMAGES}
        for each in beside:
            pictures.append(_picture(each, pictures))
        return kept, ({"image": pictures} if beside else None)
    if not isinstance(messages, list):
        return inputs, None
    told = [_without_pictures(message, pictures) for message in messages]
    return ({**inputs, "messages": told}, {"image": pictures}) if pictures else (inputs, None)


def _without_pictures(message: Any, pictures: list[Image]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            pictures.append(_picture(part.get("image_url"), pictures))
            parts.append({"type": "image"})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _picture(given: Any, others: Sequence[Image]) -> Image:
    from PIL import Image

    file = given if isinstance(given, bytes) else read_picture(given)[1]
    Image.init()
    try:
        picture = Image.open(io.BytesIO(file), formats=[name for name in Image.ID if name not in _NOT_READ])
        is_small = sum(each.width * each.height for each in (*others, picture)) <= MAX_PIXELS
        pixels = _as_seen(picture) if is_small else None
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequestError(f"image_url: the picture can't be read: {error}") from error
    if pixels is None:
        behind = f" behind {len(others)} others" if others else ""
        size = f"{picture.width} x {picture.height}"
        raise InvalidRequestError(f"image_url: a picture of {size}{behind} is too large; show fewer or smaller ones")
    return pixels


def _as_seen(picture: Image) -> Image:
    """Upright, and on white where it is transparent: as vLLM's own server shows pictures to models."""
    from PIL import Image, ImageOps

    picture.load()
    # What a camera wrote beside the picture may be anything.
    with suppress(Exception):
        picture = ImageOps.exif_transpose(picture)
    is_opaque = "A" not in picture.getbands() and "transparency" not in picture.info
    if picture.mode == "RGB" or is_opaque:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    seen = Image.new("RGB", layer.size, "white")
    seen.paste(layer, mask=layer.getchannel("A"))
    return seen
