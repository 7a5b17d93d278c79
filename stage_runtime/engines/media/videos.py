"""Decodes a client's videos: a bounded number of frames, evenly spread, and the sound beside them if it is wanted.

By ffmpeg's libraries, with the container's format named: it has formats that open other files and addresses.
"""

from __future__ import annotations

import io
import time
from typing import Any, Final

import msgspec
import numpy as np

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.media.sounds import MAX_SOUND_S, Sound

#: How many frames of a video a model sees at most; vLLM's own server shows as many.
SHOWN_FRAMES: Final = 32
#: Of one frame, and of all that are decoded of a request's videos.
MAX_FRAME_PIXELS: Final = 1920 * 1088
MAX_VIDEO_PIXELS: Final = 1 << 32
#: Longest time to decode one video.
MAX_DECODE_S: Final = 60.0
#: What a file begins with, from which byte on, and ffmpeg's name of the format.
_KINDS: Final = ((b"ftyp", 4, "mp4"), (b"\x1aE\xdf\xa3", 0, "matroska"))
_SOUND_HZ: Final = 16000
#: Frames of a second: of a video that does not say it, and at most.
_USUAL_RATE, _HIGHEST_RATE = 25.0, 1000.0


class Video(msgspec.Struct, frozen=True):
    """Frames as an array (frames, height, width, 3) of bytes, and what vLLM wants to know of them."""

    frames: Any
    metadata: dict[str, Any]
    #: Pixels of all frames that were decoded for it.
    decoded: int
    sound: Sound | None = None


def read_video(file: bytes, *, with_sound: bool = False, room_pixels: int = MAX_VIDEO_PIXELS) -> Video:
    """The video in a file. Raise InvalidRequestError if it can't be read, or is too much."""
    kind = next((name for mark, at, name in _KINDS if file[at : at + len(mark)] == mark), None)
    if kind is None:
        raise InvalidRequestError("video_url: the video can't be read: it is neither MP4 nor WebM")
    try:
        return _read(file, kind, with_sound, room_pixels, time.monotonic() + MAX_DECODE_S)
    except InvalidRequestError:
        raise
    except Exception as error:
        # Every replica would raise it again: the client's mistake.
        raise InvalidRequestError(
            f"video_url: the video can't be read: {str(error) or type(error).__name__}"
        ) from error


def _read(file: bytes, kind: str, with_sound: bool, room_pixels: int, deadline_s: float) -> Video:
    total, rate = _measure(file, kind)
    wanted = {int(at) for at in np.linspace(0, total - 1, min(SHOWN_FRAMES, total)).round()}
    shown: dict[int, Any] = {}
    decoded = 0
    with _opened(file, kind) as opened:
        for at, frame in enumerate(opened.decode(video=0)):
            decoded += frame.width * frame.height
            _check(frame, at, decoded, room_pixels, deadline_s)
            if at in wanted:
                shown[at] = frame.to_ndarray(format="rgb24")
            if at >= total - 1:
                break
    if not shown or len({each.shape for each in shown.values()}) != 1:
        raise InvalidRequestError("video_url: the video has no frames, or they change their size")
    metadata = {
        "total_num_frames": total,
        "fps": rate,
        "duration": total / rate,
        "video_backend": "pyav",
        "frames_indices": list(shown),
        "do_sample_frames": False,
    }
    sound = _sound(file, kind, deadline_s) if with_sound else None
    return Video(np.stack(list(shown.values())), metadata, decoded, sound)


def _opened(file: bytes, kind: str) -> Any:
    import av

    return av.open(io.BytesIO(file), format=kind)


def _measure(file: bytes, kind: str) -> tuple[int, float]:
    """How many frames there are, and how many of them a second has. A packet is a frame; the file's head may lie."""
    with _opened(file, kind) as opened:
        if not opened.streams.video:
            raise InvalidRequestError("video_url: the file holds no video")
        stream = opened.streams.video[0]
        total = sum(1 for packet in opened.demux(stream) if packet.size)
        rate = float(stream.average_rate or stream.guessed_rate or _USUAL_RATE)
    if not total:
        raise InvalidRequestError("video_url: the video has no frames")
    return total, rate if 0 < rate <= _HIGHEST_RATE else _USUAL_RATE


def _check(frame: Any, at: int, decoded: int, room_pixels: int, deadline_s: float) -> None:
    if frame.width * frame.height > MAX_FRAME_PIXELS or decoded > room_pixels or time.monotonic() > deadline_s:
        raise InvalidRequestError(
            f"video_url: {at + 1} frames of {frame.width} x {frame.height} are too much; show a shorter or smaller one"
        )


def _sound(file: bytes, kind: str, deadline_s: float) -> Sound:
    """The sound beside the frames."""
    import av

    parts: list[Any] = []
    room = MAX_SOUND_S * _SOUND_HZ
    with _opened(file, kind) as opened:
        if not opened.streams.audio:
            raise InvalidRequestError("use_audio_in_video: the video has no sound")
        resampler = av.AudioResampler(format="flt", layout="mono", rate=_SOUND_HZ)
        for frame in opened.decode(audio=0):
            for each in resampler.resample(frame):
                parts.append(each.to_ndarray().reshape(-1))
                room -= parts[-1].size
            if room < 0 or time.monotonic() > deadline_s:
                raise InvalidRequestError(f"video_url: up to {MAX_SOUND_S} s of sound are taken; show a shorter one")
    if not parts:
        raise InvalidRequestError("use_audio_in_video: the video's sound is empty")
    return np.nan_to_num(np.concatenate(parts)).astype(np.float32), _SOUND_HZ
