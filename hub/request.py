"""RequestMachine: walks one request through the stage graph. Pure: events in, actions out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hub import request_events as ev
from hub import segment_flow
from hub.companions import of_companion
from hub.outputs import chunk_outputs, end_output
from hub.pace import keep_pace, tell_pace
from hub.request_body import RequestBody
from hub.request_events import Action, Event, Outcome, StageEvent
from hub.request_losses import blame, decision_on, gap, lost, refused
from hub.request_pieces import end_pieces, flow, session_back, take_piece, taken
from hub.request_state import OrchestratorRequestState, Phase, StageRun
from hub.retry import ENGINE_DIED, Verdict, may_not_resume, unavailable_error
from hub.segments import Segments
from omni_discovery import wire
from omni_discovery.errors import DeadlineExceededError, EngineFailedError, InvalidRequestError


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
                return segment_flow.arrived(self._body, event, now_s)
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
                return segment_flow.segment_done(self._body, run, event, now_s)
            case ev.SessionBack():
                again = segment_flow.said_again(self._body, run) + session_back(self._body, run)
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
