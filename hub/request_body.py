"""What the parts of a request's machine share: its stages, and the actions that any of them may need. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hub import request_events as ev
from hub.companions import Companions
from hub.outputs import summary_output
from hub.pipeline import RequestPlan
from hub.request_events import Action, Outcome
from hub.request_state import OrchestratorRequestState, Phase, StageRun
from hub.segments import Segments, Step
from hub.timings import name_of, with_replica
from omni_discovery.errors import RequestError


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
        """Write down how long something took; hub/timings.py says what the names mean."""
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
