"""Connections: which connections of clients wait for their client, since when, and which must be closed. Pure.

A connection waits for its client until a whole request has come, and while output lies unsent. Both have an end. Where
all places or all memory for unfinished bodies are taken, one that waits gives way, and if there is none, the one whose
output has lain longest: a client that keeps the hub waiting must not keep others out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

ConnT = TypeVar("ConnT", bound=Hashable)

#: A body may take a second more for each of these bytes: slow networks are no attack.
BODY_BYTES_PER_S: Final = 16 << 10
#: One whose output lies unsent for so long gives way, however steadily it takes a little of it.
_LYING_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a hub's HTTP server allows. All are above 0."""

    #: From the connection, or the first byte of a later request, to the end of the request's header.
    header_timeout_s: float = 15.0
    #: The longest pause in a body; and from the header to its end, but a second more for each BODY_BYTES_PER_S.
    body_timeout_s: float = 30.0
    #: How long a client may take nothing of what waits for it.
    send_timeout_s: float = 60.0
    max_connections: int = 8192
    #: Bytes of unfinished bodies of all connections together, and of messages that their endpoints have not taken.
    max_unfinished_bytes: int = 256 << 20
    #: Memory of what is made of the long bodies of all requests that are being served; and of answers that lie unread.
    max_held_bytes: int = 2 << 30


class Cut(Enum):
    """Why a connection is closed by the hub; the values are labels of a metric."""

    HEADER_TIMEOUT = "header_timeout"
    BODY_TIMEOUT = "body_timeout"
    SEND_TIMEOUT = "send_timeout"
    #: It waited for its client, to send or to read, and its place was needed.
    DISPLACED = "displaced"
    #: Every place is taken by a request that is being served.
    REFUSED = "refused"
    #: Its answer was the largest of those that lay unread when all of the memory for them was taken.
    UNREAD_MEMORY = "unread_memory"
    #: Its unfinished body was the largest when all of the memory for them was taken.
    BODY_MEMORY = "body_memory"
    #: What it sent is no HTTP.
    MALFORMED = "malformed"
    #: The header of its request, or what came behind its body, had more lines than any client's.
    MANY_LINES = "many_lines"
    #: Its body came in a great many chunks of a few bytes, or its WebSocket sent frames like that.
    TINY_PIECES = "tiny_pieces"
    #: Its WebSocket sent more messages in a second than anybody reads.
    TOO_FAST = "too_fast"
    #: Of what it sent within TLS, hardly anything was HTTP.
    TLS_RECORDS = "tls_records"
    #: It went on to send its body after its answer.
    ANSWERED = "answered"
    #: Its answer failed after it had begun, and has no place for an error.
    CUT_SHORT = "cut_short"


@dataclass(slots=True, eq=False)
class _Waiting:
    """One connection. Moments are monotonic."""

    #: Since when a header or a body is waited for.
    since_s: float
    #: Bytes of the unfinished body, and when the last of them came; None while a header is waited for.
    body_bytes: int | None = None
    came_s: float = 0.0
    #: Whether another ends the wait: the server between two requests of one connection, the endpoint of a WebSocket.
    is_idle: bool = False


@dataclass(slots=True, eq=False)
class _Unsent:
    """Output that lies unsent: when it was last looked at, and since when the client has taken nothing."""

    size_bytes: int
    #: What the client's host had acknowledged by then, of all that was sent.
    taken_bytes: int
    since_s: float
    #: Since when there is always some.
    lies_since_s: float


