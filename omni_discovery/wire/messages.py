"""The messages between a hub and a replica; frames.py encodes them, session.py has the rules of their session. Pure.

Every message carries the epoch of the replica that it is meant for or comes from, so that no message reaches another
life of the same key. Nothing here is ever pickled.

| subject              | hub to replica                          | replica to hub                             |
|----------------------|-----------------------------------------|--------------------------------------------|
| session              | Hello (both sockets)                    | Welcome (both sockets)                     |
| requests             | Submit, Abort                           | Accepted, Rejected, Aborted (input socket) |
| output               | Pause, ReleasePayloads                  | Chunk, StageDone, StageFailed              |
| credits              | WantCredits, ReturnCredits              | Grant, Recall                              |
| hand-offs in pieces  | Feed, PieceRoom                         | HandOffPiece, PieceTaken                   |
| input in segments    | Update                                  | SegmentDone                                |
| control calls        | Control                                 | ControlResult                              |

What a hub sends travels on the replica's input socket, what a replica sends on its output socket, but for those that
name another socket above.

Hand-offs in pieces (``async_chunk``): while a stage still works, its replica sends a HandOffPiece for each piece that
it has stored, the hub passes it on to the next stage's replica as Feed, which answers PieceTaken, and the hub lets the
producer go on by PieceRoom. The pieces themselves go through the edge's connector.

Input in segments: the first segment travels in a Submit that is ``segmented``; the replica then keeps the request, and
its slot, until an Update says that no more will come. Each segment's answer ends with SegmentDone, the request with
StageDone.

Control calls: a hub calls a method of the replica's engine, beside all requests. Arguments and results are plain
msgpack values, and bounded.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from omni_discovery.text import MAX_LABEL, MAX_SHORTENED

__all__ = [
    "MAX_ATTACHMENTS",
    "MAX_ATTACHMENT_BYTES",
    "MAX_BATCH",
    "MAX_CONTROL_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_HEAD_BYTES",
    "MAX_LOGPROBS",
    "MAX_PARTIAL_IMAGES",
    "MAX_PRIORITY",
    "MAX_PROMPT_LOGPROBS",
    "MAX_REASON",
    "MAX_SOCKET_FRAME_BYTES",
    "MAX_TOOL_CALLS",
    "VERSION",
    "VERSION_CUT",
    "WITH_KEY",
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
    "ToolAnswer",
    "ToolCall",
    "Update",
    "WantCredits",
    "Welcome",
]


VERSION: Final = 1
#: That of a message that is cut into frames of a bounded size, see frames.py. Who takes it says so before any is sent:
#: a hub in its Hello and its record, a replica in its record.
VERSION_CUT: Final = 2

#: Longest frame, in bytes, between two sides that take messages that are cut. It also bounds what a handshake brings,
#: which libzmq reads before it asks whether the other side may come in.
MAX_FRAME_BYTES: Final = 64 << 10
#: The same as a socket has to allow it, with what CURVE adds.
MAX_SOCKET_FRAME_BYTES: Final = MAX_FRAME_BYTES + 64
#: Longest head frame that is decoded, in bytes; prompts travel in it, tensors and images do not.
MAX_HEAD_BYTES: Final = 4 << 20
#: Longest attachment, in bytes, and how many attachments one message may have.
MAX_ATTACHMENT_BYTES: Final = 64 << 20
MAX_ATTACHMENTS: Final = 16
#: How many messages one batch may have.
MAX_BATCH: Final = 1024
MAX_PRIORITY: Final = 1_000_000
#: How many log probabilities a token may have besides its own.
MAX_LOGPROBS: Final = 20
#: How many unfinished pictures may come before each finished one.
MAX_PARTIAL_IMAGES: Final = 3
#: How many log probabilities of its prompt one request may have: 6 MB on the wire, and a second of work at each end.
MAX_PROMPT_LOGPROBS: Final = 1 << 18
#: Longest text, in characters, of a failure's reason.
MAX_REASON: Final = MAX_SHORTENED
#: How many calls of functions one answer may be.
MAX_TOOL_CALLS: Final = 128

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
#: How a client with an API key is called, see ``Submit``.
WITH_KEY: Final = "key-"

_Word = Annotated[str, msgspec.Meta(max_length=256)]
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
_Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_StageId = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)]
#: As many stages as a deploy document may have.
_Stages = Annotated[tuple[_StageId, ...], msgspec.Meta(max_length=256)]
#: Hand-offs that one message of a replica may name, names of timings, and kinds of tokens that it may count: each of
#: these costs the hub until the answer is sent, and the engines here count four.
_MOST_PAYLOADS: Final = 4096
_MOST_NAMES: Final = 1 << 16
_MOST_KINDS: Final = 64
_Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class FailureKind(StrEnum):
    """Why a stage refused or failed a request; the hub maps each kind to a typed error."""

    INVALID = "invalid"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    ENGINE = "engine"
    PAYLOAD = "payload"
    DEADLINE = "deadline"
    #: The stage can't continue the answer from what the client has seen; the reason says why.
    NOT_RESUMABLE = "not_resumable"


class TokenLogprob(NamedTuple):
    """The probability of a token at one position of an answer: natural logarithm, and rank among all tokens, from 1.

    ``text`` is the token decoded alone; a character that takes several tokens is the text of the last of them.
    """

    token_id: _Count
    logprob: float
    rank: _Count
    text: str


#: The log probabilities at one position: the token that was sampled, then the most likely ones.
TokenLogprobs = Annotated[tuple[TokenLogprob, ...], msgspec.Meta(min_length=1, max_length=MAX_LOGPROBS + 1)]


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True):
    """A reference to a stored hand-off, enough for the next stage's connector to fetch it.

    ``role`` names the companion that the hand-off belongs to; it is empty for the request's own.
    """

    from_stage: _StageId
    to_stage: _StageId
    key: _Name
    connector: _Name
    size_bytes: _Count
    metadata: dict[str, Any] = {}
    role: Annotated[str, msgspec.Meta(max_length=64)] = ""


#: What a replica hands over, and counts, with one message.
_Payloads = Annotated[tuple[PayloadRef, ...], msgspec.Meta(max_length=_MOST_PAYLOADS)]
_Usage = Annotated[dict[str, int], msgspec.Meta(max_length=_MOST_KINDS)]


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the stage's output that the client has been shown: continue behind it, repeating nothing."""

    token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 20)] = ()
    text: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of one of the request's functions. ``arguments`` is JSON, as the model has written it."""

    name: _Name
    arguments: str


class ToolAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage's text is, read with the request's tools: the calls in it, and the words beside them."""

    calls: Annotated[tuple[ToolCall, ...], msgspec.Meta(max_length=MAX_TOOL_CALLS)] = ()
    content: str = ""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="hello"):
    """A hub opens its session with the replica under one epoch. Answered by Welcome on the same socket.

    ``session`` counts the hub's sessions with this process, from 1; credits of an earlier one are void. 0: the hub
    wants no credits. ``wire_version`` is the newest version of messages that the hub takes; unset, the first.
    """

    hub_id: _Name
    epoch: _Count
    session: _Count = 0
    wire_version: _Count | msgspec.UnsetType = msgspec.UNSET


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="welcome"):
    """The replica has the epoch that Hello named, and this load. ``session`` 0: it lends this hub no credits."""

    epoch: _Count
    capacity: _Count
    queue_length: _Count
    session: _Count = 0


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="submit"):
    """Work for the stage.

    ``inputs`` holds ``messages``, ``prompt`` or ``prompt_token_ids`` as the client gave them, and beside ``messages``
    the ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat that may call functions. ``payloads`` is what
    the stages before left for this one, ``next_stages`` the stages that want a hand-off. ``remaining_s`` is the time
    left to the request's deadline, in seconds: a duration, since clocks disagree. ``attempt`` counts from 0; all
    answers name it. ``resume`` continues an answer that another replica began. ``credit`` says that the hub spends a
    credit of its present session; a request without one is accepted, too, within the replica's own bound. Lower
    ``priority`` goes first. ``stream_to`` are those of ``next_stages`` that take pieces of the hand-off while it is
    made, ``stream_from`` the stages whose pieces will come, by Feed. ``segmented``: more input may come, by Update.
    ``trace`` is the hub's span of this attempt, as a W3C ``traceparent``; where the hub does not trace, that of its
    client, and empty if there is none. ``label`` is the client's own name for the request, for log lines only.
    ``client`` is the same for all requests of one client to this hub, and tells nothing else: where requests have to
    wait for each other, the clients have turns. With an API key it begins with WITH_KEY and is the same to all hubs.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count = 0
    inputs: dict[str, Any] = {}
    params: dict[str, Any] = {}
    payloads: _Payloads = ()
    next_stages: _Stages = ()
    remaining_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 600.0
    resume: Resume | None = None
    credit: bool = False
    priority: _Priority = 0
    stream_from: _Stages = ()
    stream_to: _Stages = ()
    segmented: bool = False
    trace: _Word = ""
    label: _Label | msgspec.UnsetType = msgspec.UNSET
    client: _Word | msgspec.UnsetType = msgspec.UNSET


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="abort"):
    """Stop all attempts of a request up to and with ``attempt``, the default being all. Always answered by Aborted.

    An attempt that was running also ends with StageDone and finish_reason ``abort``; Aborted is sent after that end.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count = (1 << 53) - 1


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="pause"):
    """The client is behind with the request's output: generate no more of it; with ``paused`` False, go on.

    The last Pause counts, and is repeated after a lost session. Answered by Accepted if the replica has the request,
    else not at all, since the request may have ended just now.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count
    paused: bool


