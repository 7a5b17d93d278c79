"""The messages between a hub and a replica; wire.py makes frames of them.

Every message carries the epoch of the replica it is meant for or comes from, so that no frame reaches another life of
the same key. Nothing here is ever pickled.

Input socket of the replica:   Hello, Submit, Abort, Pause, ReleasePayloads, WantCredits, ReturnCredits in; Welcome,
                               Accepted, Rejected, Aborted out.
Output socket of the replica:  Hello in; Welcome, Grant, Recall, Chunk, StageDone, StageFailed out.

The messages by which a stage's hand-off travels piece by piece while the stage still works (async_chunk).

A producer says HandOffPiece, the hub passes each on to the next stage's replica as Feed, that answers PieceTaken, and
the hub tells the producer by PieceRoom that it may go on. The pieces themselves go through the edge's connector.

Input socket of the replica:   Feed, PieceRoom in.
Output socket of the replica:  HandOffPiece, PieceTaken out.

The messages of streamed input: a request whose input comes in segments, one after the other, to one replica.

The first segment travels in a Submit that is ``segmented``; the replica then keeps the request, and its slot, until it
is told that no more will come. Each segment's answer ends with SegmentDone, the request with StageDone.

Input socket of the replica:   Update in; Accepted or Rejected out.
Output socket of the replica:  SegmentDone out.

The messages of collective control: what a hub asks of a replica itself, beside all requests.

Arguments and results are plain values, as msgpack has them, and bounded.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

import msgspec

__all__ = [
    "MAX_ATTACHMENTS",
    "MAX_ATTACHMENT_BYTES",
    "MAX_BATCH",
    "MAX_CONTROL_BYTES",
    "MAX_HEAD_BYTES",
    "MAX_LOGPROBS",
    "MAX_PRIORITY",
    "MAX_PROMPT_LOGPROBS",
    "MAX_REASON",
    "VERSION",
    "Abort",
    "Aborted",
    "Accepted",
    "Chunk",
    "Control",
    "ControlResult",
    "FailureKind",
    "Feed",
    "FromReplica",
    "Grant",
    "HandOffPiece",
    "Hello",
    "Pause",
    "PayloadRef",
    "PieceRoom",
    "PieceTaken",
    "Recall",
    "Rejected",
    "ReleasePayloads",
    "Resume",
    "ReturnCredits",
    "SegmentDone",
    "StageDone",
    "StageFailed",
    "Submit",
    "ToReplica",
    "TokenLogprob",
    "TokenLogprobs",
    "Update",
    "WantCredits",
    "Welcome",
]


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


class Feed(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="feed"):
    """A piece for the request, of those of ``from_stage``; ``number`` counts from 0 without a gap.

    The last one, ``is_last``, carries no payload: it says that no piece of that number will come. Pieces that came
    before may come again.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count
    from_stage: _StageId
    number: _Count
    payload: PayloadRef | None = None
    is_last: bool = False


class PieceRoom(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="room"):
    """The next stage ``to_stage`` has taken all pieces before ``number``.

    ``again``: a connection broke, and the pieces from there on may be lost; say those that were said once more.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count
    to_stage: _StageId
    number: _Count
    again: bool = False


class HandOffPiece(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="piece"):
    """A piece of the hand-off for the stages that Submit named in ``stream_to``; ``number`` counts from 0, no gap."""

    epoch: _Count
    request_id: _Name
    attempt: _Count
    number: _Count
    payloads: tuple[PayloadRef, ...]
    queue_length: _Count


class PieceTaken(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="taken"):
    """The engine has all pieces of ``from_stage`` up to and with ``number``."""

    epoch: _Count
    request_id: _Name
    attempt: _Count
    from_stage: _StageId
    number: _Count
    queue_length: _Count


class Update(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="update"):
    """The next segment of a request that this replica keeps; ``is_last``: there is none, and the request is to end.

    ``segment`` counts from 0, the one that came with Submit, without a gap. One that came before may come again, after
    a connection was lost: it is only acknowledged. Hand-offs of segments before ``kept_from`` are needed no more.
    Answered by Accepted, or by Rejected where the replica has no such request.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count
    segment: _Count
    inputs: dict[str, Any] = {}
    payloads: tuple[PayloadRef, ...] = ()
    is_last: bool = False
    kept_from: _Count = 0


class SegmentDone(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="segment"):
    """The answer to a segment is complete. Takes a ``seq`` of its own among the chunks of the request.

    No payload for a next stage means that it has nothing to do with this segment. ``usage`` is the segment's own.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count
    seq: _Count
    segment: _Count
    finish_reason: _Word
    queue_length: _Count
    payloads: tuple[PayloadRef, ...] = ()
    usage: dict[str, int] = {}


#: Longest arguments of one call, and longest result of it, as msgpack.
MAX_CONTROL_BYTES: Final = 1 << 20


class Control(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="control"):
    """Call a control method of the engine, between two steps of it. Answered by ControlResult, and never run twice.

    ``call_id`` is unique to the hub's process. ``remaining_s`` is the time left until nobody waits for the answer: a
    call that could not begin within it does not begin.
    """

    epoch: _Count
    call_id: _Name
    method: _Name
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    remaining_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 60.0


class ControlResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="controlled"):
    """What came of a Control: ``result`` if it is ``ok``, else ``error``, which begins with the error's type."""

    epoch: _Count
    call_id: _Name
    ok: bool
    queue_length: _Count
    result: Any = None
    error: _Reason = ""


#: What a hub sends to a replica.
ToReplica = (
    Hello | Submit | Abort | Pause | ReleasePayloads | WantCredits | ReturnCredits | Feed | PieceRoom | Control | Update
)
#: What a replica sends to a hub.
FromReplica = (
    Welcome
    | Accepted
    | Rejected
    | Aborted
    | Grant
    | Recall
    | Chunk
    | StageDone
    | StageFailed
    | HandOffPiece
    | PieceTaken
    | ControlResult
    | SegmentDone
)
