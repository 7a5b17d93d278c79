"""The messages of collective control: what a hub asks of a replica itself, beside all requests.

Arguments and results are plain values, as msgpack has them, and bounded.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from omni_discovery.wire_messages import _Count as Count
from omni_discovery.wire_messages import _Name as Name
from omni_discovery.wire_messages import _Reason as Reason

#: Longest arguments of one call, and longest result of it, as msgpack.
MAX_CONTROL_BYTES: Final = 1 << 20


class Control(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="control"):
    """Call a control method of the engine, between two steps of it. Answered by ControlResult, and never run twice.

    ``call_id`` is unique to the hub's process. ``remaining_s`` is the time left until nobody waits for the answer: a
    call that could not begin within it does not begin.
    """

    epoch: Count
    call_id: Name
    method: Name
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    remaining_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 60.0


class ControlResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="controlled"):
    """What came of a Control: ``result`` if it is ``ok``, else ``error``, which begins with the error's type."""

    epoch: Count
    call_id: Name
    ok: bool
    queue_length: Count
    result: Any = None
    error: Reason = ""
