"""The fields of a picture, as parameters of the stage that draws it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hub.api.images.generations import parse_image, size_of
from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.echo.engine import draw_png


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a cat", **fields}).encode()


def test_the_size_is_width_and_height_and_the_rest_keeps_its_name() -> None:
    asked = parse_image(body(size="640x480", negative_prompt="dogs", num_inference_steps=4, guidance_scale=2.5))
    assert asked.image_params() == {
        "width": 640,
        "height": 480,
        "negative_prompt": "dogs",
        "num_inference_steps": 4,
        "guidance_scale": 2.5,
    }
    neutral = {"size": "auto", "quality": "auto", "background": "auto", "output_format": "png", "stream": False}
    assert parse_image(body(**neutral)).image_params() == {}


@pytest.mark.parametrize("size", ["0x5", "5", "x", "5x", "999999x5", "-5x5", "5x5x5", 5])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(InvalidRequestError, match="size"):
        parse_image(body(size=size))


def test_the_size_of_a_picture_is_read_from_its_file() -> None:
    assert size_of(draw_png("a", 24)) == "24x24"
    assert size_of(b"GIF89a" + bytes(40)) == ""
    assert size_of(draw_png("a")[:20]) == ""
