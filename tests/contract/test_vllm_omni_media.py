"""Sound and videos that come with a request: what is read of them, what is refused, and that nothing else is opened.

Needs the environment that `make omni-test` makes: libsndfile and ffmpeg's libraries come with vLLM-Omni.
"""

from __future__ import annotations

import importlib.util
import io
import random
import socket
import tracemalloc
import wave
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni has an environment of its own: make omni-test", allow_module_level=True)

import av
import soundfile

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.media import sounds, videos
from stage_runtime.engines.media.items import take_items
from stage_runtime.engines.media.sounds import read_sound
from stage_runtime.engines.media.videos import SHOWN_FRAMES, read_video
from tests.support.omni_media import tone, video

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", ["WAV", "MP3", "FLAC", "OGG"])
def test_sound_is_read_in_the_formats_that_clients_have(kind: str) -> None:
    """Its channels become one, at the rate that it has."""
    samples, rate = read_sound(tone(1.0, kind=kind, channels=2))
    assert (rate, str(samples.dtype), samples.ndim) == (24000, "float32", 1)
    assert len(samples) == pytest.approx(24000, rel=0.1)
    assert 0.2 < np.abs(samples).max() <= 1


@pytest.mark.parametrize("kind", ["AIFF", "AU", "CAF", "RAW"])
def test_no_other_format_of_sound_is_read(kind: str) -> None:
    file = bytes(1000) if kind == "RAW" else tone(0.1, kind=kind)
    with pytest.raises(InvalidRequestError, match="audio: "):
        read_sound(file)


def test_sound_is_bounded_by_what_it_unpacks_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may hold hours of silence: it is given up as soon as it is too long, also behind others."""
    silence = tone(30.0, kind="FLAC", level=0.0)
    assert len(silence) < 20_000
    monkeypatch.setattr(sounds, "MAX_SOUND_S", 50)
    read_sound(silence)
    with pytest.raises(InvalidRequestError, match="up to 50 s of sound together"):
        read_sound(silence, [read_sound(silence)])
    monkeypatch.setattr(sounds, "MAX_SOUND_S", 20)
    with pytest.raises(InvalidRequestError, match="up to 20 s of sound are taken"):
        read_sound(silence)


def test_hours_of_silence_cost_little() -> None:
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", 8000, 1, format="FLAC") as file:
        for _ in range(40):
            file.write(np.zeros(8000 * 60, np.int16))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match="up to 600 s"):
            read_sound(buffer.getvalue())
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("change", ["", "head", "cut"])
def test_a_head_that_lies_is_not_believed(change: str) -> None:
    """The frames that are there count: none, more than are said, or fewer."""
    file = bytearray(tone(0.5))
    if change == "head":
        file[40:44] = (0x7FFFFFF0).to_bytes(4, "little")
    elif change == "cut":
        file = file[:-4000]
    samples, _ = read_sound(bytes(file))
    assert 8000 < len(samples) <= 12000
    with pytest.raises(InvalidRequestError, match=r"empty|can't be read"):
        read_sound(bytes(file[:44]))


@pytest.mark.attack("C14")
def test_malformed_sound_and_videos_are_read_or_the_clients_mistake() -> None:
    """Files with some bytes changed, cut or doubled; no other exception comes out."""
    chance, refused = random.Random(14), 0
    files = [tone(0.1, kind=kind) for kind in ("WAV", "MP3", "FLAC", "OGG")] + [video(4), video(4, kind="webm")]
    for _ in range(300):
        at = chance.randrange(len(files))
        file = bytearray(files[at])
        for _ in range(chance.randrange(1, 8)):
            file[chance.randrange(len(file))] = chance.randrange(256)
        if chance.random() < 0.3:
            file = file[: chance.randrange(len(file))]
        try:
            (read_sound if at < 4 else read_video)(bytes(file))
        except InvalidRequestError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_frames_are_spread_evenly_over_a_video(kind: str) -> None:
    read = read_video(video(60, kind=kind))
    assert read.frames.shape == (SHOWN_FRAMES, 48, 64, 3)
    assert read.frames.dtype == np.uint8
    told = read.metadata
    assert (told["total_num_frames"], told["frames_indices"][0], told["frames_indices"][-1]) == (60, 0, 59)
    assert (told["fps"], told["duration"]) == (pytest.approx(10), pytest.approx(6))
    # It grows lighter, frame by frame.
    light = [float(frame.mean()) for frame in read.frames]
    assert light[0] < light[15] < light[-1]
    assert read.sound is None


def test_a_short_video_is_shown_whole_and_its_sound_is_heard() -> None:
    read = read_video(video(6, sound_s=0.6), with_sound=True)
    assert len(read.frames) == 6
    assert read.sound is not None
    samples, rate = read.sound
    assert (rate, str(samples.dtype)) == (16000, "float32")
    assert len(samples) == pytest.approx(9600, rel=0.2)
    with pytest.raises(InvalidRequestError, match="the video has no sound"):
        read_video(video(6), with_sound=True)


def test_videos_are_bounded_by_what_they_unpack_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the pixels of a frame, those of all frames of a request, and the time that they take."""
    file = video(30)
    with pytest.raises(InvalidRequestError, match="frames of 64 x 48 are too much"):
        read_video(file, room_pixels=64 * 48 * 20)
    beside = {"prompt": "x", "videos": [file, file]}
    with monkeypatch.context() as patch:
        patch.setattr("stage_runtime.engines.media.items.MAX_VIDEO_PIXELS", 64 * 48 * 40)
        with pytest.raises(InvalidRequestError, match="11 frames of 64 x 48 are too much"):
            take_items(beside, frozenset(("video",)))
    with monkeypatch.context() as patch:
        patch.setattr(videos, "MAX_FRAME_PIXELS", 64 * 47)
        with pytest.raises(InvalidRequestError, match="1 frames of 64 x 48 are too much"):
            read_video(file)
    with monkeypatch.context() as patch:
        patch.setattr(videos, "MAX_DECODE_S", -1.0)
        with pytest.raises(InvalidRequestError, match="too much"):
            read_video(file)


@pytest.mark.attack("C12")
def test_no_address_that_a_file_names_is_called() -> None:
    """Playlists of ffmpeg's other formats, as they are and behind the marks of those that are read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.ts"
        playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{url}\n#EXT-X-ENDLIST\n".encode()
        concat = f"ffconcat version 1.0\nfile '{url}'\n".encode()
        for file in (playlist, concat, b"\0\0\0\x18ftypisom" + playlist, b"\x1aE\xdf\xa3" + concat):
            for read in (read_video, read_sound):
                with pytest.raises(InvalidRequestError):
                    read(file)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_sound_alone_is_no_video() -> None:
    """Also in a file of the right format."""
    made = io.BytesIO()
    with av.open(made, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    with pytest.raises(InvalidRequestError, match="holds no video"):
        read_video(made.getvalue())


def test_a_tone_is_what_the_support_says() -> None:
    with wave.open(io.BytesIO(tone(0.5))) as file:
        assert (file.getframerate(), file.getnframes()) == (24000, 12000)