class ReleasePayloads(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="release"):
    """Free the request's hand-offs: no stage will fetch them any more."""

    epoch: _Count
    request_id: _Name


class WantCredits(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="want"):
    """``waiting`` requests in the hub could run on this replica, the oldest for ``oldest_wait_s``; 0: none any more."""

    epoch: _Count
    session: _Count
    waiting: _Count
    oldest_wait_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class ReturnCredits(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="return"):
    """The answer to a Recall: so many of the recalled credits were unspent, and are the replica's again."""

    epoch: _Count
    session: _Count
    credits: _Count


class Accepted(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="t", tag="accepted"):
    """The replica has accepted the request, segment or pause."""

    epoch: _Count
    request_id: _Name
    queue_length: _Count
    attempt: _Count = 0


class Rejected(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="t", tag="rejected"):
    """The replica refuses the request or segment; nothing of it has run."""

    epoch: _Count
    request_id: _Name
    kind: FailureKind
    reason: _Reason
    queue_length: _Count
    attempt: _Count = 0


class Aborted(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="aborted"):
    """No attempt of the request up to this one runs or will begin; ``running`` says whether one was running."""

    epoch: _Count
    request_id: _Name
    attempt: _Count
    running: bool
    queue_length: _Count


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="grant"):
    """The hub may send so many more requests, each to run at once. Void if ``session`` is not its present one."""

    epoch: _Count
    session: _Count
    credits: _Count
    queue_length: _Count


class Recall(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="recall"):
    """Other hubs wait: return up to so many unspent credits, at once, by ReturnCredits."""

    epoch: _Count
    session: _Count
    credits: _Count
    queue_length: _Count


