"""The requests of the balancing simulation, and how long they would wait without the code under test.

Every policy gets the same requests: Poisson arrivals, lognormal service with a mean of 1 s, each at a random hub.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

#: Between a hub and a replica, each way.
MESSAGE_S: Final = 0.0005
#: Variance of the service by the square of its mean.
_CV2: Final = 3.2


@dataclass(frozen=True, slots=True)
class Setting:
    """One pool and its traffic."""

    load: float
    slots: int
    hubs: int
    #: How old a replica's record in the registry gets before the next.
    report_s: float
    replicas: int = 16


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    service_s: float
    hub: int


def arrivals(setting: Setting, count: int, seed: int) -> list[Arrival]:
    """So many requests; the same for the same load, slots, hubs and seed."""
    chance = random.Random(f"{setting.load} {setting.slots} {setting.hubs} {seed}")
    rate = setting.load * setting.slots * setting.replicas
    sigma = math.sqrt(math.log(1.0 + _CV2))
    at_s, found = 0.0, []
    for _ in range(count):
        at_s += chance.expovariate(rate)
        service_s = chance.lognormvariate(-sigma * sigma / 2, sigma)
        found.append(Arrival(at_s, service_s, chance.randrange(setting.hubs)))
    return found


def central_waits(requests: Sequence[Arrival], setting: Setting) -> list[float]:
    """One queue that everybody sees; the first slot to free takes the first request, one message away."""
    free_at_s = [0.0] * (setting.slots * setting.replicas)
    heapify(free_at_s)
    waits = []
    for request in requests:
        start_s = max(request.at_s, free_at_s[0])
        heapreplace(free_at_s, start_s + request.service_s)
        waits.append(start_s - request.at_s + MESSAGE_S)
    return waits


class _Queue:
    """One replica: first come, first served, in so many slots."""

    def __init__(self, slots: int) -> None:
        self._free_at_s = [0.0] * slots
        self._ends_s: list[float] = []

    def put(self, now_s: float, service_s: float) -> float:
        """Return when the request starts."""
        start_s = max(now_s, self._free_at_s[0])
        heapreplace(self._free_at_s, start_s + service_s)
        heappush(self._ends_s, start_s + service_s)
        return start_s

    def length(self, now_s: float) -> int:
        """How many it has at that moment; moments must not go back."""
        while self._ends_s and self._ends_s[0] <= now_s:
            heappop(self._ends_s)
        return len(self._ends_s)


def push_waits(requests: Sequence[Arrival], setting: Setting, policy: str, seed: int) -> list[float]:
    """The peer's policies: each request is sent at once. ``policy``: random, round-robin or least-reported."""
    chance = random.Random(seed)
    queues = [_Queue(setting.slots) for _ in range(setting.replicas)]
    reported = [0] * setting.replicas
    # Replicas report in turn, so that each report gets as old as the setting says.
    due = [(setting.report_s * number / setting.replicas, number) for number in range(setting.replicas)]
    turn = [hub * setting.replicas // setting.hubs for hub in range(setting.hubs)]
    waits = []
    for request in requests:
        while policy == "least-reported" and due[0][0] <= request.at_s:
            at_s, number = due[0]
            reported[number] = queues[number].length(at_s)
            heapreplace(due, (at_s + setting.report_s, number))
        if policy == "least-reported":
            least = min(reported)
            chosen = chance.choice([number for number, length in enumerate(reported) if length == least])
        elif policy == "round-robin":
            chosen = turn[request.hub] = (turn[request.hub] + 1) % setting.replicas
        else:
            chosen = chance.randrange(setting.replicas)
        sent_s = request.at_s + MESSAGE_S
        waits.append(queues[chosen].put(sent_s, request.service_s) - request.at_s)
    return waits
