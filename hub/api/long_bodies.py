"""Long bodies are read one at a time, the clients' in turn, and everything else has the loop as long between two.

To decode and check what a client has sent may take a tenth of a second, for which the hub's loop waits. A hundred
bodies whose last bytes come at one moment must not hold up all others for a hundred times that.

What is made of them is kept until they are answered, so that requests can be sent again, and has a bound, too.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from hub.api.client_quota import client_of
from omni_discovery.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, MutableMapping
    from typing import Any

    from starlette.types import ASGIApp, Receive, Scope, Send

_Body = TypeVar("_Body", bound=Hashable)

#: The keys in the ASGI scope of the turns, and of the memory that the request is counted with.
_KEY: Final = "omni.long_bodies"
_HELD: Final = "omni.held_bytes"
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


class ClientTurns:
    """``places`` for work beside the loop. Who finds none free waits for one, the clients in turn. Used on one loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: WaitingBodies[asyncio.Future[None]] = WaitingBodies()

    @asynccontextmanager
    async def turn(self, client: str, size_bytes: int = 0) -> AsyncIterator[None]:
        """Hold a place; so many bytes wait for it. Raise OverloadedError if too many wait."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(client, size_bytes)
        try:
            yield
        finally:
            self._hand_on()

    async def _wait(self, client: str, size_bytes: int) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        _refuse(self._waiting.add_body(client, mine, size_bytes))
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled() and mine.exception() is None:
                # It has the place, and leaves it to the next one.
                self._hand_on()
            raise
        finally:
            self._waiting.remove_body(client, mine)

    def _hand_on(self) -> None:
        if not _wake_next(self._waiting):
            self._free += 1


def _refuse(bodies: Iterable[asyncio.Future[None]]) -> None:
    for each in bodies:
        if not each.done():
            each.set_exception(OverloadedError("too many long bodies wait here to be read", _RETRY_AFTER_S))


def _wake_next(waiting: WaitingBodies[asyncio.Future[None]]) -> bool:
    """Hand a turn to the one whose it is, which stays taken until that one runs; False if nobody waits."""
    while (body := waiting.next_body()) is not None:
        # One that was cancelled a moment ago needs no turn.
        if not body.done():
            body.set_result(None)
            return True
    return False


class HeldBodies:
    """The memory of what is made of bodies, by client, of ``most_bytes`` for all.

    Each may have as much as is left: one client at most a half, so that others always find room.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._clients: Counter[str] = Counter()
        self.size_bytes = 0

    def __repr__(self) -> str:
        return f"HeldBodies({self.size_bytes} bytes)"

    def hold(self, client: str, size_bytes: int) -> None:
        """Count so much more. Raise OverloadedError if its client then has more than is left."""
        if self._clients[client] + self.size_bytes + size_bytes > self._most_bytes:
            raise OverloadedError("the long requests of this client take all memory that they may", _RETRY_AFTER_S)
        self._clients[client] += size_bytes
        self.size_bytes += size_bytes

    def release(self, client: str, size_bytes: int) -> None:
        """Count so much less."""
        if not size_bytes:
            return
        self.size_bytes -= size_bytes
        self._clients[client] -= size_bytes
        if not self._clients[client]:
            del self._clients[client]


@dataclass(slots=True)
class _HeldBody:
    """What one request is counted with, and as whose."""

    client: str = ""
    size_bytes: int = 0


class LongBodies:
    """ASGI middleware whose requests and WebSockets may wait for a turn, see ``long_body``. Used on one loop.

    What is made of the bodies of requests under way may take ``most_held_bytes``.
    """

    def __init__(self, app: ASGIApp, most_held_bytes: int) -> None:
        self._app = app
        self._held = HeldBodies(most_held_bytes)
        self._waiting: WaitingBodies[asyncio.Future[None]] = WaitingBodies()
        #: Whether a body is being read, or the loop has its time for everything else.
        self._is_taken = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        scope[_KEY] = self
        # Whatever copies the scope shares it.
        held = scope[_HELD] = _HeldBody()
        try:
            await self._app(scope, receive, send)
        finally:
            self._held.release(held.client, held.size_bytes)

    async def turn(self, client: str, size_bytes: int) -> None:
        """See ``long_body``."""
        if not self._is_taken:
            self._begin()
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        _refuse(self._waiting.add_body(client, mine, size_bytes))
        try:
            await mine
        finally:
            # It may have been cancelled.
            self._waiting.remove_body(client, mine)

    def hold(self, scope: MutableMapping[str, Any], size_bytes: int) -> None:
        """Count the memory of a request until it is answered; of a WebSocket, the most that it had at a time."""
        held: _HeldBody = scope[_HELD]
        if size_bytes > held.size_bytes:
            held.client = client_of(scope)
            self._held.hold(held.client, size_bytes - held.size_bytes)
            held.size_bytes = size_bytes

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
        if _wake_next(self._waiting):
            # Its task is woken before ``_end`` is.
            self._begin()
        else:
            self._is_taken = False


async def long_body(scope: MutableMapping[str, Any], size_bytes: int, memory_bytes: int = 0) -> None:
    """Wait for the turn of a body, or a message of a WebSocket, that is whole; a short one waits for nothing.

    What its task does from then on until it waits for something is the turn. ``memory_bytes``: of what is made of it
    and kept for the whole request, see ``memory_of``. Raise OverloadedError if too much waits, or is kept.
    """
    turns: LongBodies | None = scope.get(_KEY)
    if turns is not None and size_bytes >= _LONG_BYTES:
        await turns.turn(client_of(scope), size_bytes)
        turns.hold(scope, memory_bytes)


async def long_work(scope: MutableMapping[str, Any]) -> None:
    """Wait for the same turn with something short that takes the loop as long. Raise OverloadedError as above."""
    turns: LongBodies | None = scope.get(_KEY)
    if turns is not None:
        await turns.turn(client_of(scope), _LONG_BYTES)


def hold_messages(scope: MutableMapping[str, Any], memory_bytes: int) -> None:
    """Count the memory of messages of a WebSocket that wait here. Raise OverloadedError if too much is kept."""
    turns: LongBodies | None = scope.get(_KEY)
    if turns is not None:
        turns.hold(scope, memory_bytes)
