"""What a client of a request gets. Pure.

The names of a request's timings, and what a replica's own figures add to them. Pure.

All are seconds. For the whole request: ``hub_in`` (from its arrival to the first send), ``total``. For each stage, as
``stage<id>.<name>``, of the attempt that counts:

    queue         it waited, in the hub for a free slot and at the replica for its engine
    submit        from the send to the replica's word that it has the work
    first_output  from the send to the first piece of output
    generate      the engine worked on it
    transfer      its hand-offs were fetched and stored
    total         from the send to the end of the stage

``stage<id>.replica.<name>`` is what the replica itself said, in its own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET

from hub.media import array_of
from omni_discovery import wire

if TYPE_CHECKING:
    import numpy as np

#: Modality of what a stage has pooled; its data is a .npy file.
EMBEDDING: Final = "embedding"
#: Modality and stage id of the last record of each request: no content, only the pipeline's timings.
SUMMARY: Final = "summary"
NO_STAGE: Final = -1
#: About how much memory one log probability takes.
_LOGPROB_BYTES: Final = 200


@dataclass(frozen=True, slots=True)
class OmniOutput:
    """One piece of a request's output.

    A chunk has ``finish_reason`` None. Each final stage ends with one output whose ``finish_reason`` is set, which
    carries its ``usage`` and ``timings_s`` and no content. Then comes one summary (``is_summary``) with the timings of
    the whole pipeline; its ``finish_reason`` is ``done``, or ``abort`` if the request was aborted.
    """

    request_id: str
    stage_id: int
    modality: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    data: bytes = b""
    mime: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, int] = field(default_factory=dict)
    timings_s: Mapping[str, float] = field(default_factory=dict)
    #: ``stage/replica_id`` of the replica it came from.
    replica: str = ""
    #: When its frame was received, on ``time.perf_counter``; 0.0 if it came from no frame.
    received_at_s: float = 0.0
    #: Where the input came in segments: to which one it belongs, from 0, and on the output that ends a segment, why.
    segment: int = 0
    segment_end: str | None = None
    #: If they were asked for, one entry for each of ``token_ids``.
    logprobs: tuple[wire.TokenLogprobs, ...] = ()
    #: Likewise: of the prompt's tokens but its first, those that follow on what came before. All come before a token.
    prompt_logprobs: tuple[wire.TokenLogprobs, ...] = ()
    #: On the output with the first token: what a prompt came to that pictures or other items were put into.
    prompt_token_ids: tuple[int, ...] = ()
    #: On a stage's last output: which of the request's stop tokens or texts ended the answer, if one did.
    stop_reason: int | str | None = None

    @property
    def is_summary(self) -> bool:
        """Whether this is the request's last record."""
        return self.modality == SUMMARY

    @property
    def embedding(self) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """What the stage pooled, as an array; None for any other output.

        Raise EngineFailedError for what is no such array, ConfigError where numpy is missing.
        """
        return array_of(self.data) if self.modality == EMBEDDING and self.data else None

    @property
    def size_bytes(self) -> int:
        """About how much memory the content takes."""
        likely = _LOGPROB_BYTES * (sum(map(len, self.logprobs)) + sum(map(len, self.prompt_logprobs)))
        return len(self.data) + len(self.text) + 8 * len(self.token_ids + self.prompt_token_ids) + likely

    def joined(self, later: OmniOutput) -> OmniOutput | None:
        """One chunk for this and the next, or None where they are no plain text of one stage and replica."""
        if any(each.data or each.finish_reason or each.segment_end for each in (self, later)):
            return None
        if (self.stage_id, self.modality, self.replica) != (later.stage_id, later.modality, later.replica):
            return None
        if self.segment != later.segment:
            return None
        return replace(
            self,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
            prompt_token_ids=self.prompt_token_ids or later.prompt_token_ids,
            received_at_s=later.received_at_s,
        )


def chunk_outputs(
    request_id: str,
    stage_id: int,
    replica: str,
    message: wire.Chunk,
    attachments: Sequence[bytes],
    received_at_s: float,
) -> list[OmniOutput]:
    """What a chunk shows the client: one output, or one for each attachment."""
    return [
        OmniOutput(
            request_id=request_id,
            stage_id=stage_id,
            modality=message.modality,
            text="" if position else message.text,
            token_ids=() if position else message.token_ids,
            data=data,
            mime=message.mime,
            replica=replica,
            received_at_s=received_at_s,
            logprobs=() if position else message.logprobs or (),
            prompt_logprobs=() if position else message.prompt_logprobs or (),
            prompt_token_ids=() if position else message.prompt_token_ids or (),
        )
        for position, data in enumerate(attachments or (b"",))
    ]


def end_output(
    request_id: str, stage_id: int, replica: str, modality: str, message: wire.StageDone, received_at_s: float
) -> OmniOutput:
    """The last output of a final stage."""
    return OmniOutput(
        request_id=request_id,
        stage_id=stage_id,
        modality=modality,
        finish_reason=message.finish_reason,
        usage=message.usage,
        timings_s=message.timings_s,
        replica=replica,
        received_at_s=received_at_s,
        stop_reason=message.stop_reason if message.stop_reason is not UNSET else None,
    )


def segment_output(
    request_id: str,
    stage_id: int,
    replica: str,
    modality: str,
    segment: int,
    message: wire.SegmentDone,
    received_at_s: float,
) -> OmniOutput:
    """The output that tells the client that a final stage has ended a segment."""
    return OmniOutput(
        request_id=request_id,
        stage_id=stage_id,
        modality=modality,
        usage=message.usage,
        replica=replica,
        received_at_s=received_at_s,
        segment=segment,
        segment_end=message.finish_reason,
    )


def summary_output(request_id: str, finish_reason: str, timings_s: Mapping[str, float]) -> OmniOutput:
    """The record that closes a request."""
    return OmniOutput(
        request_id=request_id,
        stage_id=NO_STAGE,
        modality=SUMMARY,
        finish_reason=finish_reason,
        timings_s=dict(timings_s),
    )


#: The timings of one stage that are exported.
STAGE_PARTS: Final = ("queue", "submit", "first_output", "generate", "transfer")


def name_of(stage_id: int, part: str) -> str:
    """How a stage's timing is called among those of its request."""
    return f"stage{stage_id}.{part}"


def with_replica(queued_s: float, said_s: Mapping[str, float]) -> dict[str, float]:
    """A stage's timings once its replica has told its own; ``queued_s`` is how long the work waited in the hub."""
    parts = {name: said_s[name] for name in ("generate", "transfer") if is_length(said_s.get(name))}
    if is_length(said_s.get("queue")):
        parts["queue"] = queued_s + said_s["queue"]
    return parts


def is_length(seconds: float | None) -> bool:
    """Whether that can be a length of time: replicas may say anything."""
    return seconds is not None and isfinite(seconds) and seconds >= 0


def of_stage(timings_s: Mapping[str, float], stage_id: int) -> dict[str, float]:
    """Those of one stage that are exported, by their short names."""
    found = {part: timings_s.get(name_of(stage_id, part)) for part in STAGE_PARTS}
    return {part: seconds for part, seconds in found.items() if seconds is not None}
