"""The bookkeeping of one request. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from hub.request_events import ReplicaRef
from omni_discovery.errors import RequestError
from omni_discovery.wire import PayloadRef


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


class Phase(Enum):
    """Where one stage of one request stands."""

    WAITING = auto()
    DISPATCHED = auto()
    ACCEPTED = auto()
    DONE = auto()
    SKIPPED = auto()


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
    #: Sequence number of the next chunk of this attempt.
    next_seq: int = 0
    #: Whether the client has seen output of this stage, in any attempt.
    shown: bool = False
    #: What the stages before left for this one, by stage.
    handed: dict[int, tuple[PayloadRef, ...]] = field(default_factory=dict)
    #: Whether this attempt left hand-offs at its replica.
    left_payloads: bool = False
    #: Why the last attempt failed.
    failure: RequestError | None = None
    dispatched_at_s: float = 0.0
    sent_at_s: float = 0.0

    @property
    def running(self) -> bool:
        """Whether a dispatch is out that will be answered."""
        return self.phase in (Phase.DISPATCHED, Phase.ACCEPTED)

    @property
    def settled(self) -> bool:
        """Whether nothing more will come of this stage."""
        return self.phase in (Phase.DONE, Phase.SKIPPED)

    def reset(self) -> None:
        """Forget the attempt and what was handed in; keep the count and the replicas to avoid."""
        self.phase, self.replica, self.next_seq = Phase.WAITING, None, 0
        self.handed, self.left_payloads = {}, False
