"""Requests: the requests under way in one hub. Feeds their machines and carries out what these decide."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hub import request_events as ev
from hub.active import AbortRequest, Active, AddRequest, Ended
from hub.backlog import Backlog
from hub.cancels import Cancels
from hub.dispatcher import Dispatcher
from hub.metrics import HubMetrics
from hub.outputs import OmniOutput
from hub.request import RequestMachine
from hub.request_body import RequestBody
from hub.request_state import OrchestratorRequestState
from omni_discovery.errors import RequestError

if TYPE_CHECKING:
    from hub.config import HubConfig
    from hub.stage_pool import StagePool


@dataclass(frozen=True, slots=True)
class TimeUp:
    """A request's deadline has passed."""

    request_id: str


class Requests:
    """Part of the orchestrator's task. ``say`` takes what a client is to get; ``active`` and ``states`` are shared."""

    def __init__(
        self,
        pools: Mapping[int, StagePool],
        dispatcher: Dispatcher,
        cancels: Cancels,
        config: HubConfig,
        metrics: HubMetrics,
        backlog: Backlog,
        post: Callable[[TimeUp], None],
        say: Callable[[str, OmniOutput | Ended], None],
    ) -> None:
        #: By id, until they end.
        self.active: dict[str, Active] = {}
        self.states: dict[str, OrchestratorRequestState] = {}
        self._pools = pools
        self._dispatcher = dispatcher
        self._cancels = cancels
        self._config = config
        self._metrics = metrics
        self._backlog = backlog
        self._post = post
        self._say = say

    def add(self, request: AddRequest) -> None:
        """Take a new request."""
        body = RequestBody(
            request.request_id,
            request.inputs,
            request.plan,
            request.params,
            attempts=self._config.attempts,
            request_timestamp=time.time(),
            shown_id=request.shown_id,
            priority=request.priority,
        )
        machine = RequestMachine(body)
        deadline_s = request.received_s + request.timeout_s
        left_s = max(0.0, deadline_s - time.perf_counter())
        timer = asyncio.get_running_loop().call_later(left_s, self._post, TimeUp(request.request_id))
        self.active[request.request_id] = Active(request, machine, deadline_s, timer)
        self.states[request.request_id] = machine.state
        self._metrics.in_flight.set(len(self.active))
        self._dispatcher.retries.admitted()
        self.tell(request.request_id, ev.Submitted())

    def abort(self, abort: AbortRequest) -> None:
        """Stop a request; its ``done`` gets its result when every stage is quiet."""
        self.tell(abort.request_id, ev.Cancelled(abort.error))
        if abort.done is not None:
            self._cancels.when_quiet(abort.request_id, abort.done)

    def end_all(self, error: RequestError) -> None:
        """Abort every stage of every request; each ends with the error."""
        for request_id in list(self.active):
            self.tell(request_id, ev.Cancelled(error))

    def bury(self, request_id: str, error: RequestError) -> None:
        """End a request whatever state it is in."""
        with suppress(Exception):
            self.tell(request_id, ev.Cancelled(error))
        active = self.active.get(request_id)
        if active is not None:
            for pool in self._pools.values():
                pool.release(request_id)
            self._finish(active, ev.Outcome.FAILED, error)

    def go_on(self, request_id: str, dispatch: Callable[[Active], ev.Event | None]) -> None:
        """Go on with a dispatch that has waited, if the request is still there."""
        active = self.active.get(request_id)
        event = None if active is None else dispatch(active)
        if event is not None:
            self.tell(request_id, event)

    def tell(self, request_id: str, event: ev.Event) -> None:
        """Feed one request's machine and carry out what it decides. Requests that have ended are left alone."""
        active = self.active.get(request_id)
        if active is None:
            return
        events = deque([event])
        while events:
            for action in active.machine.handle(events.popleft(), time.perf_counter()):
                follows = self._carry_out(active, action)
                if follows is not None:
                    events.append(follows)
        if isinstance(event, ev.StageDone):
            settled = [stage_id for stage_id, run in active.machine.runs.items() if run.settled]
            self._backlog.passed(request_id, settled)

    def _carry_out(self, active: Active, action: ev.Action) -> ev.Event | None:
        match action:
            case ev.Dispatch():
                return self._dispatcher.dispatch(active, action)
            case ev.Abort():
                self._dispatcher.abort(active, action)
            case ev.ReleasePayload():
                self._dispatcher.release_payload(active, action)
            case ev.Emit(output=output):
                self._say(active.request.request_id, output)
            case ev.Drop(reason=reason):
                self._metrics.dropped.labels(reason).inc()
            case ev.Retry(stage_id=stage_id, resumed=resumed):
                self._metrics.count_retry(stage_id, resumed=resumed)
            case ev.Finish(outcome=outcome, error=error):
                self._finish(active, outcome, error)
        return None

    def _finish(self, active: Active, outcome: ev.Outcome, error: RequestError | None) -> None:
        request_id = active.request.request_id
        for timer in (active.timer, *active.graces.values()):
            timer.cancel()
        del self.active[request_id], self.states[request_id]
        self._backlog.leave(request_id)
        self._metrics.in_flight.set(len(self.active))
        self._metrics.requests.labels(outcome if error is None else type(error).__name__).inc()
        self._say(request_id, Ended(error))
