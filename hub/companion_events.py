"""What a RequestMachine is told of companions, and what it asks for. Pure; part of request_events.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_discovery import wire
from omni_discovery.errors import RequestError


@dataclass(frozen=True, slots=True)
class CompanionDone:
    """A companion has run, and this is its hand-off."""

    role: str
    payloads: tuple[wire.PayloadRef, ...]


@dataclass(frozen=True, slots=True)
class CompanionFailed:
    """A companion can't be had."""

    role: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class StartCompanions:
    """Begin the request's companions, beside it."""

    given: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class StopCompanions:
    """Stop them, and free what they left."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A companion is done: its parent gets its hand-off, and says when that is not needed any more."""

    payloads: tuple[wire.PayloadRef, ...]
