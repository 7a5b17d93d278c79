"""RequestMachine: walks one request through the stage graph. Pure: events in, actions out.

What the parts of a request's machine share: its stages, and the actions that any of them may need. Pure.

What becomes of a request when one of its stages fails: again, on, anew or over. Pure.

What a request's machine does where input comes in segments: one after the other, through all stages. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hub.request import events as ev
from hub.request.backpressure import keep_pace, tell_pace
from hub.request.companions import Companions, of_companion
from hub.request.events import Action, Event, Outcome, StageEvent
from hub.request.outputs import OmniOutput, chunk_outputs, end_output, name_of, summary_output, with_replica
from hub.request.pieces import end_pieces, flow, is_shown, producer_at_fault, session_back, take_piece, taken, withdraw
from hub.request.plan import RequestPlan
from hub.request.retry import ENGINE_DIED, Decision, Verdict, decide, error_of, may_not_resume, unavailable_error
from hub.request.segments import Segments, Step
from hub.request.state import OrchestratorRequestState, Phase, StageRun
from omni_discovery import wire
from omni_discovery.errors import (
    DeadlineExceededError,
    EngineFailedError,
    InvalidRequestError,
    ReplicaLostError,
    RequestError,
)


class RequestBody:
    """One request: what was asked, where each stage stands, and how it is dispatched and ended."""

    def __init__(
        self,
        request_id: str,
        inputs: Mapping[str, Any],
        plan: RequestPlan,
        params: Mapping[int, Mapping[str, Any]],
        attempts: int = 3,
        request_timestamp: float = 0.0,
        shown_id: str = "",
        priority: int = 0,
        companions: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        is_companion: bool = False,
        segmented: bool = False,
    ) -> None:
        self.finished = False
        #: Whether the client has so much to read that no more is to be made.
        self.is_client_behind = False
        #: Of a request whose input comes in segments.
        self.segments = Segments(plan, inputs) if segmented else None
        self.companions = Companions(plan, companions or {})
        #: Its hand-off is for its parent, which says when it is over.
        self.is_companion = is_companion
        self.plan = plan
        self.params = params
        #: How many dispatches a stage may have.
        self.attempts = attempts
        #: The client's own name for the request, on its outputs.
        self.shown_id = shown_id or request_id
        self.runs = {stage_id: StageRun(stage_id) for stage_id in plan.stages}
        self.state = OrchestratorRequestState(
            request_id=request_id,
            prompt=inputs,
            sampling_params_list=[params.get(stage_id, {}) for stage_id in plan.stages],
            final_stage_id=plan.stages[-1],
            final_output_stage_ids=set(plan.finals),
            request_timestamp=request_timestamp,
            mm_features=inputs.get("mm_features"),
            mm_processor_kwargs=inputs.get("mm_processor_kwargs"),
        )
        self._inputs = inputs
        self._priority = priority
        self.state.streaming.enabled = segmented
        self._started_at_s: float | None = None

    def set_params(self, params: Mapping[int, Mapping[str, Any]]) -> None:
        """Stages that are still to be dispatched get these parameters."""
        self.params = params
        self.state.sampling_params_list = [params.get(stage_id, {}) for stage_id in self.plan.stages]

    def start(self, now_s: float) -> list[Action]:
        """Begin, once."""
        if self._started_at_s is not None:
            return []
        self._started_at_s = now_s
        return self.begin(now_s)

    def begin(self, now_s: float, *, is_retry: bool = False) -> list[Action]:
        """Dispatch the stages that take the client's input."""
        if self.segments is not None:
            return self.next_segments(now_s, is_retry=is_retry)
        roots = [run for run in self.runs.values() if not self.plan.inputs[run.stage_id]]
        return [self.dispatch(run, now_s, is_retry=is_retry) for run in roots]

    def dispatch(self, run: StageRun, now_s: float, *, is_retry: bool = False) -> ev.Dispatch:
        """The next attempt of a stage."""
        resume = run.seen.resume()
        run.phase, run.replica, run.next_seq, run.next_piece = Phase.DISPATCHED, None, 0, 0
        run.told_paused = None
        for relay in run.streams.values():
            relay.begin()
        run.skip = run.seen.chunks if resume is None else 0
        run.attempt += 1
        run.dispatched_at_s = now_s
        return ev.Dispatch(
            stage_id=run.stage_id,
            attempt=run.attempt,
            inputs=self._inputs if self.segments is None else self.segments.inputs_of(run.stage_id),
            params=self.params.get(run.stage_id, {}),
            payloads=tuple(ref for stage_id in self.plan.inputs[run.stage_id] for ref in run.handed.get(stage_id, ()))
            + self.companions.refs_for(run.stage_id),
            next_stages=self.plan.next_stages[run.stage_id],
            avoid=frozenset(run.avoid),
            slow=frozenset(run.slow),
            resume=resume,
            priority=self._priority,
            is_retry=is_retry,
            stream_from=tuple(run.streams),
            stream_to=self.plan.pieces_to(run.stage_id),
            segmented=self.segments is not None,
        )

    def dispatch_if_ready(self, run: StageRun, now_s: float) -> list[Action]:
        """Dispatch a stage that waits, if nothing is missing: each input is there, or has begun to come in pieces."""
        has_all = len(run.handed) + len(run.streams) == len(self.plan.inputs[run.stage_id])
        if run.phase is not Phase.WAITING or not has_all or not self.companions.ready_for(run.stage_id):
            return []
        return [self.dispatch(run, now_s)]

    def next_segments(self, now_s: float, *, is_retry: bool = False) -> list[Action]:
        """Give each stage the next segment that it can have now."""
        if self.segments is None:
            return []
        actions: list[Action] = []
        for step in self.segments.steps():
            run = self.runs[step.stage_id]
            if not self.plan.inputs[run.stage_id]:
                self.state.streaming.segment_finished = step.item.is_end
            if step.number:
                actions.append(self.update(run, step))
            else:
                run.handed = dict(step.item.handed)
                actions.append(self.dispatch(run, now_s, is_retry=is_retry))
        for run in self.runs.values():
            if run.phase is Phase.WAITING and self.segments.is_over(run.stage_id):
                run.phase = Phase.SKIPPED
        return actions

    def update(self, run: StageRun, step: Step) -> ev.Update:
        """Give a stage a segment that is not its first."""
        return ev.Update(
            stage_id=run.stage_id,
            attempt=run.attempt,
            replica=run.replica,
            segment=step.number,
            inputs=step.item.inputs or {},
            payloads=tuple(ref for refs in step.item.handed.values() for ref in refs),
            is_last=step.item.is_end,
            kept_from=step.kept_from,
        )

    def restart(self, now_s: float) -> list[Action]:
        """Stop everything and begin at the beginning."""
        actions = self.stop_all()
        for run in self.runs.values():
            run.reset()
        if self.companions.given:
            actions.append(ev.StopCompanions())
            self.companions.reset()
        if self.segments is not None:
            self.segments.restart()
        return actions + self.begin(now_s, is_retry=True)

    def finish(self, outcome: Outcome, error: RequestError | None, now_s: float) -> list[Action]:
        """The request is over, and its companions with it."""
        self.finished = True
        if self._started_at_s is not None:
            self.state.pipeline_timings["total"] = now_s - self._started_at_s
        actions = self.stop_all()
        if self.companions.started:
            actions.append(ev.StopCompanions())
        if error is None and not self.is_companion:
            reason = "done" if outcome is Outcome.OK else "abort"
            actions.append(ev.Emit(summary_output(self.shown_id, reason, self.state.pipeline_timings)))
        return [*actions, ev.Finish(outcome, error)]

    def stop_all(self) -> list[Action]:
        """Stop every stage and free what it left."""
        return [action for run in self.runs.values() for action in run.stop()]

    def note(self, run: StageRun, name: str, seconds: float) -> None:
        """Write down how long something took; hub/request/outputs.py says what the names mean."""
        self.state.pipeline_timings[name_of(run.stage_id, name)] = seconds

    def note_end(self, run: StageRun, said_s: Mapping[str, float], now_s: float) -> None:
        """Write down what is known of a stage that is done; ``said_s`` is the replica's own account."""
        self.note(run, "total", now_s - run.began_at_s)
        for name, seconds in said_s.items():
            self.note(run, f"replica.{name}", seconds)
        for name, seconds in with_replica(run.sent_at_s - run.dispatched_at_s, said_s).items():
            self.note(run, name, seconds)

    @property
    def request_shown(self) -> bool:
        """Whether the client has seen output of any stage."""
        return any(run.seen for run in self.runs.values())

    @property
    def progress(self) -> str:
        """What is not finished, for the client whose time is over."""
        open_stages = [str(run.stage_id) for run in self.runs.values() if not run.settled]
        return f"the time is over; not finished: stage {', '.join(open_stages)}"


