"""Encodes the frames of a video as an MP4 file that every player takes: H.264 where this PyAV has it, else MPEG-4."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np

from omni_discovery.errors import ConfigError

#: Encoders in the order in which they are tried. The second is FFmpeg's own, so that every build has it.
_CODECS: Final = ("libx264", "mpeg4")


def mp4_of(frames: Any, rate_hz: int) -> bytes:
    """Frames of shape (frames, height, width, 3), bytes of red, green and blue, as the bytes of an MP4 file.

    Players want even sides: an odd one loses its last row or column. Raise ValueError for another shape or type,
    ConfigError without PyAV.
    """
    if hasattr(frames, "detach"):
        frames = frames.detach().cpu().numpy()
    array = np.asarray(frames)
    if array.ndim != 4 or array.shape[-1] != 3 or array.dtype != np.uint8 or min(array.shape[:3]) < 1:
        raise ValueError(f"a video is bytes of shape (frames, height, width, 3), not {array.dtype} of {array.shape}")
    height, width = array.shape[1] // 2 * 2, array.shape[2] // 2 * 2
    if not height or not width:
        raise ValueError(f"frames of {array.shape[2]} x {array.shape[1]} are too small: at least 2 x 2")
    try:
        import av
    except ImportError as error:
        raise ConfigError("to encode frames takes PyAV: pip install av, or return the bytes of an MP4 file") from error
    codec = next(each for each in _CODECS if each in av.codecs_available)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=rate_hz)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        # The same frames give the same file, on whatever machine.
        stream.codec_context.thread_count = 1
        for each in array[:, :height, :width]:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(each), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
