"""The messages of streamed input: a request whose input comes in segments, one after the other, to one replica.

The first segment travels in a Submit that is ``segmented``; the replica then keeps the request, and its slot, until it
is told that no more will come. Each segment's answer ends with SegmentDone, the request with StageDone.

Input socket of the replica:   Update in; Accepted or Rejected out.
Output socket of the replica:  SegmentDone out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from omni_discovery.wire_messages import PayloadRef
from omni_discovery.wire_messages import _Count as Count
from omni_discovery.wire_messages import _Name as Name
from omni_discovery.wire_messages import _Word as Word


class Update(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="update"):
    """The next segment of a request that this replica keeps; ``is_last``: there is none, and the request is to end.

    ``segment`` counts from 0, the one that came with Submit, without a gap. One that came before may come again, after
    a connection was lost: it is only acknowledged. Hand-offs of segments before ``kept_from`` are needed no more.
    Answered by Accepted, or by Rejected where the replica has no such request.
    """

    epoch: Count
    request_id: Name
    attempt: Count
    segment: Count
    inputs: dict[str, Any] = {}
    payloads: tuple[PayloadRef, ...] = ()
    is_last: bool = False
    kept_from: Count = 0


class SegmentDone(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="segment"):
    """The answer to a segment is complete. Takes a ``seq`` of its own among the chunks of the request.

    No payload for a next stage means that it has nothing to do with this segment. ``usage`` is the segment's own.
    """

    epoch: Count
    request_id: Name
    attempt: Count
    seq: Count
    segment: Count
    finish_reason: Word
    queue_length: Count
    payloads: tuple[PayloadRef, ...] = ()
    usage: dict[str, int] = {}
