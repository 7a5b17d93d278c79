"""What clients ask of the orchestrator, what it says to them, and one request under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hub.request.events import ClientBackpressure, Dispatch
from hub.request.machine import RequestMachine
from hub.request.plan import RequestPlan
from omni_discovery.errors import RequestError

if TYPE_CHECKING:
    from hub.orchestrator.releases import Release
    from hub.pool.stage_pool import StagePool


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A request, checked and planned. ``request_id`` is unique in this hub for ever, ``shown_id`` is the client's."""

    request_id: str
    shown_id: str
    inputs: Mapping[str, Any]
    plan: RequestPlan
    params: Mapping[int, Mapping[str, Any]]
    timeout_s: float
    #: When the hub got it, on ``time.perf_counter``; its deadline is counted from there.
    received_s: float
    #: Lower goes first where requests wait.
    priority: int = 0
    #: Whether its input comes in segments, ``inputs`` being the first.
    segmented: bool = False
    #: Which trace it belongs to, as the W3C's headers say it.
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    #: What runs through the first stage with it, by role.
    companions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Of a companion: the request that it belongs to, and what it is to that.
    parent_id: str = ""
    role: str = ""
    #: By which deploy document it goes, and what the client asked of each stage beside that; None: there is but one.
    release: Release | None = None
    asked_params: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """The next segment of a request, None: there are no more. ``done`` gets a reason if it is refused, else none.

    It gets that when the first stage has taken the segment, or the request has ended.
    """

    request_id: str
    inputs: Mapping[str, Any] | None
    done: asyncio.Future[str]


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Stop a request, for ``error`` if the reason is the hub's. ``done`` gets its result in any case."""

    request_id: str
    error: RequestError | None = None
    done: asyncio.Future[None] | None = None


@dataclass(frozen=True, slots=True)
class BackpressureChanged:
    """The client of a request has fallen behind what is made for it, or has caught up."""

    request_id: str
    pace: ClientBackpressure


@dataclass(frozen=True, slots=True)
class Ended:
    """The last thing said of a request."""

    error: RequestError | None


class Pick(NamedTuple):
    """A pick that waits, and for what."""

    task: asyncio.Task[None]
    dispatch: Dispatch


@dataclass(slots=True)
class Active:
    """One request under way."""

    request: AddRequest
    machine: RequestMachine
    #: The pools that it is served from, by stage.
    pools: Mapping[int, StagePool]
    #: On ``time.perf_counter``.
    deadline_s: float
    timer: asyncio.TimerHandle
    #: Picks that wait, by stage.
    picks: dict[int, Pick] = field(default_factory=dict)
    #: Timers of stages whose session was lost and whose work waits for it, by stage.
    graces: dict[int, asyncio.TimerHandle] = field(default_factory=dict)
    first_sent: bool = False
    #: Segments that wait for the first stage to take them.
    updates: list[asyncio.Future[str]] = field(default_factory=list)
    #: The requests that its companions are, by role.
    companions: dict[str, str] = field(default_factory=dict)
    #: The span of a stage's present attempt, as the W3C's header names it; empty where nothing is traced.
    trace_of: Callable[[int], str] = lambda _stage_id: ""


def answer(done: asyncio.Future[str], reason: str = "") -> None:
    """Say what became of an update, if anybody still waits for that."""
    if not done.done():
        done.set_result(reason)
