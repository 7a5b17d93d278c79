"""What a callable returns or yields, as output of its stage: by its type and by what the stage shows."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from stage_runtime.engines.base import EngineOutput
from stage_runtime.engines.pooled import npy_of
from stage_runtime.engines.sound import wav_of

_PNG: Final = b"\x89PNG\r\n\x1a\n"


class Speaker:
    """Reads what comes out of one stage. ``shows`` is its final_output: text, image, audio, embedding or none."""

    def __init__(self, shows: str, sample_rate_hz: int) -> None:
        self._shows = shows
        self._sample_rate_hz = sample_rate_hz

    def read(self, key: str, value: Any) -> Iterator[EngineOutput | Mapping[str, Any]]:
        """One value as outputs, and as mappings for the next stages. Raise TypeError or ValueError for what is neither.

        A tuple is all of its parts, None is nothing.
        """
        if value is None:
            return
        if isinstance(value, tuple):
            for part in value:
                yield from self.read(key, part)
        elif isinstance(value, Mapping):
            yield value
        elif isinstance(value, str):
            self._must_show("text", "a str")
            yield EngineOutput(key, text=value)
        elif isinstance(value, bytes):
            yield self._file(key, value)
        elif _is_image(value):
            self._must_show("image", "a picture")
            file = io.BytesIO()
            value.save(file, format="PNG")
            yield EngineOutput(key, image_png=file.getvalue())
        elif not _is_array(value):
            raise TypeError(f"a {type(value).__name__} can't be put out; {self._right}")
        else:
            yield self._array(key, value)

    def _array(self, key: str, value: Any) -> EngineOutput | Mapping[str, Any]:
        if self._shows == "audio":
            return EngineOutput(key, audio_wav=wav_of(value, self._sample_rate_hz))
        if self._shows == "embedding":
            return EngineOutput(key, pooled_npy=npy_of(value))
        return {"tensor": value}

    def _file(self, key: str, value: bytes) -> EngineOutput:
        if value.startswith(_PNG):
            self._must_show("image", "a picture")
            return EngineOutput(key, image_png=value)
        if value[:4] == b"RIFF" and value[8:12] == b"WAVE":
            self._must_show("audio", "sound")
            return EngineOutput(key, audio_wav=value)
        raise TypeError(f"{len(value)} bytes that are no PNG and no WAV file can't be put out; {self._right}")

    def _must_show(self, modality: str, what: str) -> None:
        if self._shows != modality:
            raise TypeError(f"{what} came out of a stage with final_output: {self._shows}; {self._right}")

    @property
    def _right(self) -> str:
        shown = {
            "text": "a str, and ",
            "image": "a PIL image or the bytes of a PNG file, and ",
            "audio": "a row of floats or the bytes of a WAV file, and ",
            "embedding": "an array of numbers, and ",
        }
        return f"return {shown.get(self._shows, '')}a mapping to hand over"


def _is_image(value: Any) -> bool:
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def _is_array(value: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    return is_array or (torch is not None and isinstance(value, torch.Tensor))