def gap(body: RequestBody, run: StageRun, seq: int, now_s: float) -> list[Action]:
    """A piece of the output is missing."""
    reason = f"piece {run.next_seq} of the output never came, piece {seq} did"
    return [ev.Drop("gap"), *lost(body, run, blame(run, reason), now_s)]


def blame(run: StageRun, reason: str) -> ev.ReplicaLost:
    """The loss of a stage's work where its replica is at fault."""
    avoid = run.replica.input_addr if run.replica is not None else ""
    return ev.ReplicaLost(run.stage_id, run.attempt, reason, avoid_addr=avoid)


def lost(body: RequestBody, run: StageRun, event: ev.ReplicaLost, now_s: float) -> list[Action]:
    """The attempt will not be answered any more."""
    if event.avoid_addr:
        (run.slow if event.is_slow else run.avoid).add(event.avoid_addr)
    stop: list[Action] = [ev.Abort(run.stage_id, run.attempt, run.replica)] if event.may_have_run else []
    return stop + _judge(body, run, None, event.reason, now_s, may_have_run=event.may_have_run)


def refused(
    body: RequestBody, run: StageRun, kind: wire.FailureKind, reason: str, now_s: float, *, may_have_run: bool
) -> list[Action]:
    """The replica said that it will not, or could not, do the work."""
    producer = producer_at_fault(body, run) if kind is wire.FailureKind.PAYLOAD else None
    if producer is not None:
        run.phase = Phase.WAITING
        return lost(body, producer, blame(producer, f"stage {run.stage_id} can't have its pieces: {reason}"), now_s)
    if run.replica is not None and kind is not wire.FailureKind.PAYLOAD:
        run.avoid.add(run.replica.input_addr)
    if kind is wire.FailureKind.NOT_RESUMABLE and run.failure is not None:
        reason = f"{reason}; that was needed because of this: {run.failure}"
    return _judge(body, run, kind, reason, now_s, may_have_run=may_have_run)


