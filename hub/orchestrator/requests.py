"""Requests: the requests under way in one hub. Passes events to their machines and carries out the actions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from hub.metrics import HubMetrics
from hub.orchestrator.aborts import AbortTracker
from hub.orchestrator.active import AbortRequest, Active, AddRequest, BackpressureChanged, Ended, UpdateRequest, answer
from hub.orchestrator.admission import Backlog
from hub.orchestrator.dispatcher import Dispatcher, PickEnded
from hub.orchestrator.failures import RequestFailures
from hub.orchestrator.retry_budget import RetryDue
from hub.orchestrator.trials import TrialDue
from hub.receipts.raw import UNDER_WAY, Ending, encode_receipt
from hub.request import events as ev
from hub.request.companions import companion_plan
from hub.request.kept_references import KeptReferences
from hub.request.machine import RequestMachine
from hub.request.outputs import OmniOutput, of_stage
from hub.request.state import OrchestratorRequestState, Phase, RequestState
from omni_discovery import wire
from omni_discovery.errors import InputTimeoutError, InvalidRequestError, OverloadedError, RequestError
from omni_discovery.failure_log import trace_id

if TYPE_CHECKING:
    from hub.config import HubConfig
    from hub.orchestrator.deploy_versions import DeployVersion
    from hub.orchestrator.tracing import Tracing
    from hub.pool.stage_pool import StagePool
    from hub.receipts.ring import ReceiptRing
    from hub.replicas.events import Answered
    from hub.request.recent import RecentRequests
    from omni_discovery.stories import Stories


logger = logging.getLogger(__name__)

_HANDS_OVER: Final = (wire.HandOffPiece, wire.StageDone, wire.SegmentDone)


@dataclass(frozen=True, slots=True)
class TimeUp:
    """A request's deadline has passed."""

    request_id: str


@dataclass(frozen=True, slots=True)
class InputIdle:
    """A request has waited for its client's next segment for as long as it may."""

    request_id: str


@dataclass(frozen=True, slots=True)
class CompanionEnded:
    """A companion of a request is done or has failed; ``request_id`` is the parent's."""

    request_id: str
    companion_id: str
    event: ev.CompanionEvent


