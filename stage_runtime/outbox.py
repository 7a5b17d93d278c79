"""Frames that wait for a hub: one bounded queue per hub, so that a slow or absent one costs only itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

Frames = Sequence[bytes]


class SendResult(Enum):
    """What became of one attempt to send."""

    SENT = "sent"
    FULL = "full"
    GONE = "gone"


@dataclass(slots=True)
class _Queue:
    waiting: deque[Frames] = field(default_factory=deque)
    size_bytes: int = 0
    #: When the hub was first found unreachable; None while it can be reached.
    gone_since_s: float | None = None


class Outbox:
    """Sends in order, keeps what can't be sent now, and says which hubs have fallen too far behind."""

    def __init__(self, send: Callable[[str, Frames], SendResult], max_messages: int, max_bytes: int) -> None:
        self._send = send
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._queues: dict[str, _Queue] = {}

    def push(self, hub_id: str, frames: Frames, now_s: float) -> bool:
        """Send, or keep for later; False if the hub's queue is full, and the frames are dropped."""
        queue = self._queues.setdefault(hub_id, _Queue())
        size_bytes = sum(len(frame) for frame in frames)
        if len(queue.waiting) >= self._max_messages or queue.size_bytes + size_bytes > self._max_bytes:
            return False
        queue.waiting.append(frames)
        queue.size_bytes += size_bytes
        if len(queue.waiting) == 1:
            self.flush(hub_id, now_s)
        return True

    def flush(self, hub_id: str, now_s: float) -> None:
        """Send what waits for one hub, as far as it goes."""
        queue = self._queues.get(hub_id)
        while queue is not None and queue.waiting:
            result = self._send(hub_id, queue.waiting[0])
            if result is SendResult.GONE:
                queue.gone_since_s = now_s if queue.gone_since_s is None else queue.gone_since_s
                return
            queue.gone_since_s = None
            if result is SendResult.FULL:
                return
            queue.size_bytes -= sum(len(frame) for frame in queue.waiting.popleft())
        if queue is not None:
            del self._queues[hub_id]

    def retry(self, now_s: float) -> None:
        """Try all that waits again."""
        for hub_id in list(self._queues):
            self.flush(hub_id, now_s)

    def waiting(self) -> int:
        """How many messages wait, over all hubs."""
        return sum(len(queue.waiting) for queue in self._queues.values())

    def has_waiting(self, hub_id: str) -> bool:
        """Whether anything waits for one hub."""
        return hub_id in self._queues

    def gone_for(self, grace_s: float, now_s: float) -> list[str]:
        """The hubs that could not be reached for longer than ``grace_s``."""
        return [
            hub_id
            for hub_id, queue in self._queues.items()
            if queue.gone_since_s is not None and now_s - queue.gone_since_s > grace_s
        ]

    def drop(self, hub_id: str) -> int:
        """Forget what waits for one hub; say how many messages that were."""
        queue = self._queues.pop(hub_id, None)
        return 0 if queue is None else len(queue.waiting)
