"""ProducerRoom: how much of this side's memory is being filled by each producer, and who has to wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from stage_runtime.connectors.errors import TransferTimeoutError

_LOOK_EVERY_S: Final = 0.05


class ProducerRoom:
    """Memory that is read into, by producer: one that never answers must not take it from others. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._has_room = threading.Condition()
        self._taken_bytes: dict[str, int] = {}

    def take(
        self, producer: str, size_bytes: int, most_bytes: int, deadline_s: float, check: Callable[[], None]
    ) -> None:
        """Take so much for a producer, which may have ``most_bytes``; wait for it behind the producer's others.

        ``deadline_s`` is a moment of the clock. Raise TransferTimeoutError at that, or what ``check`` raises, which is
        called meanwhile; else ``give_back`` it once.
        """
        with self._has_room:
            while (taken_bytes := self._taken_bytes.get(producer, 0)) and taken_bytes + size_bytes > most_bytes:
                left_s = deadline_s - self._clock()
                if left_s <= 0:
                    raise TransferTimeoutError(
                        f"{producer}: earlier reads there take {taken_bytes} of {most_bytes} bytes, and do not end"
                    )
                self._has_room.wait(min(left_s, _LOOK_EVERY_S))
                check()
            self._taken_bytes[producer] = taken_bytes + size_bytes

    def give_back(self, producer: str, size_bytes: int) -> None:
        """A read has ended, or was not begun."""
        with self._has_room:
            left_bytes = self._taken_bytes.pop(producer, 0) - size_bytes
            if left_bytes > 0:
                self._taken_bytes[producer] = left_bytes
            self._has_room.notify_all()
