"""Whether failed work may be done again: one rule, one function. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from omni_discovery.errors import (
    DeadlineExceededError,
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
    StageUnavailableError,
)
from omni_discovery.wire import FailureKind


class Verdict(Enum):
    """What becomes of the request."""

    #: Dispatch the stage to another replica.
    AGAIN = auto()
    #: Begin the whole request anew: the hand-off is gone and only its producers can make another.
    RESTART = auto()
    #: End it with the error.
    FAIL = auto()


@dataclass(frozen=True, slots=True)
class Loss:
    """The facts about one failed dispatch."""

    #: The request itself is at fault or its time is over.
    permanent: bool
    #: The attempts allowed for this stage are used up.
    exhausted: bool
    #: The replica refused it, or it was never sent.
    cannot_have_run: bool
    #: The replica said that it has the work.
    accepted: bool
    #: The stage works on hand-offs; fetching one consumes it.
    takes_handoffs: bool
    #: The replica said that the hand-off is not there.
    handoff_gone: bool
    #: The client has seen output of this stage, of any stage.
    stage_shown: bool
    request_shown: bool


def decide(loss: Loss) -> Verdict:
    """The retry rule.

    Work is repeated if it can't have run, or if the client has seen nothing of it. A stage that had taken its
    hand-off in needs a new one, so the request begins anew, which nobody notices while nothing at all was shown. If
    something was, the old hand-off is tried once more: a replica that died with the request still queued never
    fetched it, and one that did makes the next say so.
    """
    if loss.permanent or loss.exhausted or loss.stage_shown:
        return Verdict.FAIL
    if loss.handoff_gone:
        return Verdict.FAIL if loss.request_shown else Verdict.RESTART
    if loss.cannot_have_run or not loss.accepted or not loss.takes_handoffs or loss.request_shown:
        return Verdict.AGAIN
    return Verdict.RESTART


def error_of(kind: FailureKind, stage_id: int, text: str) -> RequestError:
    """The typed error for what a replica said."""
    match kind:
        case FailureKind.INVALID:
            return InvalidRequestError(text)
        case FailureKind.OVERLOADED:
            return OverloadedError(text)
        case FailureKind.DRAINING:
            return StageUnavailableError(stage_id, text)
        case FailureKind.ENGINE:
            return EngineFailedError(text)
        case FailureKind.PAYLOAD | FailureKind.NOT_RESUMABLE:
            return ReplicaLostError(text)
        case FailureKind.DEADLINE:
            return DeadlineExceededError(text)


def unavailable_error(stage_id: int, text: str, before: RequestError | None) -> RequestError:
    """The error when no replica was found; ``before`` is what the last one that was tried said."""
    if before is None or isinstance(before, ReplicaLostError):
        return StageUnavailableError(stage_id, text if before is None else f"{text}; before that: {before}")
    return before


def is_permanent(kind: FailureKind) -> bool:
    """Whether another replica would say the same."""
    return kind in (FailureKind.INVALID, FailureKind.DEADLINE)