class Requests:
    """Part of the orchestrator's task.

    ``post`` puts an item into the orchestrator's inbox, ``emit`` gives a client an output or the end of its request.
    ``active`` and ``states`` may be read by others, and are written here only.
    """

    def __init__(
        self,
        pools: Mapping[int, StagePool],
        dispatcher: Dispatcher,
        aborts: AbortTracker,
        config: HubConfig,
        metrics: HubMetrics,
        backlog: Backlog,
        post: Callable[[TimeUp | InputIdle | CompanionEnded], None],
        emit: Callable[[str, OmniOutput | Ended], None],
        tracing: Tracing | None = None,
        stories: Stories | None = None,
        recent: RecentRequests | None = None,
        receipts: ReceiptRing | None = None,
    ) -> None:
        #: By id, until they end.
        self.active: dict[str, Active] = {}
        self.states: dict[str, OrchestratorRequestState] = {}
        #: The pools of requests that go by no document.
        self._pools = pools
        self._dispatcher = dispatcher
        self._aborts = aborts
        self._config = config
        self._metrics = metrics
        self._backlog = backlog
        self._post = post
        self._emit = emit
        self._tracing = tracing
        self._stories = stories
        #: Receives what became of each request; None: nobody keeps it.
        self._receipts = receipts
        self._failures = RequestFailures(metrics.count_failure, recent, config.request_timeout_s)
        self._references = KeptReferences()
        self._companion_count = 0
        active = self.active
        metrics.clients_behind.set_function(lambda: sum(each.machine.is_client_behind for each in active.values()))

    # ---- what clients ask

    def add_request(self, request: AddRequest) -> None:
        """Begin a new request; a bug ends it."""
        try:
            self._begin(request)
        except Exception as error:  # noqa: BLE001 - it is logged there
            self.end_after_bug(request, error, "AddRequest")

    def _begin(self, request: AddRequest) -> None:
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
            seed=request.seed,
        )
        deadline_s = request.received_s + request.timeout_s
        left_s = max(0.0, deadline_s - time.perf_counter())
        timer = asyncio.get_running_loop().call_later(left_s, self._post, TimeUp(request.request_id))
        pools = self._pools if request.release is None else request.release.pools
        active = Active(request, RequestMachine(state), pools, deadline_s, timer)
        self.active[request.request_id] = active
        self.states[request.request_id] = state.public
        self._metrics.in_flight.set(len(self.active))
        if not request.parent_id:
            self._dispatcher.retries.admitted()
        if self._tracing is not None:
            active.trace_id = self._tracing.begin_request(request)
            active.trace_of = partial(self._tracing.traceparent, request.request_id)
        else:
            traceparent = request.trace_headers.get("traceparent", "")
            active.trace_id = trace_id(traceparent)
            # The client's own: an engine that traces goes on with it. No reference back to ``active``: it would keep
            # all of a request that has ended until the collector looks for such rings.
            shown = traceparent if active.trace_id else ""
            active.trace_of = lambda _stage_id: shown
        self._apply(active, ev.Submitted())

    def abort_request(self, abort: AbortRequest) -> None:
        """Stop a request; its ``done`` gets its result when no replica works on it any more."""
        active = self.active.get(abort.request_id)
        ids = [abort.request_id, *(() if active is None else active.companions.values())]
        # A companion that is done only keeps its hand-off for its parent, which the abort came too late for.
        if active is None or not (active.request.parent_id and active.machine.is_done):
            self.apply_event(abort.request_id, ev.Cancelled(abort.error))
        if abort.done is not None:
            self._aborts.when_quiet(ids, abort.done)

    def apply_item(self, item: TimeUp | InputIdle | CompanionEnded | UpdateRequest | BackpressureChanged) -> None:
        """Apply an item of the orchestrator's inbox that concerns one request."""
        match item:
            case UpdateRequest():
                self._add_segment(item)
            case BackpressureChanged(request_id=request_id, backpressure=backpressure):
                self._backlog.set_aside(request_id, is_aside=backpressure.is_behind)
                self.apply_event(request_id, backpressure)
            case TimeUp(request_id=request_id):
                self.apply_event(request_id, ev.DeadlinePassed())
            case InputIdle(request_id=request_id):
                self._end_idle(request_id)
            case CompanionEnded(request_id=request_id, companion_id=companion_id, event=event):
                parent = self.active.get(request_id)
                # After a restart the parent has another companion of that role.
                if parent is not None and parent.companions.get(event.role) == companion_id:
                    self._apply(parent, event)

    def end_all(self, error: RequestError) -> None:
        """Abort every stage of every request; each ends with the error."""
        for request_id in list(self.active):
            self.apply_event(request_id, ev.Cancelled(error))

    def close(self) -> None:
        """Log the failures that are not logged yet; call it after ``end_all``. Idempotent."""
        self._failures.close()

    @contextmanager
    def contained(self, request_id: str, event: str) -> Iterator[None]:
        """Whatever raises inside is logged as a bug, and costs this request alone."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is logged there
            self.end_after_bug(request_id, error, event)

    def end_after_bug(self, request: AddRequest | str, bug: Exception, event: str) -> None:
        """Log a bug and end the request, or that with this id, whatever state it is in.

        Its place and its slots are given back, and its client is answered. It may have ended in part already, and each
        step of its end may be where the bug is.
        """
        if isinstance(request, str):
            known = self.active.get(request)
            if known is None:
                _log_bug(event, bug)
                return
            request = known.request
        _log_bug(event, bug, request.shown_id)
        request_id, error = request.request_id, RequestError(f"a bug in the hub: {bug!r}")
        active = self.active.get(request_id)
        if active is None:
            self._backlog.leave(request_id)
            self._answer_end(request, error)
            return
        for companion_id in active.companions.values():
            if companion_id not in self.active:
                # It was not begun any more.
                self._backlog.leave(companion_id)
        actions: list[ev.Action] = []
        with suppress(Exception):
            actions = active.machine.handle(ev.Cancelled(error), time.perf_counter())
        for action in actions:
            if not isinstance(action, ev.Finish):
                with suppress(Exception):
                    self._carry_out(active, action)
        with suppress(Exception):
            self._stop_companions(active)
        for stage_id, pool in active.pools.items():
            with suppress(Exception):
                self._dispatcher.cancel_pick(active, stage_id)
            # The bug may be in the index that a release changes; the books are right before it is called.
            with suppress(Exception):
                self._dispatcher.give_up(active, stage_id)
            with suppress(Exception):
                pool.release(request_id)
        self._finish(active, ev.Outcome.FAILED, error)

    def move_request(self, active: Active, release: DeployVersion) -> None:
        """Have a request go by another deploy document, which is the same for the stages that have run already."""
        with self.contained(active.request.request_id, "ViewChanged"):
            self._move(active, release)

    def _move(self, active: Active, release: DeployVersion) -> None:
        params = release.graph.merge_params(active.request.asked_params)
        request = active.request = replace(active.request, release=release, params=params)
        active.machine.set_params(params)
        needed = [stage_id for stage_id, run in active.machine.runs.items() if not run.settled]
        self._backlog.enter(request.request_id, needed, release.fingerprints)
        for event in self._dispatcher.move(active, release.pools):
            self.apply_event(request.request_id, event)

    def stories(self) -> dict[str, list[str]]:
        """The latest events of each request under way, by the client's name for it; see ``Story.lines``."""
        return {
            active.request.shown_id + (f"%{active.request.role}" if active.request.parent_id else ""): lines
            for active in self.active.values()
            if (lines := active.machine.story.lines())
        }

    # ---- events, answers and the actions that follow

    def apply_event(self, request_id: str, event: ev.Event) -> None:
        """Apply an event to one request and carry out the actions. Requests that have ended are left alone."""
        active = self.active.get(request_id)
        if active is not None:
            self._apply(active, event)

    def apply_answer(self, active: Active, stage_id: int, answered: Answered) -> None:
        """Apply the answer of a stage's replica, and carry out the actions."""
        message, machine = answered.message, active.machine
        actions = machine.handle_message(
            stage_id, message, time.perf_counter(), answered.attachments, answered.received_at_s
        )
        is_done = isinstance(message, wire.StageDone)
        run = machine.runs[stage_id]
        if isinstance(message, wire.StageDone) and run.phase is Phase.DONE and run.attempt == message.attempt:
            self._metrics.observe_stage(stage_id, of_stage(machine.state.public.pipeline_timings, stage_id))
            self._metrics.count_tokens(stage_id, message.usage)
        if self._tracing is not None:
            self._tracing.follow_request(active.request.request_id, machine, stage_id, message, actions)
        self._carry_out_all(active, actions)
        if isinstance(message, _HANDS_OVER):
            self._bound_references(active)
        if is_done:
            settled = [each for each, run in machine.runs.items() if run.settled]
            self._backlog.passed(active.request.request_id, settled)

    def _bound_references(self, active: Active) -> None:
        """Note what a request's references take; while those of all take too much, end an attempt with the most."""
        self._note_references(active)
        while self._references.are_too_many:
            request_id = self._references.largest
            machine = self.active[request_id].machine
            run = max(machine.runs.values(), key=lambda each: each.reference_bytes)
            reason = "its references to hand-offs take the most of the hub's memory for them, which is used up"
            event: ev.Event = ev.Cancelled(OverloadedError(f"stage {run.stage_id}: {reason}: try again later"))
            if machine.is_out(run.stage_id, run.attempt) and run.replica is not None:
                addr = run.replica.input_addr
                event = ev.ReplicaLost(run.stage_id, run.attempt, reason, avoid_addr=addr, has_ended=False)
            self._metrics.dropped.labels("reference_memory").inc()
            before_bytes = self._references.kept_bytes
            self.apply_event(request_id, event)
            if request_id in self.active:
                self._note_references(self.active[request_id])
            if self._references.kept_bytes >= before_bytes:
                # Nothing was freed: it is tried again with the next hand-off.
                return

    def _note_references(self, active: Active) -> None:
        if not active.machine.finished:
            self._references.note(active.request.request_id, active.machine.state.reference_bytes)

    def show_piece(self, active: Active, stage_id: int, piece: wire.Chunk, now_s: float, received_at_s: float) -> bool:
        """Show the client a piece of text if nothing else is due for it; False, and nothing is done, if more may be."""
        if self._tracing is not None or not active.first_shown:
            return False
        output = active.machine.take_piece(stage_id, piece, now_s, received_at_s)
        if output is None:
            return False
        self._emit(active.request.request_id, output)
        return True

    def resume_dispatch(self, item: PickEnded | RetryDue | TrialDue) -> None:
        """Go on with a dispatch that has waited; if the request has ended, release the binding of its pick."""
        active = self.active.get(item.request_id)
        if active is None:
            if isinstance(item, PickEnded):
                self._dispatcher.drop_pick(item)
            return
        event: ev.Event | None
        match item:
            case PickEnded():
                event = self._dispatcher.pick_ended(active, item)
            case RetryDue():
                event = self._dispatcher.retry_due(active, item)
            case TrialDue():
                for event in self._dispatcher.trial_due(active, item):
                    self._apply(active, event)
                return
        if event is not None:
            self._apply(active, event)

    def _apply(self, active: Active, event: ev.Event) -> None:
        try:
            self._carry_out_all(active, self._handle(active, event))
        except Exception as error:  # noqa: BLE001 - it is logged there
            # A bug, here or in a third party's balancer, must cost one request and not those beside it.
            self.end_after_bug(active.request, error, type(event).__name__)

    def _handle(self, active: Active, event: ev.Event) -> list[ev.Action]:
        machine = active.machine
        actions = machine.handle(event, time.perf_counter())
        if self._tracing is not None:
            stage_id = getattr(event, "stage_id", None)
            self._tracing.follow_request(active.request.request_id, machine, stage_id, event, actions)
            if isinstance(event, ev.Sent) and active.marks:
                self._tracing.note_pick(active.request.request_id, active.marks[-1])
        return actions

    def _carry_out_all(self, active: Active, actions: list[ev.Action]) -> None:
        """Carry out actions, and those of the events that come of them, breadth first."""
        events: list[ev.Event] = []
        while True:
            for action in actions:
                event = self._carry_out(active, action)
                if event is not None:
                    events.append(event)
            if not events:
                break
            actions = self._handle(active, events.pop(0))
        if active.updates and active.machine.segments is not None and not active.machine.segments.waits:
            for done in active.updates:
                answer(done)
            active.updates.clear()
        self._watch_input(active)

    def _watch_input(self, active: Active) -> None:
        """Count the time for which nothing but the client's next segment is waited for: slots are held meanwhile."""
        segments = active.machine.segments
        waits = segments is not None and segments.waits_for_client and not active.machine.finished
        if waits == (active.idle_timer is not None):
            return
        if active.idle_timer is not None:
            active.idle_timer.cancel()
            active.idle_timer = None
        else:
            idle = InputIdle(active.request.request_id)
            limit_s = self._config.stream_idle_timeout_s
            active.idle_timer = asyncio.get_running_loop().call_later(limit_s, self._post, idle)
        if active.request.on_input_wait is not None:
            active.request.on_input_wait(waits)

    def _end_idle(self, request_id: str) -> None:
        active = self.active.get(request_id)
        # A segment may have come after the timer.
        if active is None or active.idle_timer is None:
            return
        active.idle_timer = None
        if active.machine.is_client_behind:
            # It has not read yet what was answered.
            self._watch_input(active)
            return
        text = f"no segment came for {self._config.stream_idle_timeout_s:g} s after the last was answered"
        error = InputTimeoutError(f"{text}: the request is over; begin another with the next segment")
        self.apply_event(request_id, ev.Cancelled(error))

    def _carry_out(self, active: Active, action: ev.Action) -> ev.Event | None:
        match action:
            case ev.Emit(output=output):
                self._emit_output(active, output)
            case ev.Dispatch():
                return self._dispatcher.dispatch(active, action)
            case ev.Update() | ev.FeedInput() | ev.PieceRoom() | ev.Pause():
                return self._dispatcher.pass_on(active, action)
            case ev.Abort() | ev.ReleasePayload() | ev.Acquit() | ev.Convict():
                self._dispatcher.carry_out(active, action)
            case ev.Drop(reason=reason):
                self._metrics.dropped.labels(reason).inc()
            case ev.Retry(stage_id=stage_id, resumed=resumed):
                self._metrics.count_retry(stage_id, resumed=resumed)
                # Those of the attempt before are not kept.
                self._note_references(active)
            case ev.StartCompanions() | ev.StopCompanions() | ev.Collected():
                self._carry_out_for_companions(active, action)
            case ev.Finish(outcome=outcome, error=error):
                self._finish(active, outcome, error)
        return None

    def _emit_output(self, active: Active, output: OmniOutput) -> None:
        # The end of a stage has no content.
        if not active.first_shown and (output.text or output.token_ids or output.data):
            active.first_shown = True
            self._metrics.first_output.observe(time.perf_counter() - active.request.received_s)
        self._emit(active.request.request_id, output)

    def _add_segment(self, update: UpdateRequest) -> None:
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
            self._apply(active, ev.SegmentArrived(update.inputs))

    def _finish(self, active: Active, outcome: ev.Outcome, error: RequestError | None) -> None:
        request_id = active.request.request_id
        for timer in (active.timer, active.idle_timer, *active.graces.values()):
            if timer is not None:
                timer.cancel()
        self._backlog.leave(request_id)
        for done in active.updates:
            answer(done, "the request has ended")
        self._answer_end(active.request, error)
        self.active.pop(request_id, None)
        self.states.pop(request_id, None)
        self._references.forget(request_id)
        # The client has its answer, whatever becomes of the diagnosis.
        try:
            self._note_end(active, outcome, error)
        except Exception as bug:  # noqa: BLE001 - tracing and metrics are libraries
            _log_bug("Finish", bug, active.request.shown_id)

    def _answer_end(self, request: AddRequest, error: RequestError | None) -> None:
        if request.parent_id:
            reason = error or RequestError("it was aborted")
            self._notify_parent(request, ev.CompanionFailed(request.role, reason))
        else:
            self._emit(request.request_id, Ended(error))

    def _note_end(self, active: Active, outcome: ev.Outcome, error: RequestError | None) -> None:
        request = active.request
        self._metrics.in_flight.set(len(self.active))
        if not request.parent_id:
            self._metrics.count_end(outcome if error is None else type(error).__name__)
            if error is not None or outcome is not ev.Outcome.CANCELLED:
                self._failures.count_end()
            if outcome is ev.Outcome.OK:
                self._metrics.request.observe(time.perf_counter() - request.received_s)
        if error is not None:
            self._failures.log_failure(active, error)
            self._keep_story(active, error)
        if self._receipts is not None:
            self._receipts.add(
                (request.request_id, request.shown_id, request.label),
                self.encode_receipt(active, Ending(outcome, *_about(error))),
                failed=error is not None,
            )
        if self._tracing is not None:
            self._tracing.end_request(request.request_id, outcome, error)

    def encode_receipt(self, active: Active, ending: Ending = UNDER_WAY) -> bytes:
        """The receipt of a request as it is now; see ``hub.receipts.raw``."""
        now_s, fingerprints = time.perf_counter(), _fingerprints(active.request)
        return encode_receipt(active.request, active.machine, active.marks, fingerprints, ending, now_s, time.time())

    def _keep_story(self, active: Active, error: RequestError) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            story = active.machine.story.lines()
            logger.debug("request.story request=%s\n  %s", active.request.request_id, "\n  ".join(story))
        if self._stories is not None and not isinstance(error, InvalidRequestError):
            self._stories.write("request", active.request.request_id, active.machine.story.lines)

    # ---- companions

    def _carry_out_for_companions(
        self, active: Active, action: ev.StartCompanions | ev.StopCompanions | ev.Collected
    ) -> None:
        match action:
            case ev.StartCompanions(prompts=prompts):
                self._start_companions(active, prompts)
            case ev.StopCompanions():
                self._stop_companions(active)
            case ev.Collected(payloads=payloads):
                self._notify_parent(active.request, ev.CompanionDone(active.request.role, payloads))

    def _start_companions(self, active: Active, prompts: Mapping[str, Mapping[str, Any]]) -> None:
        request = active.request
        for role, inputs in prompts.items():
            # A number of its own: after a restart, late frames must not be taken for those of its successor.
            self._companion_count += 1
            companion_id = f"{request.request_id}%{role}%{self._companion_count}"
            active.companions[role] = companion_id
            plan = companion_plan(request.plan)
            self._backlog.enter(companion_id, plan.stages, _fingerprints(request))
            self.add_request(
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
            with self.contained(companion_id, "StopCompanions"):
                self.apply_event(companion_id, ev.Cancelled())

    def _notify_parent(self, request: AddRequest, event: ev.CompanionEvent) -> None:
        # In a turn of its own: the parent may be in the middle of carrying out its last actions.
        self._post(CompanionEnded(request.parent_id, request.request_id, event))


def _log_bug(event: str, bug: Exception, shown_id: str = "") -> None:
    """Log a bug, which ends the request if one is named."""
    logger.error("orchestrator.bug event=%s request=%s", event, shown_id or "-", exc_info=bug)


def _about(error: RequestError | None) -> tuple[str, int | None]:
    """The type of an error and the stage that it is about; its text may quote the prompt."""
    return ("", None) if error is None else (type(error).__name__, getattr(error, "stage_id", None))


def _fingerprints(request: AddRequest) -> Mapping[int, str]:
    return {} if request.release is None else request.release.fingerprints
