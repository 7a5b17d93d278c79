"""The items of the orchestrator's queues, and Active: one request under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hub.receipts.raw import DispatchMark
from hub.request.events import ClientBackpressure, Dispatch
from hub.request.machine import RequestMachine
from hub.request.plan import RequestPlan
from omni_discovery.errors import RequestError

if TYPE_CHECKING:
    from hub.orchestrator.deploy_versions import DeployVersion
    from hub.pool.stage_pool import StagePool


class AddRequest(msgspec.Struct, frozen=True):
    """A request, checked and planned.

    ``request_id`` is unique among all requests of this hub, ``shown_id`` is the client's name for it.
    """

    request_id: str
    shown_id: str
    inputs: Mapping[str, Any]
    plan: RequestPlan
    params: Mapping[int, Mapping[str, Any]]
    timeout_s: float
    #: When the hub received the request, on ``time.perf_counter``; ``timeout_s`` counts from there.
    received_s: float
    #: Requests that wait for a slot are served in ascending order of it.
    priority: int = 0
    #: Whether the input comes in segments, ``inputs`` being the first.
    segmented: bool = False
    #: A name that the client gave it besides, for log lines only: several requests may have the same.
    label: str = ""
    #: The name of the API key that its client has; empty where none was asked for.
    key: str = ""
    #: What its client's requests have in common, see ``Exchange.client``.
    client: str = ""
    #: The W3C headers of the trace that the request belongs to.
    trace_headers: Mapping[str, str] = {}
    #: The prompts that run through the first stage together with the request, by role.
    companions: Mapping[str, Mapping[str, Any]] = {}
    #: If the request is a companion: the id of its parent, and its role there.
    parent_id: str = ""
    role: str = ""
    #: Called when nothing is left to do until the client's next segment (True), and when there is again (False).
    on_input_wait: Callable[[bool], None] | None = None
    #: The deploy document that serves the request (None: the hub has only one), and the client's sampling parameters.
    release: DeployVersion | None = None
    asked_params: Mapping[int, Mapping[str, Any]] = {}
    #: What deterministic stages draw from, where parameters name no seed; None: from the request's id.
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """The next segment of a request; ``inputs`` None ends the input.

    ``done`` is resolved when the first stage has taken the segment or the request has ended, with the empty string, or
    with the reason why the segment was refused.
    """

    request_id: str
    inputs: Mapping[str, Any] | None
    done: asyncio.Future[str]


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Stop a request, with ``error`` if the hub and not the client ends it.

    ``done`` is resolved in any case: with None once no replica works on it any more, with DeadlineExceededError if a
    replica does not acknowledge that in time, with AbortFailedError if the hub could not do it.
    """

    request_id: str
    error: RequestError | None = None
    done: asyncio.Future[None] | None = None


@dataclass(frozen=True, slots=True)
class BackpressureChanged:
    """The client of a request has fallen behind the output that is made for it, or has caught up."""

    request_id: str
    backpressure: ClientBackpressure


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has ended: the last item of its output, with the error if it failed."""

    error: RequestError | None


class Pick(NamedTuple):
    """A pick that waits for a slot, and the dispatch that it is for."""

    task: asyncio.Task[None]
    dispatch: Dispatch


@dataclass(slots=True)
class Active:
    """One request under way."""

    request: AddRequest
    machine: RequestMachine
    #: The pools that its stages are picked from, by stage.
    pools: Mapping[int, StagePool]
    #: On ``time.perf_counter``.
    deadline_s: float
    timer: asyncio.TimerHandle
    #: The picks that wait for a slot, by stage.
    picks: dict[int, Pick] = field(default_factory=dict)
    #: Timers of stages whose session was lost and whose work waits for it, by stage.
    graces: dict[int, asyncio.TimerHandle] = field(default_factory=dict)
    #: Runs while nothing is left to do but to wait for the client's next segment.
    idle_timer: asyncio.TimerHandle | None = None
    first_sent: bool = False
    #: Whether its client has got output.
    first_shown: bool = False
    #: Where its work failed in the engine, by stage: the input addresses of replicas.
    failed_at: dict[int, set[str]] = field(default_factory=dict)
    #: The futures of segments that wait for the first stage to take them.
    updates: list[asyncio.Future[str]] = field(default_factory=list)
    #: The request ids of its companions, by role.
    companions: dict[str, str] = field(default_factory=dict)
    #: The id of its trace; empty if it has none.
    trace_id: str = ""
    #: The span of a stage's present attempt, as the W3C's header names it; the client's own where this hub does not
    #: trace, and empty if there is none.
    trace_of: Callable[[int], str] = lambda _stage_id: ""
    #: When its work was sent where, or had to wait, for its receipt; empty where nobody keeps receipts.
    marks: list[DispatchMark] = field(default_factory=list)


def answer(done: asyncio.Future[str], reason: str = "") -> None:
    """Resolve an update's future, if its caller still waits for it."""
    if not done.done():
        done.set_result(reason)
