"""RecentEvents: the last changes of replicas and hubs, in words, for the dashboard and omni top. Pure."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from omni_discovery.records.health import ReplicaTrouble, TroubleKind
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus, own_reason
from omni_discovery.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_discovery.view.table import Delta, View

#: Events that are kept.
MOST_EVENTS: Final = 100
#: Characters of a reason that are shown.
_REASON_CHARS: Final = 200
_TROUBLES: Final[dict[str, str]] = {
    TroubleKind.EJECTED: "gets no new work for a while: its requests failed",
    TroubleKind.PROBED: "is on probation: its next request decides",
    TroubleKind.NO_SESSION: "does not answer this hub",
    TroubleKind.UNUSABLE: "can't be used by this hub",
}


class Tone(StrEnum):
    """How a thing is drawn. The words beside it say the same: colour alone says nothing."""

    GOOD = "good"
    #: It takes no work because an operator wants it so, or is on its way up or down.
    QUIET = "quiet"
    WARN = "warn"
    BAD = "bad"


class ShownEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that has happened. ``number`` counts up from 1."""

    number: int
    at: float
    tone: Tone
    about: str
    text: str


class TroubleSeen(msgspec.Struct, frozen=True):
    """A trouble of a replica without its moments, which move from one look to the next."""

    name: str
    kind: str
    epoch: int

    @classmethod
    def of(cls, trouble: ReplicaTrouble) -> TroubleSeen:
        """What tells it from others."""
        return cls(trouble.name, str(trouble.kind), trouble.epoch)


class _Known(NamedTuple):
    """What an event is made of when it changes."""

    epoch: int
    status: ReplicaStatus
    cordoned: bool
    weight: float


class RecentEvents:
    """Moments are wall-clock seconds."""

    def __init__(self) -> None:
        self._events: deque[ShownEvent] = deque(maxlen=MOST_EVENTS)
        self._count = 0
        self._known: dict[str, _Known] = {}
        self._hubs: frozenset[str] | None = None
        self._is_stale = False
        self._troubles: dict[TroubleSeen, str] = {}

    def __repr__(self) -> str:
        return f"RecentEvents({self._count} so far)"

    def newest_first(self) -> tuple[ShownEvent, ...]:
        """The events that are kept."""
        return tuple(reversed(self._events))

    def add(self, at: float, tone: Tone, about: str, text: str) -> None:
        """Keep an event."""
        self._count += 1
        self._events.append(ShownEvent(number=self._count, at=at, tone=tone, about=about, text=text))

    def follow_view(self, view: View, delta: Delta, at: float) -> None:
        """The registry has changed by ``delta``, and is now ``view``."""
        if self._hubs is None:
            # What was there when this hub came is no news.
            self._hubs, self._is_stale = frozenset(view.hubs), view.stale_since_s is not None
            self._known = {info.name: _known(info) for info in view.replicas.values()}
            return
        for info in delta.removed:
            self._gone(info, at)
        for info in (*delta.added, *delta.updated):
            self._come(info, at)
        if delta.hubs_changed:
            before, self._hubs = self._hubs, frozenset(view.hubs)
            hubs = self._hubs
            for hub_id in sorted(hubs - before):
                self.add(at, Tone.GOOD, f"hub {hub_id}", "has joined")
            for hub_id in sorted(before - hubs):
                self.add(at, Tone.QUIET, f"hub {hub_id}", "is gone")
        if delta.pipeline_changed:
            self.add(at, Tone.QUIET, "pipeline", "a new deploy document is in force")
        is_stale = view.stale_since_s is not None
        if is_stale != self._is_stale:
            text = "can't be reached: serving goes on by the last view" if is_stale else "is back, and the view fresh"
            self.add(at, Tone.WARN if is_stale else Tone.GOOD, "registry", text)
        self._is_stale = is_stale

    def follow_troubles(self, troubles: Iterable[ReplicaTrouble], at: float) -> None:
        """These replicas can't be used at the moment, whatever their records say."""
        now = {TroubleSeen.of(each): each.reason for each in troubles}
        for seen in [seen for seen in now if seen not in self._troubles]:
            text = _TROUBLES.get(seen.kind, one_line(seen.kind))
            tone = Tone.WARN if seen.kind == TroubleKind.PROBED else Tone.BAD
            self.add(at, tone, seen.name, _with_reason(text, now[seen]))
        self._troubles = now

    def _come(self, info: ReplicaInfo, at: float) -> None:
        now = _known(info)
        before, self._known[info.name] = self._known.get(info.name), now
        if before is None or before.epoch != now.epoch:
            self.add(at, Tone.QUIET, info.name, f"registered on {one_line(info.host)}, process {info.pid}")
            before = _Known(now.epoch, ReplicaStatus.STARTING, False, now.weight)
        if now.status is not before.status:
            tone, text = _STATUSES[now.status]
            self.add(at, tone, info.name, _with_reason(text, own_reason(info.reason)))
        if now.cordoned != before.cordoned:
            self.add(at, Tone.QUIET, info.name, "is cordoned" if now.cordoned else "is not cordoned any more")
        if now.weight != before.weight:
            self.add(at, Tone.QUIET, info.name, f"weighs {now.weight:g} now")

    def _gone(self, info: ReplicaInfo, at: float) -> None:
        before = self._known.pop(info.name, None)
        status = before.status if before is not None else info.status
        if status in (ReplicaStatus.DRAINING, ReplicaStatus.DOWN):
            self.add(at, Tone.QUIET, info.name, _with_reason("has ended", own_reason(info.reason)))
        else:
            text = f"is lost: its record is gone, and it has not said goodbye (it was {status})"
            self.add(at, Tone.BAD, info.name, text)


_STATUSES: Final = {
    ReplicaStatus.UP: (Tone.GOOD, "is up"),
    ReplicaStatus.STARTING: (Tone.QUIET, "is starting"),
    ReplicaStatus.DRAINING: (Tone.QUIET, "drains"),
    ReplicaStatus.DOWN: (Tone.QUIET, "goes down"),
    ReplicaStatus.ERROR: (Tone.BAD, "reports an error"),
}


def _known(info: ReplicaInfo) -> _Known:
    return _Known(info.epoch, info.status, info.cordoned, info.weight)


def _with_reason(text: str, reason: str) -> str:
    return f"{text}: {one_line(reason)[:_REASON_CHARS]}" if reason else text
