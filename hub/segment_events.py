"""What a RequestMachine is told where its input comes in segments. Pure; part of request_events.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_discovery import wire


@dataclass(frozen=True, slots=True)
class Segment:
    """The client's next segment; ``inputs`` None: there are no more."""

    inputs: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class SegmentDone:
    """A stage is through with a segment and waits for the next one."""

    stage_id: int
    attempt: int
    message: wire.SegmentDone
    received_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionBack:
    """What was said to the replica since its session was lost may not have come there."""

    stage_id: int
    attempt: int
