"""The data of one request: its plan, its stages and what each has done so far. Pure.

``RequestState`` holds everything; ``StageRun`` is one stage of it. Phases are changed by ``StageRun.to`` alone, which
only ``machine.py`` calls, and which ``ALLOWED`` limits. The other modules of this folder read the state and never write
a phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Any, Final

from hub.request.companions import Companions
from hub.request.events import Abort, Action, ReleasePayload, ReplicaRef
from hub.request.outputs import first_timings, name_of, with_replica
from hub.request.plan import RequestPlan
from hub.request.replay import Mark, Replay, mark_of
from hub.request.retry import Loss, Shown, is_permanent, is_poison, is_suspicious
from hub.request.segments import Segments
from omni_discovery import wire
from omni_discovery.errors import RequestError
from omni_discovery.inputs.seeds import SEED_BITS, seed_of
from omni_discovery.wire import PayloadRef

#: How much of what the client has seen is kept for each stage, to continue or to compare it elsewhere: about 150 000
#: tokens with their text.
MOST_KEPT_BYTES: Final = 8 << 20
#: The estimated memory of a token's id in a list, and of a character.
_TOKEN_BYTES: Final = 36
_CHARACTER_BYTES: Final = 4
#: Pieces of text before they are joined into one, which takes less memory.
_MOST_TEXTS: Final = 1024


class PieceRelay:
    """The hand-off pieces of one producer stage on their way to one consumer stage, at most ``window`` unacknowledged.

    A relay belongs to one attempt of the producer. All its pieces are kept until that attempt ends, at the producer and
    by reference here, so that a new attempt of the consumer gets all of them, from the first.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._refs: list[PayloadRef] = []
        self._is_complete = False
        #: How many went to the present attempt of the consumer, and how many of these it has taken.
        self._fed = 0
        self._taken = 0
        self._end_fed = False
        #: The last count of taken pieces that went to the producer.
        self.room_sent = 0

    @property
    def is_full(self) -> bool:
        """Whether the producer has made all pieces that it may make before it hears that more were taken."""
        return len(self._refs) >= self.room_sent + self._window

    @property
    def refs(self) -> Sequence[PayloadRef]:
        """All pieces that the producer has made."""
        return self._refs

    def add(self, ref: PayloadRef) -> None:
        """The producer has made another piece."""
        self._refs.append(ref)

    def complete(self) -> None:
        """The producer makes no more pieces."""
        self._is_complete = True

    def reset_consumer(self) -> None:
        """Another attempt of the consumer begins: it has no piece yet."""
        self._fed = self._taken = 0
        self._end_fed = False

    def rewind(self) -> None:
        """Make the pieces due again that the consumer has not taken: a lost session may have lost them."""
        self._fed, self._end_fed = self._taken, False

    def due(self) -> list[tuple[int, PayloadRef | None]]:
        """Pop the pieces that fit the window, as (number, reference); the reference None is the end of the hand-off."""
        end = min(len(self._refs), self._taken + self._window)
        due: list[tuple[int, PayloadRef | None]] = list(enumerate(self._refs[self._fed : end], self._fed))
        self._fed = max(self._fed, end)
        if self._is_complete and self._fed == len(self._refs) and not self._end_fed:
            self._end_fed = True
            due.append((self._fed, None))
        return due

    def acknowledge(self, number: int) -> bool:
        """The consumer has all pieces up to and with ``number``; False if that piece was never sent to it."""
        if number >= self._fed:
            return False
        self._taken = max(self._taken, number + 1)
        return True

    def new_room(self, *, is_free: bool) -> int | None:
        """The count of taken pieces to send to the producer; None if it already knows that count.

        ``is_free``: the consumer needs no pieces now, so all of them count as taken and the producer is not held up.
        """
        count = len(self._refs) if is_free else self._taken
        if count <= self.room_sent:
            return None
        self.room_sent = count
        return count


@dataclass
class StreamingInputState:
    """Where a request stands whose input arrives in segments; names as users of vLLM-Omni know them."""

    enabled: bool = False
    segment_finished: bool = False
    new_prompt_len_snapshot: int | None = None
    bridge_states: dict[str, Any] = field(default_factory=dict)


