"""The bookkeeping of one request. Pure.

The pieces that one stage hands to another while it works: which there are, and how far the consumer has them. Pure.

A relay belongs to one attempt of the producer. Pieces are kept until that ends, where they were made and by name here,
so that another attempt of the consumer gets all of them again, from the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from hub.request.events import Abort, Action, ReleasePayload, ReplicaRef
from hub.request.retry import Loss, Shown, is_permanent, is_poison
from omni_discovery import wire
from omni_discovery.errors import RequestError
from omni_discovery.wire import PayloadRef


class PieceRelay:
    """At most ``window`` pieces are on their way to the consumer, and the producer is told what it has taken."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._refs: list[PayloadRef] = []
        self._is_complete = False
        #: How many went to the present attempt of the consumer, and how many of these it has taken.
        self._fed = 0
        self._taken = 0
        self._end_fed = False
        #: How many the producer was told of.
        self.roomed = 0

    def add(self, ref: PayloadRef) -> None:
        """The producer has made another piece."""
        self._refs.append(ref)

    def complete(self) -> None:
        """The producer makes no more."""
        self._is_complete = True

    def begin(self) -> None:
        """Another attempt of the consumer begins: it has nothing yet."""
        self._fed = self._taken = 0
        self._end_fed = False

    def again(self) -> None:
        """What is on its way to the consumer may be lost: it is due once more."""
        self._fed, self._end_fed = self._taken, False

    def due(self) -> list[tuple[int, PayloadRef | None]]:
        """What is to go to the consumer now, by number; None is the end. It counts as sent from here on."""
        end = min(len(self._refs), self._taken + self._window)
        due: list[tuple[int, PayloadRef | None]] = list(enumerate(self._refs[self._fed : end], self._fed))
        self._fed = max(self._fed, end)
        if self._is_complete and self._fed == len(self._refs) and not self._end_fed:
            self._end_fed = True
            due.append((self._fed, None))
        return due

    def take(self, number: int) -> bool:
        """The consumer has all up to and with that one; False if it can't have."""
        if number >= self._fed:
            return False
        self._taken = max(self._taken, number + 1)
        return True

    def room(self, *, is_free: bool) -> int | None:
        """How many of them the producer is to be told that the consumer has, if that is news to it.

        ``is_free``: the consumer needs none of them now, so that nothing is to be held up for it.
        """
        count = len(self._refs) if is_free else self._taken
        if count <= self.roomed:
            return None
        self.roomed = count
        return count


@dataclass
class StreamingInputState:
    """Where a request stands whose input arrives in segments."""

    enabled: bool = False
    segment_finished: bool = False
    new_prompt_len_snapshot: int | None = None
    bridge_states: dict[str, Any] = field(default_factory=dict)


@dataclass
class OrchestratorRequestState:
    """What the orchestrator knows of one request; names as users of vLLM-Omni know them.

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
        """Keep where a prefill stage left its KV, as far as it says so beside the hand-off itself."""
        for ref in refs:
            if "kv_transfer_params" in ref.metadata:
                params = ref.metadata["kv_transfer_params"]
                self.pd_prefill_multimodal_output = {"stage_id": ref.from_stage, "kv_transfer_params": params}


class Phase(Enum):
    """Where one stage of one request stands."""

    WAITING = auto()
    DISPATCHED = auto()
    ACCEPTED = auto()
    DONE = auto()
    SKIPPED = auto()


@dataclass(slots=True)
class Seen:
    """What the client has seen of one stage's output, over all attempts."""

    #: How many chunks, and whether the stage's end was told.
    chunks: int = 0
    ended: bool = False
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    attached: bool = False

    def __bool__(self) -> bool:
        return self.ended or self.chunks > 0

    def add(self, message: wire.Chunk, attachments: Sequence[bytes]) -> None:
        """The client is shown this chunk."""
        self.chunks += 1
        self.token_ids += message.token_ids
        if message.text:
            self.texts.append(message.text)
        self.attached = self.attached or bool(attachments)

    @property
    def kind(self) -> Shown:
        """What it was, as far as it matters for going on elsewhere."""
        if not self:
            return Shown.NOTHING
        if self.token_ids:
            return Shown.OTHER if self.attached else Shown.TOKENS
        return Shown.OTHER if self.texts else Shown.PIECES

    def resume(self) -> wire.Resume | None:
        """What another replica has to go on behind; None if it begins at the beginning."""
        if self.kind is not Shown.TOKENS:
            return None
        return wire.Resume(token_ids=tuple(self.token_ids), text="".join(self.texts))


