"""Rates and lengths of the work of replicas, from the lists of requests that hubs have ended. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Final

from omni_discovery.receipts.receipt import ReceiptLine

#: Rates and lengths are those of work that ended within so many seconds.
WINDOW_S: Final = 60.0
#: Less than this is no length of time to take a rate over.
_LEAST_WINDOW_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How often work ends, and how long it takes; None where nothing is known, or nothing has ended."""

    per_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """The pace of each replica, by its name, and of each stage; ``hubs`` have told it, of ``known`` there are."""

    replicas: Mapping[str, Pace] = field(default_factory=dict)
    stages: Mapping[str, Pace] = field(default_factory=dict)
    hubs: int = 0
    known: int = 0

    def of_replica(self, name: str) -> Pace:
        """The pace of one replica: a rate of 0 if the hubs had nothing of it, unknown if no hub has told anything."""
        return self.replicas.get(name, self._nothing)

    def of_stage(self, stage_id: int) -> Pace:
        """The pace of one stage, as that of a replica."""
        return self.stages.get(str(stage_id), self._nothing)

    @property
    def _nothing(self) -> Pace:
        # Where a hub is not asked, none of its work is known: 0 would be a guess.
        return Pace(0.0) if self.hubs and self.hubs >= self.known else Pace()


def read_traffic(by_hub: Iterable[Sequence[ReceiptLine]], limit: int, now_s: float, known: int) -> Traffic:
    """The traffic of the last minute. Each hub has given its newest ``limit`` lines at most; ``known`` hubs there are.

    A hub whose list is full is asked about less than a minute: since the oldest of them began.
    """
    spans: defaultdict[str, list[float]] = defaultdict(list)
    rates: defaultdict[str, float] = defaultdict(float)
    hubs = 0
    for lines in by_hub:
        hubs += 1
        window_s = _window_s(lines, limit, now_s)
        for line in lines:
            if line.took_s is None or not 0 <= now_s - line.received_at - line.took_s <= window_s:
                continue
            for name, span_s in zip(line.replicas, line.spans_s, strict=False):
                if span_s is not None and isfinite(span_s) and span_s >= 0:
                    for each in (name, name.partition("/")[0]):
                        spans[each].append(span_s)
                        rates[each] += 1 / window_s
    paces = {name: Pace(rates[name], quantile(each, 0.5), quantile(each, 0.99)) for name, each in spans.items()}
    return Traffic(
        {name: pace for name, pace in paces.items() if "/" in name},
        {name: pace for name, pace in paces.items() if "/" not in name},
        hubs,
        known,
    )


def _window_s(lines: Sequence[ReceiptLine], limit: int, now_s: float) -> float:
    if len(lines) < limit:
        return WINDOW_S
    since_s = now_s - min(line.received_at for line in lines)
    return min(WINDOW_S, max(_LEAST_WINDOW_S, since_s))


def quantile(values: Iterable[float], part: float) -> float | None:
    """The least of the values that at least this part of them does not exceed; None for no value."""
    ordered = sorted(values)
    return ordered[max(0, ceil(part * len(ordered)) - 1)] if ordered else None


def slowest(by_hub: Iterable[Sequence[ReceiptLine]], most: int) -> list[ReceiptLine]:
    """The requests that took longest, of those that the hubs have told, the longest first."""
    ended = [(line.took_s, line) for lines in by_hub for line in lines if line.took_s is not None]
    ended.sort(key=lambda each: -each[0])
    return [line for _, line in ended[:most]]
