"""Videos are read in a process of their own, which ends in place of the replica."""

from __future__ import annotations

import resource
import struct
import time
from typing import Any

import numpy as np
import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.media import video_process
from stage_runtime.engines.media.encode import mp4_of
from stage_runtime.engines.media.video_process import read_video_apart
from stage_runtime.engines.media.videos import read_video

SAMPLES = 150_000_000


def some_video() -> bytes:
    grey = np.linspace(0, 255, 40, dtype=np.uint8)
    return mp4_of(np.broadcast_to(grey[:, None, None, None], (40, 32, 48, 3)).copy(), 12)


def that_claims(samples: int) -> bytes:
    """A video whose head says that it has so many samples of one byte, all in one piece."""
    file = bytearray(some_video())
    sizes, pieces = file.index(b"stsz"), file.index(b"stsc")
    struct.pack_into("!II", file, sizes + 8, 1, samples)
    struct.pack_into("!I", file, pieces + 16, samples)
    return bytes(file)


def test_what_is_read_apart_is_what_is_read_here() -> None:
    file = some_video()
    here, apart = read_video(file), read_video_apart(file)
    assert np.array_equal(here.frames, apart.frames)
    assert (here.metadata, here.decoded, here.sound) == (apart.metadata, apart.decoded, apart.sound)
    assert apart.frames.flags.writeable


@pytest.mark.parametrize(
    ("file", "room_pixels", "said"),
    [
        (b"no video", 1 << 20, "it is neither MP4 nor WebM"),
        (b"\0\0\0\x20ftypisom", 1 << 20, "the video can't be read"),
        (some_video(), 1000, "1 frames of 48 x 32 are too much"),
    ],
)
def test_a_clients_mistake_is_told_as_it_is(file: bytes, room_pixels: int, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read_video_apart(file, room_pixels=room_pixels)


@pytest.mark.attack("Y3")
def test_a_file_that_claims_more_than_it_holds_ends_its_own_process() -> None:
    file = that_claims(SAMPLES)
    before_kb, began_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(InvalidRequestError, match="video_url: the video"):
        read_video_apart(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 64 << 10
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10 < video_process.MAX_BYTES
    assert time.monotonic() - began_s < 60


def test_a_process_that_ends_without_a_word_is_the_clients_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_none(command: Any, **options: Any) -> Any:
        raise video_process.subprocess.CalledProcessError(-11, command)

    monkeypatch.setattr(video_process.subprocess, "run", run_none)
    with pytest.raises(InvalidRequestError, match="it takes too much memory or time"):
        read_video_apart(some_video())
