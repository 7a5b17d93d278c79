"""OmniOutput: the outputs that the client of a request gets, and the names of the timings in them. Pure.

All timings are seconds. For the whole request: ``hub_in`` (from its arrival to the first send) and ``total``. For each
stage, as ``stage<id>.<name>``, of the attempt whose output the client has:

    queue         the work waited, in the hub for a free slot and at the replica for its engine
    submit        from the send to the replica's Accepted
    first_output  from the send to the first piece of output
    generate      the engine worked on it
    transfer      its hand-offs were fetched and stored
    total         from the send to the end of the stage

``stage<id>.replica.<name>`` are the replica's own measurements, under its own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import msgspec
from msgspec import UNSET

from hub.media import array_of
from omni_discovery import wire

if TYPE_CHECKING:
    import numpy as np

#: Modality of an embedding; the output's data is a .npy file.
EMBEDDING: Final = "embedding"
#: Modality and stage id of the last record of each request: no content, only the pipeline's timings.
SUMMARY: Final = "summary"
NO_STAGE: Final = -1
#: Estimated memory of one log probability without its text, in bytes.
_LOGPROB_BYTES: Final = 200


# One is made for each piece of each stream: as a frozen dataclass of so many fields it would cost ten times as much.
class OmniOutput(msgspec.Struct, frozen=True, gc=False):
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
    usage: Mapping[str, int] = {}
    timings_s: Mapping[str, float] = {}
    #: ``stage/replica_id`` of the replica it came from.
    replica: str = ""
    #: When its frame was received, on ``time.perf_counter``; 0.0 if it came from no frame.
    received_at_s: float = 0.0
    #: Where the input came in segments: the segment's number, from 0, and on its last output the finish reason.
    segment: int = 0
    segment_end: str | None = None
    #: One entry for each of ``token_ids``, if the request has ``logprobs``.
    logprobs: tuple[wire.TokenLogprobs, ...] = ()
    #: If the request has ``prompt_logprobs``: the next entries, one for each prompt token but the first. All of them
    #: come before the first token of the answer.
    prompt_logprobs: tuple[wire.TokenLogprobs, ...] = ()
    #: On the output with the first token: the tokens of a prompt that pictures or other items were put into.
    prompt_token_ids: tuple[int, ...] = ()
    #: On a stage's last output: the request's stop token or text that ended the answer, if one did.
    stop_reason: int | str | None = None
    #: On a stage's last output: what its text is, where it calls functions of the request's ``tools``.
    called: wire.ToolAnswer | None = None
    #: On the request's first output and on its summary: the replicas that have its stages so far, as ``replica``.
    replicas: tuple[str, ...] = ()
    #: The number, from 0, of an unfinished picture; more of them, and the finished one, come behind it.
    partial_image: int | None = None

    @property
    def is_summary(self) -> bool:
        """Whether this is the request's last record."""
        return self.modality == SUMMARY

    @property
    def embedding(self) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """The embedding as a float32 array; None for any other output.

        Raise EngineFailedError for data that is no such array, ConfigError where numpy is missing.
        """
        return array_of(self.data) if self.modality == EMBEDDING and self.data else None

    @property
    def size_bytes(self) -> int:
        """The estimated memory of the content, in bytes."""
        if not (self.logprobs or self.prompt_logprobs or self.prompt_token_ids or self.called):
            return len(self.data) + len(self.text) + 8 * len(self.token_ids)
        likely_bytes = logprobs_bytes(self.logprobs) + logprobs_bytes(self.prompt_logprobs)
        called = self.called
        called_bytes = 0 if called is None else len(called.content) + sum(len(each.arguments) for each in called.calls)
        text_bytes = len(self.text) + called_bytes
        return len(self.data) + text_bytes + 8 * len(self.token_ids + self.prompt_token_ids) + likely_bytes

    def joined(self, later: OmniOutput) -> OmniOutput | None:
        """Join this chunk and the next; None unless both are plain text of one stage, replica and segment."""
        if any(each.data or each.finish_reason or each.segment_end for each in (self, later)):
            return None
        if (self.stage_id, self.modality, self.replica) != (later.stage_id, later.modality, later.replica):
            return None
        if self.segment != later.segment:
            return None
        return msgspec.structs.replace(
            self,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
            prompt_token_ids=self.prompt_token_ids or later.prompt_token_ids,
            received_at_s=later.received_at_s,
        )


