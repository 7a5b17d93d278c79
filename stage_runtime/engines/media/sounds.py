"""Decodes a client's sound, a bounded number of samples at once.

By libsndfile, which reads no other file and no address that a file may name.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from omni_discovery.errors import InvalidRequestError

#: Of all sound of a request: it is held unpacked, and a small file may unpack to any length.
MAX_SOUND_S: Final = 600
#: Of one sound, over all its channels.
MAX_SAMPLES: Final = 64 << 20
#: The formats that are opened at all, by libsndfile's names.
SOUND_FORMATS: Final = ("WAV", "WAVEX", "MP3", "FLAC", "OGG")
_MOST_CHANNELS: Final = 8
_RATES_HZ: Final = (4000, 192000)
_BLOCK: Final = 1 << 18

#: One channel of samples from -1 to 1, as float32, and how many of them a second has.
Sound = tuple["np.ndarray[Any, np.dtype[np.float32]]", int]


def read_sound(file: bytes, others: Sequence[Sound] = ()) -> Sound:
    """The sound in a file, its channels mixed into one, behind ``others`` of the same request.

    Raise InvalidRequestError if it can't be read, or if all together are longer than ``MAX_SOUND_S``.
    """
    import soundfile

    room_s = MAX_SOUND_S - sum(len(samples) / rate for samples, rate in others)
    try:
        with soundfile.SoundFile(io.BytesIO(file)) as opened:
            _check(opened.format, opened.channels, opened.samplerate)
            most = min(int(room_s * opened.samplerate), MAX_SAMPLES // opened.channels)
            parts: list[Any] = []
            # The head of a file may say anything of its length.
            while (block := opened.read(_BLOCK, dtype="float32", always_2d=True)).size:
                parts.append(block.mean(axis=1))
                if sum(map(len, parts)) > most:
                    raise _too_long(bool(others))
            rate = int(opened.samplerate)
    except InvalidRequestError:
        raise
    except Exception as error:
        # Every replica would raise it again: the client's mistake.
        raise InvalidRequestError(f"audio: the sound can't be read: {str(error) or type(error).__name__}") from error
    if not parts:
        raise InvalidRequestError("audio: the sound is empty")
    return np.nan_to_num(np.concatenate(parts)), rate


def _check(kind: str, channels: int, rate_hz: int) -> None:
    if kind not in SOUND_FORMATS:
        raise InvalidRequestError(f"audio: {kind} is not taken; give {' or '.join(SOUND_FORMATS)}")
    lowest, highest = _RATES_HZ
    if not 1 <= channels <= _MOST_CHANNELS or not lowest <= rate_hz <= highest:
        raise InvalidRequestError(
            f"audio: {channels} channels of {rate_hz} Hz; up to {_MOST_CHANNELS} of {lowest} to {highest} Hz are taken"
        )


def _too_long(is_behind_others: bool) -> InvalidRequestError:
    together = " together" if is_behind_others else ""
    return InvalidRequestError(f"audio: up to {MAX_SOUND_S} s of sound{together} are taken; give less")
