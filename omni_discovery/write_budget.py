"""The write budget: all replicas of a namespace together publish their load at most so often."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Final

from omni_discovery.clock import Clock
from omni_discovery.errors import RegistryError
from omni_discovery.kv import KVStore

logger = logging.getLogger(__name__)

#: Loads written per second, by all replicas of a namespace together.
WRITES_PER_S: Final = 200.0
#: Counts made per second, by all of them together; and the shortest pause between two of one replica.
_COUNTS_PER_S: Final = 20.0
_LEAST_PAUSE_S: Final = 10.0


class LoadPace:
    """When one replica may write its load. ``base_s`` is the shortest interval, however few replicas there are."""

    def __init__(self, base_s: float, writes_per_s: float = WRITES_PER_S) -> None:
        self._base_s = base_s
        self._writes_per_s = writes_per_s
        #: Seconds from one write to the next.
        self.interval_s = base_s

    def learn(self, replicas: int) -> None:
        """So many replicas share the budget."""
        self.interval_s = max(self._base_s, replicas / self._writes_per_s)

    def next_s(self, written_at_s: float, now_s: float, chance: float) -> float:
        """When a change of ``now_s`` may be written; ``chance`` is a number from 0 to 1, drawn once for the change."""
        moment_s = written_at_s + self.interval_s
        if self.interval_s == self._base_s:
            return moment_s
        # A burst may hit a thousand replicas that were all silent for long.
        return max(moment_s, now_s + chance * self.interval_s)


async def follow_population(
    kv: KVStore, prefix: str, pace: LoadPace, clock: Clock, jitter: Callable[[], float] = random.random
) -> None:
    """Count the replicas under ``prefix`` every so often and tell ``pace``. Ends only by cancellation."""
    replicas = 0
    while True:
        try:
            replicas = (await kv.summary(prefix)).count
            pace.learn(replicas)
        except RegistryError as error:
            logger.debug("write_budget.not_counted reason=%s", error)
        except Exception:
            logger.exception("write_budget.failed")
        pause_s = max(_LEAST_PAUSE_S, replicas / _COUNTS_PER_S)
        await clock.sleep(pause_s * (0.5 + jitter()))
