"""Outputs of our stages as vLLM-Omni's server wants them."""

from __future__ import annotations

import asyncio
import io
import time
import wave
from typing import Any, Final

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngImageFile
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.utils.serial_utils import binary2tensor
from vllm_omni.outputs import OmniRequestOutput

from hub.api.vllm.bounds.fan_out import answer_size
from hub.api.vllm.bounds.pacing import TextPace
from hub.request.outputs import OmniOutput
from omni_discovery.errors import EngineFailedError

#: Samples of 16 bits become numbers by which the server, and libsndfile behind it, make the same samples again.
_FULL_SCALE: Final = 32768
#: The most tokens of a prompt that only the replica knows. The server counts a list of them, which takes memory.
_MOST_COUNTED: Final = 1 << 20
#: Of a picture that is unpacked, at most; and what any takes beside its pixels and its file.
_PIXEL_BYTES: Final = 4
_PICTURE_BYTES: Final = 16 << 10
#: What is kept of the notes in a picture's file, which may unpack to 64 MiB.
_KEPT_NOTES: Final = ("transparency", "icc_profile")


class FinalStage:
    """The outputs of one final stage of one request, in the pieces that the server asked for."""

    def __init__(
        self, request_id: str, kind: RequestOutputKind, prompt_token_ids: list[int], *, is_paced: bool = False
    ) -> None:
        self._request_id = request_id
        self._kind = kind
        self._prompt_token_ids = prompt_token_ids
        self._is_delta = kind == RequestOutputKind.DELTA
        self._size = answer_size(is_streamed=self._is_delta)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._sound = bytearray()
        self._rate_hz = 0
        self._pictures: list[Image.Image] = []
        #: Where calls are read out of the pieces of a text.
        self._pace = TextPace() if self._is_delta and is_paced else None
        #: Whether what was kept last waits to go on with the next output.
        self._waits = False

    async def add(self, output: OmniOutput) -> OmniRequestOutput | None:
        """Add one output; return what the server gets, None if it waits for more. Raise EngineFailedError."""
        if output.partial_image is not None:
            return None
        is_last = output.finish_reason is not None
        if self._is_delta and not self._waits:
            # The server has had what was kept.
            self._texts, self._token_ids, self._sound, self._pictures = [], [], bytearray(), []
            self._size = answer_size(is_streamed=True)
        await self._keep(output)
        if not is_last and (self._kind == RequestOutputKind.FINAL_ONLY or output.modality == "image"):
            return None
        if self._pace is not None and output.modality == "text":
            self._waits = not self._pace.is_due(len(output.text), time.monotonic()) and not is_last
            if self._waits:
                return None
        heard = await asyncio.to_thread(_numbers, self._sound, self._rate_hz) if self._sound else None
        return self._made(output, heard, is_last=is_last)

    async def _keep(self, output: OmniOutput) -> None:
        if output.prompt_token_ids:
            self._prompt_token_ids = list(output.prompt_token_ids)
        elif not self._prompt_token_ids:
            # Of a prompt that the replica has written only their number is known; the server counts them.
            self._prompt_token_ids = [0] * min(output.usage.get("prompt_tokens", 0), _MOST_COUNTED)
        self._size.add(len(output.text) + 8 * len(output.token_ids))
        self._texts.append(output.text)
        self._token_ids.extend(output.token_ids)
        if not output.data:
            return
        if output.modality == "audio":
            self._add_sound(output.data)
        elif output.modality == "image":
            self._pictures.append(await self._picture(output.data))
        else:
            raise EngineFailedError(f"stage {output.stage_id} put out {output.modality}, which is not shown here")

    def _add_sound(self, file: bytes) -> None:
        samples, rate_hz = _samples(file)
        if self._rate_hz not in (0, rate_hz):
            raise EngineFailedError("pieces of sound came in several sample rates")
        # As it is sent.
        self._size.add(4 * len(samples) // 3)
        self._sound += samples
        self._rate_hz = rate_hz

    async def _picture(self, file: bytes) -> Image.Image:
        """The picture in a file, unpacked. It counts as it is unpacked: a small file may hold any number of pixels."""
        picture = await asyncio.to_thread(_opened, file)
        self._size.add(len(file) + _PICTURE_BYTES + _PIXEL_BYTES * picture.width * picture.height)
        await asyncio.to_thread(_unpack, picture)
        return picture

    def _made(self, output: OmniOutput, heard: dict[str, Any] | None, *, is_last: bool) -> OmniRequestOutput:
        completion = CompletionOutput(
            index=0,
            text="".join(self._texts),
            token_ids=list(self._token_ids),
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        if heard is not None:
            # It is read as an attribute that vLLM's own class does not have.
            setattr(completion, "multimodal_output", heard)  # noqa: B010
        stage_id, _, replica_id = output.replica.partition("/")
        return OmniRequestOutput(
            request_id=self._request_id,
            finished=is_last,
            stage_id=output.stage_id,
            replica_id=int(replica_id) if stage_id and replica_id else None,
            final_output_type=output.modality,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion],
            images=list(self._pictures),
        )


class _Picture(PngImageFile):
    """A picture that is put out as the file that it came as, where a PNG is wanted: nothing is packed a second time."""

    def __init__(self, file: bytes) -> None:
        self._file = file
        super().__init__(io.BytesIO(file))

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:  # noqa: A002 - Pillow's name
        """See Pillow."""
        if format is not None and format.upper() == "PNG" and isinstance(fp, io.IOBase):
            fp.write(self._file)
        else:
            super().save(fp, format, **params)

    def drop_notes(self) -> None:
        """Drop the texts in the file, once it is unpacked."""
        self.info = {name: self.info[name] for name in _KEPT_NOTES if name in self.info}
        self._text, self.private_chunks = {}, []


def _numbers(sound: bytearray, rate_hz: int) -> dict[str, Any]:
    samples = np.frombuffer(sound, "<i2").astype(np.float32)
    samples /= np.float32(_FULL_SCALE)
    # A bytearray: torch warns of memory that is read-only.
    numbers: Any = bytearray(samples.data.cast("B"))
    return {"audio": binary2tensor(numbers, samples.shape, "float32", "native"), "sr": rate_hz}


def _samples(file: bytes) -> tuple[bytes, int]:
    """The samples of a WAV file, and how many of them are a second. Raise EngineFailedError."""
    try:
        with wave.open(io.BytesIO(file)) as reader:
            form = reader.getnchannels(), reader.getsampwidth()
            samples, rate_hz = reader.readframes(reader.getnframes()), reader.getframerate()
    except (wave.Error, EOFError) as error:
        raise EngineFailedError(f"a piece of sound is no WAV file: {error}") from error
    if form != (1, 2):
        raise EngineFailedError(f"sound has one channel of 16 bits here, not {form[0]} of {8 * form[1]}")
    return samples, rate_hz


def _opened(file: bytes) -> _Picture:
    """A picture of which the head has been read. Raise EngineFailedError."""
    try:
        return _Picture(file)
    except Exception as error:  # Pillow raises anything over a malformed file
        raise _unreadable(error) from error


def _unpack(picture: _Picture) -> None:
    try:
        picture.load()
        picture.drop_notes()
    except Exception as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> EngineFailedError:
    return EngineFailedError(f"a picture can't be read as PNG: {error}")
