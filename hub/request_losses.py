"""What becomes of a request when one of its stages fails: again, on, anew or over. Pure."""

from __future__ import annotations

from hub import request_events as ev
from hub.request_body import RequestBody
from hub.request_events import Action, Outcome
from hub.request_pieces import is_shown, producer_at_fault, withdraw
from hub.request_state import Phase, StageRun
from hub.retry import ENGINE_DIED, Decision, Verdict, decide, error_of
from omni_discovery import wire
from omni_discovery.errors import ReplicaLostError


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
