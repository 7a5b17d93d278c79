"""Send queues, one bounded queue per connection, so that a slow or absent hub affects no other hub.

Messages wait until ``flush_all``, and leave in as few ZMQ multiparts as their sizes allow.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from omni_discovery import wire

Frames = Sequence[bytes]
#: A message's head, its attachment, and the request whose output it is; None for any other message.
_Message = tuple[bytes, bytes | None, object | None]

#: A batch is closed when it has grown to this, so that the hub need not wait long for its first message. By the number
#: of batches, ZMQ bounds what is on its way.
_BATCH_BYTES: Final = 256 << 10
_BATCH_MESSAGES: Final = 128
_REMEMBERED_S: Final = 10.0
#: How much of a queue's bounds messages that are no output may fill.
_RESERVE: Final = 1.125


class SendResult(Enum):
    """The result of one attempt to send."""

    SENT = "sent"
    FULL = "full"
    GONE = "gone"


@dataclass(slots=True)
class _Queue:
    waiting: deque[_Message] = field(default_factory=deque)
    size_bytes: int = 0
    #: When the connection was first found gone; None while it is there.
    gone_since_s: float | None = None
    #: Since when nothing could be sent, because the hub reads nothing; None while it reads.
    blocked_since_s: float | None = None


class Outbox:
    """The send queues of one socket, by connection. Sends in order, and keeps what can't be sent now.

    Outputs of requests may fill the bounds of a queue. Other messages have an eighth more, so that a hub which is
    behind with outputs still gets them.
    """

    def __init__(self, send: Callable[[str, Frames], SendResult], max_messages: int, max_bytes: int) -> None:
        self._send = send
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._queues: dict[str, _Queue] = {}
        #: When something was last sent on each connection.
        self._sent_at_s: dict[str, float] = {}
        #: How many messages wait, over all connections. May be read by any thread.
        self.waiting = 0
        #: Connections whose hub has not read what was sent: ZMQ takes no more.
        self.blocked: set[str] = set()
        #: Connections with half of what may wait for them, until no more than a quarter waits.
        self.behind: set[str] = set()
        #: Connections whose queues have grown since the last flush and are not known to be blocked, in that order.
        self._fresh: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"Outbox(connections={len(self._queues)}, waiting={self.waiting})"

    def push_message(
        self, name: str, head: bytes, attachment: bytes | None = None, request: object | None = None
    ) -> bool:
        """Queue one message; ``request`` is the one whose output it is.

        Return False if the connection's queue is full; the message is then dropped.
        """
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = _Queue()
        size_bytes = len(head) if attachment is None else len(head) + len(attachment)
        count, waiting_bytes = len(queue.waiting) + 1, queue.size_bytes + size_bytes
        if count > self._max_messages or waiting_bytes > self._max_bytes:
            is_reserved = count <= self._max_messages * _RESERVE and waiting_bytes <= self._max_bytes * _RESERVE
            if request is not None or not is_reserved:
                return False
        if not queue.waiting:
            self._fresh[name] = None
        queue.waiting.append((head, attachment, request))
        queue.size_bytes = waiting_bytes
        self.waiting += 1
        if count * 2 >= self._max_messages or waiting_bytes * 2 >= self._max_bytes:
            self.behind.add(name)
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
                self.blocked.discard(name)
                queue.gone_since_s = now_s if queue.gone_since_s is None else queue.gone_since_s
                return
            queue.gone_since_s = None
            if result is SendResult.FULL:
                queue.blocked_since_s = now_s if queue.blocked_since_s is None else queue.blocked_since_s
                self.blocked.add(name)
                return
            queue.blocked_since_s = None
            self.blocked.discard(name)
            self._sent_at_s[name] = now_s
            self.waiting -= count
            if count == len(queue.waiting):
                break
            for _ in range(count):
                head, attachment, _ = queue.waiting.popleft()
                queue.size_bytes -= len(head) + len(attachment or b"")
            self._check_behind(name, queue)
        if queue is not None:
            del self._queues[name]
            self.behind.discard(name)

    def _check_behind(self, name: str, queue: _Queue) -> None:
        if len(queue.waiting) * 4 <= self._max_messages and queue.size_bytes * 4 <= self._max_bytes:
            self.behind.discard(name)

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

    def blocked_peers(self, grace_s: float, now_s: float) -> list[str]:
        """The connections that could be sent nothing for longer than ``grace_s`` seconds though they stand."""
        return [
            name
            for name, queue in self._queues.items()
            if queue.blocked_since_s is not None and now_s - queue.blocked_since_s > grace_s
        ]

    def drop_largest(self, name: str) -> object | None:
        """Drop what waits of the request that takes most of one connection's queue; return it, None if there is none.

        A message of one request may also be as large as thousands of another: count and size count alike.
        """
        queue = self._queues.get(name)
        if queue is None:
            return None
        shares: Counter[object] = Counter()
        for head, attachment, request in queue.waiting:
            if request is not None:
                size_bytes = len(head) + len(attachment or b"")
                shares[request] += self._max_bytes + size_bytes * self._max_messages
        if not shares:
            return None
        ((largest, _),) = shares.most_common(1)
        kept = deque(message for message in queue.waiting if message[2] is not largest)
        self.waiting -= len(queue.waiting) - len(kept)
        queue.waiting = kept
        queue.size_bytes = sum(len(head) + len(attachment or b"") for head, attachment, _ in kept)
        self._check_behind(name, queue)
        return largest

    def drop_peer(self, name: str) -> int:
        """Drop what waits for one connection. Return the number of messages."""
        self.behind.discard(name)
        self.blocked.discard(name)
        queue = self._queues.pop(name, None)
        self._sent_at_s.pop(name, None)
        self._fresh.pop(name, None)
        dropped = 0 if queue is None else len(queue.waiting)
        self.waiting -= dropped
        return dropped

    def waiting_peers(self) -> list[str]:
        """The connections that messages wait for."""
        return list(self._queues)


def _next_frames(waiting: deque[_Message]) -> tuple[int, Frames]:
    """How many messages from the front of the queue make one multipart, and its frames."""
    head, attachment, _ = waiting[0]
    if attachment is not None:
        return 1, (head, attachment)
    if len(waiting) == 1:
        return 1, (head,)
    heads: list[bytes] = []
    size_bytes = 0
    for head, attachment, _ in waiting:
        size_bytes += len(head)
        if attachment is not None or (heads and size_bytes > _BATCH_BYTES) or len(heads) == _BATCH_MESSAGES:
            break
        heads.append(head)
    return len(heads), (wire.join(heads),)
