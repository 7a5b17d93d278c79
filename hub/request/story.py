"""Story: the last events of one request, for a log line or a diagnosis; no prompt and no output is kept. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from hub.request import events as ev
from hub.request.events import Action, Event, ReplicaRef, StageMessage
from omni_discovery import wire

#: How many events are kept, and how much of a reason is shown, in characters.
MAX_EVENTS: Final = 100
_MAX_REASON: Final = 200


#: One event: when, its type, the stage and attempt that it is about, where that was sent or why it failed, and the type
#: and stage of each action that followed. Plain tuples, because one is written for almost every event.
Entry = tuple[
    float,
    type[Event | StageMessage],
    int | None,
    int | None,
    ReplicaRef | str | None,
    tuple[tuple[type[Action], int | None], ...],
]


def shown_reason(message: wire.Rejected | wire.StageFailed) -> str:
    """Why a stage failed; of what an engine says only the kind of error, since its text may quote the prompt."""
    match message.kind:
        case wire.FailureKind.ENGINE:
            return f"{message.kind}: {message.reason.partition(':')[0]}" if ":" in message.reason else str(message.kind)
        case wire.FailureKind.INVALID:
            return str(message.kind)
        case _:
            return message.reason


def _error_of(event: ev.Cancelled | ev.CompanionFailed) -> str | None:
    return None if event.error is None else type(event.error).__name__


_DETAILS: Final[Mapping[type[Any], Callable[[Any], ReplicaRef | str | None]]] = {
    ev.Sent: attrgetter("replica"),
    ev.ClientBackpressure: lambda event: "behind" if event.is_behind else "caught up",
    ev.Cancelled: _error_of,
    ev.CompanionFailed: _error_of,
    wire.Chunk: attrgetter("modality"),
    wire.Rejected: shown_reason,
    wire.StageFailed: shown_reason,
    **dict.fromkeys((ev.ReplicaLost, ev.StageUnavailable, ev.DispatchRefused), attrgetter("reason")),
}


class Story:
    """The last ``MAX_EVENTS`` events of one request.

    Of the pieces of an attempt's output, only the first one and those that were of no use are kept, so that a long
    answer does not push out how the request began.
    """

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=MAX_EVENTS)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Iterable[Entry]:
        """The events, oldest first."""
        return self._entries

    def add(self, now_s: float, stage_id: int | None, event: Event | StageMessage, actions: Sequence[Action]) -> None:
        """Keep an event that the machine took, and the actions that it returned; ``now_s`` is monotonic."""
        kind = type(event)
        attempt = None if stage_id is None else getattr(event, "attempt", None)
        detail_of = _DETAILS.get(kind)
        kinds = tuple([(type(action), getattr(action, "stage_id", None)) for action in actions])
        self._entries.append((now_s, kind, stage_id, attempt, detail_of and detail_of(event), kinds))

    def add_message(self, now_s: float, stage_id: int, message: StageMessage, actions: Sequence[Action]) -> None:
        """Keep an answer of a replica, unless it is one of many pieces that only go on."""
        if isinstance(message, wire.Chunk):
            number = message.seq
        elif isinstance(message, (wire.HandOffPiece, wire.PieceTaken)):
            number = message.number
        else:
            number = 0
        if not number or (actions and isinstance(actions[0], ev.Drop)):
            self.add(now_s, stage_id, message, actions)

    def lines(self) -> list[str]:
        """The events, oldest first, one line each; times are seconds since the oldest one."""
        return [self._line(entry) for entry in self._entries]

    def _line(self, entry: Entry) -> str:
        at_s, kind, stage_id, attempt, detail, actions = entry
        words = [f"+{at_s - self._entries[0][0]:.3f}", kind.__name__]
        if stage_id is not None:
            words.append(f"stage={stage_id}")
        if attempt is not None:
            words.append(f"attempt={attempt}")
        if isinstance(detail, ReplicaRef):
            words.append(f"replica={detail}")
        elif kind is wire.Chunk:
            words.append(f"modality={detail}")
        elif detail:
            words.append(f"reason={detail[:_MAX_REASON]!r}")
        if actions:
            words.append(f"-> {', '.join(_name_of(*action) for action in actions)}")
        return " ".join(words)


def _name_of(kind: type[Action], stage_id: int | None) -> str:
    return kind.__name__ if stage_id is None else f"{kind.__name__}({stage_id})"
