"""OutputQueue: the bounded queue of outputs between the orchestrator and one client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from hub.orchestrator.active import AbortRequest, Ended
from hub.request.backpressure import Watermarks
from hub.request.events import ClientBackpressure
from hub.request.outputs import OmniOutput
from omni_discovery.errors import OverloadedError, RequestError

#: The longest output that text is joined to, in bytes: joining copies it.
_LONG_BYTES: Final = 4096


class OutputQueue:
    """The outputs of one request that wait for its reader, at most ``max_outputs`` and ``max_bytes`` of them.

    From half of ``max_outputs`` on, text that waits is joined: a slow reader gets longer pieces. ``on_backpressure`` is
    called when the reader falls behind, and when it has caught up.
    """

    def __init__(
        self,
        max_outputs: int,
        max_bytes: int,
        on_backpressure: Callable[[ClientBackpressure], None] = lambda _backpressure: None,
    ) -> None:
        self._max_outputs = max_outputs
        self._max_bytes = max_bytes
        self._watermarks = Watermarks(max_outputs, max_bytes)
        self._on_backpressure = on_backpressure
        self._outputs: deque[OmniOutput] = deque()
        self._size_bytes = 0
        self._ended = False
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: OmniOutput) -> bool:
        """Add an output; False, and the output is not added, if the queue is full."""
        if self._size_bytes + output.size_bytes > self._max_bytes and self._outputs:
            return False
        behind = len(self._outputs) >= self._watermarks.high_outputs
        last = self._outputs[-1] if behind else None
        joined = last.joined(output) if last is not None and last.size_bytes < _LONG_BYTES else None
        if joined is not None:
            self._outputs[-1] = joined
        elif len(self._outputs) >= self._max_outputs:
            return False
        else:
            self._outputs.append(output)
        self._size_bytes += output.size_bytes
        self._check_watermarks()
        self._wake()
        return True

    def end(self, error: RequestError | None) -> None:
        """End the queue, with the request's error if it failed. Only the first call counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    async def get(self) -> OmniOutput | None:
        """Wait for the next output; None at the end. Raise the request's error after its last output."""
        while not self._outputs and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._outputs:
            output = self._outputs.popleft()
            self._size_bytes -= output.size_bytes
            self._check_watermarks()
            return output
        if self._error is not None:
            raise self._error
        return None

    def _check_watermarks(self) -> None:
        backpressure = None if self._ended else self._watermarks.crossed(len(self._outputs), self._size_bytes)
        if backpressure is not None:
            self._on_backpressure(backpressure)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def deliver(
    source: asyncio.Queue[tuple[str, OmniOutput | Ended]],
    queues: Mapping[str, OutputQueue],
    abort: Callable[[AbortRequest], None],
    failed: Callable[[RequestError], None] = lambda _error: None,
) -> None:
    """Move each output of ``source`` to the queue of its request, until cancelled.

    A request whose queue is full ends with OverloadedError and is given to ``abort``. ``failed`` is called with the
    error of each request that ends with one.
    """
    while True:
        request_id, item = await source.get()
        if isinstance(item, Ended) and item.error is not None:
            failed(item.error)
        queue = queues.get(request_id)
        if queue is None:
            continue
        if isinstance(item, Ended):
            queue.end(item.error)
        elif not queue.put(item):
            error = OverloadedError("the client reads too slowly: its outputs filled the hub's bound")
            queue.end(error)
            abort(AbortRequest(request_id, error))
