"""What becomes of work that failed: one rule, one function. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

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

#: How a replica's reason begins when its engine died with the request on it.
ENGINE_DIED: Final = "the engine died"
#: How many replicas a request may take with it: whose engine died, or that were lost while they worked on it.
_MAX_ENGINE_DEATHS: Final = 2
_MAX_LOSSES: Final = 3
#: When a client may come back to a stage that had nobody for as long as its request waited, in seconds.
_EMPTY_RETRY_S: Final = 5.0
#: With one of these, an engine may refuse to go on behind what was shown.
_DOUBTFUL: Final = ("stop", "presence_penalty", "frequency_penalty", "bad_words", "structured_outputs", "extra_args")


class Shown(Enum):
    """What the client has seen of a stage's output."""

    NOTHING = auto()
    #: Text with its token ids: another replica can go on behind it.
    TOKENS = auto()
    #: Pictures or sound, the same on every run: another replica begins anew, and what was shown is not shown again.
    PIECES = auto()
    #: Anything else, text without token ids for one: nobody knows what comes behind it.
    OTHER = auto()


class Verdict(Enum):
    """What becomes of the request."""

    #: Dispatch the stage to another replica, from the hand-offs that were kept; shown pieces are dropped.
    AGAIN = auto()
    #: Dispatch the stage to another replica, which goes on behind what was shown.
    CONTINUE = auto()
    #: Begin the whole request anew: the hand-off is gone and only its producers can make another.
    RESTART = auto()
    #: End it with the error.
    FAIL = auto()


@dataclass(frozen=True, slots=True)
class Loss:
    """The facts about one failed dispatch."""

    #: The request itself is at fault, its time is over, or what was shown can't be continued.
    permanent: bool
    #: The attempts allowed for this stage are used up.
    exhausted: bool
    #: So many replicas were lost with this stage's work on them that the work itself is the likely cause.
    poison: bool
    #: The stage takes hand-offs, and the replica said that one is not there.
    handoff_gone: bool
    #: What the client has seen of this stage.
    shown: Shown
    #: The client has seen output of any stage.
    request_shown: bool
    #: The client has seen what other stages made of its first pieces, and another attempt may make others.
    pieces_shown: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict; ``why`` says what stands in the way where it is FAIL and the failure alone does not say it."""

    verdict: Verdict
    why: str = ""


def decide(loss: Loss) -> Decision:
    """The retry rule.

    Hand-offs stay where they were made until the request ends, so a failed stage is done by itself, whatever the other
    stages have shown. What the client has seen is never made twice: an answer in tokens is continued behind it, equal
    pieces are dropped, anything else can't be saved. Only where a hand-off is gone does the request begin anew, and
    only if nothing at all was shown.
    """
    if loss.permanent:
        return Decision(Verdict.FAIL)
    if loss.exhausted:
        return Decision(Verdict.FAIL, "no attempts are left")
    if loss.poison:
        return Decision(Verdict.FAIL, "too many replicas were lost with this work on them, it is not given to another")
    if loss.handoff_gone:
        if loss.request_shown:
            return Decision(Verdict.FAIL, "what made the hand-off was shown already and is not made twice")
        return Decision(Verdict.RESTART)
    if loss.pieces_shown:
        return Decision(Verdict.FAIL, "what came of its first pieces was shown, and they are not sure to be made again")
    match loss.shown:
        case Shown.NOTHING | Shown.PIECES:
            return Decision(Verdict.AGAIN)
        case Shown.TOKENS:
            return Decision(Verdict.CONTINUE)
        case Shown.OTHER:
            return Decision(
                Verdict.FAIL, "part of the output was shown, and without token ids nobody can go on behind it"
            )


def is_poison(engine_deaths: int, losses: int) -> bool:
    """Whether work is not to be given to yet another replica.

    ``engine_deaths`` counts replicas that said that their engine died with it, ``losses`` those that fell silent after
    they had accepted it. One death leaves one more attempt, and so do two losses: a replica may also fall silent for
    reasons of its own.
    """
    total = engine_deaths + losses
    return total >= (_MAX_ENGINE_DEATHS if engine_deaths else _MAX_LOSSES)


def may_not_resume(params: Mapping[str, Any]) -> bool:
    """Whether an engine may refuse to continue an answer that was made with these parameters."""
    return params.get("seed") is not None or any(params.get(name) for name in _DOUBTFUL)


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
        error = StageUnavailableError(stage_id, text if before is None else f"{text}; before that: {before}")
        # It has waited in here already: whoever comes at once waits in vain once more.
        error.retry_after_s = _EMPTY_RETRY_S
        return error
    return before


def is_permanent(kind: FailureKind) -> bool:
    """Whether another replica would say the same."""
    return kind in (FailureKind.INVALID, FailureKind.DEADLINE, FailureKind.NOT_RESUMABLE)