@dataclass
class OrchestratorRequestState:
    """The public state of one request, for other parts of the hub; fields have vLLM-Omni's names.

    ``request_timestamp`` is wall-clock seconds; ``stage_submit_ts`` and ``pipeline_timings`` count on the monotonic
    clock. ``sampling_params_list`` has one entry for each stage of the request, in their order.
    """

    request_id: str
    prompt: Any = None
    sampling_params_list: list[Any] = field(default_factory=list)
    final_stage_id: int = -1
    final_output_stage_ids: set[int] = field(default_factory=set)
    finished_final_output_stage_ids: set[int] = field(default_factory=set)
    request_timestamp: float = 0.0
    stage_submit_ts: dict[int, float] = field(default_factory=dict)
    pipeline_timings: dict[str, float] = field(default_factory=dict)
    mm_features: list[Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    pd_prefill_multimodal_output: dict[str, Any] | None = None
    streaming: StreamingInputState = field(default_factory=StreamingInputState)

    def note_prefill(self, refs: Iterable[PayloadRef]) -> None:
        """Keep where a prefill stage left its KV cache, if the metadata of its hand-off names the place."""
        for ref in refs:
            if "kv_transfer_params" in ref.metadata:
                params = ref.metadata["kv_transfer_params"]
                self.pd_prefill_multimodal_output = {"stage_id": ref.from_stage, "kv_transfer_params": params}


class Phase(Enum):
    """Where one stage of one request stands."""

    #: Its inputs are not there yet, or its last attempt has failed.
    WAITING = auto()
    #: An attempt has begun: a replica is being picked, or has not answered the dispatch yet.
    DISPATCHED = auto()
    #: A replica works on it.
    ACCEPTED = auto()
    #: A replica has done it.
    DONE = auto()
    #: The stage before left nothing for it.
    SKIPPED = auto()

    # Members are compared by identity; an Enum's own hash is that of its name, and slow.
    __hash__ = object.__hash__


#: Every change of a stage's phase. A failed attempt passes through WAITING, also where the next one begins at once; an
#: output that comes before Accepted passes through ACCEPTED. A stage that is settled goes back only with the whole
#: request.
ALLOWED: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.WAITING: frozenset({Phase.DISPATCHED, Phase.SKIPPED}),
    Phase.DISPATCHED: frozenset({Phase.ACCEPTED, Phase.WAITING}),
    Phase.ACCEPTED: frozenset({Phase.DONE, Phase.WAITING}),
    Phase.DONE: frozenset({Phase.WAITING}),
    Phase.SKIPPED: frozenset({Phase.WAITING}),
}


