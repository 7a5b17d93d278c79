"""RingCollector: when Python looks for rings of objects that nobody uses, in a hub."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final

#: Objects that may come beyond those that go before Python itself looks; its own number is 700. A ring of a request
#: that was missed has some 130.
_OBJECTS_BETWEEN_LOOKS: Final = 20_000
#: How often to look where fewer come, and how many there have to be. A failed call to etcd leaves a ring that holds
#: some KB of gRPC's: after an outage of ten seconds these are hundreds of KB.
_EVERY_S: Final = 10.0
_FEW: Final = 1000
#: Every so many looks go through the older objects, too, as Python's own do.
_OLDER: Final = 10


class RingCollector:
    """Makes looks rare, since each holds up every request, and requests leave no rings behind. Used by one thread.

    (``tests/integration/hub/test_memory.py`` shows that they leave none.)
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._next_s = 0.0
        self._looks = 0

    def settle(self) -> None:
        """Spare the looks what can't be a ring: all that was made by now stays to the end.

        To look through it takes half a second with vLLM's modules.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(_OBJECTS_BETWEEN_LOOKS, _OLDER, _OLDER)

    def look(self) -> None:
        """Look where one is due: it takes a millisecond or two, of the young objects nearly always."""
        now_s = self._now_s()
        if now_s < self._next_s or gc.get_count()[0] < _FEW:
            return
        self._next_s = now_s + _EVERY_S
        self._looks += 1
        generation = 2 if self._looks % _OLDER**2 == 0 else 1 if self._looks % _OLDER == 0 else 0
        gc.collect(generation)
