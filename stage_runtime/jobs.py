"""What the ZMQ thread asks of the engine's thread, and what comes back.

Every request that was accepted has a ``key`` of its own in this replica; exactly one Finished or Broken ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_discovery.wire import FailureKind, PayloadRef, Resume


@dataclass(frozen=True, slots=True)
class Work:
    """A request was accepted. ``owner`` names the hub's request over all its attempts."""

    key: str
    owner: str
    request_id: str
    attempt: int
    inputs: Mapping[str, Any]
    params: Mapping[str, Any]
    payloads: tuple[PayloadRef, ...]
    next_stages: tuple[int, ...]
    accepted_at_s: float
    deadline_s: float
    #: What the client has seen of the answer already; None: begin at the beginning.
    resume: Resume | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the request; its end is Finished with ``abort``."""

    key: str


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody will fetch what the owner's request left for other stages."""

    owner: str


@dataclass(frozen=True, slots=True)
class ReleaseHub:
    """Nobody will fetch anything that the hub's requests left for other stages."""

    hub_id: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Look at the flags: the replica is to drain or to stop."""


Job = Work | Cancel | Release | ReleaseHub | Wake


@dataclass(frozen=True, slots=True)
class Piece:
    """Some output. An image or other binary comes as ``attachment`` of type ``mime``."""

    key: str
    modality: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    mime: str = ""
    attachment: bytes | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended as it should, or was cancelled."""

    key: str
    finish_reason: str
    payloads: tuple[PayloadRef, ...] = ()
    usage: Mapping[str, int] = field(default_factory=dict)
    timings_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Broken:
    """The request could not be finished."""

    key: str
    kind: FailureKind
    reason: str


Outcome = Piece | Finished | Broken