class Chunk(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="t", tag="chunk"):
    """A piece of output; ``seq`` counts from 0 without a gap. An image comes as one attachment of type ``mime``.

    ``logprobs``, if the request has it, has one entry for each of ``token_ids``. ``prompt_logprobs`` has one entry for
    each prompt token but the first, in order over as many chunks as needed, all of them before the first chunk with a
    token of the answer. That chunk has ``prompt_token_ids`` if pictures, sound or other items were put into the
    prompt: the prompt's tokens with the items in it. ``partial_image``: the attachment is an unfinished picture, the
    one with this number, from 0, of those that come before the finished one.
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
    partial_image: _Count | msgspec.UnsetType = msgspec.UNSET


class StageDone(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="t", tag="done"):
    """The stage has finished the request. A next stage without a payload has nothing to do.

    ``usage`` counts tokens, ``timings_s`` holds seconds by name (queue, first_output, generate, transfer), ``pieces``
    is the number of HandOffPiece messages. ``stop_reason`` is the stop token or stop text of the request that ended the
    answer; unset if none of them did. ``called`` is set where the answer calls functions of the request's ``tools``:
    the text of its chunks is then what the model wrote, and this is what it means.
    """

    epoch: _Count
    request_id: _Name
    seq: _Count
    finish_reason: _Word
    queue_length: _Count
    attempt: _Count = 0
    payloads: _Payloads = ()
    usage: _Usage = {}
    timings_s: Annotated[dict[str, float], msgspec.Meta(max_length=_MOST_NAMES)] = {}
    pieces: _Count = 0
    stop_reason: _Count | _Word | msgspec.UnsetType = msgspec.UNSET
    called: ToolAnswer | msgspec.UnsetType = msgspec.UNSET


class StageFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="failed"):
    """The stage had accepted the request and has failed it.

    ``status``, with the kind INVALID only, is the HTTP status that the client is to get in place of 400.
    ``from_stage``, with the kind PAYLOAD only, is the stage whose replica left a hand-off that can't be read.
    """

    epoch: _Count
    request_id: _Name
    kind: FailureKind
    reason: _Reason
    queue_length: _Count
    attempt: _Count = 0
    status: Annotated[int, msgspec.Meta(ge=400, le=499)] | msgspec.UnsetType = msgspec.UNSET
    from_stage: _StageId | msgspec.UnsetType = msgspec.UNSET


class Feed(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="feed"):
    """A piece of the hand-off of ``from_stage`` to the request; ``number`` counts from 0 without a gap.

    The last Feed, ``is_last``, carries no payload: no piece of that number will come. Pieces may come again after a
    lost session.
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

    ``again``: a connection broke, and HandOffPiece messages from that number on may be lost; send them once more.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count
    to_stage: _StageId
    number: _Count
    again: bool = False


class HandOffPiece(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="piece"):
    """A piece of the hand-off is stored for the stages in Submit's ``stream_to``; ``number`` counts from 0, no gap."""

    epoch: _Count
    request_id: _Name
    attempt: _Count
    number: _Count
    payloads: _Payloads
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
    """The next segment of a request that the replica keeps; with ``is_last`` there is none, and the request ends.

    ``segment`` counts without a gap from 0, the segment that came with Submit. A segment may come again after a
    connection was lost: it is then only acknowledged. Hand-offs of segments before ``kept_from`` can be freed.
    Answered by Accepted, or by Rejected where the replica has no such request.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count
    segment: _Count
    inputs: dict[str, Any] = {}
    payloads: _Payloads = ()
    is_last: bool = False
    kept_from: _Count = 0


class SegmentDone(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="segment"):
    """The answer to a segment is complete. Takes a ``seq`` of its own among the chunks of the request.

    A next stage without a payload has nothing to do for this segment. ``usage`` is the segment's own.
    """

    epoch: _Count
    request_id: _Name
    attempt: _Count
    seq: _Count
    segment: _Count
    finish_reason: _Word
    queue_length: _Count
    payloads: _Payloads = ()
    usage: _Usage = {}


#: Longest arguments of one call, and longest result of it, as msgpack.
MAX_CONTROL_BYTES: Final = 1 << 20


class Control(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="control"):
    """Call a control method of the engine, between two steps of it. Answered by ControlResult, and never run twice.

    ``call_id`` is unique to the hub's process. ``remaining_s`` is how long the caller waits for the answer: a call
    that could not begin within it does not begin.
    """

    epoch: _Count
    call_id: _Name
    method: _Name
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    remaining_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 60.0


class ControlResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="controlled"):
    """The outcome of a Control: ``result`` if ``ok``, else ``error``, which begins with the error's type."""

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
