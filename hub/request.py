"""RequestMachine: walks one request through the stage graph. Pure: events in, actions out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hub import request_events as ev
from hub.outputs import chunk_outputs, end_output, summary_output
from hub.pipeline import RequestPlan
from hub.request_events import Action, Event, Outcome, StageEvent
from hub.request_state import OrchestratorRequestState, Phase, StageRun
from hub.retry import ENGINE_DIED, Decision, Verdict, decide, error_of, may_not_resume, unavailable_error
from omni_discovery import wire
from omni_discovery.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ReplicaLostError,
    RequestError,
)


class RequestMachine:
    """One request. ``handle`` applies an event and returns what the driver must do, ending with one Finish."""

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
    ) -> None:
        self.finished = False
        self.runs = {stage_id: StageRun(stage_id) for stage_id in plan.stages}
        self.state = OrchestratorRequestState(
            request_id=request_id,
            prompt=inputs,
            sampling_params_list=[params.get(stage_id, {}) for stage_id in plan.stages],
            final_stage_id=plan.stages[-1],
            final_output_stage_ids=set(plan.finals),
            request_timestamp=request_timestamp,
        )
        self._plan = plan
        self._inputs = inputs
        self._params = params
        self._attempts = attempts
        self._priority = priority
        #: The client's own name for the request, on its outputs.
        self._shown_id = shown_id or request_id
        self._started_at_s: float | None = None

    def is_out(self, stage_id: int, attempt: int) -> bool:
        """Whether that attempt is the one whose answers count."""
        run = self.runs.get(stage_id)
        return run is not None and not self.finished and run.running and run.attempt == attempt

    def can_move(self, stage_id: int) -> bool:
        """Whether the stage's work, if lost now, is sure to be done again elsewhere unnoticed."""
        match self._decide(self.runs[stage_id], None).verdict:
            case Verdict.CONTINUE:
                return not may_not_resume(self._params.get(stage_id, {}))
            case verdict:
                return verdict is Verdict.AGAIN

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event; ``now_s`` is monotonic. After ev.Finish, and for attempts that are over, nothing happens."""
        if self.finished:
            return []
        match event:
            case ev.Submitted():
                return self._start(now_s)
            case ev.DeadlinePassed():
                return self._finish(Outcome.FAILED, DeadlineExceededError(self._progress()), now_s)
            case ev.Cancelled(error=error):
                return self._finish(Outcome.FAILED if error else Outcome.CANCELLED, error, now_s)
            case _:
                if self.is_out(event.stage_id, event.attempt):
                    return self._of_stage(self.runs[event.stage_id], event, now_s)
                return [ev.Drop("stale")] if isinstance(event, ev.Chunk | ev.StageDone | ev.StageFailed) else []

    def _of_stage(self, run: StageRun, event: StageEvent, now_s: float) -> list[Action]:
        match event:
            case ev.Sent(replica=replica):
                run.sent(replica, now_s, hands_over=bool(self._plan.next_stages[run.stage_id]))
                self.state.stage_submit_ts[run.stage_id] = now_s
                self._note(run, "pick", now_s - run.dispatched_at_s)
                return []
            case ev.Accepted():
                self._accept(run, now_s)
                return []
            case ev.Chunk():
                return self._chunk(run, event, now_s)
            case ev.StageDone():
                return self._done(run, event, now_s)
            case ev.Rejected(kind=kind, reason=reason):
                return self._refused(run, kind, reason, now_s, may_have_run=False)
            case ev.StageFailed(kind=kind, reason=reason):
                run.engine_deaths += kind is wire.FailureKind.ENGINE and reason.startswith(ENGINE_DIED)
                return self._refused(run, kind, reason, now_s, may_have_run=True)
            case ev.ReplicaLost():
                run.losses += event.may_have_run and run.phase is Phase.ACCEPTED
                return self._lost(run, event, now_s)
            case ev.StageUnavailable(reason=reason):
                return self._finish(Outcome.FAILED, unavailable_error(run.stage_id, reason, run.failure), now_s)
            case ev.DispatchRefused(reason=reason):
                return self._finish(Outcome.FAILED, InvalidRequestError(reason), now_s)

    # ---- forward: dispatch, output, hand-off

    def _start(self, now_s: float) -> list[Action]:
        if self._started_at_s is not None:
            return []
        self._started_at_s = now_s
        return self._begin(now_s)

    def _begin(self, now_s: float, *, is_retry: bool = False) -> list[Action]:
        roots = [run for run in self.runs.values() if not self._plan.inputs[run.stage_id]]
        return [self._dispatch(run, now_s, is_retry=is_retry) for run in roots]

    def _dispatch(self, run: StageRun, now_s: float, *, is_retry: bool = False) -> ev.Dispatch:
        resume = run.seen.resume()
        run.phase, run.replica, run.next_seq = Phase.DISPATCHED, None, 0
        run.skip = run.seen.chunks if resume is None else 0
        run.attempt += 1
        run.dispatched_at_s = now_s
        return ev.Dispatch(
            stage_id=run.stage_id,
            attempt=run.attempt,
            inputs=self._inputs,
            params=self._params.get(run.stage_id, {}),
            payloads=tuple(ref for stage_id in self._plan.inputs[run.stage_id] for ref in run.handed[stage_id]),
            next_stages=self._plan.next_stages[run.stage_id],
            avoid=frozenset(run.avoid),
            slow=frozenset(run.slow),
            resume=resume,
            priority=self._priority,
            is_retry=is_retry,
        )

    def _accept(self, run: StageRun, now_s: float) -> None:
        # ev.Accepted and ev.Chunk travel on different sockets: either may be first.
        if run.phase is Phase.DISPATCHED:
            run.phase = Phase.ACCEPTED
            self._note(run, "accept", now_s - run.sent_at_s)

    def _chunk(self, run: StageRun, event: ev.Chunk, now_s: float) -> list[Action]:
        self._accept(run, now_s)
        message = event.message
        if message.seq < run.next_seq:
            return [ev.Drop("duplicate")]
        if message.seq > run.next_seq:
            return self._gap(run, message.seq, now_s)
        if message.seq == 0 and not run.seen:
            self._note(run, "first_output", now_s - run.began_at_s)
        run.next_seq += 1
        if run.stage_id not in self._plan.finals or message.seq < run.skip:
            return []
        run.seen.add(message, event.attachments)
        replica = str(run.replica)
        outputs = chunk_outputs(self._shown_id, run.stage_id, replica, message, event.attachments, event.received_at_s)
        return [ev.Emit(output) for output in outputs]

    def _done(self, run: StageRun, event: ev.StageDone, now_s: float) -> list[Action]:
        self._accept(run, now_s)
        message = event.message
        if message.finish_reason == "abort":
            # Nobody here asked for it: the replica gave the work up.
            return self._lost(run, self._blame(run, "the replica stopped the work"), now_s)
        if message.seq != run.next_seq:
            return self._gap(run, message.seq, now_s)
        if run.next_seq < run.skip:
            return self._lost(run, self._blame(run, "it made less than had been shown before"), now_s)
        run.phase = Phase.DONE
        if not message.payloads and run.attempt == 0:
            run.holders.clear()
        self._note(run, "total", now_s - run.began_at_s)
        for name, seconds in message.timings_s.items():
            self._note(run, f"replica.{name}", seconds)
        actions: list[Action] = []
        modality = self._plan.finals.get(run.stage_id)
        if modality is not None:
            run.seen.ended = True
            self.state.finished_final_output_stage_ids.add(run.stage_id)
            replica = str(run.replica)
            actions.append(
                ev.Emit(end_output(self._shown_id, run.stage_id, replica, modality, message, event.received_at_s))
            )
        return actions + self._hand_over(run, message, now_s)

    def _hand_over(self, run: StageRun, message: wire.StageDone, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for stage_id in self._plan.next_stages[run.stage_id]:
            target = self.runs[stage_id]
            refs = tuple(ref for ref in message.payloads if ref.to_stage == stage_id)
            if not refs:
                self._skip(target)
            elif target.phase is Phase.WAITING:
                target.handed[run.stage_id] = refs
                if len(target.handed) == len(self._plan.inputs[stage_id]):
                    actions.append(self._dispatch(target, now_s))
        if all(each.settled for each in self.runs.values()):
            actions += self._finish(Outcome.OK, None, now_s)
        return actions

    def _skip(self, run: StageRun) -> None:
        if run.phase is Phase.WAITING:
            run.phase = Phase.SKIPPED
            for stage_id in self._plan.next_stages[run.stage_id]:
                self._skip(self.runs[stage_id])

    # ---- backward: loss, retry, end

    def _gap(self, run: StageRun, seq: int, now_s: float) -> list[Action]:
        reason = f"piece {run.next_seq} of the output never came, piece {seq} did"
        return [ev.Drop("gap"), *self._lost(run, self._blame(run, reason), now_s)]

    def _blame(self, run: StageRun, reason: str) -> ev.ReplicaLost:
        avoid = run.replica.input_addr if run.replica is not None else ""
        return ev.ReplicaLost(run.stage_id, run.attempt, reason, avoid_addr=avoid)

    def _lost(self, run: StageRun, event: ev.ReplicaLost, now_s: float) -> list[Action]:
        if event.avoid_addr:
            (run.slow if event.is_slow else run.avoid).add(event.avoid_addr)
        stop: list[Action] = [ev.Abort(run.stage_id, run.attempt, run.replica)] if event.may_have_run else []
        return stop + self._judge(run, None, event.reason, now_s, may_have_run=event.may_have_run)

    def _refused(
        self, run: StageRun, kind: wire.FailureKind, reason: str, now_s: float, *, may_have_run: bool
    ) -> list[Action]:
        if run.replica is not None and kind is not wire.FailureKind.PAYLOAD:
            run.avoid.add(run.replica.input_addr)
        if kind is wire.FailureKind.NOT_RESUMABLE and run.failure is not None:
            reason = f"{reason}; that was needed because of this: {run.failure}"
        return self._judge(run, kind, reason, now_s, may_have_run=may_have_run)

    def _judge(
        self, run: StageRun, kind: wire.FailureKind | None, reason: str, now_s: float, *, may_have_run: bool
    ) -> list[Action]:
        decision = self._decide(run, kind)
        text = f"stage {run.stage_id} replica {run.replica or 'not picked'}: {reason}"
        text += f"; {decision.why}" if decision.why else ""
        # Work that killed no other engine was in the way when this one died: for its client the replica is lost.
        lost = kind is None or (run.engine_deaths == 1 and not run.losses and reason.startswith(ENGINE_DIED))
        error = ReplicaLostError(text) if kind is None or lost else error_of(kind, run.stage_id, text)
        run.failure = error
        # The failed attempt needs no ev.Abort any more; a ev.Finish or a restart below must not send a second one.
        run.phase = Phase.WAITING
        match decision.verdict:
            case Verdict.AGAIN:
                return [ev.Retry(run.stage_id), self._dispatch(run, now_s, is_retry=may_have_run)]
            case Verdict.CONTINUE:
                return [ev.Retry(run.stage_id, resumed=True), self._dispatch(run, now_s, is_retry=may_have_run)]
            case Verdict.RESTART:
                return [ev.Retry(run.stage_id), *self._restart(now_s)]
            case Verdict.FAIL:
                return self._finish(Outcome.FAILED, error, now_s)

    def _decide(self, run: StageRun, kind: wire.FailureKind | None) -> Decision:
        request_shown = any(each.seen for each in self.runs.values())
        return decide(run.loss(kind, self._attempts, request_shown=request_shown))

    def _restart(self, now_s: float) -> list[Action]:
        actions = self._stop_all()
        for run in self.runs.values():
            run.reset()
        return actions + self._begin(now_s, is_retry=True)

    def _stop_all(self) -> list[Action]:
        return [action for run in self.runs.values() for action in run.stop()]

    def _finish(self, outcome: Outcome, error: RequestError | None, now_s: float) -> list[Action]:
        self.finished = True
        if self._started_at_s is not None:
            self.state.pipeline_timings["total"] = now_s - self._started_at_s
        actions = self._stop_all()
        if error is None:
            reason = "done" if outcome is Outcome.OK else "abort"
            actions.append(ev.Emit(summary_output(self._shown_id, reason, self.state.pipeline_timings)))
        return [*actions, ev.Finish(outcome, error)]

    def _note(self, run: StageRun, name: str, seconds: float) -> None:
        self.state.pipeline_timings[f"stage{run.stage_id}.{name}"] = seconds

    def _progress(self) -> str:
        open_stages = [str(run.stage_id) for run in self.runs.values() if not run.settled]
        return f"the time is over; not finished: stage {', '.join(open_stages)}"
