"""The messages by which a stage's hand-off travels piece by piece while the stage still works (async_chunk).

A producer says HandOffPiece, the hub passes each on to the next stage's replica as Feed, that answers PieceTaken, and
the hub tells the producer by PieceRoom that it may go on. The pieces themselves go through the edge's connector.

Input socket of the replica:   Feed, PieceRoom in.
Output socket of the replica:  HandOffPiece, PieceTaken out.
"""

from __future__ import annotations

import msgspec

from omni_discovery.wire_messages import PayloadRef
from omni_discovery.wire_messages import _Count as Count
from omni_discovery.wire_messages import _Name as Name
from omni_discovery.wire_messages import _StageId as StageId


class Feed(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="feed"):
    """A piece for the request, of those of ``from_stage``; ``number`` counts from 0 without a gap.

    The last one, ``is_last``, carries no payload: it says that no piece of that number will come. Pieces that came
    before may come again.
    """

    epoch: Count
    request_id: Name
    attempt: Count
    from_stage: StageId
    number: Count
    payload: PayloadRef | None = None
    is_last: bool = False


class PieceRoom(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="room"):
    """The next stage ``to_stage`` has taken all pieces before ``number``.

    ``again``: a connection broke, and the pieces from there on may be lost; say those that were said once more.
    """

    epoch: Count
    request_id: Name
    attempt: Count
    to_stage: StageId
    number: Count
    again: bool = False


class HandOffPiece(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="piece"):
    """A piece of the hand-off for the stages that Submit named in ``stream_to``; ``number`` counts from 0, no gap."""

    epoch: Count
    request_id: Name
    attempt: Count
    number: Count
    payloads: tuple[PayloadRef, ...]
    queue_length: Count


class PieceTaken(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="taken"):
    """The engine has all pieces of ``from_stage`` up to and with ``number``."""

    epoch: Count
    request_id: Name
    attempt: Count
    from_stage: StageId
    number: Count
    queue_length: Count
