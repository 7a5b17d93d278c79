"""The thread that a pipeline runs in, so that the engine's own thread hears aborts while a picture is drawn.

A pipeline's call draws all steps in one go. Between two of them it says here how far it is, and hears whether anybody
still wants the picture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

from omni_discovery.wire import FailureKind

_Item = TypeVar("_Item")

#: How long a pipeline may take for the step that it is in, when the replica ends.
_CLOSE_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Generic[_Item]):
    """Pictures that are drawn together, in order."""

    items: Sequence[_Item]
    #: Set by the engine's thread: stop at the next step.
    is_unwanted: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class BatchStepped:
    """So many steps are done."""

    steps: int


@dataclass(frozen=True, slots=True)
class BatchDrawn:
    """The batch is done, in so many steps: a PNG each."""

    pngs: Sequence[bytes]
    steps: int


@dataclass(frozen=True, slots=True)
class BatchStopped:
    """Nobody wanted it any more."""


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The pipeline raised. ``is_lost``: and the device with it, so that nothing can be drawn here any more."""

    kind: FailureKind
    reason: str
    is_lost: bool = False


Event = BatchStepped | BatchDrawn | BatchStopped | BatchFailed


class UnwantedError(Exception):
    """Raised through the pipeline's call, between two steps."""


#: Draws a batch; calls what it is given after each step, with how many are done. That may raise UnwantedError.
Draw = Callable[[Sequence[_Item], Callable[[int], None]], Sequence[bytes]]
#: Says whether the device still works, after something was raised.
IsLost = Callable[[], bool]


class PipelineThread(Generic[_Item]):
    """Draws one batch after the other. ``start`` and ``close`` are for the thread that made it."""

    def __init__(self, draw: Draw[_Item], is_lost: IsLost) -> None:
        self._draw = draw
        self._is_lost = is_lost
        self._batches: SimpleQueue[Batch[_Item] | None] = SimpleQueue()
        #: What becomes of the batch under way; the last is no BatchStepped. Read by the thread that made this.
        self._events: SimpleQueue[Event] = SimpleQueue()
        # Not waited for at the end of the process: a device that hangs must not keep it.
        self._thread = threading.Thread(target=self._run, name="diffusers", daemon=True)
        self._thread.start()

    def start(self, batch: Batch[_Item]) -> None:
        """Draw this; only when the one before has ended."""
        self._batches.put(batch)

    def events(self, timeout_s: float) -> list[Event]:
        """What has happened since, waiting so long for the first of it."""
        found: list[Event] = []
        try:
            found.append(self._events.get(timeout=timeout_s))
            while True:
                found.append(self._events.get_nowait())
        except Empty:
            return found

    def close(self) -> None:
        """End the thread, after the step that it is in. Idempotent."""
        self._batches.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            self._events.put(self._end_of(batch))

    def _end_of(self, batch: Batch[_Item]) -> Event:
        steps_done = 0

        def heard(steps: int) -> None:
            nonlocal steps_done
            steps_done = steps
            self._events.put(BatchStepped(steps))
            if batch.is_unwanted.is_set():
                raise UnwantedError

        try:
            return (
                BatchStopped() if batch.is_unwanted.is_set() else BatchDrawn(self._draw(batch.items, heard), steps_done)
            )
        except UnwantedError:
            return BatchStopped()
        except Exception as error:  # noqa: BLE001 - whatever a pipeline raises is its batch's end, not the thread's
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            # What a pipeline refuses before its first step is what it was given.
            is_refusal = isinstance(error, ValueError) and not steps_done
        # Looked at when the error is gone: its frames hold the batch's tensors.
        is_lost = self._is_lost()
        if is_refusal:
            return BatchFailed(FailureKind.INVALID, f"the pipeline refuses this: {reason}", is_lost)
        return BatchFailed(FailureKind.ENGINE, f"the pipeline raised {reason}", is_lost)
