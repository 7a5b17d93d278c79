"""Outputs of our stages as vLLM-Omni's server wants them."""

from __future__ import annotations

import io
import wave
from typing import Any, Final

import numpy as np
from PIL import Image
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.utils.serial_utils import binary2tensor
from vllm_omni.outputs import OmniRequestOutput

from hub.request.outputs import OmniOutput
from omni_discovery.data_urls import MAX_PIXELS, PICTURE_FORMATS
from omni_discovery.errors import EngineFailedError

#: Samples of 16 bits become numbers by which the server, and libsndfile behind it, make the same samples again.
_FULL_SCALE: Final = 32768


class FinalStage:
    """The outputs of one final stage of one request, in the pieces that the server asked for."""

    def __init__(self, request_id: str, kind: RequestOutputKind, prompt_token_ids: list[int]) -> None:
        self._request_id = request_id
        self._kind = kind
        self._prompt_token_ids = prompt_token_ids
        self._text = ""
        self._token_ids: list[int] = []
        self._sound = b""
        self._rate_hz = 0
        self._pictures: list[Image.Image] = []

    def add(self, output: OmniOutput) -> OmniRequestOutput | None:
        """Add one output; return what the server gets, None if it waits for more. Raise EngineFailedError."""
        if output.partial_image is not None:
            return None
        is_last, is_delta = output.finish_reason is not None, self._kind == RequestOutputKind.DELTA
        if is_delta:
            self._text, self._token_ids, self._sound, self._pictures = "", [], b"", []
        self._keep(output)
        if not is_last and (self._kind == RequestOutputKind.FINAL_ONLY or output.modality == "image"):
            return None
        return self._made(output, is_last=is_last)

    def _keep(self, output: OmniOutput) -> None:
        if output.prompt_token_ids:
            self._prompt_token_ids = list(output.prompt_token_ids)
        elif not self._prompt_token_ids:
            # Of a prompt that the replica has written only their number is known; the server counts them.
            self._prompt_token_ids = [0] * output.usage.get("prompt_tokens", 0)
        self._text += output.text
        self._token_ids.extend(output.token_ids)
        if not output.data:
            return
        if output.modality == "audio":
            samples, rate_hz = _samples(output.data)
            if self._rate_hz not in (0, rate_hz):
                raise EngineFailedError("pieces of sound came in several sample rates")
            self._sound, self._rate_hz = self._sound + samples, rate_hz
        elif output.modality == "image":
            self._pictures.append(_picture(output.data))
        else:
            raise EngineFailedError(f"stage {output.stage_id} put out {output.modality}, which is not shown here")

    def _made(self, output: OmniOutput, *, is_last: bool) -> OmniRequestOutput:
        completion = CompletionOutput(
            index=0,
            text=self._text,
            token_ids=list(self._token_ids),
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        if self._sound:
            # It is read as an attribute that vLLM's own class does not have.
            setattr(completion, "multimodal_output", self._heard())  # noqa: B010
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

    def _heard(self) -> dict[str, Any]:
        samples = np.frombuffer(self._sound, "<i2").astype(np.float32) / np.float32(_FULL_SCALE)
        # A bytearray: torch warns of memory that is read-only.
        numbers: Any = bytearray(samples.tobytes())
        return {"audio": binary2tensor(numbers, samples.shape, "float32", "native"), "sr": self._rate_hz}


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


def _picture(file: bytes) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(file), formats=PICTURE_FORMATS)
        if picture.width * picture.height > MAX_PIXELS:
            raise EngineFailedError(f"a picture has more than {MAX_PIXELS} pixels")
        picture.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise EngineFailedError(f"a picture can't be read: {error}") from error
    return picture
