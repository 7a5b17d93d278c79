"""The state of one request in the engine, owned by the engine's thread. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_discovery.failure_log import word
from omni_discovery.wire import FailureKind, PayloadRef
from stage_runtime.config import PayloadError
from stage_runtime.engine_loop.jobs import Finished, HandOffs, RequestFailed, SegmentEnded, Work
from stage_runtime.engines.base import EngineOutput, StageRequest
from stage_runtime.engines.capabilities import Capabilities
from stage_runtime.engines.errors import error_of


@dataclass(slots=True)
class SegmentedRequest:
    """The part of a request that outlives its segments: whether it waits for the next one, and the sums so far."""

    #: Whether the request waits for its next segment: the engine has nothing to do for it.
    is_idle: bool = False
    finish_reason: str = "stop"
    #: Sums over the segments that have ended.
    usage: dict[str, int] = field(default_factory=dict)
    timings_s: dict[str, float] = field(default_factory=dict)

    def end_segment(self, end: Finished) -> SegmentEnded:
        """Turn the end of a segment's run into SegmentEnded, and add its usage and timings (seconds) to the sums."""
        self.is_idle, self.finish_reason = True, end.finish_reason
        for name, count in end.usage.items():
            self.usage[name] = self.usage.get(name, 0) + count
        for name, seconds in end.timings_s.items():
            if name == "first_output":
                self.timings_s.setdefault(name, seconds)
            else:
                self.timings_s[name] = self.timings_s.get(name, 0.0) + seconds
        return SegmentEnded(end.key, end.finish_reason, end.payloads, end.usage)

    def finish(self, key: str) -> Finished:
        """The end of the whole request, with the sums over its segments: no further segment will come."""
        return Finished(key, self.finish_reason, (), dict(self.usage), dict(self.timings_s))


@dataclass(slots=True)
class Running:
    """Work that the engine has, or that waits for its pieces or its next segment."""

    work: Work
    added_at_s: float
    transfer_s: float
    first_output_at_s: float | None = None
    #: Tokens that the engine has put out for it.
    tokens: int = 0
    #: Whether the engine has put out the end of the request, or of its present segment.
    has_ended: bool = False
    #: Whether the hub has cancelled it: nothing is handed over any more.
    is_cancelled: bool = False
    #: Set where the request's input comes in segments.
    segmented: SegmentedRequest | None = None
    #: Whether its hand-offs are on their way: the engine does not have it yet.
    is_fetching: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether it waits for its next segment."""
        return self.segmented is not None and self.segmented.is_idle

    def timings(self, done_at_s: float, now_s: float) -> dict[str, float]:
        """The durations of the request's parts, in seconds; its hand-off was stored from ``done_at_s`` to ``now_s``."""
        accepted_at_s = self.work.accepted_at_s
        timings_s = {
            "queue": self.added_at_s - self.transfer_s - accepted_at_s,
            "generate": done_at_s - self.added_at_s,
            "transfer": self.transfer_s + now_s - done_at_s,
        }
        if self.first_output_at_s is not None:
            timings_s["first_output"] = self.first_output_at_s - accepted_at_s
        return timings_s


def name_of(work: Work) -> str:
    """The work as all log lines name it: by the id of its request, without white space."""
    return word(work.request_id)


def request_of(
    work: Work,
    defaults: Mapping[str, Any],
    whole: Mapping[int, Mapping[str, Any]],
    fetched: HandOffs,
) -> StageRequest:
    """The work as the engine gets it. ``whole`` holds hand-offs that came in pieces, and are complete, by stage."""
    handed = {**fetched.get("", {}), **whole}
    return StageRequest(
        key=work.key,
        request_id=work.request_id,
        attempt=work.attempt,
        inputs=work.inputs,
        params={**defaults, **work.params},
        payloads=handed,
        companions={role: of_role for role, of_role in fetched.items() if role},
        next_stages=work.next_stages,
        deadline_s=work.deadline_s,
        resume=work.resume,
        priority=work.priority,
        stream_from=tuple(stage for stage in work.stream_from if stage not in handed),
        stream_to=work.stream_to,
        segment=work.segment,
        trace=work.trace,
        client=work.client,
    )


def end_of(
    running: Running,
    output: EngineOutput,
    hand_over: Callable[[Work, EngineOutput], tuple[PayloadRef, ...]],
    clock: Callable[[], float],
) -> Finished | RequestFailed:
    """How a request ends after the engine's last output: stores the hand-off, if it is to have one."""
    if output.error is not None:
        return RequestFailed(output.key, *output.error)
    done_at_s = clock()
    if running.is_cancelled:
        return Finished(output.key, "abort", (), output.usage, running.timings(done_at_s, clock()))
    try:
        refs = hand_over(running.work, output)
    except PayloadError as error:
        return RequestFailed(output.key, FailureKind.PAYLOAD, str(error))
    timings_s = running.timings(done_at_s, clock())
    reason = output.finish_reason or "stop"
    return Finished(output.key, reason, refs, output.usage, timings_s, output.stop_reason, output.called)


def refusal_of(work: Work, capabilities: Capabilities, now_s: float) -> RequestFailed | None:
    """Why the work is refused before the engine gets it; None if it is not."""
    if now_s >= work.deadline_s:
        return RequestFailed(work.key, FailureKind.DEADLINE, "the deadline passed while the request waited")
    if work.resume is not None and not capabilities.can_resume():
        # The engine would begin the answer again, and the client would see its beginning twice.
        return RequestFailed(work.key, FailureKind.NOT_RESUMABLE, "this engine can't go on behind what was shown")
    if work.segment is not None and capabilities.update is None:
        return RequestFailed(work.key, FailureKind.INVALID, "this engine takes no input in segments")
    if any(ref.role for ref in work.payloads) and not capabilities.takes_companions():
        return RequestFailed(work.key, FailureKind.INVALID, "this stage takes no companions; ask without them")
    return None


def failed(key: str, error: BaseException) -> RequestFailed:
    """The end of a request that an engine method refused, by raising ``error``."""
    from_stage = error.from_stage if isinstance(error, PayloadError) else None
    return RequestFailed(key, *error_of(error), from_stage=from_stage)