@dataclass(slots=True)
class StageRun:
    """One stage of one request."""

    stage_id: int
    phase: Phase = Phase.WAITING
    #: Number of the last dispatch, -1 before the first. Frames of any other attempt are stale.
    attempt: int = -1
    #: Where this attempt was sent; None while it is being picked.
    replica: ReplicaRef | None = None
    #: Input addresses of replicas that failed this request and may look healthy.
    avoid: set[str] = field(default_factory=set)
    #: Of those that only were late to answer.
    slow: set[str] = field(default_factory=set)
    #: Sequence number of the next chunk of this attempt.
    next_seq: int = 0
    #: What the client has seen of this stage, in any attempt.
    seen: Seen = field(default_factory=Seen)
    #: Whether this attempt's replica was told last to pause; None: it was told nothing of that.
    told_paused: bool | None = None
    #: How many chunks of this attempt the client has had from an earlier one: they are dropped.
    skip: int = 0
    #: What the stages before left for this one, by stage.
    handed: dict[int, tuple[PayloadRef, ...]] = field(default_factory=dict)
    #: What comes of the stages before in pieces, by stage.
    streams: dict[int, PieceRelay] = field(default_factory=dict)
    #: Number of the next piece that this attempt hands on.
    next_piece: int = 0
    #: Where hand-offs of this stage may lie, of any attempt, by input address.
    holders: dict[str, ReplicaRef] = field(default_factory=dict)
    #: Why the last attempt failed.
    failure: RequestError | None = None
    #: How many replicas said that their engine died with this work, and how many fell silent after they accepted it.
    engine_deaths: int = 0
    losses: int = 0
    dispatched_at_s: float = 0.0
    sent_at_s: float = 0.0
    #: When the attempt was sent whose output the client saw first; of one that showed nothing, when it was sent.
    began_at_s: float = 0.0

    @property
    def running(self) -> bool:
        """Whether a dispatch is out that will be answered."""
        return self.phase in (Phase.DISPATCHED, Phase.ACCEPTED)

    @property
    def settled(self) -> bool:
        """Whether nothing more will come of this stage."""
        return self.phase in (Phase.DONE, Phase.SKIPPED)

    def sent(self, replica: ReplicaRef, now_s: float, *, hands_over: bool) -> None:
        """The attempt has left for a replica."""
        self.replica, self.sent_at_s = replica, now_s
        if not self.seen:
            self.began_at_s = now_s
        if hands_over:
            self.holders[replica.input_addr] = replica

    def loss(
        self, kind: wire.FailureKind | None, attempts: int, *, request_shown: bool, pieces_shown: bool = False
    ) -> Loss:
        """The facts for the retry rule if the attempt fails now; ``kind`` None: it will not be answered."""
        return Loss(
            permanent=kind is not None and is_permanent(kind),
            exhausted=self.attempt + 1 >= attempts,
            poison=is_poison(self.engine_deaths, self.losses),
            # Without a hand-off of another's, it was its own that could not be stored.
            handoff_gone=kind is wire.FailureKind.PAYLOAD and bool(self.handed or self.streams),
            shown=self.seen.kind,
            request_shown=request_shown,
            pieces_shown=pieces_shown,
        )

    def stop(self) -> list[Action]:
        """What ends the stage's work and frees what it left."""
        actions: list[Action] = [Abort(self.stage_id, self.attempt, self.replica)] if self.running else []
        # Also after it was fetched: the replica keeps it, so that the next stage can be run again. An attempt that was
        # given up may have ended there unheard.
        return actions + [ReleasePayload(self.stage_id, replica) for replica in self.holders.values()]

    def reset(self) -> None:
        """Forget the attempt and the hand-offs; keep the counts and the replicas to avoid."""
        self.phase, self.replica, self.next_seq, self.skip = Phase.WAITING, None, 0, 0
        self.handed, self.streams, self.holders = {}, {}, {}
