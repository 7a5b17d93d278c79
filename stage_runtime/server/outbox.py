"""Send queues, one bounded queue per connection, so that a slow or absent hub affects no other hub.

Messages wait until ``flush_all``, and leave in as few ZMQ multiparts as their sizes allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from omni_discovery import wire

Frames = Sequence[bytes]

#: A batch is closed when it has grown to this, so that the hub need not wait long for its first message.
_BATCH_BYTES: Final = 256 << 10
_REMEMBERED_S: Final = 10.0


class SendResult(Enum):
    """The result of one attempt to send."""

    SENT = "sent"
    FULL = "full"
    GONE = "gone"


@dataclass(slots=True)
class _Queue:
    waiting: deque[tuple[bytes, bytes | None]] = field(default_factory=deque)
    size_bytes: int = 0
    #: When the connection was first found gone; None while it is there.
    gone_since_s: float | None = None


class Outbox:
    """The send queues of one socket, by connection. Sends in order, and keeps what can't be sent now."""

    def __init__(self, send: Callable[[str, Frames], SendResult], max_messages: int, max_bytes: int) -> None:
        self._send = send
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._queues: dict[str, _Queue] = {}
        #: When something was last sent on each connection.
        self._sent_at_s: dict[str, float] = {}
        #: How many messages wait, over all connections. May be read by any thread.
        self.waiting = 0
        #: Connections whose queues have grown since the last flush and are not known to be blocked, in that order.
        self._fresh: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"Outbox(connections={len(self._queues)}, waiting={self.waiting})"

    def push_message(self, name: str, head: bytes, attachment: bytes | None = None) -> bool:
        """Queue one message. Return False if the connection's queue is full; the message is then dropped."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = _Queue()
        size_bytes = len(head) if attachment is None else len(head) + len(attachment)
        if len(queue.waiting) >= self._max_messages or queue.size_bytes + size_bytes > self._max_bytes:
            return False
        if not queue.waiting:
            self._fresh[name] = None
        queue.waiting.append((head, attachment))
        queue.size_bytes += size_bytes
        self.waiting += 1
        return True

    def flush_all(self, now_s: float) -> None:
        """Send what was queued since the last flush."""
        while self._fresh:
            fresh, self._fresh = self._fresh, {}
            for name in fresh:
                self.flush_peer(name, now_s)

    def flush_peer(self, name: str, now_s: float) -> None:
        """Send what waits for one connection, until its send queue in ZMQ is full."""
        queue = self._queues.get(name)
        while queue is not None and queue.waiting:
            count, frames = _next_frames(queue.waiting)
            result = self._send(name, frames)
            if result is SendResult.GONE:
                queue.gone_since_s = now_s if queue.gone_since_s is None else queue.gone_since_s
                return
            queue.gone_since_s = None
            if result is SendResult.FULL:
                return
            self._sent_at_s[name] = now_s
            self.waiting -= count
            if count == len(queue.waiting):
                break
            for _ in range(count):
                head, attachment = queue.waiting.popleft()
                queue.size_bytes -= len(head) + len(attachment or b"")
        if queue is not None:
            del self._queues[name]

    def retry_all(self, now_s: float) -> None:
        """Try to send everything that waits; called by a timer, for connections that were blocked or gone."""
        self._sent_at_s = {name: at_s for name, at_s in self._sent_at_s.items() if at_s > now_s - _REMEMBERED_S}
        for name in list(self._queues):
            self.flush_peer(name, now_s)

    def has_waiting(self, name: str) -> bool:
        """Whether any message waits for one connection."""
        return name in self._queues

    def was_sent_since(self, name: str, since_s: float) -> bool:
        """Whether anything was sent on one connection since that moment, which is at most ten seconds ago."""
        return self._sent_at_s.get(name, float("-inf")) >= since_s

    def unreachable_peers(self, grace_s: float, now_s: float) -> list[str]:
        """The connections that have been gone for longer than ``grace_s`` seconds."""
        return [
            name
            for name, queue in self._queues.items()
            if queue.gone_since_s is not None and now_s - queue.gone_since_s > grace_s
        ]

    def drop_peer(self, name: str) -> int:
        """Drop what waits for one connection. Return the number of messages."""
        queue = self._queues.pop(name, None)
        self._sent_at_s.pop(name, None)
        self._fresh.pop(name, None)
        dropped = 0 if queue is None else len(queue.waiting)
        self.waiting -= dropped
        return dropped

    def waiting_peers(self) -> list[str]:
        """The connections that messages wait for."""
        return list(self._queues)


def _next_frames(waiting: deque[tuple[bytes, bytes | None]]) -> tuple[int, Frames]:
    """How many messages from the front of the queue make one multipart, and its frames."""
    head, attachment = waiting[0]
    if attachment is not None:
        return 1, (head, attachment)
    if len(waiting) == 1:
        return 1, (head,)
    heads: list[bytes] = []
    size_bytes = 0
    for head, attachment in waiting:
        size_bytes += len(head)
        if attachment is not None or (heads and size_bytes > _BATCH_BYTES) or len(heads) == wire.MAX_BATCH:
            break
        heads.append(head)
    return len(heads), (wire.join(heads),)
