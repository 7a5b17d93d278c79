"""Decodes a client's pictures, a bounded number of pixels at once."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from omni_discovery.data_urls import MAX_PIXELS, PICTURE_FORMATS
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.picture_heads import check_head

if TYPE_CHECKING:
    from PIL.Image import Image


def open_picture(file: bytes, others: Sequence[Image]) -> Image:
    """The picture in a file, behind ``others`` of the same request.

    Raise InvalidRequestError if it can't be read, or not soon, or if all together have more than ``MAX_PIXELS``.
    """
    from PIL import Image, UnidentifiedImageError

    check_head(file)
    try:
        picture = Image.open(io.BytesIO(file), formats=PICTURE_FORMATS)
        is_small = sum(each.width * each.height for each in (*others, picture)) <= MAX_PIXELS
        pixels = _as_seen(picture) if is_small else None
    except UnidentifiedImageError as error:
        formats = " or ".join(PICTURE_FORMATS)
        raise InvalidRequestError(f"image_url: the picture can't be read: it is no {formats}") from error
    except Exception as error:
        # Decoders raise anything over a malformed file, and every replica would raise it again: the client's mistake.
        raise InvalidRequestError(
            f"image_url: the picture can't be read: {str(error) or type(error).__name__}"
        ) from error
    if pixels is None:
        behind = f" behind {len(others)} others" if others else ""
        size = f"{picture.width} x {picture.height}"
        raise InvalidRequestError(f"image_url: a picture of {size}{behind} is too large; show fewer or smaller ones")
    return pixels


def _as_seen(picture: Image) -> Image:
    """The picture upright, in RGB, on white where it is transparent: as vLLM's own server gives pictures to models."""
    from PIL import Image, ImageOps

    picture.load()
    # EXIF data may be malformed in any way.
    with suppress(Exception):
        picture = ImageOps.exif_transpose(picture)
    is_opaque = "A" not in picture.getbands() and "transparency" not in picture.info
    if picture.mode == "RGB" or is_opaque:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    seen = Image.new("RGB", layer.size, "white")
    seen.paste(layer, mask=layer.getchannel("A"))
    return seen