def decision_on(body: RequestBody, run: StageRun, kind: wire.FailureKind | None) -> Decision:
    """The retry rule's word on the stage's work if it fails now; ``kind`` None: it will not be answered."""
    shown, pieces_shown = body.request_shown, is_shown(body, run)
    loss = run.loss(kind, body.attempts, request_shown=shown, pieces_shown=pieces_shown)
    return decide(loss) if body.segments is None else body.segments.decide(run.stage_id, loss)


def _judge(
    body: RequestBody, run: StageRun, kind: wire.FailureKind | None, reason: str, now_s: float, *, may_have_run: bool
) -> list[Action]:
    decision = decision_on(body, run, kind)
    text = f"stage {run.stage_id} replica {run.replica or 'not picked'}: {reason}"
    text += f"; {decision.why}" if decision.why else ""
    # Work that killed no other engine was in the way when this one died: for its client the replica is lost.
    is_lost = kind is None or (run.engine_deaths == 1 and not run.losses and reason.startswith(ENGINE_DIED))
    error = ReplicaLostError(text) if kind is None or is_lost else error_of(kind, run.stage_id, text)
    run.failure = error
    # The failed attempt needs no Abort any more; a finish or a restart below must not send a second one.
    run.phase = Phase.WAITING
    match decision.verdict:
        case Verdict.AGAIN | Verdict.CONTINUE:
            again = ev.Retry(run.stage_id, resumed=decision.verdict is Verdict.CONTINUE)
            return [*withdraw(body, run), again, body.dispatch(run, now_s, is_retry=may_have_run)]
        case Verdict.RESTART:
            return [ev.Retry(run.stage_id), *body.restart(now_s)]
        case Verdict.FAIL:
            return body.finish(Outcome.FAILED, error, now_s)


def arrived(body: RequestBody, event: ev.Segment, now_s: float) -> list[Action]:
    """The client has sent its next segment, or said that there are no more. What comes after that is dropped."""
    if body.segments is None or body.segments.is_complete:
        return []
    body.segments.add(event.inputs)
    return body.next_segments(now_s)