class Connections(Generic[ConnT]):
    """All connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: set[ConnT] = set()
        #: Those that wait for their client to send, the one that has waited longest first.
        self._waiting: dict[ConnT, _Waiting] = {}
        #: The one whose output has lain longest first.
        self._unsent: dict[ConnT, _Unsent] = {}
        #: The sum of ``body_bytes``.
        self.unfinished_bytes = 0
        #: Memory of whole messages that their endpoints have not taken yet, and its sum.
        self._held: dict[ConnT, int] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        return f"Connections({len(self._open)} open, {len(self._waiting)} waiting, {self.unfinished_bytes} bytes)"

    # ---- what a connection does

    def opened(
        self, conn: ConnT, now_s: float, *, is_handshake: bool = False, after: ConnT | None = None
    ) -> dict[ConnT, Cut]:
        """A client has connected; return the connections to close, which may be the new one.

        ``is_handshake``: it can't be told why it is refused before TLS stands, so one more than there are places may
        go on to that. ``after``: the handshake whose place it takes.
        """
        if after is not None:
            self.closed(after)
        self._open.add(conn)
        if len(self._open) <= self._limits.max_connections:
            self._waiting[conn] = _Waiting(now_s)
            return {}
        oldest = next(iter(self._waiting), None) or self._slowest(now_s)
        if oldest is None and not is_handshake:
            return {conn: Cut.REFUSED}
        self._waiting[conn] = _Waiting(now_s)
        if oldest is None:
            return {}
        self.answered(oldest)
        self._unsent.pop(oldest, None)
        return {oldest: Cut.DISPLACED}

    def _slowest(self, now_s: float) -> ConnT | None:
        """The one that has left output lie longest, if that is long."""
        slowest = next(iter(self._unsent), None)
        is_long = slowest is not None and now_s - self._unsent[slowest].lies_since_s >= _LYING_S
        return slowest if is_long else None

    def adopted(self, conn: ConnT, now_s: float) -> None:
        """A connection goes on under another protocol: it waits for its client, who has time but may be displaced."""
        self._open.add(conn)
        self._waiting[conn] = _Waiting(now_s, is_idle=True)

    def closed(self, conn: ConnT) -> None:
        """A connection is no more. Idempotent."""
        self._open.discard(conn)
        self._unsent.pop(conn, None)
        self.held_bytes -= self._held.pop(conn, 0)
        self.answered(conn)

    def header_awaited(self, conn: ConnT, now_s: float, *, is_idle: bool = False) -> None:
        """The next request's header is waited for; ``is_idle``: nothing of it has come."""
        waiting = self._waiting.get(conn)
        if waiting is None or waiting.body_bytes is not None or (waiting.is_idle and not is_idle):
            self.answered(conn)
            self._waiting[conn] = _Waiting(now_s, is_idle=is_idle)

    def body_came(self, conn: ConnT, size_bytes: int, now_s: float) -> dict[ConnT, Cut]:
        """The header has come, or so much more of the body, which is unfinished; return the connections to close."""
        waiting = self._waiting.get(conn)
        if waiting is None or waiting.body_bytes is None:
            self._waiting.pop(conn, None)
            waiting = self._waiting[conn] = _Waiting(now_s, 0)
        waiting.body_bytes, waiting.came_s = (waiting.body_bytes or 0) + size_bytes, now_s
        self.unfinished_bytes += size_bytes
        return self._too_large()

    def message_came(self, conn: ConnT, size_bytes: int) -> dict[ConnT, Cut]:
        """A whole message of so much memory waits for its endpoint; return the connections to close."""
        self._held[conn] = self._held.get(conn, 0) + size_bytes
        self.held_bytes += size_bytes
        return self._too_large()

    def message_taken(self, conn: ConnT, size_bytes: int) -> None:
        """The endpoint of a connection has taken such a message."""
        left_bytes = self._held.pop(conn, 0) - size_bytes
        # None are left of one that was given up.
        if left_bytes >= 0:
            self.held_bytes -= size_bytes
        if left_bytes > 0:
            self._held[conn] = left_bytes

    def _too_large(self) -> dict[ConnT, Cut]:
        cut: dict[ConnT, Cut] = {}
        while self.unfinished_bytes + self.held_bytes > self._limits.max_unfinished_bytes:
            largest = max({**self._waiting, **self._held}, key=self._memory_of)
            self.held_bytes -= self._held.pop(largest, 0)
            self.answered(largest)
            cut[largest] = Cut.BODY_MEMORY
        return cut

    def _memory_of(self, conn: ConnT) -> int:
        waiting = self._waiting.get(conn)
        return (0 if waiting is None else waiting.body_bytes or 0) + self._held.get(conn, 0)

    def all(self) -> list[ConnT]:
        """Every connection."""
        return list(self._open)

    def waiting(self) -> list[ConnT]:
        """Those that wait for their client to send."""
        return list(self._waiting)

    def answered(self, conn: ConnT) -> None:
        """Nothing is waited for from the client: its request is whole, or it is being closed. Idempotent."""
        waiting = self._waiting.pop(conn, None)
        if waiting is not None:
            self.unfinished_bytes -= waiting.body_bytes or 0

    # ---- what time does

    def overdue(
        self, now_s: float, unsent_bytes: Callable[[ConnT], int], taken_bytes: Callable[[ConnT], int] = lambda _conn: 0
    ) -> dict[ConnT, Cut]:
        """Return the connections that have kept the hub waiting too long. To be called about once a second.

        ``unsent_bytes`` is what waits in this process. Megabytes may lie in front of it in the kernel, so that it
        becomes less only now and then, however steadily the client reads: ``taken_bytes`` grows with each read.
        """
        limits, cut = self._limits, dict[ConnT, Cut]()
        for conn, waiting in self._waiting.items():
            waited_s = now_s - waiting.since_s
            if waiting.body_bytes is not None:
                is_slow = waited_s > limits.body_timeout_s + waiting.body_bytes / BODY_BYTES_PER_S
                if is_slow or now_s - waiting.came_s > limits.body_timeout_s:
                    cut[conn] = Cut.BODY_TIMEOUT
            elif waited_s > limits.header_timeout_s and not waiting.is_idle:
                cut[conn] = Cut.HEADER_TIMEOUT
        for conn in self._open:
            if not (size_bytes := unsent_bytes(conn)):
                self._unsent.pop(conn, None)
            elif self._is_unread(conn, size_bytes, taken_bytes(conn), now_s):
                cut[conn] = Cut.SEND_TIMEOUT
        for conn in self._unread_too_large(now_s):
            cut.setdefault(conn, Cut.UNREAD_MEMORY)
        for conn in cut:
            self.answered(conn)
        return cut

    def _is_unread(self, conn: ConnT, size_bytes: int, taken_bytes: int, now_s: float) -> bool:
        """Whether a client has taken nothing for too long of what waits for it."""
        unsent = self._unsent.get(conn)
        if unsent is None or size_bytes < unsent.size_bytes or taken_bytes > unsent.taken_bytes:
            lies_since_s = now_s if unsent is None else unsent.lies_since_s
            self._unsent[conn] = _Unsent(size_bytes, taken_bytes, now_s, lies_since_s)
            return False
        unsent.size_bytes = size_bytes
        return now_s - unsent.since_s > self._limits.send_timeout_s

    def _unread_too_large(self, now_s: float) -> list[ConnT]:
        """Those that have left most unread, for a while, if all together have left more than there is memory for."""
        excess = sum(unsent.size_bytes for unsent in self._unsent.values()) - self._limits.max_held_bytes
        if excess <= 0:
            return []
        lying = [conn for conn, unsent in self._unsent.items() if now_s - unsent.lies_since_s >= _LYING_S]
        lying.sort(key=lambda each: -self._unsent[each].size_bytes)
        found: list[ConnT] = []
        while lying and excess > 0:
            found.append(lying.pop(0))
            excess -= self._unsent[found[-1]].size_bytes
        return found
