"""Draws pictures, batch by batch, in a thread of the pipeline's own.

Requests for similar pictures are drawn as one batch, from its first step to its last; requests that come meanwhile wait
for the next batch. The pictures of a failed batch are drawn again one by one, so that only the request that caused the
failure fails.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import EngineOutput
from stage_runtime.engines.pictures.batches import BatchQueue, Waiting
from stage_runtime.engines.pictures.request import Embeds, Picture
from stage_runtime.engines.pictures.thread import (
    Batch,
    BatchDrawn,
    BatchFailed,
    BatchStepped,
    BatchStopped,
    Draw,
    Event,
    IsLost,
    PipelineThread,
)

logger = logging.getLogger(__name__)

#: How long ``step`` waits for an event of the pipeline; new requests and aborts wait no longer than this.
_LISTEN_S: Final = 0.02


class PictureDrawer:
    """One pipeline, drawing one batch of at most ``capacity`` pictures at a time. For the engine's own thread."""

    def __init__(self, capacity: int, draw: Draw[Picture], is_lost: IsLost) -> None:
        self._capacity = capacity
        self._thread = PipelineThread(draw, is_lost)
        self._queue: BatchQueue[Picture] = BatchQueue()
        self._batch: Batch[Picture] | None = None
        #: The requests of the batch; None in the place of one that was aborted.
        self._members: list[Waiting[Picture] | None] = []
        self._moved_at_s = 0.0
        self._due: list[EngineOutput] = []

    def add(self, key: str, picture: Picture, priority: int) -> None:
        """See Engine."""
        running = {each.key for each in self._members if each is not None}
        if key in running or key in self._queue:
            raise InvalidRequestError("the request is running already")
        self._queue.add(key, picture, picture.alike, priority)

    def abort(self, key: str) -> None:
        """See Engine. The batch goes on for its other requests; without any, it ends after its present step."""
        is_known = self._queue.remove(key)
        for place, member in enumerate(self._members):
            if member is not None and member.key == key:
                self._members[place], is_known = None, True
        if self._batch is not None and not any(self._members):
            self._batch.is_unwanted.set()
        if is_known:
            self._due.append(EngineOutput(key, finish_reason="abort"))

    def has_unfinished(self) -> bool:
        """See Engine."""
        return bool(self._due or self._queue) or self._batch is not None

    def moved_at_s(self) -> float:
        """See ThreadedEngine."""
        return time.monotonic() if self._batch is None else self._moved_at_s

    def step(self) -> list[EngineOutput]:
        """See Engine. Waits up to 20 ms for events of the pipeline."""
        outputs, self._due = self._due, []
        self._start_batch()
        for event in self._thread.events(0.0 if outputs or self._batch is None else _LISTEN_S):
            self._moved_at_s = time.monotonic()
            outputs += self._outputs_of(event)
        self._start_batch()
        return outputs

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._queue.clear()
        if self._batch is not None:
            self._batch.is_unwanted.set()
        self._thread.close()

    def _start_batch(self) -> None:
        """Start the next batch if none is being drawn."""
        if self._batch is None and len(self._queue):
            members = self._queue.pop_batch(self._capacity)
            self._members = [*members]
            self._batch, self._moved_at_s = Batch([member.item for member in members]), time.monotonic()
            self._thread.start(self._batch)

    def _outputs_of(self, event: Event) -> list[EngineOutput]:
        """The outputs of an event, for the requests that were not aborted. Raise RuntimeError if the device is lost."""
        if isinstance(event, BatchStepped):
            usage = {"steps": event.steps}
            stepped = [EngineOutput(member.key, usage=usage) for member in self._members if member is not None]
            return stepped + self._unfinished(event)
        members, self._members, self._batch = self._members, [], None
        present = [member for member in members if member is not None]
        match event:
            case BatchDrawn(pngs, steps):
                return [
                    EngineOutput(member.key, image_png=png, finish_reason="stop", usage={"steps": steps})
                    for member, png in zip(members, pngs, strict=True)
                    if member is not None
                ]
            case BatchStopped():
                return []
            case BatchFailed(is_lost=True):
                raise RuntimeError(f"{event.reason}; the device does not work any more")
            case BatchFailed() if len(members) > 1:
                # One picture, or their number, was too much; it may have been one that was aborted.
                logger.warning("pictures.batch_failed pictures=%d reason=%s", len(members), event.reason)
                self._queue.requeue_alone(present)
                return []
            case BatchFailed():
                return [EngineOutput(member.key, error=(event.kind, _reason(event, member))) for member in present]

    def _unfinished(self, event: BatchStepped) -> list[EngineOutput]:
        return [
            EngineOutput(member.key, image_png=each.png, partial_image=each.number)
            for each in event.unfinished
            if (member := self._members[each.place]) is not None
        ]


def _reason(event: BatchFailed, member: Waiting[Picture]) -> str:
    prompt = member.item.prompt
    shape = f", drawing embeddings of shape {tuple(prompt.rows.shape)}" if isinstance(prompt, Embeds) else ""
    return event.reason + shape