@dataclass(slots=True)
class Seen:
    """The part of one stage's output that the client has seen, over all attempts."""

    #: How many chunks, and whether the stage's end was shown.
    chunks: int = 0
    ended: bool = False
    #: How many unfinished pictures of the one that comes next. They are no part of the output: another replica need not
    #: make the same.
    partial_images: int = 0
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    attached: bool = False
    #: What is kept of the attachments of a deterministic stage, to compare them with those of another attempt.
    marks: list[Mark] = field(default_factory=list)
    #: Whether it became more than is kept; then nothing of it is. And the estimated memory of what is kept, in bytes.
    is_long: bool = False
    kept_bytes: int = 0

    def __bool__(self) -> bool:
        return self.ended or self.chunks > 0

    def add(self, message: wire.Chunk, attachments: Sequence[bytes], *, keep_marks: bool) -> None:
        """The client is shown this chunk."""
        self.chunks += 1
        self.partial_images = 0
        self.attached = self.attached or bool(attachments)
        if self.is_long:
            return
        self.kept_bytes += _TOKEN_BYTES * len(message.token_ids) + _CHARACTER_BYTES * len(message.text)
        if keep_marks:
            marks = [mark_of(message.mime, file) for file in attachments]
            self.marks += marks
            self.kept_bytes += sum(mark.memory_bytes for mark in marks)
        if self.kept_bytes > MOST_KEPT_BYTES:
            self.token_ids, self.texts, self.marks = [], [], []
            self.is_long = True
            return
        self.token_ids += message.token_ids
        if message.text:
            self.texts.append(message.text)
            if len(self.texts) > _MOST_TEXTS:
                self.texts = ["".join(self.texts)]

    def end_segment(self) -> None:
        """A segment of the output was shown to its end, behind which no replica continues: its text is not kept."""
        self.token_ids, self.texts = [], []
        self.kept_bytes = sum(mark.memory_bytes for mark in self.marks)
        self.chunks += 1
        self.partial_images = 0

    @property
    def kind(self) -> Shown:
        """Which kind of output it was, as the retry rule distinguishes them."""
        if not self:
            return Shown.NOTHING
        if self.is_long:
            return Shown.LONG
        if self.token_ids:
            return Shown.OTHER if self.attached else Shown.TOKENS
        return Shown.OTHER if self.texts else Shown.PIECES

    def resume(self) -> wire.Resume | None:
        """The output that another replica has to continue; None if it begins at the beginning."""
        if self.kind is not Shown.TOKENS:
            return None
        return wire.Resume(token_ids=tuple(self.token_ids), text="".join(self.texts))

    def replay(self) -> Replay:
        """The comparison of another attempt's output with this."""
        return Replay(self.chunks, tuple(self.token_ids), "".join(self.texts), tuple(self.marks))


