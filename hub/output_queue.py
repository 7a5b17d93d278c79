"""OutputQueue: the bounded queue of outputs between the orchestrator and one client, with its watermarks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

from hub.orchestrator.active import AbortRequest, Ended
from hub.request.events import ClientBackpressure
from hub.request.outputs import OmniOutput
from omni_discovery.errors import OverloadedError, RequestError

logger = logging.getLogger(__name__)

#: Texts are joined up to this length only, because joining copies them.
_LONG_BYTES: Final = 4096
#: Where too much waits for all clients, one is behind from here on; and how much more may come then: not all engines
#: pause.
_CROWDED_BYTES: Final = 1 << 20
_MORE_BYTES: Final = 16 << 20
_TOO_SLOW: Final = "the client reads too slowly: its outputs filled the hub's bound"


class Watermarks:
    """High and low watermark of the output that waits for one client.

    A client is behind from half of ``max_outputs`` or half of ``max_bytes`` on, until no more than a quarter of both
    waits.
    """

    def __init__(self, max_outputs: int, max_bytes: int) -> None:
        self.high_outputs, self._high_bytes = max(1, max_outputs // 2), max(1, max_bytes // 2)
        self._low_outputs = self.high_outputs // 2
        self._is_behind = False

    def crossed(self, outputs: int, size_bytes: int, *, is_crowded: bool = False) -> ClientBackpressure | None:
        """Take the number and size of the outputs that wait now; return an event if a watermark was crossed.

        ``is_crowded``: too much waits for all clients together.
        """
        high_bytes = min(self._high_bytes, _CROWDED_BYTES) if is_crowded else self._high_bytes
        if self._is_behind:
            is_behind = outputs > self._low_outputs or size_bytes > high_bytes // 2
        else:
            is_behind = outputs >= self.high_outputs or size_bytes >= high_bytes
        if is_behind == self._is_behind:
            return None
        self._is_behind = is_behind
        return ClientBackpressure(is_behind)


class Unread:
    """What waits for all clients of a hub, in bytes, of which ``most_bytes`` are not too much."""

    def __init__(self, most_bytes: float = inf) -> None:
        self.size_bytes = 0
        self._most_bytes = most_bytes

    def __repr__(self) -> str:
        return f"Unread({self.size_bytes} bytes)"

    @property
    def is_too_much(self) -> bool:
        """Whether each client is to have less wait."""
        return self.size_bytes > self._most_bytes


class OutputQueue:
    """The outputs of one request that its client has not read, which count among those of ``unread``.

    From the high watermark (half of a bound) on, texts are joined: a slow reader gets longer pieces.
    ``on_backpressure`` is called when the reader falls behind and when it has caught up. ``taker`` is offered each
    output for which the reader waits, in its place: one that it takes (True) has been read, without a turn of the loop.
    """

    def __init__(
        self,
        max_outputs: int,
        max_bytes: int,
        on_backpressure: Callable[[ClientBackpressure], None] = lambda _news: None,
        taker: Callable[[OmniOutput], bool] | None = None,
        unread: Unread | None = None,
    ) -> None:
        self._max_outputs = max_outputs
        self._max_bytes = max_bytes
        self._watermarks = Watermarks(max_outputs, max_bytes)
        self._on_backpressure = on_backpressure
        self._taker = taker
        #: Each output with its size in bytes and the moment when it, or the first of what it was joined of, was put.
        self._outputs: deque[tuple[OmniOutput, int, float]] = deque()
        self._size_bytes = 0
        self._unread = Unread() if unread is None else unread
        #: What waited when the reader was told to be behind, in bytes; infinity while it is not.
        self._told_bytes = inf
        #: Whether no output follows those that wait.
        self.has_ended = False
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def unread_since_s(self) -> float:
        """Since when the oldest output waits for the client, monotonic; infinity if none does."""
        return self._outputs[0][2] if self._outputs else inf

    def put(self, output: OmniOutput) -> bool:
        """Add an output; return False, and add nothing, if the queue is full."""
        waiter = self._waiter
        # Who waits has read all that came before.
        if self._taker is not None and waiter is not None and not waiter.done() and self._taker(output):
            return True
        size_bytes = output.size_bytes
        most_bytes: float = self._max_bytes
        if self._unread.is_too_much:
            most_bytes = min(most_bytes, self._told_bytes + _MORE_BYTES)
        if self._size_bytes + size_bytes > most_bytes and self._outputs:
            return False
        joined = None
        if len(self._outputs) >= self._watermarks.high_outputs:
            last, last_bytes, put_at_s = self._outputs[-1]
            joined = last.joined(output) if last_bytes < _LONG_BYTES else None
        if joined is not None:
            self._outputs[-1] = joined, last_bytes + size_bytes, put_at_s
        elif len(self._outputs) >= self._max_outputs:
            return False
        else:
            self._outputs.append((output, size_bytes, time.monotonic()))
        self._count(size_bytes)
        self._check_watermarks()
        self._wake()
        return True

    def end(self, error: RequestError | None) -> None:
        """Mark the end of the outputs, with an error or None. Does nothing after the first call."""
        if not self.has_ended:
            self.has_ended, self._error = True, error
            self._wake()

    def discard(self, error: RequestError) -> None:
        """Drop what waits, and end with the error whatever the end was to be."""
        self.forget()
        self.has_ended, self._error = True, error
        self._wake()

    def forget(self) -> None:
        """Drop what waits: nobody reads it any more. Idempotent."""
        self._outputs.clear()
        self._count(-self._size_bytes)

    async def get(self) -> OmniOutput | None:
        """Wait for the next output; None at the end. Raise the request's error after its last output."""
        while not self._outputs and not self.has_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._outputs:
            output, size_bytes, _put_at_s = self._outputs.popleft()
            self._count(-size_bytes)
            self._check_watermarks()
            return output
        if self._error is not None:
            raise self._error
        return None

    def _count(self, more_bytes: int) -> None:
        self._size_bytes += more_bytes
        self._unread.size_bytes += more_bytes

    def _check_watermarks(self) -> None:
        if self.has_ended:
            return
        is_crowded = self._unread.is_too_much
        backpressure = self._watermarks.crossed(len(self._outputs), self._size_bytes, is_crowded=is_crowded)
        if backpressure is not None:
            self._told_bytes = self._size_bytes if backpressure.is_behind else inf
            self._on_backpressure(backpressure)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Delivery:
    """Puts each output into the queue of its request. A request whose queue is full is ended with OverloadedError.

    ``queues`` are by request id, ``abort`` has the stages of a request stopped.
    """

    def __init__(self, queues: Mapping[str, OutputQueue], abort: Callable[[AbortRequest], None]) -> None:
        self._queues = queues
        self._abort = abort

    def deliver(self, request_id: str, output: OmniOutput | Ended) -> None:
        """Give a client an output, or the end of its request; drop it if its reader has gone."""
        queue = self._queues.get(request_id)
        if queue is None:
            return
        try:
            if isinstance(output, Ended):
                queue.end(output.error)
                return
            if queue.put(output):
                return
            failure: RequestError = OverloadedError(_TOO_SLOW)
        except Exception as bug:
            # It must cost one request and not those of all other clients.
            logger.exception("output.bug request=%s", request_id)
            failure = RequestError(f"a bug in the hub: {bug!r}")
        if not queue.has_ended:
            # Once: the request's other outputs come until its stages have heard of it.
            queue.end(failure)
            self._abort(AbortRequest(request_id, failure))
