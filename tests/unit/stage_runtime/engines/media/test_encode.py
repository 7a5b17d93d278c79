"""Frames as an MP4 file: what was put in comes out, as nearly as a codec does that."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import pytest

from stage_runtime.engines.media.encode import mp4_of
from stage_runtime.engines.media.videos import read_video


def frames_of(count: int, height: int = 32, width: int = 48) -> Any:
    grey = np.linspace(0, 255, count, dtype=np.uint8)
    return np.broadcast_to(grey[:, None, None, None], (count, height, width, 3)).copy()


@pytest.mark.parametrize("count", [1, 2, 12])
def test_a_video_has_the_frames_their_rate_and_their_brightness(count: int) -> None:
    file = mp4_of(frames_of(count), 12)
    assert file[4:8] == b"ftyp"
    read = read_video(file)
    assert read.frames.shape == (count, 32, 48, 3)
    assert read.metadata["fps"] == 12
    means = read.frames.reshape(count, -1).mean(axis=1)
    assert np.abs(means - np.linspace(0, 255, count)).max() < 8


def test_it_plays_everywhere_and_is_the_same_each_time() -> None:
    file = mp4_of(frames_of(5), 24)
    assert mp4_of(frames_of(5), 24) == file
    with av.open(io.BytesIO(file)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")


def test_an_odd_side_loses_its_last_line() -> None:
    assert read_video(mp4_of(frames_of(3, 17, 33), 24)).frames.shape == (3, 16, 32, 3)


def test_tensors_are_frames_too() -> None:
    import torch

    assert mp4_of(torch.from_numpy(frames_of(2)), 24) == mp4_of(frames_of(2), 24)


@pytest.mark.parametrize(
    "wrong",
    [frames_of(2)[0], frames_of(2).astype(np.float32), frames_of(2)[..., :1], frames_of(2)[:0], frames_of(2, 1, 1)],
    ids=lambda value: f"{value.dtype}{value.shape}",
)
def test_what_is_no_video_is_refused_with_what_is_right(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"a video is bytes of shape|too small"):
        mp4_of(wrong, 24)
