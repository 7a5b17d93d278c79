"""What a RequestMachine is told of pieces of a hand-off, and what it asks for. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_discovery import wire

if TYPE_CHECKING:
    from hub.request_events import ReplicaRef


@dataclass(frozen=True, slots=True)
class HandOffPiece:
    """A stage has made a piece of its hand-off."""

    stage_id: int
    attempt: int
    message: wire.HandOffPiece


@dataclass(frozen=True, slots=True)
class PieceTaken:
    """A stage has taken all pieces of ``from_stage`` up to and with ``number``."""

    stage_id: int
    attempt: int
    from_stage: int
    number: int


@dataclass(frozen=True, slots=True)
class Feed:
    """Pass a piece on to the stage's replica; ``payload`` None: there are no more, and this would be its number."""

    stage_id: int
    attempt: int
    replica: ReplicaRef
    from_stage: int
    number: int
    payload: wire.PayloadRef | None


@dataclass(frozen=True, slots=True)
class PieceRoom:
    """Tell the stage's replica that ``to_stage`` has taken all pieces before ``number``; see wire.PieceRoom."""

    stage_id: int
    attempt: int
    replica: ReplicaRef
    to_stage: int
    number: int
    again: bool = False
