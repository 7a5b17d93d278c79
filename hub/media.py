"""Media files in outputs: embeddings as arrays (needs numpy, which a hub does not), sound as WAV files. Pure."""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from omni_discovery.errors import ConfigError, EngineFailedError
from omni_discovery.inputs.sounds import LEAST_RATE_HZ, MOST_RATE_HZ

if TYPE_CHECKING:
    import numpy as np

_MOST_WIDTH_BYTES: Final = 4


def array_of(file: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Read a .npy file as an array of float32. Raise EngineFailedError if it is none, ConfigError without numpy."""
    try:
        import numpy as np
    except ImportError as error:
        raise ConfigError("to read an embedding as an array takes numpy: pip install numpy") from error
    try:
        # No pickled objects: reading them would run code.
        read = np.load(io.BytesIO(file), allow_pickle=False)
    except Exception as error:
        # Any exception: numpy parses the file's header with Python's own parser.
        raise EngineFailedError(f"what a stage pooled is no .npy file of numbers: {error}") from error
    if not isinstance(read, np.ndarray) or read.dtype != np.float32:
        raise EngineFailedError("what a stage pooled is no .npy file of float32")
    return read


class SoundKind(NamedTuple):
    """What the samples of a WAV file are."""

    channels: int
    #: Bytes of one sample.
    width_bytes: int
    rate_hz: int


def joined_wav(files: Sequence[bytes]) -> bytes:
    """Concatenate WAV files of one sample rate, width and channel count. Raise EngineFailedError for other files."""
    if len(files) == 1:
        return files[0]
    kinds, frames = zip(*map(read_wav, files), strict=True)
    if len(set(kinds)) != 1:
        raise EngineFailedError("pieces of sound came in several sample rates, widths or numbers of channels")
    return wav_file(kinds[0], b"".join(frames))


def wav_file(kind: SoundKind, frames: bytes) -> bytes:
    """A WAV file of these frames."""
    made = io.BytesIO()
    with wave.open(made, "wb") as writer:
        writer.setnchannels(kind.channels)
        writer.setsampwidth(kind.width_bytes)
        writer.setframerate(kind.rate_hz)
        writer.writeframes(frames)
    return made.getvalue()


def read_wav(file: bytes) -> tuple[SoundKind, bytes]:
    """The frames of a WAV file and what they are.

    Raise EngineFailedError for any other file, and for samples that are too wide, or too many or too few in a second.
    """
    try:
        with wave.open(io.BytesIO(file)) as reader:
            kind = SoundKind(reader.getnchannels(), reader.getsampwidth(), reader.getframerate())
            _check_kind(kind)
            return kind, reader.readframes(reader.getnframes())
    except (wave.Error, EOFError) as error:
        raise EngineFailedError(f"a piece of sound is no WAV file: {error}") from error


def _check_kind(kind: SoundKind) -> None:
    # What a header says is the replica's word: encoders end the process, or take memory without end, for some of it.
    if not LEAST_RATE_HZ <= kind.rate_hz <= MOST_RATE_HZ:
        raise EngineFailedError(
            f"a piece of sound has a sample rate of {kind.rate_hz} Hz: {LEAST_RATE_HZ} to {MOST_RATE_HZ} can be played"
        )
    if kind.width_bytes > _MOST_WIDTH_BYTES:
        raise EngineFailedError(
            f"a piece of sound has samples of {8 * kind.width_bytes} bits: up to {8 * _MOST_WIDTH_BYTES} can be played"
        )
