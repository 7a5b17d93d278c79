"""What one replica still has to answer: the dispatches it has not taken or refused, and the aborts.

Outgoing: requests on their way to one replica's socket, so that many at once cost little more than one.

Unmet: a replica that is listed and does not become a session is worth one warning, with what is known of why.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

from hub.config import HubConfig, SendFailedError
from omni_discovery import wire

if TYPE_CHECKING:
    from hub.replicas.sockets import DealerConnection
    from omni_discovery.records.schema import ReplicaInfo

logger = logging.getLogger(__name__)

_Key = tuple[str, int]


class AwaitedDispatches:
    """Lives on the loop. ``on_silence(request_id, attempt, is_final)`` comes twice for a dispatch without an answer.

    First after ``accept_timeout_s``, when another replica might take it, then after ``accept_limit_s``, when it is
    given up.
    """

    def __init__(self, config: HubConfig, on_silence: Callable[[str, int, bool], None]) -> None:
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        #: When each was sent, on the loop's clock.
        self._sent_at_s: dict[_Key, float] = {}
        self._first = _Line(config.accept_timeout_s, self._silent_at_first)
        self._final = _Line(config.accept_limit_s, self._silent_to_the_end)

    def sent(self, key: _Key) -> None:
        """A dispatch has left."""
        now_s = self._loop.time()
        self._sent_at_s[key] = now_s
        self._first.add(now_s, key)

    def answered(self, key: _Key) -> None:
        """The replica has spoken of it. Unknown ones are fine."""
        self._sent_at_s.pop(key, None)

    def forget(self, request_id: str) -> None:
        """Nobody waits for the request's dispatches any more."""
        for key in [key for key in self._sent_at_s if key[0] == request_id]:
            del self._sent_at_s[key]

    def clear(self) -> None:
        """Nobody waits for any."""
        self._sent_at_s.clear()
        self._first.clear()
        self._final.clear()

    def _silent_at_first(self, sent_at_s: float, key: _Key) -> None:
        if self._sent_at_s.get(key) == sent_at_s:
            self._final.add(sent_at_s, key)
            self._on_silence(*key, False)

    def _silent_to_the_end(self, sent_at_s: float, key: _Key) -> None:
        if self._sent_at_s.get(key) == sent_at_s:
            del self._sent_at_s[key]
            self._on_silence(*key, True)


