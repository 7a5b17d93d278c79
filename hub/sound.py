"""Sound that came in pieces, as one. Pure."""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence

from omni_discovery.errors import EngineFailedError


def joined_wav(files: Sequence[bytes]) -> bytes:
    """WAV files of one kind, one behind the other, as one file. Raise EngineFailedError where they are none such."""
    if len(files) == 1:
        return files[0]
    kinds, frames = zip(*map(_read, files), strict=True)
    if len(set(kinds)) != 1:
        raise EngineFailedError("pieces of sound came in several sample rates, widths or numbers of channels")
    joined = io.BytesIO()
    with wave.open(joined, "wb") as writer:
        writer.setnchannels(kinds[0][0])
        writer.setsampwidth(kinds[0][1])
        writer.setframerate(kinds[0][2])
        writer.writeframes(b"".join(frames))
    return joined.getvalue()


def _read(file: bytes) -> tuple[tuple[int, int, int], bytes]:
    """Channels, bytes of a sample and samples a second; and the frames."""
    try:
        with wave.open(io.BytesIO(file)) as reader:
            kind = reader.getnchannels(), reader.getsampwidth(), reader.getframerate()
            return kind, reader.readframes(reader.getnframes())
    except (wave.Error, EOFError) as error:
        raise EngineFailedError(f"a piece of sound is no WAV file: {error}") from error
