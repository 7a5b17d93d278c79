"""The thread that owns the engine: jobs in, steps, outcomes out.

Every accepted request ends with exactly one Finished or Broken, whatever the engine does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec

from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest
from stage_runtime.errors import EngineDeadError, NotResumableError, PayloadError
from stage_runtime.jobs import Broken, Cancel, Finished, Job, Outcome, Piece, Release, ReleaseHub, Wake, Work
from stage_runtime.payloads import Payloads

logger = logging.getLogger(__name__)

_IDLE_WAIT_S: Final = 0.5


@dataclass(slots=True)
class _Running:
    work: Work
    added_at_s: float
    transfer_s: float
    first_output_at_s: float | None = None
    #: Nobody wants its end: what it would hand over is not kept.
    is_cancelled: bool = False


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
        self._running: dict[str, _Running] = {}
        #: No deadline of those passes before this.
        self._next_deadline_s = float("inf")
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
        while True:
            try:
                job = self.jobs.get_nowait()
            except Empty:
                break
            if isinstance(job, Work):
                outcomes.append(Broken(job.key, kind, reason))
        self._emit(outcomes)

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
                running = self._running.get(key)
                if running is not None:
                    running.is_cancelled = True
                self._engine.abort(key)
            case Release(owner):
                self._payloads.release(owner)
            case ReleaseHub(hub_id):
                self._payloads.release_hub(hub_id)
            case Wake():
                pass
        return ()

    def _start(self, work: Work) -> Sequence[Outcome]:
        now_s = self._clock()
        if now_s >= work.deadline_s:
            return [Broken(work.key, FailureKind.DEADLINE, "the deadline passed while the request waited")]
        if work.resume is not None and getattr(self._engine, "not_resumable", None) is None:
            # It would begin at the beginning, and the client would see that twice.
            return [Broken(work.key, FailureKind.NOT_RESUMABLE, "this engine can't go on behind what was shown")]
        try:
            fetched = self._payloads.fetch(work.payloads, work.deadline_s - now_s)
            added_at_s = self._clock()
            self._engine.add(
                StageRequest(
                    key=work.key,
                    request_id=work.request_id,
                    attempt=work.attempt,
                    inputs=work.inputs,
                    params={**self._defaults, **work.params},
                    payloads=fetched,
                    next_stages=work.next_stages,
                    deadline_s=work.deadline_s,
                    resume=work.resume,
                    priority=work.priority,
                )
            )
        except InvalidRequestError as error:
            return [Broken(work.key, FailureKind.INVALID, str(error))]
        except PayloadError as error:
            return [Broken(work.key, FailureKind.PAYLOAD, str(error))]
        except NotResumableError as error:
            return [Broken(work.key, FailureKind.NOT_RESUMABLE, str(error))]
        except Exception as error:
            # The engine is not stepped here: what one request broke is that request's own.
            logger.exception("engine.add_failed")
            return [Broken(work.key, FailureKind.ENGINE, f"{type(error).__name__}: {error}")]
        self._running[work.key] = _Running(work, added_at_s, transfer_s=added_at_s - now_s)
        self._next_deadline_s = min(self._next_deadline_s, work.deadline_s)
        return ()

    def _enforce_deadlines(self, outcomes: list[Outcome]) -> None:
        now_s = self._clock()
        if now_s < self._next_deadline_s:
            return
        late = [key for key, running in self._running.items() if now_s >= running.work.deadline_s]
        for key in late:
            del self._running[key]
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
        if output.finished:
            del self._running[output.key]
            outcomes.append(self._end(running, output))
        return outcomes

    def _end(self, running: _Running, output: EngineOutput) -> Outcome:
        if output.error is not None:
            return Broken(output.key, *output.error)
        done_at_s = self._clock()
        if running.is_cancelled:
            return Finished(output.key, "abort", (), output.usage, self._timings(running, done_at_s))
        try:
            refs = self._payloads.hand_over(running.work, output.handoff)
        except PayloadError as error:
            return Broken(output.key, FailureKind.PAYLOAD, str(error))
        reason = output.finish_reason or "stop"
        return Finished(output.key, reason, refs, output.usage, self._timings(running, done_at_s))

    def _timings(self, running: _Running, done_at_s: float) -> dict[str, float]:
        accepted_at_s = running.work.accepted_at_s
        timings_s = {
            "queue": running.added_at_s - running.transfer_s - accepted_at_s,
            "generate": done_at_s - running.added_at_s,
            "transfer": running.transfer_s + self._clock() - done_at_s,
        }
        if running.first_output_at_s is not None:
            timings_s["first_output"] = running.first_output_at_s - accepted_at_s
        return timings_s