class _Line:
    """Calls ``on_due(sent_at_s, key)`` when so long has passed. All wait equally long, so one timer serves them."""

    def __init__(self, length_s: float, on_due: Callable[[float, _Key], None]) -> None:
        self._length_s = length_s
        self._on_due = on_due
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, _Key]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, sent_at_s: float, key: _Key) -> None:
        """Wait with this one, too."""
        self._waiting.append((sent_at_s, key))
        if self._timer is None:
            self._timer = self._loop.call_at(sent_at_s + self._length_s, self._look)

    def clear(self) -> None:
        """Wait for none."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        while self._waiting and self._waiting[0][0] + self._length_s <= now_s:
            self._on_due(*self._waiting.popleft())
        if self._waiting and self._timer is None:
            # Not sooner than the clock can tell apart.
            due_s = max(now_s + 0.001, self._waiting[0][0] + self._length_s)
            self._timer = self._loop.call_at(due_s, self._look)


class AwaitedAborts:
    """Aborts that the replica has not acknowledged, by request, with the attempt up to which it is to stop."""

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}
        #: Those of them that nobody waits for any more; said all the same, should the replica come back.
        self._given_up: set[str] = set()

    def __bool__(self) -> bool:
        return len(self._attempts) > len(self._given_up)

    def ask(self, request_id: str, attempt: int) -> None:
        """The request is to stop."""
        self._attempts[request_id] = max(attempt, self._attempts.get(request_id, -1))
        self._given_up.discard(request_id)

    def acknowledged(self, request_id: str, attempt: int) -> bool:
        """The replica has answered; whether that is news and all that was asked."""
        if self._attempts.get(request_id, attempt + 1) > attempt:
            return False
        del self._attempts[request_id]
        was_awaited = request_id not in self._given_up
        self._given_up.discard(request_id)
        return was_awaited

    def open(self) -> list[tuple[str, int]]:
        """What is still to be acknowledged, in the order in which it was asked."""
        return list(self._attempts.items())

    def give_up(self) -> list[str]:
        """There is nobody left to ask: wait for none any more, and say which those are."""
        request_ids = [request_id for request_id in self._attempts if request_id not in self._given_up]
        self._given_up.update(request_ids)
        return request_ids


#: A batch is closed when it has grown to this.
_BATCH_BYTES: Final = 256 << 10


class Outgoing:
    """The first of a turn of the loop leaves at once, those that follow it in the same turn go together after it.

    ``send`` raises SendFailedError; ``on_unsent`` is told of each request, by ``key``, that then has not left.
    """

    def __init__(self, send: Callable[[Sequence[bytes]], None], on_unsent: Callable[[_Key], None]) -> None:
        self._send = send
        self._on_unsent = on_unsent
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[_Key, bytes]] = []
        self._turn_ends = False

    def push(self, key: _Key, head: bytes) -> None:
        """Send one request. Raise SendFailedError if it certainly has not left."""
        if self._turn_ends:
            self._waiting.append((key, head))
            return
        self._send([head])
        self._turn_ends = True
        self._loop.call_soon(self._end_turn)

    def flush(self) -> None:
        """Send what waits: something else is to go behind it."""
        waiting, self._waiting = self._waiting, []
        batch: list[tuple[_Key, bytes]] = []
        size_bytes = 0
        for item in waiting:
            if batch and (size_bytes + len(item[1]) > _BATCH_BYTES or len(batch) == wire.MAX_BATCH):
                self._send_batch(batch)
                batch, size_bytes = [], 0
            batch.append(item)
            size_bytes += len(item[1])
        if batch:
            self._send_batch(batch)

    def clear(self) -> None:
        """Forget what waits: the session has ended, and with it all that was on its way."""
        self._waiting.clear()

    def _end_turn(self) -> None:
        self._turn_ends = False
        if self._waiting:
            self.flush()

    def _send_batch(self, batch: Sequence[tuple[_Key, bytes]]) -> None:
        try:
            self._send([wire.join([head for _, head in batch])])
        except SendFailedError:
            for key, _ in batch:
                self._on_unsent(key)


#: Whoever looks less often than that had a session in between.
_PAUSE_S: Final = 2.0

_REFUSED: Final = (
    "the handshake fails: it does not know this hub, it has another key than its record says, or something else"
    " listens there; omni doctor looks from here"
)
_NOBODY: Final = "nobody answers there: its process is gone, or the network lets nothing through"
_NOT_GREETED: Final = "it is connected and does not greet back: the registry may know another life of it"


class Unmet:
    """Of one replica. ``after_s``: how long it may take to make a session before that is told."""

    def __init__(self, after_s: float, now_s: float) -> None:
        self._after_s = after_s
        self._since_s = self._looked_s = now_s
        self._told = ""

    def look(self, info: ReplicaInfo, connections: Collection[DealerConnection], now_s: float) -> None:
        """There is no session now; called again and again while that is so."""
        if now_s - self._looked_s > _PAUSE_S:
            self._since_s, self._told = now_s, ""
        self._looked_s = now_s
        waited_s = now_s - self._since_s
        if waited_s < self._after_s:
            return
        cause = self._cause(connections, now_s)
        if cause != self._told:
            self._told = cause
            logger.warning(
                "replica.no_session stage=%d replica=%d addr=%s output_addr=%s after_s=%.1f: %s",
                info.stage_id,
                info.replica_id,
                info.input_addr,
                info.output_addr,
                waited_s,
                cause,
            )

    def _cause(self, connections: Collection[DealerConnection], now_s: float) -> str:
        lacking = [each for each in connections if not each.connected]
        if not lacking:
            return _NOT_GREETED
        # Between two attempts nobody is there for a moment.
        return _REFUSED if any(now_s - each.refused_at_s < self._after_s for each in lacking) else _NOBODY