@dataclass(slots=True, repr=False)
class StageRun:
    """One stage of one request."""

    stage_id: int
    #: Written by ``to`` only.
    phase: Phase = field(default=Phase.WAITING, init=False)
    #: Number of the last dispatch, -1 before the first. Frames of any other attempt are stale.
    attempt: int = -1
    #: Where this attempt was sent; None while it is being picked.
    replica: ReplicaRef | None = None
    #: What outputs call the replica that an attempt was sent to last.
    replica_name: str = ""
    #: Input addresses of replicas that failed this request and may look healthy.
    avoid: set[str] = field(default_factory=set)
    #: Input addresses of replicas that were only late to answer, or left a hand-off that could not be read: others are
    #: better.
    slow: set[str] = field(default_factory=set)
    #: Sequence number of the next chunk of this attempt, and how many of those before it were unfinished pictures.
    next_seq: int = 0
    partial_images: int = 0
    #: When the last output came, in any attempt, shown or not.
    output_at_s: float = -inf
    #: What the client has seen of this stage, in any attempt.
    seen: Seen = field(default_factory=Seen)
    #: The last Pause that this attempt's replica was sent; None: none was sent.
    pause_sent: bool | None = None
    #: How many chunks of this attempt the client has had from an earlier one: they are dropped.
    skip: int = 0
    #: Whether every replica that this was sent to declares that it makes the same output again.
    deterministic: bool = True
    #: What the client has had from an earlier attempt of a deterministic stage: this one has to begin with it.
    replay: Replay | None = None
    #: The hand-offs that the stages before left for this one, by stage.
    handed: dict[int, tuple[PayloadRef, ...]] = field(default_factory=dict)
    #: The hand-offs that come from the stages before in pieces, by stage.
    streams: dict[int, PieceRelay] = field(default_factory=dict)
    #: Number of the next piece that this attempt hands on.
    next_piece: int = 0
    #: The estimated memory of the references to hand-offs that this attempt has named and that are kept.
    reference_bytes: int = 0
    #: Where hand-offs of this stage may lie, of any attempt, by input address.
    holders: dict[str, ReplicaRef] = field(default_factory=dict)
    #: Why the last attempt that failed did so, its number, and its replica (None: none was picked).
    failure: RequestError | None = None
    failed_attempt: int = -1
    failed_replica: ReplicaRef | None = None
    #: The HTTP status that the engine wants for a wrong request.
    refusal_status: int = 400
    #: How many replicas were lost, or lost their engine, after this work was sent to them; and those of them for which
    #: it is a suspect.
    deaths: int = 0
    blamed_for: list[ReplicaRef] = field(default_factory=list)
    #: Whether other suspects were tried at this attempt's replica meanwhile.
    had_company: bool = False
    #: Attempts that were given up because a stage before it had to make its pieces anew: no failures of this stage.
    excused: int = 0
    dispatched_at_s: float = 0.0
    sent_at_s: float = 0.0
    #: When the attempt was sent whose output the client saw first; of one that showed nothing, when it was sent.
    began_at_s: float = 0.0

    def __repr__(self) -> str:
        where = f"replica {self.replica}" if self.replica is not None else "no replica"
        what = f"{self.phase.name}, attempt {self.attempt}, {where}, next seq {self.next_seq}"
        return f"StageRun(stage {self.stage_id}, {what})"

    def to(self, phase: Phase) -> None:
        """Enter another phase. Raise RuntimeError for a change that ``ALLOWED`` does not list: a bug in the machine."""
        if phase not in ALLOWED[self.phase]:
            raise RuntimeError(f"stage {self.stage_id} can't go from {self.phase.name} to {phase.name}")
        self.phase = phase

    def show(self, message: wire.Chunk, attachments: Sequence[bytes]) -> None:
        """The client is shown this chunk."""
        self.seen.add(message, attachments, keep_marks=self.deterministic)
        # What is no longer kept can't be compared.
        self.deterministic = self.deterministic and not self.seen.is_long

    @property
    def chunks(self) -> int:
        """How many chunks of this attempt have come, without unfinished pictures."""
        return self.next_seq - self.partial_images

    def show_partial_image(self, number: int) -> bool:
        """Whether the client is shown an unfinished picture with this number: none twice, and none behind a later."""
        if self.chunks < self.seen.chunks or number < self.seen.partial_images:
            return False
        self.seen.partial_images = number + 1
        return True

    @property
    def running(self) -> bool:
        """Whether a dispatch is out that will be answered."""
        return self.phase in (Phase.DISPATCHED, Phase.ACCEPTED)

    @property
    def settled(self) -> bool:
        """Whether nothing more will come of this stage."""
        return self.phase in (Phase.DONE, Phase.SKIPPED)

    def begin_attempt(self, now_s: float) -> wire.Resume | None:
        """Count the next attempt and forget the last one's progress; return the output that it has to continue."""
        resume = None if self.deterministic else self.seen.resume()
        self.replay = self.seen.replay() if self.deterministic and self.seen else None
        self.replica, self.next_seq, self.next_piece, self.pause_sent = None, 0, 0, None
        self.partial_images = self.reference_bytes = 0
        self.had_company = False
        for relay in self.streams.values():
            relay.reset_consumer()
        self.skip = self.seen.chunks if resume is None and self.replay is None else 0
        self.attempt += 1
        self.dispatched_at_s = now_s
        return resume

    def sent(self, replica: ReplicaRef, now_s: float, *, hands_over: bool, deterministic: bool) -> None:
        """The attempt has left for a replica; with ``hands_over`` that keeps a hand-off for later stages."""
        self.replica, self.replica_name, self.sent_at_s = replica, str(replica), now_s
        self.deterministic = self.deterministic and deterministic
        if not self.seen:
            self.began_at_s = now_s
        if hands_over:
            self.holders[replica.input_addr] = replica

    def loss(
        self,
        kind: wire.FailureKind | None,
        attempts: int,
        *,
        request_shown: bool,
        all_deterministic: bool = False,
        in_doubt: int | None = None,
    ) -> Loss:
        """The facts for the retry rule if the attempt fails now; ``kind`` None: it will not be answered."""
        return Loss(
            permanent=kind is not None and is_permanent(kind),
            exhausted=self.is_last_of(attempts),
            poison=is_poison(len(self.blamed_for), self.deaths, was_alone=not self.had_company),
            # Without a hand-off from another stage, it was its own that could not be stored.
            handoff_gone=kind is wire.FailureKind.PAYLOAD and bool(self.handed or self.streams),
            shown=self.seen.kind,
            request_shown=request_shown,
            deterministic=self.deterministic,
            all_deterministic=all_deterministic,
            in_doubt=in_doubt,
        )

    def is_last_of(self, attempts: int) -> bool:
        """Whether the present attempt is the last of so many that may fail."""
        return self.attempt + 1 - self.excused >= attempts

    @property
    def is_continued(self) -> bool:
        """Whether this attempt has to continue what the client has seen, which it is sent."""
        return not self.deterministic and self.seen.kind is Shown.TOKENS

    @property
    def has_output(self) -> bool:
        """Whether any output of this attempt came."""
        return self.next_seq > 0 or self.next_piece > 0

    def replica_died(self) -> None:
        """The replica of this attempt was lost, or its engine died. Counts only if the work had been sent to it."""
        # Accepted or not: work that ends its replica at once takes the word of that with it.
        if self.running and self.replica is not None:
            self.deaths += 1
            if is_suspicious(self.deaths, had_output=self.has_output):
                self.blamed_for.append(self.replica)

    def acquit(self) -> None:
        """The deaths that the work is blamed for have another explanation."""
        self.deaths -= len(self.blamed_for)
        self.blamed_for.clear()

    def stop(self) -> list[Action]:
        """The actions that end the stage's work and free its hand-offs."""
        actions: list[Action] = [Abort(self.stage_id, self.attempt, self.replica)] if self.running else []
        # Also after it was fetched: the replica keeps it, so that the next stage can be run again. An attempt that was
        # given up may have ended there without this hub having heard of it.
        return actions + [ReleasePayload(self.stage_id, replica) for replica in self.holders.values()]

    def reset(self) -> None:
        """Forget the attempt and the hand-offs; keep the phase, the counts and the replicas to avoid."""
        self.replica, self.next_seq, self.reference_bytes = None, 0, 0
        self.handed, self.streams, self.holders = {}, {}, {}


