"""The messages between a hub and a replica; wire.py makes frames of them.

Every message carries the epoch of the replica it is meant for or comes from, so that no frame reaches another life of
the same key. Nothing here is ever pickled.

Input socket of the replica:   Hello, Submit, Abort, Pause, ReleasePayloads, WantCredits, ReturnCredits in; Welcome,
                               Accepted, Rejected, Aborted out.
Output socket of the replica:  Hello in; Welcome, Grant, Recall, Chunk, StageDone, StageFailed out.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

import msgspec

VERSION: Final = 1

#: Longest head frame that is looked at; prompts travel in it, tensors and images do not.
MAX_HEAD_BYTES: Final = 4 << 20
#: Longest attachment, and how many one message may have.
MAX_ATTACHMENT_BYTES: Final = 64 << 20
MAX_ATTACHMENTS: Final = 16
#: How many messages one batch may have.
MAX_BATCH: Final = 1024
MAX_PRIORITY: Final = 1_000_000
#: How many log probabilities a token may have besides its own.
MAX_LOGPROBS: Final = 20
#: How many of its prompts one request may have in all: 6 MB between replica and hub, and a second of either's time.
MAX_PROMPT_LOGPROBS: Final = 1 << 18
#: Longest text, in characters, that says why something failed.
MAX_REASON: Final = 4096

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Word = Annotated[str, msgspec.Meta(max_length=256)]
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_StageId = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)]
_Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class FailureKind(StrEnum):
    """Why a stage did not do its work; the hub maps it to a typed error."""

    INVALID = "invalid"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    ENGINE = "engine"
    PAYLOAD = "payload"
    DEADLINE = "deadline"
    #: The stage can't go on from what the client has seen of the request; the reason says what stands in the way.
    NOT_RESUMABLE = "not_resumable"


class TokenLogprob(NamedTuple):
    """How likely a token was at one place of an answer: the natural logarithm, and its rank there, from 1.

    ``text`` is what the token says alone; of a character that takes several tokens, the last one says it.
    """

    token_id: _Count
    logprob: float
    rank: _Count
    text: str


#: What was likely at one place: the token that was taken, then the most likely ones.
TokenLogprobs = Annotated[tuple[TokenLogprob, ...], msgspec.Meta(min_length=1, max_length=MAX_LOGPROBS + 1)]


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stage left its hand-off: enough for the next stage's connector to fetch it.

    ``role`` names the companion whose hand-off it is; empty for the request's own.
    """

    from_stage: _StageId
    to_stage: _StageId
    key: _Name
    connector: _Name
    size_bytes: _Count
    metadata: dict[str, Any] = {}
    role: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """What the client has been shown of the stage's output: go on behind it, without repeating any of it."""

    token_ids: tuple[int, ...] = ()
    text: str = ""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="hello"):
    """A hub opens its session with one life of the replica.

    ``session`` counts the hub's sessions with this process: credits of an earlier one are void.
    """

    hub_id: _Name
    epoch: _Count
    session: _Count = 0


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="welcome"):
    """The replica is the life that Hello named, and this is its load."""

    epoch: _Count
    capacity: _Count
    queue_length: _Count
    session: _Count = 0


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="submit"):
    """Work for the stage.

    ``inputs`` holds ``messages``, ``prompt`` or ``prompt_token_ids`` as the client gave them. ``payloads`` is what the
    stages before left for this one, ``next_stages`` who wants a hand-off. ``remaining_s`` is the time left to the
    request's deadline: lengths survive clocks that disagree. ``attempt`` counts from 0, and each has frames of its own.
    ``resume`` continues an answer that another replica began. ``credit`` says that the hub spends a credit of its
    present session on it; one without is taken, too, within the replica's own bound. Lower ``priority`` goes first.
    ``stream_to`` are those of ``next_stages`` that take pieces of the hand-off while it is made, ``stream_from`` the
    stages whose pieces will come, by Feed. ``segmented``: more input may come, by Update. ``trace`` is the hub's span
    of this attempt, as the W3C's ``traceparent``; empty where nothing is traced.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count = 0
    inputs: dict[str, Any] = {}
    params: dict[str, Any] = {}
    payloads: tuple[PayloadRef, ...] = ()
    next_stages: tuple[_StageId, ...] = ()
    remaining_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 600.0
    resume: Resume | None = None
    credit: bool = False
    priority: _Priority = 0
    stream_from: tuple[_StageId, ...] = ()
    stream_to: tuple[_StageId, ...] = ()
    segmented: bool = False
    trace: _Word = ""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="abort"):
    """Stop working on a request, up to and with ``attempt``. Always answered by Aborted.

    What was running ends with StageDone, finish_reason ``abort``, besides.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count = (1 << 53) - 1


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="pause"):
    """The client is behind with what was made of the request: make no more of it; ``paused`` False: go on.

    The last word counts, and it is said again after a lost session. Answered by Accepted if the request is there, else
    not at all: it may have ended just now.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count
    paused: bool


class ReleasePayloads(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="release"):
    """Nobody will fetch the request's hand-offs any more."""

    epoch: _Count
    request_id: _Name


