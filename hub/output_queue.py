"""OutputQueue: what waits between the orchestrator and one client, within bounds."""

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

#: Text that waits is not made longer than this: joining copies it.
_LONG_BYTES: Final = 4096


class OutputQueue:
    """Outputs of one request. Behind half the bound, text that waits is joined: a slow reader gets longer pieces.

    ``on_pace`` is told when the reader falls behind, and when it has caught up.
    """

    def __init__(
        self, max_outputs: int, max_bytes: int, on_pace: Callable[[ClientBackpressure], None] = lambda _pace: None
    ) -> None:
        self._max_outputs = max_outputs
        self._max_bytes = max_bytes
        self._marks = Watermarks(max_outputs, max_bytes)
        self._on_pace = on_pace
        self._outputs: deque[OmniOutput] = deque()
        self._size_bytes = 0
        self._ended = False
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: OmniOutput) -> bool:
        """Add an output; False, and nothing added, if the reader is too far behind."""
        if self._size_bytes + output.size_bytes > self._max_bytes and self._outputs:
            return False
        behind = len(self._outputs) >= self._marks.high_outputs
        last = self._outputs[-1] if behind else None
        joined = last.joined(output) if last is not None and last.size_bytes < _LONG_BYTES else None
        if joined is not None:
            self._outputs[-1] = joined
        elif len(self._outputs) >= self._max_outputs:
            return False
        else:
            self._outputs.append(output)
        self._size_bytes += output.size_bytes
        self._look_at_pace()
        self._wake()
        return True

    def end(self, error: RequestError | None) -> None:
        """Nothing more will come. The first end counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    async def get(self) -> OmniOutput | None:
        """The next output, None at the end. Raise the request's error once its outputs are taken."""
        while not self._outputs and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._outputs:
            output = self._outputs.popleft()
            self._size_bytes -= output.size_bytes
            self._look_at_pace()
            return output
        if self._error is not None:
            raise self._error
        return None

    def _look_at_pace(self) -> None:
        pace = None if self._ended else self._marks.crossed(len(self._outputs), self._size_bytes)
        if pace is not None:
            self._on_pace(pace)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def deliver(
    source: asyncio.Queue[tuple[str, OmniOutput | Ended]],
    queues: Mapping[str, OutputQueue],
    abort: Callable[[AbortRequest], None],
    failed: Callable[[RequestError], None] = lambda _error: None,
) -> None:
    """Give each output to the queue of its request, for ever; ``abort`` ends those whose reader is far behind.

    ``failed`` is told the errors that requests end with.
    """
    while True:
        request_id, what = await source.get()
        if isinstance(what, Ended) and what.error is not None:
            failed(what.error)
        queue = queues.get(request_id)
        if queue is None:
            continue
        if isinstance(what, Ended):
            queue.end(what.error)
        elif not queue.put(what):
            error = OverloadedError("the client reads too slowly: its outputs filled the hub's bound")
            queue.end(error)
            abort(AbortRequest(request_id, error))