def logprobs_bytes(places: Sequence[wire.TokenLogprobs]) -> int:
    """The estimated memory of log probabilities, in bytes."""
    return sum(_LOGPROB_BYTES + len(each.text) for place in places for each in place)


def chunk_outputs(
    request_id: str,
    stage_id: int,
    replica: str,
    message: wire.Chunk,
    attachments: Sequence[bytes],
    received_at_s: float,
) -> list[OmniOutput]:
    """The outputs of a chunk: one, or one for each attachment."""
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
            partial_image=None if message.partial_image is UNSET else message.partial_image,
        )
        for position, data in enumerate(attachments or (b"",))
    ]


def is_plain_text(message: wire.FromReplica) -> TypeGuard[wire.Chunk]:
    """Whether a message is a chunk of text and tokens and nothing else: whatever they are, they may be passed on."""
    return (
        type(message) is wire.Chunk
        and message.modality == "text"
        and not message.mime
        and message.logprobs is UNSET
        and message.prompt_logprobs is UNSET
        and message.prompt_token_ids is UNSET
        and message.partial_image is UNSET
    )


def text_output(request_id: str, stage_id: int, replica: str, piece: wire.Chunk, received_at_s: float) -> OmniOutput:
    """The output of a chunk that ``is_plain_text``."""
    return OmniOutput(
        request_id=request_id,
        stage_id=stage_id,
        modality=piece.modality,
        text=piece.text,
        token_ids=piece.token_ids,
        replica=replica,
        received_at_s=received_at_s,
    )


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
        timings_s=first_timings(message.timings_s),
        replica=replica,
        received_at_s=received_at_s,
        stop_reason=message.stop_reason if message.stop_reason is not UNSET else None,
        called=message.called if message.called is not UNSET else None,
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


def summary_output(
    request_id: str, finish_reason: str, timings_s: Mapping[str, float], replicas: tuple[str, ...] = ()
) -> OmniOutput:
    """The record that closes a request."""
    return OmniOutput(
        request_id=request_id,
        stage_id=NO_STAGE,
        modality=SUMMARY,
        finish_reason=finish_reason,
        timings_s=dict(timings_s),
        replicas=replicas,
    )


#: The timings of one stage that are exported as metrics and in traces.
STAGE_PARTS: Final = ("queue", "submit", "first_output", "generate", "transfer", "total")


def name_of(stage_id: int, part: str) -> str:
    """The name of a stage's timing among those of its request."""
    return f"stage{stage_id}.{part}"


#: Timings that a replica may name for one stage; each costs the hub until the answer is sent.
_MOST_REPLICA_TIMINGS: Final = 64


def first_timings(replica_s: Mapping[str, float]) -> dict[str, float]:
    """The timings of a stage as its replica measured them; of very many the first."""
    return dict(islice(replica_s.items(), _MOST_REPLICA_TIMINGS))


def with_replica(queued_s: float, replica_s: Mapping[str, float]) -> dict[str, float]:
    """A stage's timings from its replica's own, ``replica_s``; ``queued_s`` is how long the work waited in the hub."""
    parts = {name: replica_s[name] for name in ("generate", "transfer") if is_length(replica_s.get(name))}
    if is_length(replica_s.get("queue")):
        parts["queue"] = queued_s + replica_s["queue"]
    return parts


def is_length(seconds: float | None) -> bool:
    """Whether a number from a replica is a length of time: there, finite and not negative."""
    return seconds is not None and isfinite(seconds) and seconds >= 0


def of_stage(timings_s: Mapping[str, float], stage_id: int) -> dict[str, float]:
    """The exported timings of one stage, by their short names."""
    return {part: timings_s[name] for part, name in _names_of(stage_id) if name in timings_s}


@lru_cache(maxsize=256)
def _names_of(stage_id: int) -> tuple[tuple[str, str], ...]:
    return tuple((part, name_of(stage_id, part)) for part in STAGE_PARTS)
