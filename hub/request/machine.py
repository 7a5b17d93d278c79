"""RequestMachine: the state machine of one request, whole: every event, every change of a phase, every action. Pure.

The driver (hub/orchestrator/requests.py) passes events in and carries the returned actions out. The data lies in
``RequestState``; what a loss leads to is decided in ``retry.py``; pieces, segments, companions and backpressure have
helpers of their own, which never write a phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import UNSET
from msgspec.structs import replace

from hub.request import events as ev
from hub.request.backpressure import pause_or_resume, update_backpressure
from hub.request.companions import of_companion
from hub.request.events import Action, Event, Outcome, StageEvent, StageMessage
from hub.request.kept_references import MOST_OF_ATTEMPT_BYTES, memory_of
from hub.request.outputs import OmniOutput, chunk_outputs, end_output, segment_output, summary_output, text_output
from hub.request.pieces import (
    acknowledge_pieces,
    add_pieces,
    consumers_of_pieces,
    end_pieces,
    flow,
    overfull_stage,
    producer_at_fault,
    repeat_pieces,
    stage_in_doubt,
)
from hub.request.retry import (
    Decision,
    Verdict,
    decide,
    error_of,
    is_engine_death,
    may_not_resume,
    unavailable_error,
)
from hub.request.segments import Segments, Step
from hub.request.state import Phase, RequestState, StageRun
from hub.request.story import Story
from omni_discovery import wire
from omni_discovery.errors import (
    DeadlineExceededError,
    EngineFailedError,
    InvalidRequestError,
    PoisonousRequestError,
    ReplicaLostError,
    RequestError,
)

#: How many replicas the error of a request names at most.
_MOST_NAMED: Final = 32


class RequestMachine:
    """One request. ``handle`` takes an event and ``handle_message`` a replica's answer.

    Both return what the driver must do, in order; the last action of every request is one Finish.
    """

    def __init__(self, state: RequestState) -> None:
        self.state = state
        #: The stages of the request, by id.
        self.runs: Mapping[int, StageRun] = state.runs
        #: What happened to the request lately.
        self.story = Story()
        self._plan = state.plan

    def __repr__(self) -> str:
        finished = ", finished" if self.finished else ""
        return f"RequestMachine({self.state.request_id}{finished}, {list(self.runs.values())})"

    # ---- what the driver may ask

    @property
    def finished(self) -> bool:
        """Whether Finish was returned."""
        return self.state.finished

    @property
    def is_done(self) -> bool:
        """Whether no stage has anything left to do; a companion is kept after that, until its parent ends."""
        return all(run.settled for run in self.runs.values())

    @property
    def segments(self) -> Segments | None:
        """The input of a request that comes in segments; None for any other."""
        return self.state.segments

    @property
    def is_client_behind(self) -> bool:
        """Whether so much output waits for the client that the replicas are to make no more."""
        return self.state.is_client_behind

    def is_out(self, stage_id: int, attempt: int) -> bool:
        """Whether that attempt of the stage is the present one and still runs: answers to any other are stale."""
        run = self.runs.get(stage_id)
        return run is not None and not self.finished and run.running and run.attempt == attempt

    def can_move(self, stage_id: int) -> bool:
        """Whether the stage's work, if lost now, is sure to be done again by another replica unnoticed."""
        match self._decision_on(self.runs[stage_id], None).verdict:
            case Verdict.CONTINUE:
                return not may_not_resume(self.state.params.get(stage_id, {}))
            case verdict:
                return verdict is Verdict.AGAIN

    def has_past(self, stage_id: int) -> bool:
        """Whether the stage was given more than one segment: no other replica can continue it."""
        return self.state.segments is not None and not self.state.segments.is_first(stage_id)

    def must_repeat(self, stage_id: int) -> bool:
        """Whether messages to the stage's replica other than its Submit must be repeated after a lost session."""
        was_paused = self.runs[stage_id].pause_sent is not None
        return was_paused or self.has_past(stage_id) or any(stage_id in edge for edge in self._plan.windows)

    def set_params(self, params: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the sampling parameters; stages that were dispatched already keep theirs."""
        self.state.set_params(params)

    # ---- events

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event; ``now_s`` is monotonic. After Finish, and for attempts that are over, nothing happens."""
        if self.finished:
            return []
        actions = self._handle(event, now_s)
        self.story.add(now_s, getattr(event, "stage_id", None), event, actions)
        return actions

    def _handle(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case ev.Submitted():
                return self._start(now_s)
            case ev.DeadlinePassed():
                return self._finish(Outcome.FAILED, DeadlineExceededError(self.state.progress), now_s)
            case ev.Cancelled(error=error):
                return self._finish(Outcome.FAILED if error else Outcome.CANCELLED, error, now_s)
            case ev.SegmentArrived(inputs=inputs):
                return self._add_segment(inputs, now_s)
            case ev.ClientBackpressure():
                return [*update_backpressure(self.state, event)]
            case ev.CompanionDone():
                return self._collect_companion(event, now_s)
            case ev.CompanionFailed(role=role, error=error):
                return self._finish(Outcome.FAILED, of_companion(role, error), now_s)
            case _:
                if self.is_out(event.stage_id, event.attempt):
                    return self._of_stage(self.runs[event.stage_id], event, now_s)
                return []

    def handle_message(
        self,
        stage_id: int,
        message: StageMessage,
        now_s: float,
        attachments: Sequence[bytes] = (),
        received_at_s: float = 0.0,
    ) -> list[Action]:
        """Apply an answer of the stage's replica, as it came off the wire; stale ones change nothing.

        ``attachments`` are the images or sounds of a Chunk. ``received_at_s`` is when its frame was received, on
        ``time.perf_counter``; it is only passed on to the client.
        """
        run = self.runs.get(stage_id)
        if run is None or run.attempt != message.attempt or not run.running or self.state.finished:
            is_stale = isinstance(message, wire.Chunk | wire.StageDone | wire.StageFailed) and not self.state.finished
            return [ev.Drop("stale")] if is_stale else []
        actions = self._handle_message(run, message, now_s, attachments, received_at_s)
        if run.blamed_for and self._shows_innocence(run, message):
            run.blamed_for.clear()
            actions = [ev.Acquit(stage_id), *actions]
        self.story.add_message(now_s, stage_id, message, actions)
        return actions

    def take_piece(
        self, stage_id: int, piece: wire.Chunk, now_s: float, received_at_s: float = 0.0
    ) -> OmniOutput | None:
        """Apply a piece that ``is_plain_text`` and return it for the client, if nothing else follows from it.

        The usual case of ``handle_message``, with the same effect: the next piece, not the first, of an attempt that is
        out, where nothing is compared, skipped, counted in segments or held against a replica. None, and nothing is
        changed, in any other case: ``handle_message`` decides.
        """
        run, state = self.runs.get(stage_id), self.state
        if (
            run is None
            or run.phase is not Phase.ACCEPTED
            or run.replica is None
            or run.attempt != piece.attempt
            or run.next_seq != piece.seq
            or not piece.seq
            or piece.seq < run.skip
            or run.replay is not None
            or run.partial_images
            or run.blamed_for
            or stage_id not in self._plan.finals
            or state.segments is not None
            or state.finished
        ):
            return None
        run.output_at_s = now_s
        run.next_seq += 1
        run.show(piece, ())
        return text_output(state.shown_id, stage_id, run.replica_name, piece, received_at_s)

    def _handle_message(
        self,
        run: StageRun,
        message: StageMessage,
        now_s: float,
        attachments: Sequence[bytes],
        received_at_s: float,
    ) -> list[Action]:
        match message:
            case wire.Chunk():
                return self._chunk(run, message, now_s, attachments, received_at_s)
            case wire.Accepted():
                self._accept(run, now_s)
                return []
            case wire.HandOffPiece():
                return self._piece(run, message, now_s)
            case wire.PieceTaken():
                self._accept(run, now_s)
                return acknowledge_pieces(self.state, run, message)
            case wire.StageDone():
                return self._done(run, message, now_s, received_at_s)
            case wire.SegmentDone():
                return self._segment_done(run, message, now_s, received_at_s)
            case wire.Rejected() | wire.StageFailed():
                return self._failed(run, message, now_s)

    def _of_stage(self, run: StageRun, event: StageEvent, now_s: float) -> list[Action]:
        match event:
            case ev.Sent(replica=replica, deterministic=deterministic):
                return self._sent(run, replica, now_s, deterministic=deterministic)
            case ev.SessionBack():
                repeated = self._repeat_segment(run) + repeat_pieces(self.state, run)
                return [*repeated, *pause_or_resume(self.state, run, again=True)]
            case ev.ReplicaLost():
                if event.may_have_run and event.has_ended:
                    run.replica_died()
                return self._lost(run, event, now_s)
            case ev.FoundInnocent():
                run.acquit()
                return []
            case ev.TriedTogether():
                run.had_company = True
                return []
            case ev.StageUnavailable(reason=reason):
                return self._finish(Outcome.FAILED, unavailable_error(run.stage_id, reason, run.failure), now_s)
            case ev.DispatchRefused(reason=reason):
                return self._finish(Outcome.FAILED, self._unsendable(run, reason), now_s)

    # ---- begin and end of the request

    def _start(self, now_s: float) -> list[Action]:
        if self.state.started_at_s is not None:
            return []
        self.state.started_at_s = now_s
        return self._begin(now_s)

    def _begin(self, now_s: float, *, is_retry: bool = False) -> list[Action]:
        """Dispatch the stages that take the client's input."""
        if self.state.segments is not None:
            return self._next_segments(now_s, is_retry=is_retry)
        roots = [run for run in self.runs.values() if not self._plan.inputs[run.stage_id]]
        return [self._dispatch(run, now_s, is_retry=is_retry) for run in roots]

    def _restart(self, now_s: float) -> list[Action]:
        """Stop every stage and begin the whole request again."""
        actions = self._stop_all()
        for run in self.runs.values():
            _back_to_waiting(run)
            run.reset()
        if self.state.companions.prompts:
            actions.append(ev.StopCompanions())
            self.state.companions.reset()
        if self.state.segments is not None:
            self.state.segments.restart()
        return actions + self._begin(now_s, is_retry=True)

    def _finish(self, outcome: Outcome, error: RequestError | None, now_s: float) -> list[Action]:
        """End the request, and its companions with it."""
        state = self.state
        state.finished = True
        if state.started_at_s is not None:
            state.public.pipeline_timings["total"] = now_s - state.started_at_s
        actions = self._stop_all()
        if state.companions.started:
            actions.append(ev.StopCompanions())
        if error is None and not state.is_companion:
            reason = "done" if outcome is Outcome.OK else "abort"
            timings_s, replicas = state.public.pipeline_timings, state.replicas
            actions.append(ev.Emit(summary_output(state.shown_id, reason, timings_s, replicas)))
        if error is not None:
            error.replicas = tuple(state.tried)[-_MOST_NAMED:]
        return [*actions, ev.Finish(outcome, error)]

    def _stop_all(self) -> list[Action]:
        return [action for run in self.runs.values() for action in run.stop()]

    # ---- dispatch

    def _dispatch(self, run: StageRun, now_s: float, *, is_retry: bool = False) -> ev.Dispatch:
        """Begin the next attempt of a stage."""
        run.to(Phase.DISPATCHED)
        resume = run.begin_attempt(now_s)
        return ev.Dispatch(
            stage_id=run.stage_id,
            attempt=run.attempt,
            inputs=self.state.inputs_of(run.stage_id),
            params=self.state.params.get(run.stage_id, {}),
            payloads=self.state.payloads_of(run),
            next_stages=self._plan.next_stages[run.stage_id],
            avoid=frozenset(run.avoid),
            slow=frozenset(run.slow),
            resume=resume,
            priority=self.state.priority,
            is_retry=is_retry,
            stream_from=tuple(run.streams),
            stream_to=self._plan.pieces_to(run.stage_id),
            segmented=self.state.segments is not None,
            blamed_for=tuple(run.blamed_for),
            seed=self.state.seed,
            has_had_seed=run.stage_id in self.state.seeded,
        )

    def _dispatch_if_ready(self, run: StageRun, now_s: float) -> list[Action]:
        """Dispatch a stage that waits, if each input is there or has begun to come in pieces."""
        if run.phase is not Phase.WAITING or not self.state.has_all_inputs(run):
            return []
        return [self._dispatch(run, now_s)]

    def _sent(self, run: StageRun, replica: ev.ReplicaRef, now_s: float, *, deterministic: bool) -> list[Action]:
        hands_over, is_whole = bool(self._plan.next_stages[run.stage_id]), self.state.segments is None
        run.sent(replica, now_s, hands_over=hands_over, deterministic=deterministic and is_whole)
        if (deterministic and is_whole) or run.stage_id in self.state.seeded:
            self.state.note_seed(run.stage_id)
        self.state.tried[str(replica)] = None
        self.state.public.stage_submit_ts[run.stage_id] = now_s
        self.state.note(run, "queue", now_s - run.dispatched_at_s)
        return [*self._start_companions(run), *flow(self.state, run), *pause_or_resume(self.state, run)]

    def _accept(self, run: StageRun, now_s: float) -> None:
        # Accepted and the output travel on different sockets: either may be first.
        if run.phase is Phase.DISPATCHED:
            run.to(Phase.ACCEPTED)
            self.state.note(run, "submit", now_s - run.sent_at_s)

    # ---- output

    def _chunk(
        self, run: StageRun, message: wire.Chunk, now_s: float, attachments: Sequence[bytes], received_at_s: float
    ) -> list[Action]:
        self._accept(run, now_s)
        if message.seq < run.next_seq:
            return [ev.Drop("duplicate")]
        if message.seq > run.next_seq:
            return self._gap(run, message.seq, now_s)
        if message.seq == 0 and not run.seen:
            self.state.note(run, "first_output", now_s - run.began_at_s)
        number, run.output_at_s = run.chunks, now_s
        run.next_seq += 1
        is_final, is_first = run.stage_id in self._plan.finals, message.seq == 0 and not self.state.request_shown
        if message.partial_image is not UNSET:
            run.partial_images += 1
            is_shown = is_final and run.show_partial_image(message.partial_image)
            return self._emit(run, message, attachments, received_at_s, is_first=is_first) if is_shown else []
        if not is_final or number < run.skip:
            return []
        if run.replay is not None:
            # To it, unfinished pictures are none of the output.
            message = replace(message, seq=number)
            rest = run.replay.rest_of(message, attachments)
            if rest.difference:
                return self._fail_differing(run, rest.difference, now_s)
            if rest.is_empty:
                return []
            message, attachments = rest.message, rest.attachments
        run.show(message, attachments)
        return self._emit(run, message, attachments, received_at_s, is_first=is_first)

    def _emit(
        self,
        run: StageRun,
        message: wire.Chunk,
        attachments: Sequence[bytes],
        received_at_s: float,
        *,
        is_first: bool,
    ) -> list[Action]:
        """Show a chunk; ``is_first``: of the request."""
        replica, shown_id = str(run.replica), self.state.shown_id
        outputs = chunk_outputs(shown_id, run.stage_id, replica, message, attachments, received_at_s)
        segments = self.state.segments
        if segments is not None:
            outputs = [replace(output, segment=segments.segment_of(run.stage_id)) for output in outputs]
        if is_first:
            outputs[0] = replace(outputs[0], replicas=self.state.replicas)
        return [ev.Emit(output) for output in outputs]

    def _done(self, run: StageRun, message: wire.StageDone, now_s: float, received_at_s: float) -> list[Action]:
        self._accept(run, now_s)
        segments = self.state.segments
        if message.finish_reason == "abort":
            # This hub sent no Abort for it: the replica gave the work up.
            return self._lost_at(run, "the replica stopped the work", now_s)
        if message.seq != run.next_seq or message.pieces != run.next_piece:
            return self._gap(run, message.seq, now_s)
        if run.chunks < run.skip:
            return self._lost_at(run, "it made less than had been shown before", now_s)
        if run.replay is not None and (shortage := run.replay.shortage):
            return self._fail_differing(run, shortage, now_s)
        if segments is not None and not segments.is_ending(run.stage_id):
            return self._lost_at(run, "it ended before the last segment", now_s)
        run.to(Phase.DONE)
        run.reference_bytes += memory_of(message.payloads)
        if not (message.payloads or run.next_piece or run.attempt) and segments is None:
            run.holders.clear()
        self.state.note_end(run, message.timings_s, now_s)
        actions: list[Action] = []
        modality = self._plan.finals.get(run.stage_id)
        # It may have ended before, and have run again for the sake of a hand-off that was lost.
        if modality is not None and not run.seen.ended:
            run.seen.ended = True
            self.state.public.finished_final_output_stage_ids.add(run.stage_id)
            replica, shown_id = str(run.replica), self.state.shown_id
            end = end_output(shown_id, run.stage_id, replica, modality, message, received_at_s)
            if segments is not None:
                end = replace(end, segment=segments.segment_of(run.stage_id))
            actions.append(ev.Emit(end))
        return actions + self._hand_over(run, message, now_s)

    # ---- hand-off

    def _hand_over(self, run: StageRun, message: wire.StageDone, now_s: float) -> list[Action]:
        """Pass a finished stage's hand-off on; the request ends with its last stage."""
        if self.state.is_companion:
            return [ev.Collected(message.payloads)]
        actions: list[Action] = []
        if self.state.segments is not None:
            self.state.segments.ended(run.stage_id)
            actions += self._next_segments(now_s)
        else:
            for stage_id in self._plan.next_stages[run.stage_id]:
                actions += self._hand_over_to(self.runs[stage_id], run, message, now_s)
        if self.is_done:
            actions += self._finish(Outcome.OK, None, now_s)
        return actions

    def _hand_over_to(self, target: StageRun, run: StageRun, message: wire.StageDone, now_s: float) -> list[Action]:
        refs = tuple(ref for ref in message.payloads if ref.to_stage == target.stage_id)
        end_of_pieces = end_pieces(self.state, run, target.stage_id)
        if end_of_pieces is not None:
            return end_of_pieces
        if not refs:
            self._skip(target)
        elif target.phase is Phase.WAITING:
            target.handed[run.stage_id] = refs
            self.state.public.note_prefill(refs)
            return self._dispatch_if_ready(target, now_s)
        return []

    def _skip(self, run: StageRun) -> None:
        if run.phase is Phase.WAITING:
            run.to(Phase.SKIPPED)
            for stage_id in self._plan.next_stages[run.stage_id]:
                self._skip(self.runs[stage_id])

    def _piece(self, run: StageRun, message: wire.HandOffPiece, now_s: float) -> list[Action]:
        """A producer has made its next piece: pass it on, and begin the stages that waited for it."""
        self._accept(run, now_s)
        if message.number < run.next_piece:
            return [ev.Drop("duplicate")]
        if message.number > run.next_piece:
            return self._gap(run, message.number, now_s)
        overfull = overfull_stage(self.state, run, message)
        if overfull is not None:
            reason = f"it made piece {message.number} before stage {overfull} had taken enough of those before"
            return [ev.Drop("window"), *self._lost_at(run, reason, now_s)]
        run.reference_bytes += memory_of(message.payloads)
        if run.reference_bytes > MOST_OF_ATTEMPT_BYTES:
            reason = f"the references of its pieces take more than {MOST_OF_ATTEMPT_BYTES >> 20} MiB"
            return [ev.Drop("reference_memory"), *self._lost_at(run, reason, now_s)]
        run.output_at_s = now_s
        actions: list[Action] = []
        for consumer in add_pieces(self.state, run, message):
            actions += self._dispatch_if_ready(consumer, now_s)
            actions += flow(self.state, consumer)
        return actions

    def _withdraw_pieces(self, run: StageRun) -> list[Action]:
        """The producer's attempt is over: stop every stage that works on its pieces, and those behind these."""
        actions: list[Action] = []
        for consumer in consumers_of_pieces(self.state, run):
            del consumer.streams[run.stage_id]
            if consumer.settled:
                continue
            if consumer.running:
                actions.append(ev.Abort(consumer.stage_id, consumer.attempt, consumer.replica))
                # Or two losses of the producer would leave it none of its own.
                consumer.excused += 1
            _back_to_waiting(consumer)
            consumer.replica, consumer.reference_bytes = None, 0
            # Of other pieces it may well make something else than was shown.
            consumer.deterministic = consumer.deterministic and (run.deterministic or not consumer.seen)
            actions += self._withdraw_pieces(consumer) + flow(self.state, consumer)
        return actions

    def producer_of(self, stage_id: int, message: wire.StageFailed) -> StageRun | None:
        """The run of the stage whose hand-off a stage can't read, if its replica says which; else None."""
        is_named = message.kind is wire.FailureKind.PAYLOAD and message.from_stage in self._plan.inputs[stage_id]
        return self.runs[message.from_stage] if is_named and message.from_stage is not UNSET else None

    # ---- losses

    def _fail_differing(self, run: StageRun, difference: str, now_s: float) -> list[Action]:
        """What was shown came out otherwise when it was made again: the rest would not fit, so the request ends."""
        text = f"stage {run.stage_id} replica {run.replica}: it did a lost replica's work again, and {difference}"
        lost = f"; that was needed because of this: {run.failure}" if run.failure is not None else ""
        advice = f"if this goes on, stage {run.stage_id} or one before it is not deterministic as it is declared"
        error = ReplicaLostError(f"{text}; ask again; {advice}{lost}")
        run.failure, run.failed_attempt, run.failed_replica = error, run.attempt, run.replica
        return self._finish(Outcome.FAILED, error, now_s)

    def _unsendable(self, run: StageRun, reason: str) -> RequestError:
        """The error of a dispatch that no message can hold: the client's, unless the answer so far is a part of it."""
        if not run.is_continued:
            return InvalidRequestError(reason)
        text = f"stage {run.stage_id}: with the answer so far, the request fits into no message to another replica"
        lost = f"; that was needed because of this: {run.failure}" if run.failure is not None else ""
        run.failure = ReplicaLostError(f"{text}: {reason}{lost}")
        return run.failure

    def _gap(self, run: StageRun, seq: int, now_s: float) -> list[Action]:
        """A part of the output is missing."""
        reason = f"piece {run.next_seq} of the output never came, piece {seq} did"
        return [ev.Drop("gap"), *self._lost_at(run, reason, now_s)]

    def _lost_at(self, run: StageRun, reason: str, now_s: float) -> list[Action]:
        """The attempt is lost, and its replica is at fault."""
        avoid = run.replica.input_addr if run.replica is not None else ""
        return self._lost(run, ev.ReplicaLost(run.stage_id, run.attempt, reason, avoid_addr=avoid), now_s)

    def _lost(self, run: StageRun, event: ev.ReplicaLost, now_s: float) -> list[Action]:
        """The attempt will not be answered any more."""
        if event.avoid_addr:
            (run.slow if event.is_slow else run.avoid).add(event.avoid_addr)
        stop: list[Action] = [ev.Abort(run.stage_id, run.attempt, run.replica)] if event.may_have_run else []
        return stop + self._decide(run, None, event.reason, now_s, may_have_run=event.may_have_run)

    def _failed(self, run: StageRun, message: wire.Rejected | wire.StageFailed, now_s: float) -> list[Action]:
        kind, reason = message.kind, message.reason
        if isinstance(message, wire.StageFailed):
            if is_engine_death(kind, reason):
                self._accept(run, now_s)
                run.replica_died()
            run.refusal_status = 400 if message.status is UNSET else message.status
            producer = self.producer_of(run.stage_id, message)
            if producer is not None and producer.replica is not None:
                producer.slow.add(producer.replica.input_addr)
            return self._refused(run, kind, reason, now_s, may_have_run=True)
        if self.has_past(run.stage_id):
            return self._lost_at(run, reason, now_s)
        return self._refused(run, kind, reason, now_s, may_have_run=False)

    def _refused(
        self, run: StageRun, kind: wire.FailureKind, reason: str, now_s: float, *, may_have_run: bool
    ) -> list[Action]:
        """The replica will not, or could not, do the work."""
        producer = producer_at_fault(self.state, run) if kind is wire.FailureKind.PAYLOAD else None
        if producer is not None:
            run.to(Phase.WAITING)
            return self._lost_at(producer, f"stage {run.stage_id} can't have its pieces: {reason}", now_s)
        if run.replica is not None and kind is not wire.FailureKind.PAYLOAD:
            run.avoid.add(run.replica.input_addr)
        if kind is wire.FailureKind.NOT_RESUMABLE and run.failure is not None:
            reason = f"{reason}; that was needed because of this: {run.failure}"
        return self._decide(run, kind, reason, now_s, may_have_run=may_have_run)

    def _decision_on(self, run: StageRun, kind: wire.FailureKind | None) -> Decision:
        """The retry rule's decision if the stage's attempt fails now; ``kind`` None: it will not be answered."""
        loss = run.loss(
            kind,
            self.state.attempts,
            request_shown=self.state.request_shown,
            all_deterministic=self.state.all_deterministic,
            in_doubt=stage_in_doubt(self.state, run),
        )
        segments = self.state.segments
        return decide(loss) if segments is None else segments.decide(run.stage_id, loss)

    def _decide(
        self, run: StageRun, kind: wire.FailureKind | None, reason: str, now_s: float, *, may_have_run: bool
    ) -> list[Action]:
        """Repeat or continue the stage's work, restart the request, or fail it."""
        decision = self._decision_on(run, kind)
        text = f"stage {run.stage_id} replica {run.replica or 'not picked'}: {reason}"
        text += f"; {decision.why}" if decision.why else ""
        error: RequestError
        if decision.is_poison:
            error = PoisonousRequestError(f"{text} (lost with it: {ev.lives_text(run.blamed_for)})")
        elif kind is None or is_engine_death(kind, reason):
            # The engine died with work that is not known to be the cause: for its client the replica is lost.
            error = ReplicaLostError(text)
        else:
            error = error_of(kind, run.stage_id, text, run.refusal_status)
        run.failure, run.failed_attempt, run.failed_replica = error, run.attempt, run.replica
        # The failed attempt needs no Abort any more; a finish or a restart below must not send a second one.
        run.to(Phase.WAITING)
        match decision.verdict:
            case Verdict.AGAIN | Verdict.CONTINUE:
                again = ev.Retry(run.stage_id, resumed=decision.verdict is Verdict.CONTINUE)
                return [*self._withdraw_pieces(run), again, self._dispatch(run, now_s, is_retry=may_have_run)]
            case Verdict.RESTART:
                return [ev.Retry(run.stage_id), *self._restart(now_s)]
            case Verdict.FAIL:
                blamed_for = tuple(run.blamed_for)
                convict = [ev.Convict(run.stage_id, blamed_for)] if decision.is_poison else []
                return [*convict, *self._finish(Outcome.FAILED, error, now_s)]

    def _shows_innocence(self, run: StageRun, message: StageMessage) -> bool:
        """Whether a message is output of the present attempt: the work gets further than where a replica ended."""
        is_output = isinstance(message, wire.Chunk | wire.HandOffPiece | wire.SegmentDone | wire.StageDone)
        is_at_work = run.phase in (Phase.ACCEPTED, Phase.DONE)
        return is_output and is_at_work and run.attempt == message.attempt

    # ---- input in segments

    def _add_segment(self, inputs: Mapping[str, Any] | None, now_s: float) -> list[Action]:
        """The client has sent its next segment; None: no more come. Segments after that are dropped."""
        segments = self.state.segments
        if segments is None or segments.is_complete:
            return []
        segments.add(inputs)
        return self._next_segments(now_s)

    def _next_segments(self, now_s: float, *, is_retry: bool = False) -> list[Action]:
        """Give each stage the next segment that it can take now."""
        segments = self.state.segments
        if segments is None:
            return []
        actions: list[Action] = []
        for step in segments.steps():
            run = self.runs[step.stage_id]
            if not self._plan.inputs[run.stage_id]:
                self.state.public.streaming.segment_finished = step.item.is_end
            if step.number:
                actions.append(_update(run, step))
            else:
                run.handed = dict(step.item.handed)
                actions.append(self._dispatch(run, now_s, is_retry=is_retry))
        for run in self.runs.values():
            if run.phase is Phase.WAITING and segments.is_over(run.stage_id):
                run.to(Phase.SKIPPED)
        return actions

    def _segment_done(
        self, run: StageRun, message: wire.SegmentDone, now_s: float, received_at_s: float
    ) -> list[Action]:
        """A stage has ended a segment: show its end, and hand it on."""
        self._accept(run, now_s)
        segments = self.state.segments
        if message.seq < run.next_seq:
            return [ev.Drop("duplicate")]
        if message.seq > run.next_seq:
            return self._gap(run, message.seq, now_s)
        if segments is None or segments.is_ending(run.stage_id) or segments.is_idle(run.stage_id):
            return self._lost_at(run, "it ended a segment that it had not been given", now_s)
        if run.chunks < run.skip:
            return self._lost_at(run, "it made less than had been shown before", now_s)
        run.next_seq, run.skip = run.next_seq + 1, 0
        segment = segments.segment_of(run.stage_id)
        segments.ended(run.stage_id, message.payloads)
        # Few segments wait for a stage, and references of those that it has taken are not kept.
        run.reference_bytes = memory_of(message.payloads)
        self.state.note_segment(run, message)
        actions: list[Action] = []
        modality = self._plan.finals.get(run.stage_id)
        if modality is not None:
            run.seen.end_segment()
            replica, shown_id = str(run.replica), self.state.shown_id
            end = segment_output(shown_id, run.stage_id, replica, modality, segment, message, received_at_s)
            actions.append(ev.Emit(end))
        if self.state.request_shown:
            segments.forget_past()
        return actions + self._next_segments(now_s)

    def _repeat_segment(self, run: StageRun) -> list[Action]:
        """The session of the stage's replica is back: repeat the last Update, which may be lost."""
        segments = self.state.segments
        if segments is None or segments.is_first(run.stage_id):
            return []
        return [_update(run, segments.last_step(run.stage_id))]

    # ---- companions

    def _start_companions(self, run: StageRun) -> list[Action]:
        companions = self.state.companions
        if not companions.prompts or companions.started or run.stage_id != companions.stage_id:
            return []
        # Only once the parent was sent: companions go to the parent's replica.
        companions.started = True
        return [ev.StartCompanions(companions.prompts)]

    def _collect_companion(self, event: ev.CompanionDone, now_s: float) -> list[Action]:
        companions = self.state.companions
        problem = companions.collect(event.role, event.payloads)
        if problem:
            return self._finish(Outcome.FAILED, EngineFailedError(problem), now_s)
        takers = [self.runs[stage_id] for stage_id in self._plan.next_stages[companions.stage_id]]
        return [action for run in takers if run.handed for action in self._dispatch_if_ready(run, now_s)]


def _back_to_waiting(run: StageRun) -> None:
    if run.phase is not Phase.WAITING:
        run.to(Phase.WAITING)


def _update(run: StageRun, step: Step) -> ev.Update:
    """The action that gives a stage a segment that is not its first."""
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
