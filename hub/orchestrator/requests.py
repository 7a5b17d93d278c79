"""Requests: the requests under way in one hub. Feeds their machines and carries out what these decide."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hub.metrics import HubMetrics
from hub.orchestrator.aborts import Cancels
from hub.orchestrator.active import AbortRequest, Active, AddRequest, BackpressureChanged, Ended, UpdateRequest, answer
from hub.orchestrator.admission import Backlog
from hub.orchestrator.dispatcher import Dispatcher
from hub.request import events as ev
from hub.request.companions import companion_plan
from hub.request.machine import RequestMachine
from hub.request.outputs import OmniOutput, of_stage
from hub.request.state import OrchestratorRequestState, Phase, RequestState
from omni_discovery.errors import RequestError

if TYPE_CHECKING:
    from hub.config import HubConfig
    from hub.orchestrator.releases import Release
    from hub.orchestrator.tracing import Tracing
    from hub.pool.stage_pool import StagePool


@dataclass(frozen=True, slots=True)
class TimeUp:
    """A request's deadline has passed."""

    request_id: str


@dataclass(frozen=True, slots=True)
class CompanionSaid:
    """News of a companion for the request that it belongs to."""

    request_id: str
    companion_id: str
    event: ev.CompanionDone | ev.CompanionFailed


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
        post: Callable[[TimeUp | CompanionSaid], None],
        say: Callable[[str, OmniOutput | Ended], None],
        tracing: Tracing | None = None,
    ) -> None:
        #: By id, until they end.
        self.active: dict[str, Active] = {}
        self.states: dict[str, OrchestratorRequestState] = {}
        #: Where requests are served from that go by no document.
        self._pools = pools
        self._dispatcher = dispatcher
        self._cancels = cancels
        self._config = config
        self._metrics = metrics
        self._backlog = backlog
        self._post = post
        self._say = say
        self._tracing = tracing
        self._companion_count = 0
        active = self.active
        metrics.clients_behind.set_function(lambda: sum(each.machine.is_client_behind for each in active.values()))

    def add(self, request: AddRequest) -> None:
        """Take a new request."""
        state = RequestState(
            request.request_id,
            request.inputs,
            request.plan,
            request.params,
            attempts=self._config.attempts,
            request_timestamp=time.time(),
            shown_id=request.shown_id,
            priority=request.priority,
            companions=request.companions,
            is_companion=bool(request.parent_id),
            segmented=request.segmented,
        )
        machine = RequestMachine(state)
        deadline_s = request.received_s + request.timeout_s
        left_s = max(0.0, deadline_s - time.perf_counter())
        timer = asyncio.get_running_loop().call_later(left_s, self._post, TimeUp(request.request_id))
        pools = self._pools if request.release is None else request.release.pools
        self.active[request.request_id] = Active(request, machine, pools, deadline_s, timer)
        self.states[request.request_id] = machine.state.public
        self._metrics.in_flight.set(len(self.active))
        if not request.parent_id:
            self._dispatcher.retries.admitted()
        if self._tracing is not None:
            self._tracing.begin(request)
            self.active[request.request_id].trace_of = partial(self._tracing.traceparent, request.request_id)
        self.tell(request.request_id, ev.Submitted())

    def abort(self, abort: AbortRequest) -> None:
        """Stop a request; its ``done`` gets its result when every stage is quiet."""
        active = self.active.get(abort.request_id)
        ids = [abort.request_id, *(() if active is None else active.companions.values())]
        self.tell(abort.request_id, ev.Cancelled(abort.error))
        if abort.done is not None:
            self._cancels.when_quiet(ids, abort.done)

    def follow(self, news: TimeUp | CompanionSaid | UpdateRequest | BackpressureChanged) -> None:
        """Take in what was posted for one request."""
        if isinstance(news, UpdateRequest):
            self._update(news)
            return
        if isinstance(news, BackpressureChanged):
            self.tell(news.request_id, news.pace)
            return
        if isinstance(news, TimeUp):
            self.tell(news.request_id, ev.DeadlinePassed())
            return
        parent = self.active.get(news.request_id)
        # It may have other companions by now.
        if parent is not None and parent.companions.get(news.event.role) == news.companion_id:
            self.tell(news.request_id, news.event)

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
            for pool in active.pools.values():
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
            for action in self._handle(active, events.popleft()):
                follows = self._carry_out(active, action)
                if follows is not None:
                    events.append(follows)
        if active.updates and active.machine.segments is not None and not active.machine.segments.waits:
            for done in active.updates:
                answer(done)
            active.updates.clear()
        if isinstance(event, ev.StageDone):
            settled = [stage_id for stage_id, run in active.machine.runs.items() if run.settled]
            self._backlog.passed(request_id, settled)

    def _handle(self, active: Active, event: ev.Event) -> list[ev.Action]:
        machine = active.machine
        counts = isinstance(event, ev.StageDone) and machine.is_out(event.stage_id, event.attempt)
        actions = machine.handle(event, time.perf_counter())
        if counts and isinstance(event, ev.StageDone) and machine.runs[event.stage_id].phase is Phase.DONE:
            self._metrics.observe_stage(event.stage_id, of_stage(machine.state.public.pipeline_timings, event.stage_id))
        if self._tracing is not None:
            self._tracing.follow(active.request.request_id, machine, event, actions)
        return actions

    def move(self, active: Active, release: Release) -> None:
        """Have a request go by another deploy document, which says the same of the stages that have had it."""
        params = release.graph.merge_params(active.request.asked_params)
        request = active.request = replace(active.request, release=release, params=params)
        active.machine.set_params(params)
        needed = [stage_id for stage_id, run in active.machine.runs.items() if not run.settled]
        self._backlog.enter(request.request_id, needed, release.fingerprints)
        for event in self._dispatcher.move(active, release.pools):
            self.tell(request.request_id, event)

    def _update(self, update: UpdateRequest) -> None:
        active = self.active.get(update.request_id)
        segments = None if active is None else active.machine.segments
        if active is None:
            answer(update.done, "the request has ended")
        elif segments is None:
            answer(update.done, "the request was not begun as one that comes in segments")
        elif segments.is_complete:
            answer(update.done, "the request was told that no more segments come")
        else:
            active.updates.append(update.done)
            self.tell(update.request_id, ev.SegmentArrived(update.inputs))

    def _carry_out(self, active: Active, action: ev.Action) -> ev.Event | None:
        match action:
            case ev.Dispatch():
                return self._dispatcher.dispatch(active, action)
            case ev.Update() | ev.FeedInput() | ev.PieceRoom() | ev.Pause():
                return self._dispatcher.pass_on(active, action)
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
            case ev.StartCompanions() | ev.StopCompanions() | ev.Collected():
                self._of_companions(active, action)
            case ev.Finish(outcome=outcome, error=error):
                self._finish(active, outcome, error)
        return None

    def _finish(self, active: Active, outcome: ev.Outcome, error: RequestError | None) -> None:
        request_id = active.request.request_id
        for timer in (active.timer, *active.graces.values()):
            timer.cancel()
        del self.active[request_id], self.states[request_id]
        for done in active.updates:
            answer(done, "the request has ended")
        self._backlog.leave(request_id)
        self._metrics.in_flight.set(len(self.active))
        if self._tracing is not None:
            self._tracing.end(request_id, outcome, error)
        if active.request.parent_id:
            reason = error or RequestError("it was aborted")
            self._tell_parent(active.request, ev.CompanionFailed(active.request.role, reason))
            return
        self._metrics.requests.labels(outcome if error is None else type(error).__name__).inc()
        self._say(request_id, Ended(error))

    # ---- companions

    def _of_companions(self, active: Active, action: ev.StartCompanions | ev.StopCompanions | ev.Collected) -> None:
        match action:
            case ev.StartCompanions(given=given):
                self._start_companions(active, given)
            case ev.StopCompanions():
                self._stop_companions(active)
            case ev.Collected(payloads=payloads):
                self._tell_parent(active.request, ev.CompanionDone(active.request.role, payloads))

    def _start_companions(self, active: Active, given: Mapping[str, Mapping[str, Any]]) -> None:
        request = active.request
        for role, inputs in given.items():
            # A number of its own: after a restart late frames must not be taken for those of its successor.
            self._companion_count += 1
            companion_id = f"{request.request_id}%{role}%{self._companion_count}"
            active.companions[role] = companion_id
            plan = companion_plan(request.plan)
            self._backlog.enter(companion_id, plan.stages, _fingerprints(request))
            self.add(
                replace(
                    request,
                    request_id=companion_id,
                    inputs=inputs,
                    plan=plan,
                    companions={},
                    parent_id=request.request_id,
                    role=role,
                )
            )

    def _stop_companions(self, active: Active) -> None:
        companion_ids = list(active.companions.values())
        active.companions.clear()
        for companion_id in companion_ids:
            self.tell(companion_id, ev.Cancelled())

    def _tell_parent(self, request: AddRequest, event: ev.CompanionDone | ev.CompanionFailed) -> None:
        # In a turn of its own: the parent may be in the middle of what it has decided last.
        self._post(CompanionSaid(request.parent_id, request.request_id, event))


def _fingerprints(request: AddRequest) -> Mapping[int, str]:
    return {} if request.release is None else request.release.fingerprints
