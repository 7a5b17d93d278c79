"""The fields of a picture, as parameters of the stage that draws it."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from hub.api.chat.messages import check_messages
from hub.api.errors import BodyTooLongError
from hub.api.generation.body import MAX_BODY_BYTES
from hub.api.images.schema import ImageEdit, parse_edit, parse_image
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


EDGE = "multipart/form-data; boundary=edge"
PNG = draw_png("a")


def form(*parts: tuple[str, str | bytes]) -> bytes:
    """A form; bytes are files."""
    whole = b""
    for name, value in parts:
        file = '; filename="f"' if isinstance(value, bytes) else ""
        content = value if isinstance(value, bytes) else value.encode()
        whole += f'--edge\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
    return whole + b"--edge--\r\n"


def edit(*parts: tuple[str, str | bytes]) -> ImageEdit:
    return parse_edit(EDGE, form(*parts))


def test_a_form_becomes_a_message_with_its_pictures_and_the_mask_a_parameter() -> None:
    """Numbers, booleans and JSON come as text; a field that is empty is none; the bytes say what a file is."""
    gif = b"GIF89a" + bytes(20)
    asked = edit(
        ("prompt", "a hat"), ("image[]", PNG), ("image[]", gif), ("mask", PNG), ("n", "2"), ("stream", "true"),
        ("partial_images", "3"), ("guidance_scale", "2.5"), ("size", ""), ("output_compression", "100"),
        ("sampling_params_list", '[null, {"seed": 3}]'), ("user", "7"),
    )  # fmt: skip
    urls = [
        f"data:image/{kind};base64,{base64.b64encode(file).decode()}" for kind, file in (("png", PNG), ("gif", gif))
    ]
    assert asked.content() == [
        {"type": "text", "text": "a hat"},
        *({"type": "image_url", "image_url": {"url": url}} for url in urls),
    ]
    assert asked.image_params() == {"guidance_scale": 2.5, "mask": urls[0], "partial_images": 3}
    assert (asked.n, asked.stream, asked.size, asked.user) == (2, True, None, "7")
    assert asked.sampling_params_list == [None, {"seed": 3}]
    check_messages([{"role": "user", "content": asked.content()}])


@pytest.mark.attack("C12", "C15")
@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([("prompt", "a")], "'image' is missing"),
        ([("image", PNG)], "prompt"),
        ([("image", PNG), ("prompt", "  ")], "'prompt' is empty"),
        ([("image", "https://example.org/cat.png"), ("prompt", "a")], "nothing is fetched"),
        ([("image", b"%PDF-1.7"), ("prompt", "a")], "'image' is no picture that can be read here"),
        ([("image", b""), ("prompt", "a")], "'image' is no picture"),
        ([("image", PNG), ("mask", b"GIF89a" + bytes(9)), ("prompt", "a")], "'mask' .* send the file of a PNG"),
        ([("image", PNG), ("mask", PNG), ("mask", PNG), ("prompt", "a")], "'mask' is there twice"),
        ([("image", PNG), ("prompt", "a"), ("prompt", "b")], "'prompt' is there twice"),
        ([("image", PNG)] * 17 + [("prompt", "a")], "length <= 16"),
        ([("image", PNG), ("prompt", "a"), ("url", "file:///etc/passwd")], "unknown field 'url'"),
        ([("image", PNG), ("prompt", "a"), ("prompt2", PNG)], "'prompt2' is a file"),
        ([("image", PNG), ("prompt", "a"), ("n", "two")], "n"),
        ([("image", PNG), ("prompt", "a"), ("n", "11")], "n"),
        ([("image", PNG), ("prompt", "a"), ("timeout", "null")], "'timeout' is 'null', which a form can't say"),
        ([("image", PNG), ("prompt", "a"), ("partial_images", "2")], "'partial_images' needs 'stream'"),
        ([("image", PNG), ("prompt", "a"), ("response_format", "url")], "pictures come as 'b64_json'"),
        ([("image", PNG), ("prompt", "a"), ("output_format", "webp")], "'output_format' is not served here"),
        ([("image", PNG), ("prompt", "a"), ("sampling_params_list", "[" * 100)], "'sampling_params_list'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_form_that_can_not_be_used_is_refused_by_the_field(parts: list[tuple[str, str | bytes]], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        edit(*parts)


def test_files_that_would_not_fit_into_a_message_are_too_long() -> None:
    """A form may hold more bytes than their base64 may have."""
    with pytest.raises(BodyTooLongError, match="send smaller pictures"):
        edit(("image", PNG + bytes(MAX_BODY_BYTES * 3 // 4)), ("prompt", "a"))
