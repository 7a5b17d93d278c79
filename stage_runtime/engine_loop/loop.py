"""The engine loop, in the thread that owns the engine: takes jobs, steps the engine, emits outcomes.

Every accepted request ends with exactly one Finished or RequestFailed, whatever the engine does.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec

from omni_discovery.wire import FailureKind, PayloadRef
from stage_runtime.config import EngineDeadError, PayloadError
from stage_runtime.engine_loop.backpressure import Behind, Pauses
from stage_runtime.engine_loop.check_output import flaw_of, pieces_of
from stage_runtime.engine_loop.control import Controls, fail
from stage_runtime.engine_loop.fetching import HandOffFetches, RunAside, in_thread
from stage_runtime.engine_loop.jobs import (
    Call,
    Cancel,
    Fetched,
    Finished,
    HandOffs,
    HoldBack,
    Job,
    NextSegment,
    Outcome,
    Pause,
    PieceArrived,
    ReleaseHub,
    ReleasePayload,
    RequestFailed,
    Wake,
    WindowUpdate,
    Work,
)
from stage_runtime.engine_loop.meter import EngineMeter
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.engine_loop.pieces import Pieces
from stage_runtime.engine_loop.running import (
    Running,
    SegmentedRequest,
    end_of,
    failed,
    name_of,
    refusal_of,
    request_of,
)
from stage_runtime.engines.base import Engine, EngineOutput
from stage_runtime.engines.capabilities import capabilities_of, warn_of_misspelled
from stage_runtime.engines.errors import failure_kind, is_panic

logger = logging.getLogger(__name__)

_IDLE_WAIT_S: Final = 0.5
#: How long jobs are taken before the engine makes its next step: to read a prompt may take some 10 ms.
_MOST_TAKING_S: Final = 0.05
#: Requests that the log line of an engine's crash names.
_MOST_NAMED: Final = 20


class Progress(msgspec.Struct, frozen=True):
    """When the engine last made progress, and whether it has work. Replaced as a whole, so any thread may read it."""

    busy: bool
    at_s: float


class EngineLoop:
    """Runs in the main thread; from others only ``jobs``, ``progress``, ``meter`` and ``names_of_running`` are used.

    Hand-offs are fetched by ``run_aside``.
    """

    def __init__(
        self,
        engine: Engine,
        payloads: Payloads,
        defaults: dict[str, Any],
        emit: Callable[[Sequence[Outcome]], None],
        clock: Callable[[], float] = time.monotonic,
        run_aside: RunAside = in_thread,
    ) -> None:
        warn_of_misspelled(engine)
        self._engine = engine
        self._capabilities = capabilities_of(engine)
        self._give_next_segment = self._capabilities.update or engine.add
        self._moved_at_s = self._capabilities.moved_at_s or clock
        self._payloads = payloads
        self._defaults = defaults
        self._emit = emit
        self._clock = clock
        self._running: dict[str, Running] = {}
        #: No deadline of a running request passes before this moment.
        self._next_deadline_s = float("inf")
        self._controls = Controls(
            self._capabilities, lambda: not (self._running or engine.has_unfinished()), clock, self._extend_progress
        )
        self._pauses = Pauses(engine, self._capabilities)
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self._fetches = HandOffFetches(payloads, self.jobs.put, run_aside, clock)
        self._pieces = Pieces(
            engine, self._capabilities, payloads, self._fetches, self._pauses, self._add, self._finish
        )
        self.meter = EngineMeter(self._capabilities.metrics)
        #: Outputs of the engine that were discarded, by kind.
        self.counters: Counter[str] = Counter()
        self.progress = Progress(busy=False, at_s=clock())

    def __len__(self) -> int:
        return len(self._running)

    def turn(self) -> None:
        """Take the queued jobs, step the engine once, emit the outcomes; waits for a job if there is nothing to do.

        Raise EngineDeadError if the engine raised; everything in flight has been failed then.
        """
        outcomes: list[Outcome] = []
        self._payloads.expire()
        try:
            self._take_jobs(outcomes)
            self._fetches.start_due()
            self._enforce_deadlines(outcomes)
            if self._engine.has_unfinished():
                self.meter.steps += 1
                for output in self._engine.step():
                    outcomes += self._outcomes_of(output)
            outcomes += self._of_pieces(self._pieces.feed_waiting())
            outcomes += self._controls.run_due()
            self.meter.read_engine(self._clock())
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            logger.exception("engine.died requests=%s", self.names_of_running())
            self._emit(outcomes)
            self.fail_all(FailureKind.ENGINE, f"the engine died: {type(error).__name__}: {error}")
            raise EngineDeadError(f"{type(error).__name__}: {error}") from error
        is_busy = self._engine.has_unfinished() or not self.jobs.empty()
        self.progress = Progress(busy=is_busy, at_s=self._moved_at_s())
        self._emit(outcomes)

    def fail_all(self, kind: FailureKind, reason: str) -> None:
        """Fail everything in flight and every queued job that would have an answer."""
        outcomes: list[Outcome] = [RequestFailed(key, kind, reason) for key in self._running]
        for key in self._running:
            self._fetches.forget_request(key)
        self._running.clear()
        outcomes += self._controls.fail_all(reason)
        while not self.jobs.empty():
            job = self.jobs.get_nowait()
            if isinstance(job, Work):
                outcomes.append(RequestFailed(job.key, kind, reason))
            elif isinstance(job, Call):
                outcomes += fail([job], reason)
        self._emit(outcomes)

    def names_of_running(self) -> str:
        """The requests in the engine, for a log line. Any thread may call it while the engine stands still."""
        all_running = list(self._running.values())
        names = [name_of(running.work) for running in all_running[:_MOST_NAMED]]
        more = len(all_running) - len(names)
        return ",".join([*names, *([f"and {more} more"] if more else [])]) or "none"

    def _extend_progress(self, until_s: float) -> None:
        self.progress = Progress(busy=True, at_s=until_s)

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
        # Only this thread takes jobs out, so a queue that is not empty stays so. What is left waits for one step.
        ends_s = self._clock() + _MOST_TAKING_S
        while not self.jobs.empty() and self._clock() < ends_s:
            outcomes += self._do(self.jobs.get_nowait())

    def _do(self, job: Job) -> Sequence[Outcome]:
        match job:
            case Work():
                return self._start(job)
            case Cancel(key):
                return self._cancel(key)
            case NextSegment():
                return self._go_on(job)
            case PieceArrived() | WindowUpdate() | Fetched():
                return self._of_pieces(self._update_flow(job))
            case Pause() | HoldBack():
                return self._of_pieces(self._set_behind(job))
            case Call():
                return self._controls.accept_call(job)
            case ReleasePayload(owner):
                self._payloads.release(owner)
            case ReleaseHub(hub_id):
                self._payloads.release_hub(hub_id)
            case Wake():
                pass
        return ()

    def _update_flow(self, job: PieceArrived | WindowUpdate | Fetched) -> Sequence[Outcome]:
        if isinstance(job, Fetched):
            return self._fetches.finish(job)
        return self._pieces.accept_piece(job) if isinstance(job, PieceArrived) else self._pieces.update_window(job)

    def _set_behind(self, job: Pause | HoldBack) -> Sequence[Outcome]:
        if job.key not in self._running:
            return ()
        if isinstance(job, Pause):
            return self._pauses.set_behind(job.key, Behind.CLIENT, is_behind=job.paused)
        return self._pauses.set_behind(job.key, Behind.HUB, is_behind=job.held)

    def _cancel(self, key: str) -> Sequence[Outcome]:
        running = self._running.get(key)
        if running is not None:
            running.is_cancelled = True
        self._pauses.request_ended(key)
        self._engine.abort(key)
        is_elsewhere = running is not None and (running.is_idle or running.is_fetching)
        if is_elsewhere or self._pieces.has_left_engine(key):
            return self._finish(EngineOutput(key, finish_reason="abort"))
        return self._controls.cancel_call(key)

    def _start(self, work: Work) -> Sequence[Outcome]:
        now_s = self._clock()
        refusal = refusal_of(work, self._capabilities, now_s)
        if refusal is not None:
            return [refusal]
        try:
            is_due = self._pieces.expect_pieces(work)
        except PayloadError as error:
            return [failed(work.key, error)]
        if is_due:
            return self._add(work, {})
        self._run(work, now_s)
        return ()

    def _go_on(self, job: NextSegment) -> Sequence[Outcome]:
        """Begin the next segment of a request that waits for one. Unknown requests are ignored."""
        running = self._running.get(job.key)
        if running is None or not running.is_idle or running.segmented is None:
            return ()
        if job.is_last:
            self._forget(job.key)
            self._engine.abort(job.key)
            return [running.segmented.finish(job.key)]
        self._payloads.release_before(running.work.owner, job.kept_from)
        work = msgspec.structs.replace(
            running.work,
            inputs=job.inputs,
            payloads=job.payloads,
            segment=job.segment,
            accepted_at_s=self._clock(),
            resume=None,
        )
        running.segmented.is_idle = False
        return self._add(work, {})

    def _add(self, work: Work, whole: Mapping[int, Mapping[str, Any]]) -> Sequence[Outcome]:
        """Give the engine work, as soon as its hand-offs are here.

        ``whole`` holds hand-offs that came in pieces, for an engine without ``feed``.
        """
        now_s = self._clock()
        if self._payloads.is_at_hand(work.payloads):
            return self._give(work, whole, self._payloads.fetch_at_hand(work.payloads), now_s)
        self._run(work, now_s)
        self._running[work.key].is_fetching = True
        self._pieces.hold_pieces(work.key)
        self._fetches.fetch(
            work.key, work.payloads, work.deadline_s, lambda result: self._give(work, whole, result, now_s)
        )
        return ()

    def _give(
        self, work: Work, whole: Mapping[int, Mapping[str, Any]], fetched: HandOffs | Exception, began_s: float
    ) -> Sequence[Outcome]:
        """Give the engine work with its hand-offs, which were fetched from ``began_s`` on."""
        try:
            if isinstance(fetched, Exception):
                raise fetched
            added_at_s = self._clock()
            give = self._give_next_segment if work.segment else self._engine.add
            give(request_of(work, self._defaults, whole, fetched))
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            # The engine is not in a step, so the other requests in it are unharmed.
            if failure_kind(error) is FailureKind.ENGINE:
                logger.exception("engine.add_failed request=%s", name_of(work))
            self._forget(work.key)
            if work.segment:
                self._engine.abort(work.key)
            return [failed(work.key, error)]
        self._run(work, added_at_s, transfer_s=added_at_s - began_s)
        outcomes = [*self._pauses.request_started(work.key), *self._pieces.release_pieces(work.key)]
        return self._of_pieces(outcomes)

    def _run(self, work: Work, added_at_s: float, transfer_s: float = 0.0) -> None:
        earlier = self._running.get(work.key)
        segmented = (None if work.segment is None else SegmentedRequest()) if earlier is None else earlier.segmented
        self._running[work.key] = Running(work, added_at_s, transfer_s, segmented=segmented)
        self._next_deadline_s = min(self._next_deadline_s, work.deadline_s)

    def _forget(self, key: str) -> Running | None:
        self._fetches.forget_request(key)
        self._pieces.forget_request(key)
        self._pauses.forget_request(key)
        return self._running.pop(key, None)

    def _of_pieces(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        for outcome in outcomes:
            if isinstance(outcome, RequestFailed):
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
            outcomes.append(RequestFailed(key, FailureKind.DEADLINE, "the deadline passed while the request ran"))
        self._next_deadline_s = min((each.work.deadline_s for each in self._running.values()), default=float("inf"))

    def _outcomes_of(self, output: EngineOutput) -> Sequence[Outcome]:
        key: Any = output.key
        running = self._running.get(key) if isinstance(key, str) else None
        if running is None:
            # An aborted request still puts out its end; its outcome was emitted already.
            self.counters["stray_outputs"] += output.finish_reason != "abort"
            return ()
        flaw = "the engine said more of it behind its end" if running.has_ended else flaw_of(output)
        if flaw:
            return self._reject(output.key, flaw)
        self.meter.count_output(running, output)
        outcomes: list[Outcome] = [*pieces_of(output, self._engine.modality)]
        if outcomes and running.first_output_at_s is None:
            running.first_output_at_s = self._clock()
        if output.handoff_piece is not None and not running.is_cancelled:
            outcomes += self._of_pieces(self._pieces.send_piece(running.work, output.handoff_piece))
        if output.finished:
            running.has_ended = True
            self._pauses.request_ended(output.key)
            outcomes += () if self._pieces.delay_end(output) else self._finish(output)
        return outcomes

    def _reject(self, key: str, flaw: str) -> Sequence[Outcome]:
        """Fail the request of an invalid output, and no other."""
        self.counters["bad_outputs"] += 1
        logger.error("engine.bad_output key=%s %s", key, flaw)
        self._forget(key)
        self._engine.abort(key)
        return [RequestFailed(key, FailureKind.ENGINE, flaw)]

    def _finish(self, output: EngineOutput) -> Sequence[Outcome]:
        running = self._running.get(output.key)
        if running is None:
            self._pieces.forget_request(output.key)
            return ()
        self.meter.count_end(running, output)
        end = end_of(running, output, self._hand_over, self._clock)
        self._pieces.forget_request(output.key)
        if running.segmented is not None:
            if isinstance(end, Finished) and not running.is_cancelled:
                return [running.segmented.end_segment(end)]
            self._engine.abort(output.key)
        self._forget(output.key)
        return [end]

    def _hand_over(self, work: Work, output: EngineOutput) -> tuple[PayloadRef, ...]:
        return self._payloads.hand_over(work, output.handoff, self._pieces.takers_of_rest(work))
