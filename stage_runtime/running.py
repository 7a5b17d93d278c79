"""One request in the engine, as the engine's thread knows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.engines.base import StageRequest
from stage_runtime.errors import NotResumableError, PayloadError
from stage_runtime.jobs import Broken, Work
from stage_runtime.segments import Talk


@dataclass(slots=True)
class Running:
    """Work that the engine has, or waits for its input."""

    work: Work
    added_at_s: float
    transfer_s: float
    first_output_at_s: float | None = None
    #: Nobody wants its end: what it would hand over is not kept.
    is_cancelled: bool = False
    #: Of one that comes in segments.
    talk: Talk | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it waits for its next segment."""
        return self.talk is not None and self.talk.is_idle

    def timings(self, done_at_s: float, now_s: float) -> dict[str, float]:
        """What took how long, in seconds; between the two moments its hand-off was stored."""
        accepted_at_s = self.work.accepted_at_s
        timings_s = {
            "queue": self.added_at_s - self.transfer_s - accepted_at_s,
            "generate": done_at_s - self.added_at_s,
            "transfer": self.transfer_s + now_s - done_at_s,
        }
        if self.first_output_at_s is not None:
            timings_s["first_output"] = self.first_output_at_s - accepted_at_s
        return timings_s


def request_of(
    work: Work,
    defaults: Mapping[str, Any],
    handed: Mapping[int, Mapping[str, Any]],
    companions: Mapping[str, Mapping[int, Mapping[str, Any]]],
) -> StageRequest:
    """What the engine gets; ``handed`` is what came for it, whole, by stage."""
    return StageRequest(
        key=work.key,
        request_id=work.request_id,
        attempt=work.attempt,
        inputs=work.inputs,
        params={**defaults, **work.params},
        payloads=handed,
        companions=companions,
        next_stages=work.next_stages,
        deadline_s=work.deadline_s,
        resume=work.resume,
        priority=work.priority,
        stream_from=tuple(stage for stage in work.stream_from if stage not in handed),
        stream_to=work.stream_to,
        segment=work.segment,
    )


def kind_of(error: Exception) -> FailureKind:
    """What an error says of the request that met it while it was given to the engine."""
    match error:
        case InvalidRequestError():
            return FailureKind.INVALID
        case PayloadError():
            return FailureKind.PAYLOAD
        case NotResumableError():
            return FailureKind.NOT_RESUMABLE
        case _:
            return FailureKind.ENGINE


def broken(key: str, error: Exception) -> Broken:
    """The end of a request that could not be given to the engine."""
    kind = kind_of(error)
    return Broken(key, kind, f"{type(error).__name__}: {error}" if kind is FailureKind.ENGINE else str(error))