class RequestState:
    """One request: what the client asked, and where each stage stands.

    ``inputs`` is the client's prompt, or the first segment of it where ``segmented``. ``params`` are sampling
    parameters by stage. ``attempts`` of each stage may fail at most. ``request_timestamp`` is wall-clock seconds.
    ``shown_id`` is the client's own name for the request; ``priority``: lower goes first. ``companions`` are prompts by
    role, and ``is_companion`` marks a request that is one: its hand-off goes to its parent. ``seed``, below 2**62, is
    for deterministic stages; None: it is made of the id.
    """

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
        seed: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.inputs = inputs
        self.plan = plan
        self.params = params
        self.attempts = attempts
        #: For whatever is drawn at random in deterministic stages, if the client names no seed: one for all attempts.
        #: Below 2**62, as the seeds that clients may give.
        self.seed = seed_of(request_id) >> (SEED_BITS - 62) if seed is None else seed
        #: The stages that were sent it: all their attempts get it.
        self.seeded: set[int] = set()
        self.shown_id = shown_id or request_id
        self.priority = priority
        self.is_companion = is_companion
        self.runs = {stage_id: StageRun(stage_id) for stage_id in plan.stages}
        #: The input of a request that comes in segments; None for any other.
        self.segments = Segments(plan, inputs) if segmented else None
        self.companions = Companions(plan, companions or {})
        #: The replicas that work was sent to, the last one last; those of a request that fails are named.
        self.tried: dict[str, None] = {}
        #: Whether so much output waits for the client that the replicas are to make no more.
        self.is_client_behind = False
        #: When it was submitted, monotonic; None before.
        self.started_at_s: float | None = None
        #: Whether Finish was returned.
        self.finished = False
        self.public = OrchestratorRequestState(
            request_id=request_id,
            prompt=inputs,
            sampling_params_list=[params.get(stage_id, {}) for stage_id in plan.stages],
            final_stage_id=plan.stages[-1],
            final_output_stage_ids=set(plan.finals),
            request_timestamp=request_timestamp,
            mm_features=inputs.get("mm_features"),
            mm_processor_kwargs=inputs.get("mm_processor_kwargs"),
            streaming=StreamingInputState(enabled=segmented),
        )

    def __repr__(self) -> str:
        return f"RequestState({self.request_id}, {list(self.runs.values())})"

    @property
    def request_shown(self) -> bool:
        """Whether the client has seen output of any stage."""
        return any(run.seen for run in self.runs.values())

    @property
    def all_deterministic(self) -> bool:
        """Whether the whole request, run again, makes the same output again."""
        if self.segments is not None or self.companions.prompts or self.is_companion:
            return False
        return all(run.deterministic for run in self.runs.values())

    @property
    def reference_bytes(self) -> int:
        """The estimated memory of the references to hand-offs that are kept for it, without those of companions."""
        return sum(run.reference_bytes for run in self.runs.values())

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas that have accepted the present attempts of its stages, or have done them, in stage order."""
        has_it = (Phase.ACCEPTED, Phase.DONE)
        return tuple(str(run.replica) for run in self.runs.values() if run.replica is not None and run.phase in has_it)

    @property
    def progress(self) -> str:
        """Which stages are not finished, for the error of a deadline that has passed."""
        open_stages = [str(run.stage_id) for run in self.runs.values() if not run.settled]
        return f"the time is over; not finished: stage {', '.join(open_stages)}"

    def set_params(self, params: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the sampling parameters; stages that were dispatched already keep theirs."""
        self.params = params
        self.public.sampling_params_list = [params.get(stage_id, {}) for stage_id in self.plan.stages]

    def note_seed(self, stage_id: int) -> None:
        """Show that a stage was sent the request's seed, in ``public.sampling_params_list``."""
        shown, place = list(self.public.sampling_params_list), self.plan.stages.index(stage_id)
        if shown[place].get("seed") is None:
            self.seeded.add(stage_id)
            shown[place] = {**shown[place], "seed": self.seed}
            self.public.sampling_params_list = shown

    def inputs_of(self, stage_id: int) -> Mapping[str, Any]:
        """The client's input for the stage's next dispatch."""
        return self.inputs if self.segments is None else self.segments.inputs_of(stage_id)

    def has_all_inputs(self, run: StageRun) -> bool:
        """Whether each input of the stage is there, or has begun to come in pieces, those of companions included."""
        count = len(run.handed) + len(run.streams)
        return count == len(self.plan.inputs[run.stage_id]) and self.companions.ready_for(run.stage_id)

    def payloads_of(self, run: StageRun) -> tuple[PayloadRef, ...]:
        """The hand-offs that the stage's next dispatch carries."""
        own = tuple(ref for stage_id in self.plan.inputs[run.stage_id] for ref in run.handed.get(stage_id, ()))
        return own + self.companions.refs_for(run.stage_id)

    def note(self, run: StageRun, name: str, seconds: float) -> None:
        """Set one of the stage's timings; hub/request/outputs.py lists the names."""
        self.public.pipeline_timings[name_of(run.stage_id, name)] = seconds

    def note_end(self, run: StageRun, replica_timings_s: Mapping[str, float], now_s: float) -> None:
        """Set the timings of a stage that is done; ``replica_timings_s`` are those that its replica measured."""
        self.note(run, "total", now_s - run.began_at_s)
        for name, seconds in first_timings(replica_timings_s).items():
            self.note(run, f"replica.{name}", seconds)
        for name, seconds in with_replica(run.sent_at_s - run.dispatched_at_s, replica_timings_s).items():
            self.note(run, name, seconds)

    def note_segment(self, run: StageRun, message: wire.SegmentDone) -> None:
        """Set what ``public.streaming`` shows of a segment that a stage has ended."""
        streaming = self.public.streaming
        if not self.plan.inputs[run.stage_id]:
            streaming.segment_finished = True
            streaming.new_prompt_len_snapshot = message.usage.get("prompt_tokens")
        for to_stage in {ref.to_stage for ref in message.payloads} & set(self.plan.next_stages[run.stage_id]):
            edge = f"{run.stage_id}-{to_stage}"
            streaming.bridge_states[edge] = streaming.bridge_states.get(edge, 0) + 1
