"""Reads a client's video in a process of its own, which gets a bound of memory and of processor time.

ffmpeg's libraries make an index of all that a file's head claims to hold: a file of 700 bytes takes gigabytes. And what
ends them in a file nobody has tried ends that process, not the replica.
"""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.media.videos import MAX_DECODE_S, MAX_VIDEO_PIXELS, Video, read_video

#: Address space beyond the libraries': thirty-two frames of full size twice, ten minutes of sound, a decoder's own.
MAX_BYTES: Final = 2 << 30
#: Longer than to decode: it has two passes, and the process has to start.
_MOST_S: Final = 2 * MAX_DECODE_S
_SIZE: Final = struct.Struct("!Q")


class _VideoAsked(msgspec.Struct, frozen=True):
    with_sound: bool
    room_pixels: int


class _VideoRead(msgspec.Struct, frozen=True):
    """What was read, or why it was not. Behind it come the frames' bytes and those of the sound."""

    error: str = ""
    shape: tuple[int, ...] = ()
    metadata: dict[str, Any] = {}
    decoded: int = 0
    #: Samples in a second; 0: no sound.
    rate_hz: int = 0


def read_video_apart(file: bytes, *, with_sound: bool = False, room_pixels: int = MAX_VIDEO_PIXELS) -> Video:
    """See ``read_video``."""
    asked = msgspec.msgpack.encode(_VideoAsked(with_sound, room_pixels))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=_SIZE.pack(len(asked)) + asked + file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_MOST_S,
            check=True,
        )
        head, body = _split(done.stdout)
        read = msgspec.msgpack.decode(head, type=_VideoRead)
    except (subprocess.SubprocessError, struct.error, msgspec.DecodeError) as error:
        raise InvalidRequestError("video_url: the video can't be read: it takes too much memory or time") from error
    if read.error:
        raise InvalidRequestError(read.error)
    frames = np.frombuffer(bytearray(body), np.uint8, count=int(np.prod(read.shape))).reshape(read.shape)
    sound = np.frombuffer(body[frames.size :], np.float32).copy() if read.rate_hz else None
    return Video(frames, read.metadata, read.decoded, None if sound is None else (sound, read.rate_hz))


def _split(message: bytes) -> tuple[bytes, memoryview]:
    (size,) = _SIZE.unpack_from(message)
    return message[_SIZE.size : _SIZE.size + size], memoryview(message)[_SIZE.size + size :]


def _main() -> None:
    import av  # noqa: F401 - what it takes itself is no part of the bound

    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MAX_BYTES, taken + MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(_MOST_S), int(_MOST_S)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    head, file = _split(sys.stdin.buffer.read())
    asked = msgspec.msgpack.decode(head, type=_VideoAsked)
    parts: list[Any] = []
    try:
        video = read_video(bytes(file), with_sound=asked.with_sound, room_pixels=asked.room_pixels)
    except InvalidRequestError as error:
        read = _VideoRead(str(error))
    else:
        parts = [np.ascontiguousarray(video.frames).data]
        rate_hz = 0
        if video.sound is not None:
            samples, rate_hz = video.sound
            parts.append(np.ascontiguousarray(samples).data)
        read = _VideoRead("", video.frames.shape, video.metadata, video.decoded, rate_hz)
    said = msgspec.msgpack.encode(read)
    out = sys.stdout.buffer
    out.write(_SIZE.pack(len(said)) + said)
    for part in parts:
        out.write(part)
    out.flush()


if __name__ == "__main__":
    _main()
