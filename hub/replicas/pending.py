"""Messages to one replica that it has not acknowledged, and the cause if a listed replica has no session.

PendingDispatches reports dispatches that are neither accepted nor rejected in time, PendingAborts keeps aborts for
repetition, DispatchBatcher sends together what need not leave alone, and ConnectDiagnostics warns once about a replica
without a session, with the cause as far as the hub can see it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from hub.config import HubConfig, SendFailedError
from omni_discovery import wire
from omni_discovery.log_once import LogOnce

if TYPE_CHECKING:
    from hub.replicas.sockets import DealerConnection
    from omni_discovery.records.schema import ReplicaInfo

logger = logging.getLogger(__name__)

_Key = tuple[str, int]


class PendingDispatches:
    """Dispatches without an answer. ``on_silence(request_id, attempt, is_final)`` is called until one comes.

    First after ``accept_timeout_s``, then each time after twice as long, when another replica might take the request;
    then, with ``is_final``, after ``accept_limit_s``, when the dispatch is given up. Lives on the loop.
    """

    def __init__(self, config: HubConfig, on_silence: Callable[[str, int, bool], None]) -> None:
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        #: When each pending dispatch was sent, on the loop's clock.
        self._sent_at_s: dict[_Key, float] = {}
        #: One for each time at which a dispatch is looked at, the last one at the limit.
        self._looks: list[DeadlineQueue] = []
        look_s = config.accept_timeout_s
        while look_s < config.accept_limit_s:
            self._looks.append(DeadlineQueue(look_s, partial(self._report_silence, len(self._looks))))
            look_s *= 2
        self._looks.append(DeadlineQueue(config.accept_limit_s, partial(self._report_silence, len(self._looks))))

    @property
    def are_pending(self) -> bool:
        """Whether any dispatch has no answer yet."""
        return bool(self._sent_at_s)

    def add_dispatch(self, key: _Key) -> None:
        """A dispatch was sent."""
        now_s = self._loop.time()
        self._sent_at_s[key] = now_s
        self._looks[0].push_item(now_s, key)

    def resolve_dispatch(self, key: _Key) -> None:
        """The replica accepted or rejected the dispatch, or it never left. Does nothing for unknown keys."""
        self._sent_at_s.pop(key, None)

    def forget_request(self, request_id: str) -> None:
        """Forget all pending dispatches of one request."""
        for key in [key for key in self._sent_at_s if key[0] == request_id]:
            del self._sent_at_s[key]

    def forget_all(self) -> None:
        """Forget all pending dispatches."""
        self._sent_at_s.clear()
        for look in self._looks:
            look.clear_items()

    def _report_silence(self, look: int, sent_at_s: float, key: _Key) -> None:
        if self._sent_at_s.get(key) != sent_at_s:
            return
        is_final = look == len(self._looks) - 1
        if is_final:
            del self._sent_at_s[key]
        else:
            self._looks[look + 1].push_item(sent_at_s, key)
        self._on_silence(*key, is_final)


class DeadlineQueue:
    """Calls ``on_due(sent_at_s, key)`` ``timeout_s`` after each item was sent. One timer serves all items."""

    def __init__(self, timeout_s: float, on_due: Callable[[float, _Key], None]) -> None:
        self._timeout_s = timeout_s
        self._on_due = on_due
        self._loop = asyncio.get_running_loop()
        #: In the order of their deadlines, since all have the same timeout.
        self._items: deque[tuple[float, _Key]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def push_item(self, sent_at_s: float, key: _Key) -> None:
        """Add an item that was sent no earlier than those in the queue, on the loop's clock."""
        self._items.append((sent_at_s, key))
        if self._timer is None:
            self._timer = self._loop.call_at(sent_at_s + self._timeout_s, self._run_due)

    def clear_items(self) -> None:
        """Drop all items and cancel the timer."""
        self._items.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run_due(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        while self._items and self._items[0][0] + self._timeout_s <= now_s:
            self._on_due(*self._items.popleft())
        if self._items and self._timer is None:
            # Not sooner than the clock can tell apart.
            due_s = max(now_s + 0.001, self._items[0][0] + self._timeout_s)
            self._timer = self._loop.call_at(due_s, self._run_due)


#: Aborts that are repeated at one time, and that are kept in all: a replica that acknowledges none costs no more.
_MOST_REPEATED: Final = 64
_MOST_ABORTS: Final = 16_384


class PendingAborts:
    """Aborts that the replica has not acknowledged, by request, with the attempt up to which it is to stop."""

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}
        #: Aborts whose acknowledgement the hub no longer waits for; repeated all the same if the replica comes back.
        self._abandoned: set[str] = set()

    def __bool__(self) -> bool:
        return len(self._attempts) > len(self._abandoned)

    def add_abort(self, request_id: str, attempt: int) -> None:
        """The replica is to stop the request's attempts up to this one."""
        self._attempts[request_id] = max(attempt, self._attempts.get(request_id, -1))
        self._abandoned.discard(request_id)
        if len(self._attempts) > _MOST_ABORTS:
            oldest = next(iter(self._attempts))
            del self._attempts[oldest]
            self._abandoned.discard(oldest)

    def acknowledge_abort(self, request_id: str, attempt: int) -> bool:
        """The replica has stopped up to ``attempt``. Return whether that completes an abort that was waited for."""
        if self._attempts.get(request_id, attempt + 1) > attempt:
            return False
        del self._attempts[request_id]
        was_awaited = request_id not in self._abandoned
        self._abandoned.discard(request_id)
        return was_awaited

    def open_aborts(self) -> list[tuple[str, int]]:
        """All aborts, as (request id, attempt), for a new session."""
        return list(self._attempts.items())

    def aborts_to_repeat(self) -> list[tuple[str, int]]:
        """Some aborts, as (request id, attempt): those that have not been repeated for the longest time."""
        due = list(islice(self._attempts.items(), _MOST_REPEATED))
        for request_id, attempt in due:
            del self._attempts[request_id]
            self._attempts[request_id] = attempt
        return due

    def abandon_aborts(self) -> list[str]:
        """The replica's process is gone: stop waiting, and return the requests whose aborts were waited for."""
        request_ids = [request_id for request_id in self._attempts if request_id not in self._abandoned]
        self._abandoned.update(request_ids)
        return request_ids


