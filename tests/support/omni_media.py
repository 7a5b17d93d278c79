"""Small sounds and videos for models that hear and see."""

from __future__ import annotations

import io
import wave
from typing import Any, Final

import numpy as np

_RATE_HZ: Final = 24000
_FPS: Final = 10


def tone(length_s: float, *, kind: str = "WAV", channels: int = 1, level: float = 0.5, pitch_hz: float = 440) -> bytes:
    """The file of a tone."""
    import soundfile

    samples = level * np.sin(2 * np.pi * pitch_hz / _RATE_HZ * np.arange(int(length_s * _RATE_HZ)))
    made = io.BytesIO()
    soundfile.write(made, np.stack([samples] * channels, axis=1), _RATE_HZ, format=kind)
    return made.getvalue()


def sine(pitch_hz: float, length_s: float = 0.6) -> bytes:
    """The WAV file of a tone, made without a library."""
    samples = 16000 * np.sin(2 * np.pi * pitch_hz / _RATE_HZ * np.arange(int(length_s * _RATE_HZ)))
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE_HZ)
        file.writeframes(samples.astype("<i2").tobytes())
    return made.getvalue()


def clip() -> bytes:
    """The file of a video of eight frames, with sound."""
    return video(8, sound_s=0.8)


def video(frames: int, *, kind: str = "mp4", width: int = 64, height: int = 48, sound_s: float = 0.0) -> bytes:
    """The file of a video that grows lighter, ten frames a second."""
    import av

    made = io.BytesIO()
    with av.open(made, "w", format=kind) as container:
        stream: Any = container.add_stream("mpeg4" if kind == "mp4" else "libvpx", rate=_FPS)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        speech: Any = container.add_stream("aac", rate=16000) if sound_s else None
        for number in range(frames):
            level = int(255 * (number + 1) / frames)
            shown = av.VideoFrame.from_ndarray(np.full((height, width, 3), level, np.uint8), format="rgb24")
            for packet in stream.encode(shown):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
        if speech is not None:
            for at in range(int(sound_s * 16000 / 1024)):
                loud = 0.5 * np.sin(np.arange(at * 1024, (at + 1) * 1024) / 8)
                heard = av.AudioFrame.from_ndarray(loud[None].astype(np.float32), format="fltp", layout="mono")
                heard.sample_rate, heard.pts = 16000, at * 1024
                for packet in speech.encode(heard):
                    container.mux(packet)
            for packet in speech.encode(None):
                container.mux(packet)
    return made.getvalue()
