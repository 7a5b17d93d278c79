"""What the ZMQ thread asks of the engine's thread, and what comes back.

Every request that was accepted has a ``key`` of its own in this replica; exactly one Finished or Broken ends it. These
are structs because every token makes one, and a frozen dataclass takes several times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omni_discovery.wire import FailureKind, PayloadRef, Resume


class Work(msgspec.Struct, frozen=True):
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


class Cancel(msgspec.Struct, frozen=True):
    """Stop the request; its end is Finished with ``abort``."""

    key: str


class Release(msgspec.Struct, frozen=True):
    """Nobody will fetch what the owner's request left for other stages."""

    owner: str


class ReleaseHub(msgspec.Struct, frozen=True):
    """Nobody will fetch anything that the hub's requests left for other stages."""

    hub_id: str


class Wake(msgspec.Struct, frozen=True):
    """Look at the flags: the replica is to drain or to stop."""


Job = Work | Cancel | Release | ReleaseHub | Wake


class Piece(msgspec.Struct, frozen=True):
    """Some output. An image or other binary comes as ``attachment`` of type ``mime``."""

    key: str
    modality: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    mime: str = ""
    attachment: bytes | None = None


class Finished(msgspec.Struct, frozen=True):
    """The request ended as it should, or was cancelled."""

    key: str
    finish_reason: str
    payloads: tuple[PayloadRef, ...] = ()
    usage: Mapping[str, int] = {}
    timings_s: Mapping[str, float] = {}


class Broken(msgspec.Struct, frozen=True):
    """The request could not be finished."""

    key: str
    kind: FailureKind
    reason: str


Outcome = Piece | Finished | Broken