#: A batch is closed when it has grown to this.
_BATCH_BYTES: Final = 256 << 10
#: How long a release waits for a message that it may go with.
_RELEASE_WITHIN_S: Final = 0.01


class DispatchBatcher:
    """Sends the first dispatch of a turn of the loop at once, and those that follow in the same turn together after it.

    Releases go with the next message, whatever that is, or alone after 10 ms. All leave in the order they came in.
    ``send`` raises SendFailedError; ``on_unsent`` gets the key of each dispatch that had waited, or the request id of
    each release, that then has not left.
    """

    def __init__(self, send: Callable[[Sequence[bytes]], None], on_unsent: Callable[[_Key | str], None]) -> None:
        self._send = send
        self._on_unsent = on_unsent
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[_Key | str, bytes]] = []
        self._turn_ends = False
        #: Sends the releases that wait.
        self._timer: asyncio.TimerHandle | None = None

    def push_dispatch(self, key: _Key, head: bytes) -> None:
        """Send one dispatch, now or at the end of the turn. Raise SendFailedError if it certainly has not left."""
        if self._turn_ends:
            self._waiting.append((key, head))
            return
        heads = [*[each for _, each in self._waiting], head]
        if len(heads) > wire.MAX_BATCH or sum(map(len, heads)) > _BATCH_BYTES:
            self.flush_waiting()
            heads = [head]
        self._send([wire.join(heads)])
        self._waiting.clear()
        self._turn_ends = True
        self._loop.call_soon(self._end_turn)

    def push_release(self, request_id: str, head: bytes) -> None:
        """Send one release soon."""
        self._waiting.append((request_id, head))
        if self._timer is None:
            self._timer = self._loop.call_later(_RELEASE_WITHIN_S, self._end_wait)

    def flush_waiting(self) -> None:
        """Send all that waits, so that the next message goes behind it."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        batch: list[tuple[_Key | str, bytes]] = []
        size_bytes = 0
        for item in waiting:
            if batch and (size_bytes + len(item[1]) > _BATCH_BYTES or len(batch) == wire.MAX_BATCH):
                self._send_batch(batch)
                batch, size_bytes = [], 0
            batch.append(item)
            size_bytes += len(item[1])
        self._send_batch(batch)

    def forget_waiting(self) -> list[str]:
        """Drop what waits: the session has ended, and everything on its way with it. Return the releases in it."""
        waiting, self._waiting = self._waiting, []
        return [key for key, _ in waiting if isinstance(key, str)]

    def close(self) -> None:
        """Send nothing any more. Idempotent."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_turn(self) -> None:
        self._turn_ends = False
        self.flush_waiting()

    def _end_wait(self) -> None:
        self._timer = None
        self.flush_waiting()

    def _send_batch(self, batch: Sequence[tuple[_Key | str, bytes]]) -> None:
        try:
            self._send([wire.join([head for _, head in batch])])
        except SendFailedError:
            for key, _ in batch:
                self._on_unsent(key)


