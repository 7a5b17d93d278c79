"""The retry rule: whether failed work is repeated, continued, restarted, or fails the request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from omni_discovery.errors import (
    REFUSALS,
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
#: After how many deaths of replicas under one stage's work it counts as their cause: of deaths that it is blamed for,
#: where it was the only suspect at the last one, and of all.
_MAX_BLAMED: Final = 2
_MAX_DEATHS: Final = 3
#: Retry-After of a stage that had no replica for as long as the request waited, in seconds.
_EMPTY_RETRY_S: Final = 5.0
#: Sampling parameters with which an engine may refuse to continue an answer.
_DOUBTFUL: Final = ("stop", "presence_penalty", "frequency_penalty", "bad_words", "structured_outputs", "extra_args")


class Shown(Enum):
    """How much of a stage's output the client has seen."""

    NOTHING = auto()
    #: Text with its token ids: another replica can continue it.
    TOKENS = auto()
    #: Pictures or sound, the same on every run: another replica begins again, and the shown pieces are dropped.
    PIECES = auto()
    #: Anything else, text without token ids for example: no replica can continue it.
    OTHER = auto()
    #: More than is kept of it: no replica can continue it, and no other output can be compared with it.
    LONG = auto()


class Verdict(Enum):
    """The decision on failed work."""

    #: Dispatch the stage to another replica, with the hand-offs that were kept; shown pieces are dropped.
    #: A deterministic stage's are compared with what it makes now.
    AGAIN = auto()
    #: Dispatch the stage to another replica, which continues the output that was shown.
    CONTINUE = auto()
    #: Restart the whole request: the hand-off is gone and only its producers can make another.
    RESTART = auto()
    #: End the request with the error.
    FAIL = auto()


@dataclass(frozen=True, slots=True)
class Loss:
    """The facts about one failed dispatch."""

    #: The request itself is at fault, its time is over, or the shown output can't be continued.
    permanent: bool
    #: The attempts allowed for this stage are used up.
    exhausted: bool
    #: Replicas have ended under this stage's work so often that the work itself is the likely cause.
    poison: bool
    #: The stage takes hand-offs, and the replica reported that one is not there.
    handoff_gone: bool
    #: The kind of this stage's output that the client has seen.
    shown: Shown
    #: The client has seen output of any stage.
    request_shown: bool
    #: Every replica that has worked on the stage declares that it makes the same again; so do those of all stages.
    deterministic: bool = False
    all_deterministic: bool = False
    #: The client has seen output that other stages made of its first pieces, and it can't be made again, because this
    #: stage on the way from here to there is not deterministic. None: there is no such output, or it can be.
    in_doubt: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict; ``why`` is the reason of a FAIL, empty where the failure itself says it.

    ``is_poison``: the work is taken to be the cause of the deaths of its replicas.
    """

    verdict: Verdict
    why: str = ""
    is_poison: bool = False


def decide(loss: Loss) -> Decision:
    """The retry rule.

    Hand-offs stay where they were made until the request ends, so a failed stage is repeated by itself, whatever output
    of other stages was shown. The client never gets an output twice: a deterministic stage runs again, and what was
    shown is dropped; of any other stage an answer in tokens is continued, equal pieces are dropped, and all else fails
    the request. Only where a hand-off is gone is the whole request restarted, and only if no output at all was shown or
    all stages are deterministic.
    """
    if loss.permanent:
        return Decision(Verdict.FAIL)
    if loss.poison:
        why = "too many replicas were lost with this work on them, it is not given to another"
        return Decision(Verdict.FAIL, why, is_poison=True)
    if loss.exhausted:
        return Decision(Verdict.FAIL, "no attempts are left")
    if loss.handoff_gone:
        if loss.request_shown and not loss.all_deterministic:
            return Decision(Verdict.FAIL, "what made the hand-off was shown already and is not made twice")
        return Decision(Verdict.RESTART)
    if loss.in_doubt is not None:
        why = "what came of its first pieces was shown, and they are not sure to be made again"
        return Decision(Verdict.FAIL, f"{why}: stage {loss.in_doubt} is not declared deterministic")
    return Decision(Verdict.AGAIN) if loss.deterministic else _by_output(loss.shown)


def _by_output(shown: Shown) -> Decision:
    """The decision on a stage that is not deterministic, by what of it was shown."""
    match shown:
        case Shown.NOTHING | Shown.PIECES:
            return Decision(Verdict.AGAIN)
        case Shown.TOKENS:
            return Decision(Verdict.CONTINUE)
        case Shown.OTHER:
            return Decision(
                Verdict.FAIL, "part of the output was shown, and without token ids nobody can go on behind it"
            )
        case Shown.LONG:
            return Decision(
                Verdict.FAIL, "more of the output was shown than a hub keeps, so nobody can go on behind it"
            )


def is_poison(blamed: int, deaths: int, *, was_alone: bool = True) -> bool:
    """Whether the work itself is the likely cause of its replicas' deaths, so that no other replica gets it.

    ``deaths`` counts the replicas that were lost, or whose engine died, after it was sent to them; ``blamed`` those of
    them for which it is a suspect (see ``is_suspicious``). A suspect is tried at one more replica (see
    hub/pool/probation.py): if it was the only one there, a second such death has no other explanation.
    """
    return (blamed >= _MAX_BLAMED and was_alone) or deaths >= _MAX_DEATHS


def is_suspicious(deaths: int, *, had_output: bool) -> bool:
    """Whether work is a suspect for the last of so many deaths of its replicas.

    Work whose output came in that attempt was seen to run well, and is suspected only if it is not the first death.
    """
    return deaths > 1 or not had_output


def may_not_resume(params: Mapping[str, Any]) -> bool:
    """Whether an engine may refuse to continue an answer that was made with these sampling parameters."""
    return params.get("seed") is not None or any(params.get(name) for name in _DOUBTFUL)


def error_of(kind: FailureKind, stage_id: int, text: str, status: int = 400) -> RequestError:
    """The typed error for a failure that a replica reported; ``status`` is what its engine says of a wrong request."""
    match kind:
        case FailureKind.INVALID:
            # A later release may know more of them.
            return InvalidRequestError(text, status if status in REFUSALS else 400)
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
    """The error when no replica was found; ``before`` is the failure of the last attempt, if there was one."""
    if before is None or isinstance(before, ReplicaLostError):
        error = StageUnavailableError(stage_id, text if before is None else f"{text}; before that: {before}")
        # The request has waited in the hub already: a client that retries at once would wait in vain again.
        error.retry_after_s = _EMPTY_RETRY_S
        return error
    return before


def is_engine_death(kind: FailureKind | None, reason: str) -> bool:
    """Whether a replica's failure means that its whole engine is gone, with all that ran there."""
    return kind is FailureKind.ENGINE and reason.startswith(ENGINE_DIED)


def is_permanent(kind: FailureKind) -> bool:
    """Whether every replica would fail in the same way."""
    return kind in (FailureKind.INVALID, FailureKind.DEADLINE, FailureKind.NOT_RESUMABLE)
