"""What the clients of a load test saw, as figures: percentiles, rates, failures, and whether the client kept up.

A latency counts from when the request was due. In an open loop that is the moment of its arrival, however late it was
sent: a hub that stands still is not excused from what waited behind it.

Pure.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

#: The failure of a request that the hub refused for load.
REFUSED: Final = 429
#: More of one core than this is too much for the client's own part.
_BUSY_SHARE: Final = 0.8
#: Its loop may be so late, or by this part of the median latency if that is longer.
_LATE_S, _LATE_PART = 0.005, 0.1


@dataclass(frozen=True, slots=True)
class Seen:
    """One request that has ended. Moments are seconds from the start of the test."""

    due_s: float
    sent_s: float
    ended_s: float
    #: When the first output of each modality came.
    firsts_s: Mapping[str, float] = field(default_factory=dict)
    #: Empty if it was answered whole; else what a reader finds in a log, such as ``503 stage_unavailable``.
    failure: str = ""
    status: int = 0
    tokens: int = 0
    characters: int = 0
    pictures: int = 0
    sound_s: float = 0.0

    @property
    def is_refused(self) -> bool:
        """Whether the hub had no room for it."""
        return self.status == REFUSED

    @property
    def first_s(self) -> float | None:
        """Seconds to its first output; None if there was none."""
        return min(self.firsts_s.values()) - self.due_s if self.firsts_s else None

    @property
    def whole_s(self) -> float:
        """Seconds to its end."""
        return self.ended_s - self.due_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of seconds by nearest rank; each is a value that occurred."""

    count: int
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


def spread_of(values: Iterable[float]) -> Spread | None:
    """The percentiles; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, part) for part in (0.5, 0.9, 0.99))
    return Spread(len(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], part: float) -> float:
    """The smallest of these values that at least this part of them does not exceed."""
    # A product such as 0.99 * 100 may lie a hair above the whole number that it is.
    return ordered[max(0, math.ceil(part * len(ordered) - 1e-9) - 1)]


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """How the client itself fared: its processor time by time that passed, and how late its loop was."""

    busy_share: float
    loop_lag: Spread | None


@dataclass(frozen=True, slots=True)
class BenchSummary:
    """The figures of a load test. All latencies are of requests that were answered whole."""

    seconds: float
    answered: int
    refused: int
    #: How many by what went wrong, without those refused.
    failed: Mapping[str, int]
    #: The first message of each failure that has one.
    messages: Mapping[str, str]
    #: Still on their way when the test was ended, and how long the oldest of them had waited.
    unfinished: int
    oldest_s: float
    #: Open loop: due before the end, and never sent, as too many were on their way.
    unsent: int
    without_output: int
    first: Spread | None
    firsts: Mapping[str, Spread]
    between: Spread | None
    whole: Spread | None
    #: How much later than due requests were sent.
    late: Spread | None
    requests_per_s: float
    tokens_per_s: float
    characters_per_s: float
    pictures_per_s: float
    sound_s_per_s: float
    client: ClientLoad
    #: Why the figures may be the client's own, each with what to do.
    doubts: Sequence[str]

    @property
    def requests(self) -> int:
        """All that were due."""
        return self.answered + self.refused + sum(self.failed.values()) + self.unfinished + self.unsent


class Tally:
    """Collects what has ended; ``summary`` makes the figures of it."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.answered = 0
        self.refused = 0
        self.failed: Counter[str] = Counter()
        self.messages: dict[str, str] = {}
        self._gaps_s = array("d")

    def add(self, seen: Seen, gaps_s: array[float], message: str = "") -> None:
        """Note a request that has ended, with the times between its outputs, or what was said of its failure."""
        self.seen.append(seen)
        if message:
            self.messages.setdefault(seen.failure, message)
        if seen.is_refused:
            self.refused += 1
        elif seen.failure:
            self.failed[seen.failure] += 1
        else:
            self.answered += 1
            self._gaps_s.extend(gaps_s)

    def summary(
        self, seconds: float, client: ClientLoad, *, waiting_since_s: Sequence[float] = (), unsent: int = 0
    ) -> BenchSummary:
        """The figures; ``waiting_since_s`` are the moments at which the requests were due that have not ended."""
        whole = [each for each in self.seen if not each.failure]
        firsts: dict[str, list[float]] = {}
        for each in whole:
            for modality, at_s in each.firsts_s.items():
                firsts.setdefault(modality, []).append(at_s - each.due_s)
        wholes = spread_of(each.whole_s for each in whole)
        late = spread_of(each.sent_s - each.due_s for each in self.seen)
        span_s = max(seconds, 1e-9)
        return BenchSummary(
            seconds=seconds,
            answered=self.answered,
            refused=self.refused,
            failed=dict(self.failed.most_common()),
            messages=dict(self.messages),
            unfinished=len(waiting_since_s),
            oldest_s=max((seconds - due_s for due_s in waiting_since_s), default=0.0),
            unsent=unsent,
            without_output=sum(not each.firsts_s for each in whole),
            first=spread_of(each.first_s for each in whole if each.first_s is not None),
            firsts={name: spread for name, values in firsts.items() if (spread := spread_of(values)) is not None},
            between=spread_of(self._gaps_s),
            whole=wholes,
            late=late,
            requests_per_s=self.answered / span_s,
            tokens_per_s=sum(each.tokens for each in whole) / span_s,
            characters_per_s=sum(each.characters for each in whole) / span_s,
            pictures_per_s=sum(each.pictures for each in whole) / span_s,
            sound_s_per_s=sum(each.sound_s for each in whole) / span_s,
            client=client,
            doubts=find_doubts(client, wholes, unsent=unsent),
        )


def find_doubts(client: ClientLoad, whole: Spread | None, *, unsent: int = 0) -> list[str]:
    """Why the figures may tell of the client and not of the hub, each with what to do."""
    doubts = []
    if client.busy_share > _BUSY_SHARE:
        doubts.append(
            f"this client used {100 * client.busy_share:.0f} % of a core, so it may be the bottleneck: share the load"
            " among several of them, best on other machines"
        )
    allowed_s = max(_LATE_S, _LATE_PART * whole.p50_s if whole is not None else 0.0)
    if client.loop_lag is not None and client.loop_lag.p99_s > allowed_s:
        doubts.append(
            f"this client was up to {1000 * client.loop_lag.p99_s:.0f} ms late (p99) to see what had come, and its"
            " latencies are too long by that: run it on a machine that has time for it"
        )
    if unsent:
        doubts.append(
            f"{unsent} requests were due and never sent, as --max-in-flight were on their way: the hub is slower than"
            " --rate; the true latencies are longer than these"
        )
    return doubts
