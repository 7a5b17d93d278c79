"""OmniResult: the outputs of a finished request, joined stage by stage. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hub.media import array_of, joined_wav
from hub.request.outputs import EMBEDDING, OmniOutput
from omni_discovery.errors import RequestError
from omni_discovery.wire import TokenLogprobs, ToolAnswer

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class StageResult:
    """All output of one final stage. ``timings_s`` holds seconds by name, as the replica measured them."""

    stage_id: int
    modality: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    #: Each image, piece of audio or embedding, as a file of type ``mime``.
    data: tuple[bytes, ...] = ()
    mime: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, int] = field(default_factory=dict)
    timings_s: Mapping[str, float] = field(default_factory=dict)
    #: ``stage/replica_id`` of the replica that ended it.
    replica: str = ""
    #: If the request has them: one entry for each of ``token_ids``, and for each prompt token but the first.
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    #: Which of the request's stop tokens or texts ended the answer, if one did.
    stop_reason: int | str | None = None
    #: What the text is, where it calls functions of the request's ``tools``.
    called: ToolAnswer | None = None


@dataclass(frozen=True, slots=True)
class OmniResult:
    """One request of a batch. A failed one has its ``error``, and its output until then in ``stages``."""

    #: The position of its prompt in the batch, from 0.
    index: int
    request_id: str
    prompt: Any
    #: The final stages that have output or ended, in order of appearance.
    stages: tuple[StageResult, ...] = ()
    #: Seconds by name for the whole pipeline.
    timings_s: Mapping[str, float] = field(default_factory=dict)
    error: RequestError | None = None

    @property
    def text(self) -> str:
        """The text of the first stage of text; empty if there is none. Raise the error of a failed request."""
        self.raise_for_error()
        return next((stage.text for stage in self.stages if stage.modality == "text"), "")

    @property
    def images(self) -> tuple[bytes, ...]:
        """All images, as files. Raise the error of a failed request."""
        self.raise_for_error()
        return tuple(image for stage in self.stages if stage.modality == "image" for image in stage.data)

    @property
    def videos(self) -> tuple[bytes, ...]:
        """All videos, as MP4 files. Raise the error of a failed request."""
        self.raise_for_error()
        return tuple(video for stage in self.stages if stage.modality == "video" for video in stage.data)

    @property
    def audio(self) -> bytes | None:
        """The sound of the first stage of sound, as one WAV file; None if there is none.

        Raise the error of a failed request, and EngineFailedError for pieces that don't make one.
        """
        self.raise_for_error()
        pieces = next((stage.data for stage in self.stages if stage.modality == "audio" and stage.data), None)
        return None if pieces is None else joined_wav(pieces)

    @property
    def embedding(self) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """The embedding of the first stage that pools, as a float32 array; None if there is none.

        Raise the error of a failed request, EngineFailedError for data that is no array, ConfigError where numpy is
        missing.
        """
        self.raise_for_error()
        file = next((stage.data[0] for stage in self.stages if stage.modality == EMBEDDING and stage.data), None)
        return None if file is None else array_of(file)

    @property
    def finish_reason(self) -> str | None:
        """Why the first final stage ended. Raise the error of a failed request."""
        self.raise_for_error()
        return self.stages[0].finish_reason if self.stages else None

    def stage(self, stage_id: int) -> StageResult | None:
        """The result of one stage, None if it has no output."""
        return next((stage for stage in self.stages if stage.stage_id == stage_id), None)

    def raise_for_error(self) -> None:
        """Raise RequestError if the request failed."""
        if self.error is not None:
            raise self.error


class ResultBuilder:
    """Joins the outputs of one request."""

    def __init__(self, index: int, request_id: str, prompt: Any) -> None:
        self._head = (index, request_id, prompt)
        self._pieces: dict[int, list[OmniOutput]] = {}
        self._timings_s: Mapping[str, float] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no output has come yet."""
        return not self._pieces

    def add(self, output: OmniOutput) -> None:
        """Add one output. Unfinished pictures are left out."""
        if output.is_summary:
            self._timings_s = output.timings_s
        elif output.partial_image is None:
            self._pieces.setdefault(output.stage_id, []).append(output)

    def result(self, error: RequestError | None = None) -> OmniResult:
        """The result of the request, from the outputs so far."""
        stages = tuple(_joined(pieces) for pieces in self._pieces.values())
        return OmniResult(*self._head, stages, self._timings_s, error)


def _joined(pieces: list[OmniOutput]) -> StageResult:
    last = pieces[-1]
    return StageResult(
        stage_id=last.stage_id,
        modality=last.modality,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        data=tuple(piece.data for piece in pieces if piece.data),
        mime=next((piece.mime for piece in pieces if piece.mime), ""),
        finish_reason=last.finish_reason,
        usage=last.usage,
        timings_s=last.timings_s,
        replica=last.replica,
        logprobs=tuple(place for piece in pieces for place in piece.logprobs),
        prompt_logprobs=tuple(place for piece in pieces for place in piece.prompt_logprobs),
        stop_reason=last.stop_reason,
        called=last.called,
    )
