"""The thread that owns the engine: jobs in, steps, outcomes out.

Every accepted request ends with exactly one Finished or Broken, whatever the engine does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec

from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.control import Controls, fail
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest
from stage_runtime.errors import EngineDeadError, PayloadError
from stage_runtime.jobs import (
    Broken,
    Call,
    Cancel,
    Fed,
    Finished,
    Job,
    NextSegment,
    Outcome,
    Piece,
    Release,
    ReleaseHub,
    Room,
    Wake,
    Work,
)
from stage_runtime.payloads import Payloads
from stage_runtime.pieces import Pieces
from stage_runtime.running import Running, broken, kind_of, request_of
from stage_runtime.segments import Talk

logger = logging.getLogger(__name__)

_IDLE_WAIT_S: Final = 0.5


class Progress(msgspec.Struct, frozen=True):
    """When the engine last got anywhere, and whether it has anything to do. Swapped whole."""

    busy: bool
    at_s: float


class EngineLoop:
    """Runs in the replica's main thread; only ``jobs`` and ``progress`` may be touched from others."""

    def __init__(
        self,
        engine: Engine,
        payloads: Payloads,
        defaults: dict[str, Any],
        emit: Callable[[Sequence[Outcome]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._payloads = payloads
        self._defaults = defaults
        self._emit = emit
        self._clock = clock
        self._running: dict[str, Running] = {}
        #: No deadline of those passes before this.
        self._next_deadline_s = float("inf")
        self._controls = Controls(engine, lambda: not (self._running or engine.has_unfinished()), clock, self._grant)
        self._pieces = Pieces(engine, payloads, self._add, self._finish, clock)
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self.progress = Progress(busy=False, at_s=clock())

    def __len__(self) -> int:
        return len(self._running)

    def turn(self) -> None:
        """Take the jobs that wait, work for one step, say what came out; waits a moment if there is nothing to do.

        Raise EngineDeadError, after everything in flight was failed, if the engine raised.
        """
        outcomes: list[Outcome] = []
        self._payloads.expire()
        try:
            self._take_jobs(outcomes)
            self._enforce_deadlines(outcomes)
            if self._engine.has_unfinished():
                for output in self._engine.step():
                    outcomes += self._outcomes_of(output)
            outcomes += self._of_pieces(self._pieces.feed())
            outcomes += self._controls.turn()
        except Exception as error:
            logger.exception("engine.died")
            self._emit(outcomes)
            self.fail_all(FailureKind.ENGINE, f"the engine died: {type(error).__name__}: {error}")
            raise EngineDeadError(f"{type(error).__name__}: {error}") from error
        self._note_progress()
        self._emit(outcomes)

    def fail_all(self, kind: FailureKind, reason: str) -> None:
        """End everything in flight and everything that waits to be taken."""
        outcomes: list[Outcome] = [Broken(key, kind, reason) for key in self._running]
        self._running.clear()
        outcomes += self._controls.fail_all(reason)
        while not self.jobs.empty():
            job = self.jobs.get_nowait()
            if isinstance(job, Work):
                outcomes.append(Broken(job.key, kind, reason))
            elif isinstance(job, Call):
                outcomes += fail([job], reason)
        self._emit(outcomes)

    def _grant(self, until_s: float) -> None:
        self.progress = Progress(busy=True, at_s=until_s)

    def _note_progress(self) -> None:
        self.progress = Progress(busy=self._engine.has_unfinished() or not self.jobs.empty(), at_s=self._clock())

    def _take_jobs(self, outcomes: list[Outcome]) -> None:
        wait = not self._engine.has_unfinished()
        if wait:
            self.progress = Progress(busy=False, at_s=self._clock())
            try:
                job = self.jobs.get(timeout=_IDLE_WAIT_S)
            except Empty:
                return
            self.progress = Progress(busy=True, at_s=self._clock())
            outcomes += self._do(job)
        # Nobody else takes anything out.
        while not self.jobs.empty():
            outcomes += self._do(self.jobs.get_nowait())

    def _do(self, job: Job) -> Sequence[Outcome]:
        match job:
            case Work():
                return self._start(job)
            case Cancel(key):
                return self._cancel(key)
            case NextSegment():
                return self._go_on(job)
            case Fed():
                return self._of_pieces(self._pieces.take(job))
            case Room():
                return self._of_pieces(self._pieces.make_room(job))
            case Call():
                return self._controls.take(job)
            case Release(owner):
                self._payloads.release(owner)
            case ReleaseHub(hub_id):
                self._payloads.release_hub(hub_id)
            case Wake():
                pass
        return ()

    def _cancel(self, key: str) -> Sequence[Outcome]:
        running = self._running.get(key)
        if running is not None:
            running.is_cancelled = True
        self._engine.abort(key)
        if self._pieces.cancel(key) or (running is not None and running.is_idle):
            return self._finish(EngineOutput(key, finish_reason="abort"))
        return self._controls.cancel(key)

    def _start(self, work: Work) -> Sequence[Outcome]:
        now_s = self._clock()
        if now_s >= work.deadline_s:
            return [Broken(work.key, FailureKind.DEADLINE, "the deadline passed while the request waited")]
        if work.resume is not None and getattr(self._engine, "not_resumable", None) is None:
            # It would begin at the beginning, and the client would see that twice.
            return [Broken(work.key, FailureKind.NOT_RESUMABLE, "this engine can't go on behind what was shown")]
        if work.segment is not None and getattr(self._engine, "update", None) is None:
            return [Broken(work.key, FailureKind.INVALID, "this engine takes no input in segments")]
        if self._pieces.begin(work):
            return self._add(work, {})
        self._run(work, now_s)
        return ()

    def _go_on(self, job: NextSegment) -> Sequence[Outcome]:
        """The next segment of a request that waits for it. Those of unknown requests are fine."""
        running = self._running.get(job.key)
        if running is None or not running.is_idle or running.talk is None:
            return ()
        if job.is_last:
            self._forget(job.key)
            self._engine.abort(job.key)
            return [running.talk.over(job.key)]
        self._payloads.release_before(running.work.owner, job.kept_from)
        work = msgspec.structs.replace(
            running.work,
            inputs=job.inputs,
            payloads=job.payloads,
            segment=job.segment,
            accepted_at_s=self._clock(),
            resume=None,
        )
        running.talk.is_idle = False
        outcomes = self._add(work, {})
        if outcomes:
            self._engine.abort(job.key)
        return outcomes

    def _add(self, work: Work, whole: Mapping[int, Mapping[str, Any]]) -> Sequence[Outcome]:
        """Give the engine its work; ``whole`` is what came in pieces that it does not take."""
        now_s = self._clock()
        try:
            fetched = self._payloads.fetch(work.payloads, work.deadline_s - now_s)
            roles = dict.fromkeys(ref.role for ref in work.payloads if ref.role)
            if roles and not getattr(self._engine, "takes_companions", False):
                raise InvalidRequestError("this stage takes no companions; ask without them")
            companions = {
                role: self._payloads.fetch(work.payloads, work.deadline_s - self._clock(), role) for role in roles
            }
            added_at_s = self._clock()
            give: Callable[[StageRequest], None] = getattr(self._engine, "update" if work.segment else "add")
            give(request_of(work, self._defaults, {**fetched, **whole}, companions))
        except Exception as error:
            # The engine is not stepped here: what one request broke is that request's own.
            if kind_of(error) is FailureKind.ENGINE:
                logger.exception("engine.add_failed")
            self._forget(work.key)
            return [broken(work.key, error)]
        self._run(work, added_at_s, transfer_s=added_at_s - now_s)
        return ()

    def _run(self, work: Work, added_at_s: float, transfer_s: float = 0.0) -> None:
        earlier = self._running.get(work.key)
        talk = (None if work.segment is None else Talk()) if earlier is None else earlier.talk
        self._running[work.key] = Running(work, added_at_s, transfer_s, talk=talk)
        self._next_deadline_s = min(self._next_deadline_s, work.deadline_s)

    def _forget(self, key: str) -> Running | None:
        self._pieces.close(key)
        return self._running.pop(key, None)

    def _of_pieces(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        for outcome in outcomes:
            if isinstance(outcome, Broken):
                self._forget(outcome.key)
        return outcomes

    def _enforce_deadlines(self, outcomes: list[Outcome]) -> None:
        now_s = self._clock()
        if now_s < self._next_deadline_s:
            return
        late = [key for key, running in self._running.items() if now_s >= running.work.deadline_s]
        for key in late:
            self._forget(key)
            self._engine.abort(key)
            outcomes.append(Broken(key, FailureKind.DEADLINE, "the deadline passed while the request ran"))
        self._next_deadline_s = min((each.work.deadline_s for each in self._running.values()), default=float("inf"))

    def _outcomes_of(self, output: EngineOutput) -> list[Outcome]:
        running = self._running.get(output.key)
        if running is None:
            return []
        outcomes: list[Outcome] = []
        if output.image_png is not None:
            outcomes.append(Piece(output.key, "image", mime="image/png", attachment=output.image_png))
        if output.text or output.token_ids:
            outcomes.append(Piece(output.key, self._engine.modality, text=output.text, token_ids=output.token_ids))
        if outcomes and running.first_output_at_s is None:
            running.first_output_at_s = self._clock()
        if output.handoff_piece is not None and not running.is_cancelled:
            outcomes += self._of_pieces(self._pieces.put(running.work, output.handoff_piece))
        if output.finished and not self._pieces.hold(output):
            outcomes += self._finish(output)
        return outcomes

    def _finish(self, output: EngineOutput) -> Sequence[Outcome]:
        running = self._running.get(output.key)
        if running is None:
            self._pieces.close(output.key)
            return ()
        end = self._end(running, output)
        self._pieces.close(output.key)
        if running.talk is not None:
            if isinstance(end, Finished) and not running.is_cancelled:
                return [running.talk.ended(end)]
            self._engine.abort(output.key)
        del self._running[output.key]
        return [end]

    def _end(self, running: Running, output: EngineOutput) -> Outcome:
        if output.error is not None:
            return Broken(output.key, *output.error)
        done_at_s = self._clock()
        if running.is_cancelled:
            return Finished(output.key, "abort", (), output.usage, running.timings(done_at_s, self._clock()))
        try:
            takers = self._pieces.takers_of_rest(running.work)
            refs = self._payloads.hand_over(running.work, output.handoff, takers)
        except PayloadError as error:
            return Broken(output.key, FailureKind.PAYLOAD, str(error))
        reason = output.finish_reason or "stop"
        return Finished(output.key, reason, refs, output.usage, running.timings(done_at_s, self._clock()))
