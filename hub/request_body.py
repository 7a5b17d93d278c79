"""What the parts of a request's machine share: its stages, and the actions that any of them may need. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hub import request_events as ev
from hub.outputs import summary_output
from hub.pipeline import RequestPlan
from hub.request_events import Action, Outcome
from hub.request_state import OrchestratorRequestState, Phase, StageRun
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
    ) -> None:
        self.finished = False
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
        )
        self._inputs = inputs
        self._priority = priority
        self._started_at_s: float | None = None

    def start(self, now_s: float) -> list[Action]:
        """Begin, once."""
        if self._started_at_s is not None:
            return []
        self._started_at_s = now_s
        return self.begin(now_s)

    def begin(self, now_s: float, *, is_retry: bool = False) -> list[Action]:
        """Dispatch the stages that take the client's input."""
        roots = [run for run in self.runs.values() if not self.plan.inputs[run.stage_id]]
        return [self.dispatch(run, now_s, is_retry=is_retry) for run in roots]

    def dispatch(self, run: StageRun, now_s: float, *, is_retry: bool = False) -> ev.Dispatch:
        """The next attempt of a stage."""
        resume = run.seen.resume()
        run.phase, run.replica, run.next_seq = Phase.DISPATCHED, None, 0
        run.skip = run.seen.chunks if resume is None else 0
        run.attempt += 1
        run.dispatched_at_s = now_s
        return ev.Dispatch(
            stage_id=run.stage_id,
            attempt=run.attempt,
            inputs=self._inputs,
            params=self.params.get(run.stage_id, {}),
            payloads=tuple(ref for stage_id in self.plan.inputs[run.stage_id] for ref in run.handed[stage_id]),
            next_stages=self.plan.next_stages[run.stage_id],
            avoid=frozenset(run.avoid),
            slow=frozenset(run.slow),
            resume=resume,
            priority=self._priority,
            is_retry=is_retry,
        )

    def restart(self, now_s: float) -> list[Action]:
        """Stop everything and begin at the beginning."""
        actions = self.stop_all()
        for run in self.runs.values():
            run.reset()
        return actions + self.begin(now_s, is_retry=True)

    def finish(self, outcome: Outcome, error: RequestError | None, now_s: float) -> list[Action]:
        """The request is over."""
        self.finished = True
        if self._started_at_s is not None:
            self.state.pipeline_timings["total"] = now_s - self._started_at_s
        actions = self.stop_all()
        if error is None:
            reason = "done" if outcome is Outcome.OK else "abort"
            actions.append(ev.Emit(summary_output(self.shown_id, reason, self.state.pipeline_timings)))
        return [*actions, ev.Finish(outcome, error)]

    def stop_all(self) -> list[Action]:
        """Stop every stage and free what it left."""
        return [action for run in self.runs.values() for action in run.stop()]

    def note(self, run: StageRun, name: str, seconds: float) -> None:
        """Write down how long something took."""
        self.state.pipeline_timings[f"stage{run.stage_id}.{name}"] = seconds

    @property
    def request_shown(self) -> bool:
        """Whether the client has seen output of any stage."""
        return any(run.seen for run in self.runs.values())

    @property
    def progress(self) -> str:
        """What is not finished, for the client whose time is over."""
        open_stages = [str(run.stage_id) for run in self.runs.values() if not run.settled]
        return f"the time is over; not finished: stage {', '.join(open_stages)}"
