"""Long bodies are read one at a time, the clients' in turn, and everything else has the loop as long between two.

To decode and check what a client has sent may take a tenth of a second, for which the hub's loop waits. A hundred
bodies whose last bytes come at one moment must not hold up all others for a hundred times that.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from hub.api.client_quota import client_of
from omni_discovery.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Any

    from starlette.types import ASGIApp, Receive, Scope, Send

_Body = TypeVar("_Body", bound=Hashable)

#: The key of the turns in the ASGI scope.
_KEY: Final = "omni.long_bodies"
#: Shorter ones wait for nothing: the worst of them take a few milliseconds.
_LONG_BYTES: Final = 16 << 10
#: After a body that took the loop no longer than this, the next one follows at once.
_SHORT_S: Final = 0.005
_LONGEST_REST_S: Final = 0.5
#: Bytes of whole bodies that may wait, as many as of unfinished ones.
_MOST_WAITING_BYTES: Final = 256 << 20
_RETRY_AFTER_S: Final = 1.0


class WaitingBodies(Generic[_Body]):
    """The bodies that wait for their turn. Each client has one in turn, its first first."""

    def __init__(self, most_bytes: int = _MOST_WAITING_BYTES) -> None:
        self._most_bytes = most_bytes
        #: By client, the one whose turn is next before all others: its bodies, each with its size.
        self._clients: OrderedDict[str, OrderedDict[_Body, int]] = OrderedDict()
        self.size_bytes = 0

    def __repr__(self) -> str:
        return f"WaitingBodies({sum(map(len, self._clients.values()))}, {self.size_bytes} bytes)"

    def add_body(self, client: str, body: _Body, size_bytes: int) -> list[_Body]:
        """Have a body wait; return those that there is no room for: the last ones of whoever has the most bytes."""
        self._clients.setdefault(client, OrderedDict())[body] = size_bytes
        self.size_bytes += size_bytes
        refused: list[_Body] = []
        while self.size_bytes > self._most_bytes:
            largest = max(self._clients, key=lambda each: sum(self._clients[each].values()))
            last = next(reversed(self._clients[largest]))
            self.remove_body(largest, last)
            refused.append(last)
        return refused

    def next_body(self) -> _Body | None:
        """Remove and return the body whose turn it is; None if none waits."""
        client = next(iter(self._clients), None)
        if client is None:
            return None
        body = next(iter(self._clients[client]))
        self._clients.move_to_end(client)
        self.remove_body(client, body)
        return body

    def remove_body(self, client: str, body: _Body) -> None:
        """Have a body wait no more. Idempotent."""
        bodies = self._clients.get(client)
        if bodies is None or body not in bodies:
            return
        self.size_bytes -= bodies.pop(body)
        if not bodies:
            del self._clients[client]


class LongBodies:
    """ASGI middleware whose requests and WebSockets may wait for a turn, see ``long_body``. Used on one loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: WaitingBodies[asyncio.Future[None]] = WaitingBodies()
        #: Whether a body is being read, or the loop has its time for everything else.
        self._is_taken = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        scope[_KEY] = self
        await self._app(scope, receive, send)

    async def turn(self, client: str, size_bytes: int) -> None:
        """See ``long_body``."""
        if not self._is_taken:
            self._begin()
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for refused in self._waiting.add_body(client, mine, size_bytes):
            if not refused.done():
                refused.set_exception(OverloadedError("too many long bodies wait here to be read", _RETRY_AFTER_S))
        try:
            await mine
        finally:
            # It may have been cancelled.
            self._waiting.remove_body(client, mine)

    def _begin(self) -> None:
        """Who has called, or was just woken, has the loop until it waits for something; then ``_end`` runs."""
        self._is_taken = True
        asyncio.get_running_loop().call_soon(self._end, time.thread_time())

    def _end(self, began_s: float) -> None:
        took_s = time.thread_time() - began_s
        if took_s > _SHORT_S:
            asyncio.get_running_loop().call_later(min(took_s, _LONGEST_REST_S), self._next)
        else:
            self._next()

    def _next(self) -> None:
        while (body := self._waiting.next_body()) is not None:
            # One that was cancelled a moment ago needs no turn.
            if not body.done():
                # Its task is woken before ``_end`` is.
                body.set_result(None)
                self._begin()
                return
        self._is_taken = False


async def long_body(scope: MutableMapping[str, Any], size_bytes: int) -> None:
    """Wait for the turn of a body, or a message of a WebSocket, that is whole; a short one waits for nothing.

    What its task does from then on until it waits for something is the turn. Raise OverloadedError if too much waits.
    """
    turns: LongBodies | None = scope.get(_KEY)
    if turns is not None and size_bytes >= _LONG_BYTES:
        await turns.turn(client_of(scope), size_bytes)