class WantCredits(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="want"):
    """The hub has ``waiting`` requests that this replica could serve, the oldest for ``oldest_wait_s``; 0: no more."""

    epoch: _Count
    session: _Count
    waiting: _Count
    oldest_wait_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class ReturnCredits(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="return"):
    """The answer to a Recall: so many of the credits it named were not spent, and are the replica's again."""

    epoch: _Count
    session: _Count
    credits: _Count


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="accepted"):
    """The replica has the request and will answer it."""

    epoch: _Count
    request_id: _Name
    queue_length: _Count
    attempt: _Count = 0


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="rejected"):
    """The replica will not do it; nothing has run."""

    epoch: _Count
    request_id: _Name
    kind: FailureKind
    reason: _Reason
    queue_length: _Count
    attempt: _Count = 0


class Aborted(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="aborted"):
    """The Abort has arrived, and nothing of the request up to that attempt runs on; ``running``: something did."""

    epoch: _Count
    request_id: _Name
    attempt: _Count
    running: bool
    queue_length: _Count


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="grant"):
    """The hub may send ``credits`` more requests, each to run at once. Void if ``session`` is not its present one."""

    epoch: _Count
    session: _Count
    credits: _Count
    queue_length: _Count


class Recall(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="recall"):
    """Others wait: give up to ``credits`` unspent ones back, at once, by ReturnCredits."""

    epoch: _Count
    session: _Count
    credits: _Count
    queue_length: _Count


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="chunk"):
    """A piece of output; ``seq`` counts from 0 without a gap. An image comes as one attachment of type ``mime``.

    ``logprobs`` has one entry for each of ``token_ids``, and is left out where they were not asked for.
    ``prompt_logprobs`` has one for each of the prompt's tokens but its first, in order over as many chunks as it takes,
    all of them before the first chunk with a token of the answer. That one has ``prompt_token_ids``, where the prompt
    is not what was asked because pictures, sound or other items were put into it: what it came to.
    """

    epoch: _Count
    request_id: _Name
    seq: _Count
    modality: _Name
    queue_length: _Count
    attempt: _Count = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    mime: _Word = ""
    logprobs: tuple[TokenLogprobs, ...] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: tuple[TokenLogprobs, ...] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class StageDone(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="done"):
    """The stage is through with the request. No payload for a next stage means that it has nothing to do.

    ``usage`` counts tokens, ``timings_s`` holds seconds by name (queue, first_output, generate, transfer), ``pieces``
    is how many were said of the hand-off. ``stop_reason`` is the token or the text that ended an answer, if one did
    that the request had named.
    """

    epoch: _Count
    request_id: _Name
    seq: _Count
    finish_reason: _Word
    queue_length: _Count
    attempt: _Count = 0
    payloads: tuple[PayloadRef, ...] = ()
    usage: dict[str, int] = {}
    timings_s: dict[str, float] = {}
    pieces: _Count = 0
    stop_reason: _Count | _Word | msgspec.UnsetType = msgspec.UNSET


class StageFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="failed"):
    """The stage accepted the request and could not finish it."""

    epoch: _Count
    request_id: _Name
    kind: FailureKind
    reason: _Reason
    queue_length: _Count
    attempt: _Count = 0


ToReplica = Hello | Submit | Abort | Pause | ReleasePayloads | WantCredits | ReturnCredits
FromReplica = Welcome | Accepted | Rejected | Aborted | Grant | Recall | Chunk | StageDone | StageFailed
