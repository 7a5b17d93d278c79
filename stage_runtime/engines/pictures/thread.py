"""The thread that a pipeline runs in, so that the engine's own thread can take aborts while a batch is drawn.

One call of a pipeline draws all steps of a batch. After each step a callback reports the progress, and ends the call if
every request of the batch was aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

from omni_discovery.wire import FailureKind

_Item = TypeVar("_Item")

#: How long ``close`` waits for the step that the pipeline is in.
_CLOSE_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Generic[_Item]):
    """Pictures that are drawn in one call, in order."""

    items: Sequence[_Item]
    #: Set by the engine's thread: stop after this step.
    is_unwanted: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class UnfinishedPicture:
    """The one with this number, from 0, of the picture at this place of the batch."""

    place: int
    number: int
    png: bytes


@dataclass(frozen=True, slots=True)
class BatchStepped:
    """``steps`` steps of the batch are done."""

    steps: int
    unfinished: Sequence[UnfinishedPicture] = ()


@dataclass(frozen=True, slots=True)
class BatchDrawn:
    """The batch is done, in ``steps`` steps: one PNG for each picture, in order."""

    pngs: Sequence[bytes]
    steps: int


@dataclass(frozen=True, slots=True)
class BatchStopped:
    """The batch was given up because all its requests were aborted."""


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The pipeline raised. ``is_lost``: the device does not work any more, so nothing can be drawn by this process."""

    kind: FailureKind
    reason: str
    is_lost: bool = False


Event = BatchStepped | BatchDrawn | BatchStopped | BatchFailed


class UnwantedError(Exception):
    """Raised through the pipeline's call, between two steps."""


class OnStep(Protocol):
    """The second argument of Draw."""

    def __call__(self, steps: int, unfinished: Sequence[UnfinishedPicture] = ()) -> None:
        """So many steps are done, and this is shown of the pictures. May raise UnwantedError."""


#: Draws a batch, calling its second argument with the number of steps done after each.
Draw = Callable[[Sequence[_Item], OnStep], Sequence[bytes]]
#: Whether the device does not work any more; called after the pipeline raised.
IsLost = Callable[[], bool]


class PipelineThread(Generic[_Item]):
    """Draws one batch after the other. ``start`` and ``close`` are for the thread that made it."""

    def __init__(self, draw: Draw[_Item], is_lost: IsLost) -> None:
        self._draw = draw
        self._is_lost = is_lost
        self._batches: SimpleQueue[Batch[_Item] | None] = SimpleQueue()
        #: Events of the batch being drawn; the last one is no BatchStepped. Read by the thread that made this object.
        self._events: SimpleQueue[Event] = SimpleQueue()
        # A daemon: a device that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="pictures", daemon=True)
        self._thread.start()

    def start(self, batch: Batch[_Item]) -> None:
        """Draw a batch. To be called only when the last one has ended."""
        self._batches.put(batch)

    def events(self, timeout_s: float) -> list[Event]:
        """The new events; waits up to ``timeout_s`` for the first one."""
        found: list[Event] = []
        try:
            found.append(self._events.get(timeout=timeout_s))
            while True:
                found.append(self._events.get_nowait())
        except Empty:
            return found

    def close(self) -> None:
        """End the thread after the step that it is in; waits 5 s at most. Idempotent."""
        self._batches.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            self._events.put(self._end_of(batch))

    def _end_of(self, batch: Batch[_Item]) -> Event:
        steps_done = 0

        def report_step(steps: int, unfinished: Sequence[UnfinishedPicture] = ()) -> None:
            nonlocal steps_done
            steps_done = steps
            self._events.put(BatchStepped(steps, unfinished))
            if batch.is_unwanted.is_set():
                raise UnwantedError

        try:
            return (
                BatchStopped()
                if batch.is_unwanted.is_set()
                else BatchDrawn(self._draw(batch.items, report_step), steps_done)
            )
        except UnwantedError:
            return BatchStopped()
        except Exception as error:  # noqa: BLE001 - whatever a pipeline raises is its batch's end, not the thread's
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            # A ValueError before the first step means the arguments.
            is_refusal = isinstance(error, ValueError) and not steps_done
        # Checked outside the handler: the frames of the error hold the batch's tensors.
        is_lost = self._is_lost()
        if is_refusal:
            return BatchFailed(FailureKind.INVALID, f"the pipeline refuses this: {reason}", is_lost)
        return BatchFailed(FailureKind.ENGINE, f"the pipeline raised {reason}", is_lost)