def segment_done(body: RequestBody, run: StageRun, event: ev.SegmentDone, now_s: float) -> list[Action]:
    """A stage has ended a segment: it is shown, and handed on."""
    segments, message = body.segments, event.message
    if message.seq < run.next_seq:
        return [ev.Drop("duplicate")]
    if message.seq > run.next_seq:
        return gap(body, run, message.seq, now_s)
    if segments is None or segments.is_ending(run.stage_id) or segments.is_idle(run.stage_id):
        return lost(body, run, blame(run, "it ended a segment that it had not been given"), now_s)
    if run.next_seq < run.skip:
        return lost(body, run, blame(run, "it made less than had been shown before"), now_s)
    run.next_seq, run.skip = run.next_seq + 1, 0
    segment = segments.segment_of(run.stage_id)
    segments.ended(run.stage_id, message.payloads)
    _note(body, run, event)
    actions: list[Action] = []
    modality = body.plan.finals.get(run.stage_id)
    if modality is not None:
        # Nobody can go on behind it any more, so what it said need not be remembered; that it said something must.
        run.seen.token_ids, run.seen.texts = [], []
        run.seen.chunks += 1
        actions.append(ev.Emit(segment_output(body.shown_id, run, segment, modality, event)))
    if body.request_shown:
        segments.forget_past()
    return actions + body.next_segments(now_s)


def said_again(body: RequestBody, run: StageRun) -> list[Action]:
    """The session of a stage's replica is back: what it was told last may not have come there."""
    if body.segments is None or body.segments.is_first(run.stage_id):
        return []
    return [body.update(run, body.segments.last_step(run.stage_id))]


def segment_output(shown_id: str, run: StageRun, segment: int, modality: str, event: ev.SegmentDone) -> OmniOutput:
    """What tells the client that a segment has ended."""
    return OmniOutput(
        request_id=shown_id,
        stage_id=run.stage_id,
        modality=modality,
        usage=event.message.usage,
        replica=str(run.replica),
        received_at_s=event.received_at_s,
        segment=segment,
        segment_end=event.message.finish_reason,
    )


def _note(body: RequestBody, run: StageRun, event: ev.SegmentDone) -> None:
    streaming = body.state.streaming
    if not body.plan.inputs[run.stage_id]:
        streaming.segment_finished = True
        streaming.new_prompt_len_snapshot = event.message.usage.get("prompt_tokens")
    given_to = {ref.to_stage for ref in event.message.payloads} & set(body.plan.next_stages[run.stage_id])
    for to_stage in given_to:
        edge = f"{run.stage_id}-{to_stage}"
        streaming.bridge_states[edge] = streaming.bridge_states.get(edge, 0) + 1