#: A longer gap between two calls of ``warn_if_overdue`` means that a session was open in between.
_GAP_S: Final = 2.0

_REFUSED: Final = (
    "the handshake fails: it does not know this hub, it has another key than its record says, or something else"
    " listens there; omni doctor looks from here"
)
_UNREACHABLE: Final = "nobody answers there: its process is gone, or the network lets nothing through"
_NOT_WELCOMED: Final = "it is connected and does not greet back: the registry may know another life of it"


class ConnectDiagnostics:
    """Warns of one replica that has had no session for ``after_s`` seconds, and again whenever the cause changes."""

    def __init__(self, after_s: float, now_s: float) -> None:
        self._after_s = after_s
        self._since_s = self._called_at_s = now_s
        #: Whether a line about the lost session has said already that the replica does not answer.
        self._is_loss_told = False
        #: Remembers the cause of the last warning alone: another cause is news, also one that was there before.
        self._log_once = LogOnce(most_keys=1)

    def session_lost(self) -> None:
        """The session was lost, and its loss is logged: that nobody answers after that is no news."""
        self._is_loss_told = True

    def warn_if_overdue(self, info: ReplicaInfo, connections: Collection[DealerConnection], now_s: float) -> None:
        """Called at every tick without a session; logs ``replica.no_session`` if that has lasted too long."""
        if now_s - self._called_at_s > _GAP_S:
            self._since_s = now_s
            self._log_once.clear()
        self._called_at_s = now_s
        waited_s = now_s - self._since_s
        if waited_s < self._after_s:
            return
        cause = self._cause_of(connections, now_s)
        if cause == _UNREACHABLE and self._is_loss_told:
            return
        if self._log_once.should(cause):
            logger.warning(
                "replica.no_session replica=%s addr=%s output_addr=%s after_s=%.1f: %s",
                info.name,
                info.input_addr,
                info.output_addr,
                waited_s,
                cause,
            )

    def _cause_of(self, connections: Collection[DealerConnection], now_s: float) -> str:
        unconnected = [connection for connection in connections if not connection.connected]
        if not unconnected:
            return _NOT_WELCOMED
        unresolved = [connection.unresolved for connection in unconnected if connection.unresolved]
        if unresolved:
            return unresolved[0]
        # A refused connection is not there for a moment between two attempts.
        is_refused = any(now_s - connection.refused_at_s < self._after_s for connection in unconnected)
        return _REFUSED if is_refused else _UNREACHABLE
