"""Items are taken out of a request where they come with it; links, files and nonsense are the client's mistake."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.media.items import has_items, take_items

EVERY = frozenset(("image", "audio", "video"))


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 4), "red").save(buffer, "PNG")
    return buffer.getvalue()


def asked(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": list(parts)}]}


TEXT = {"type": "text", "text": "what is this"}
SHOWN = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png()).decode()}}


def test_parts_leave_their_place_and_files_beside_a_prompt_leave_none() -> None:
    inputs, items = take_items(asked(SHOWN, TEXT), EVERY)
    assert inputs == asked({"type": "image"}, TEXT)
    assert items is not None
    assert [(kind, [each.size for each in found]) for kind, found in items.items()] == [("image", [(8, 4)])]
    inputs, items = take_items({"prompt": "x", "images": [png()], "audios": []}, EVERY)
    assert (inputs, list(items or ())) == ({"prompt": "x"}, ["image"])


def test_inputs_without_items_are_known_and_left_alone() -> None:
    for plain in (asked(TEXT), {"prompt": "x"}, {"messages": "x"}, {"messages": [1]}, {"prompt": "x", "images": []}):
        assert not has_items(plain)
        assert take_items(plain, EVERY)[1] is None
    for held in (asked(TEXT, SHOWN), {"prompt": "x", "videos": [b"x"]}, asked({"type": "input_audio"})):
        assert has_items(held)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (asked({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/x.wav"}}), "audio_url: give the audio"),
        (asked({"type": "audio_url", "audio_url": "file:///etc/passwd"}), "nothing is fetched"),
        (asked({"type": "video_url", "video_url": {"url": "data:audio/wav;base64,AAAA"}}), "video_url: give the video"),
        (asked({"type": "video_url", "video_url": None}), "video_url: give the video"),
        (asked({"type": "audio_url", "audio_url": "data:audio/wav,AAAA"}), "audio_url: give the audio"),
        (asked({"type": "audio_url", "audio_url": "data:audio/wav;base64,@@"}), "audio_url: the file can't be read"),
        (asked({"type": "input_audio", "input_audio": {"data": "http://x/y.wav"}}), "input_audio: the file can't be"),
        (asked({"type": "input_audio", "input_audio": 7}), "input_audio: the file can't be read"),
        (asked({"type": "input_audio"}), "input_audio: the file can't be read"),
        (asked({"type": "video_url", "video_url": "data:video/mp4;base64,AAAA"}), "neither MP4 nor WebM"),
        ({**asked(TEXT), "audios": [b"x"]}, "audios: a list of files, beside a prompt"),
        ({"prompt": "x", "videos": b"x"}, "videos: a list of files, beside a prompt"),
    ],
)
def test_what_did_not_come_with_the_request_is_the_clients_mistake(inputs: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        take_items(inputs, EVERY)


def test_a_kind_that_the_model_does_not_take_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="image_url: this stage's model takes none"):
        take_items(asked(SHOWN), frozenset(("audio",)))


def test_sound_of_videos_needs_videos() -> None:
    with pytest.raises(InvalidRequestError, match="use_audio_in_video: give videos"):
        take_items(asked(TEXT), EVERY, with_sound=True)


@pytest.mark.attack("C12")
@pytest.mark.parametrize("file", [b"#EXTM3U\n#EXT-X-VERSION:3\nhttp://127.0.0.1:1/x.ts\n", b"ffconcat version 1.0\n"])
def test_a_list_of_addresses_is_no_video(file: bytes) -> None:
    """ffmpeg would open what it names: only the formats that hold all of a video themselves are handed to it."""
    with pytest.raises(InvalidRequestError, match="neither MP4 nor WebM"):
        take_items({"prompt": "x", "videos": [file]}, EVERY)