class RequestMachine:
    """One request. ``handle`` applies an event and returns what the driver must do, ending with one Finish."""

    def __init__(self, body: RequestBody) -> None:
        self._body = body
        self._plan = body.plan
        self.runs = body.runs

    @property
    def state(self) -> OrchestratorRequestState:
        """What the request's owner may look at."""
        return self._body.state

    def set_params(self, params: Mapping[int, Mapping[str, Any]]) -> None:
        """Stages that are still to be dispatched get these parameters."""
        self._body.set_params(params)

    @property
    def is_client_behind(self) -> bool:
        """Whether the client has so much to read that no more is to be made."""
        return self._body.is_client_behind

    @property
    def finished(self) -> bool:
        """Whether Finish was said."""
        return self._body.finished

    def is_out(self, stage_id: int, attempt: int) -> bool:
        """Whether that attempt is the one whose answers count."""
        run = self.runs.get(stage_id)
        return run is not None and not self.finished and run.running and run.attempt == attempt

    def can_move(self, stage_id: int) -> bool:
        """Whether the stage's work, if lost now, is sure to be done again elsewhere unnoticed."""
        match decision_on(self._body, self.runs[stage_id], None).verdict:
            case Verdict.CONTINUE:
                return not may_not_resume(self._body.params.get(stage_id, {}))
            case verdict:
                return verdict is Verdict.AGAIN

    def has_past(self, stage_id: int) -> bool:
        """Whether the stage was given more than one segment: no other replica can go on with it."""
        return self._body.segments is not None and not self._body.segments.is_first(stage_id)

    def must_repeat(self, stage_id: int) -> bool:
        """Whether what the stage's replica was told besides its work must be said again after a lost session."""
        was_told = self.runs[stage_id].told_paused is not None
        return was_told or self.has_past(stage_id) or any(stage_id in edge for edge in self._plan.windows)

    @property
    def segments(self) -> Segments | None:
        """The input of a request that comes in segments."""
        return self._body.segments

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event; ``now_s`` is monotonic. After Finish, and for attempts that are over, nothing happens."""
        if self.finished:
            return []
        match event:
            case ev.Submitted():
                return self._body.start(now_s)
            case ev.DeadlinePassed():
                return self._body.finish(Outcome.FAILED, DeadlineExceededError(self._body.progress), now_s)
            case ev.Cancelled(error=error):
                return self._body.finish(Outcome.FAILED if error else Outcome.CANCELLED, error, now_s)
            case ev.Segment():
                return arrived(self._body, event, now_s)
            case ev.ClientPace():
                return [*keep_pace(self._body, event)]
            case ev.CompanionDone():
                return self._collect(event, now_s)
            case ev.CompanionFailed(role=role, error=error):
                return self._body.finish(Outcome.FAILED, of_companion(role, error), now_s)
            case _:
                if self.is_out(event.stage_id, event.attempt):
                    return self._of_stage(self.runs[event.stage_id], event, now_s)
                return [ev.Drop("stale")] if isinstance(event, ev.Chunk | ev.StageDone | ev.StageFailed) else []

    def _of_stage(self, run: StageRun, event: StageEvent, now_s: float) -> list[Action]:
        match event:
            case ev.Sent(replica=replica):
                run.sent(replica, now_s, hands_over=bool(self._plan.next_stages[run.stage_id]))
                self.state.stage_submit_ts[run.stage_id] = now_s
                self._body.note(run, "queue", now_s - run.dispatched_at_s)
                return [*self._start_companions(run), *flow(self._body, run), *tell_pace(self._body, run)]
            case ev.Accepted():
                self._accept(run, now_s)
                return []
            case ev.Chunk():
                return self._chunk(run, event, now_s)
            case ev.StageDone():
                return self._done(run, event, now_s)
            case ev.SegmentDone():
                self._accept(run, now_s)
                return segment_done(self._body, run, event, now_s)
            case ev.SessionBack():
                again = said_again(self._body, run) + session_back(self._body, run)
                return [*again, *tell_pace(self._body, run, again=True)]
            case ev.HandOffPiece() | ev.PieceTaken():
                return self._piece(run, event, now_s)
            case _:
                return self._failed(run, event, now_s)

    def _failed(
        self,
        run: StageRun,
        event: ev.Rejected | ev.StageFailed | ev.ReplicaLost | ev.StageUnavailable | ev.DispatchRefused,
        now_s: float,
    ) -> list[Action]:
        match event:
            case ev.Rejected(reason=reason) if self.has_past(run.stage_id):
                return lost(self._body, run, blame(run, reason), now_s)
            case ev.Rejected(kind=kind, reason=reason):
                return refused(self._body, run, kind, reason, now_s, may_have_run=False)
            case ev.StageFailed(kind=kind, reason=reason):
                run.engine_deaths += kind is wire.FailureKind.ENGINE and reason.startswith(ENGINE_DIED)
                return refused(self._body, run, kind, reason, now_s, may_have_run=True)
            case ev.ReplicaLost():
                run.losses += event.may_have_run and run.phase is Phase.ACCEPTED
                return lost(self._body, run, event, now_s)
            case ev.StageUnavailable(reason=reason):
                error = unavailable_error(run.stage_id, reason, run.failure)
                return self._body.finish(Outcome.FAILED, error, now_s)
            case ev.DispatchRefused(reason=reason):
                return self._body.finish(Outcome.FAILED, InvalidRequestError(reason), now_s)

    # ---- output

    def _accept(self, run: StageRun, now_s: float) -> None:
        # Accepted and Chunk travel on different sockets: either may be first.
        if run.phase is Phase.DISPATCHED:
            run.phase = Phase.ACCEPTED
            self._body.note(run, "submit", now_s - run.sent_at_s)

    def _chunk(self, run: StageRun, event: ev.Chunk, now_s: float) -> list[Action]:
        self._accept(run, now_s)
        message = event.message
        if message.seq < run.next_seq:
            return [ev.Drop("duplicate")]
        if message.seq > run.next_seq:
            return gap(self._body, run, message.seq, now_s)
        if message.seq == 0 and not run.seen:
            self._body.note(run, "first_output", now_s - run.began_at_s)
        run.next_seq += 1
        if run.stage_id not in self._plan.finals or message.seq < run.skip:
            return []
        run.seen.add(message, event.attachments)
        replica, shown_id = str(run.replica), self._body.shown_id
        outputs = chunk_outputs(shown_id, run.stage_id, replica, message, event.attachments, event.received_at_s)
        segments = self._body.segments
        if segments is not None:
            outputs = [replace(output, segment=segments.segment_of(run.stage_id)) for output in outputs]
        return [ev.Emit(output) for output in outputs]

    def _piece(self, run: StageRun, event: ev.HandOffPiece | ev.PieceTaken, now_s: float) -> list[Action]:
        self._accept(run, now_s)
        if isinstance(event, ev.PieceTaken):
            return taken(self._body, run, event.from_stage, event.number)
        number = event.message.number
        if number < run.next_piece:
            return [ev.Drop("duplicate")]
        if number > run.next_piece:
            return gap(self._body, run, number, now_s)
        return take_piece(self._body, run, event.message, now_s)

    def _done(self, run: StageRun, event: ev.StageDone, now_s: float) -> list[Action]:
        self._accept(run, now_s)
        message = event.message
        if message.finish_reason == "abort":
            # Nobody here asked for it: the replica gave the work up.
            return lost(self._body, run, blame(run, "the replica stopped the work"), now_s)
        if message.seq != run.next_seq or message.pieces != run.next_piece:
            return gap(self._body, run, message.seq, now_s)
        if run.next_seq < run.skip:
            return lost(self._body, run, blame(run, "it made less than had been shown before"), now_s)
        segments = self._body.segments
        if segments is not None and not segments.is_ending(run.stage_id):
            return lost(self._body, run, blame(run, "it ended before the last segment"), now_s)
        run.phase = Phase.DONE
        if not (message.payloads or run.next_piece or run.attempt) and segments is None:
            run.holders.clear()
        self._body.note_end(run, message.timings_s, now_s)
        actions: list[Action] = []
        modality = self._plan.finals.get(run.stage_id)
        if modality is not None:
            run.seen.ended = True
            self.state.finished_final_output_stage_ids.add(run.stage_id)
            replica, shown_id = str(run.replica), self._body.shown_id
            end = end_output(shown_id, run.stage_id, replica, modality, message, event.received_at_s)
            if segments is not None:
                end = replace(end, segment=segments.segment_of(run.stage_id))
            actions.append(ev.Emit(end))
        return actions + self._hand_over(run, message, now_s)

    # ---- hand-off

    def _hand_over(self, run: StageRun, message: wire.StageDone, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if self._body.is_companion:
            return [ev.Collected(message.payloads)]
        if self._body.segments is not None:
            self._body.segments.ended(run.stage_id)
            actions += self._body.next_segments(now_s)
        for stage_id in self._plan.next_stages[run.stage_id] if self._body.segments is None else ():
            target = self.runs[stage_id]
            refs = tuple(ref for ref in message.payloads if ref.to_stage == stage_id)
            passed_on = end_pieces(self._body, run, stage_id)
            if passed_on is not None:
                actions += passed_on
            elif not refs:
                self._skip(target)
            elif target.phase is Phase.WAITING:
                target.handed[run.stage_id] = refs
                self.state.note_prefill(refs)
                actions += self._body.dispatch_if_ready(target, now_s)
        if all(each.settled for each in self.runs.values()):
            actions += self._body.finish(Outcome.OK, None, now_s)
        return actions

    def _skip(self, run: StageRun) -> None:
        if run.phase is Phase.WAITING:
            run.phase = Phase.SKIPPED
            for stage_id in self._plan.next_stages[run.stage_id]:
                self._skip(self.runs[stage_id])

    # ---- companions

    def _start_companions(self, run: StageRun) -> list[Action]:
        companions = self._body.companions
        if not companions.given or companions.started or run.stage_id != companions.stage_id:
            return []
        # Not before: they go where their parent has gone.
        companions.started = True
        return [ev.StartCompanions(companions.given)]

    def _collect(self, event: ev.CompanionDone, now_s: float) -> list[Action]:
        companions = self._body.companions
        wrong = companions.collect(event.role, event.payloads)
        if wrong:
            return self._body.finish(Outcome.FAILED, EngineFailedError(wrong), now_s)
        takers = [self.runs[stage_id] for stage_id in self._plan.next_stages[companions.stage_id]]
        return [action for run in takers if run.handed for action in self._body.dispatch_if_ready(run, now_s)]
