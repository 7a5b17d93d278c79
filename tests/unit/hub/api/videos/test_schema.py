"""The body of POST /v1/videos, as JSON and as a form, and what becomes of it for stages."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from hub.api.errors import BodyTooLongError
from hub.api.videos.schema import MOST_FRAMES, VideoCreate, makes_videos, parse_video, video_params
from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.echo.engine import draw_png
from tests.support.hub_fakes import PAIR, deploy_of

DEPLOY = deploy_of("""
stages:
  - {stage_id: 0, engine: echo}
  - stage_id: 1
    engine: torch
    engine_args: {target: "tests.support.filming:film"}
    default_sampling_params: {fps: 8}
    final_output: video
""")
PICTURE = draw_png("a")
URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"


def of_json(**fields: Any) -> VideoCreate:
    return parse_video("application/json", msgspec.json.encode({"prompt": "a cat", **fields}))


def form_of(*parts: tuple[str, bytes | str, str]) -> bytes:
    body = b""
    for name, content, file in parts:
        head = f'Content-Disposition: form-data; name="{name}"' + (f'; filename="{file}"' if file else "")
        data = content.encode() if isinstance(content, str) else content
        body += b"--b\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n"
    return body + b"--b--\r\n"


def of_form(*parts: tuple[str, bytes | str, str]) -> VideoCreate:
    return parse_video("multipart/form-data; boundary=b", form_of(("prompt", "a cat", ""), *parts))


def test_json_and_a_form_mean_the_same() -> None:
    """A picture is a file in a form, or its URL as OpenAI's clients write a field of a field."""
    plain = of_json(seconds="4", size="64x32", seed=7, num_inference_steps=9)
    parts = [("seconds", "4", ""), ("size", "64x32", ""), ("seed", "7", ""), ("num_inference_steps", "9", "")]
    assert of_form(*parts, ("model", "", "")) == plain
    shown = of_json(input_reference={"image_url": URL})
    assert of_form(("input_reference", PICTURE, "cat.png")) == shown
    assert of_form(("input_reference[image_url]", URL, "")) == shown
    assert shown.content() == [
        {"type": "text", "text": "a cat"},
        {"type": "image_url", "image_url": {"url": URL}},
    ]
    assert plain.content() == "a cat"


def test_length_and_size_go_to_the_stages_that_film() -> None:
    """Seconds are frames, by the rate that is asked for, or else the stage's own, or else 24."""
    assert video_params(DEPLOY, of_json()) == {0: {}, 1: {}}
    assert video_params(DEPLOY, of_json(seconds="auto", size="auto")) == {0: {}, 1: {}}
    assert video_params(DEPLOY, of_json(seconds="2"))[1] == {"num_frames": 16, "fps": 8}
    assert video_params(DEPLOY, of_json(seconds="2", fps=5))[1] == {"num_frames": 10, "fps": 5}
    whole = of_json(num_frames=3, size="64x32", seed=1, guidance_scale=2.5, negative_prompt="dogs")
    made = {"num_frames": 3, "width": 64, "height": 32, "guidance_scale": 2.5, "negative_prompt": "dogs"}
    assert video_params(DEPLOY, whole) == {0: {"seed": 1}, 1: {**made, "seed": 1}}
    assert video_params(DEPLOY, of_json(seconds=2)) == video_params(DEPLOY, of_json(seconds="2"))
    other = deploy_of("stages: [{stage_id: 0, engine: torch, engine_args: {target: 'a:b'}, final_output: video}]")
    assert video_params(other, of_json(seconds="2"))[0] == {"num_frames": 48, "fps": 24}
    listed = of_json(seconds="2", sampling_params_list=[None, {"num_frames": 1}])
    assert video_params(DEPLOY, listed)[1] == {"num_frames": 1, "fps": 8}
    with pytest.raises(InvalidRequestError, match=f"{MOST_FRAMES} are the most"):
        video_params(DEPLOY, of_json(seconds="999", fps=240))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt": " "}, "'prompt' is empty"),
        ({"prompt": 1}, "prompt"),
        ({"seconds": "-1"}, "seconds"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 4.5}, "seconds"),
        ({"seconds": "4", "num_frames": 9}, "both say how long"),
        ({"size": "large"}, "size"),
        ({"fps": 0}, "fps"),
        ({"num_frames": MOST_FRAMES + 1}, "num_frames"),
        ({"input_reference": "cat.png"}, "input_reference"),
        ({"input_reference": {"file_id": "file-1"}}, "file_id"),
        ({"input_reference": {"image_url": "http://127.0.0.1/cat.png"}}, "image_url"),
        ({"input_reference": {"image_url": "file:///etc/passwd"}}, "image_url"),
        ({"video_reference": "x"}, "video_reference"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_its_name(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        of_json(**fields)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (("input_reference", b"RIFF....AVI ", "cat.avi"), "no picture that can be read here"),
        (("input_reference", "cat.png", ""), "is a file"),
        (("mask", PICTURE, "mask.png"), "'mask' is a file; there is one file, 'input_reference'"),
        (("prompt", "again", ""), "'prompt' is there twice"),
        (("seed", "null", ""), "'seed' is 'null'"),
        (("input_reference[image_url]", "http://a/b.png", ""), "image_url"),
        (("metadata", "{}", ""), "'metadata' can't be in a form: send the request as JSON"),
        (("async_chunk", "0", ""), "'async_chunk' is true or false, not '0'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_in_a_form_is_refused_by_its_name(part: tuple[str, bytes | str, str], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        of_form(part)


def test_a_picture_that_is_too_large_for_a_message_is_refused() -> None:
    with pytest.raises(BodyTooLongError, match="send a smaller picture"):
        of_form(("input_reference", PICTURE + bytes(3 << 20), "cat.png"))


def test_only_a_stage_of_video_makes_videos() -> None:
    assert makes_videos(DEPLOY)
    assert not makes_videos(deploy_of(PAIR))


@pytest.mark.attack("M8")
@pytest.mark.parametrize("field", [{"seconds": "4\n"}, {"size": "640x480\n"}])
def test_no_value_ends_with_a_line(field: dict[str, str]) -> None:
    """A pattern's ``$`` lets it pass, and the record of the job could never be read again."""
    with pytest.raises(InvalidRequestError, match=next(iter(field))):
        parse_video("application/json", msgspec.json.encode({"prompt": "a", **field}))
