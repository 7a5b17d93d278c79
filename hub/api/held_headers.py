"""The headers of an answer wait for its first piece, so that a client whose hub ends before that may simply ask again.

Clients repeat a request by themselves as long as nothing of its answer has come; a stream whose headers have come is
theirs to mend. This holds for every ``--api``: vLLM's server would send headers when it has begun to wait.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: The key, in the ASGI scope, of the moment on ``time.monotonic`` at which headers leave without a piece.
_LATEST: Final = "omni.headers_latest_s"


def headers_latest_s(scope: Scope) -> float | None:
    """When the headers of this answer leave at the latest, on ``time.monotonic``; None: with its first piece."""
    latest_s: float | None = scope.get(_LATEST)
    return latest_s


class HeldHeaders:
    """ASGI middleware that sends the headers of an answer to a POST together with the first piece of its body.

    ``wait_s``: so long after the request came, they leave without one; None: they always wait.
    """

    def __init__(self, app: ASGIApp, wait_s: float | None = None) -> None:
        self._app = app
        self._wait_s = wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._wait_s is not None:
            scope[_LATEST] = time.monotonic() + self._wait_s
        held = _UnsentAnswer(send, headers_latest_s(scope))
        try:
            await self._app(scope, receive, held.send)
        finally:
            held.close()


class _UnsentAnswer:
    """The messages of one answer, the first of which may wait for the second."""

    def __init__(self, send: Send, latest_s: float | None) -> None:
        self._send = send
        self._latest_s = latest_s
        self._headers: Message | None = None
        self._timer: asyncio.Task[None] | None = None
        # What leaves when the time is over must not be overtaken by a piece. None where nothing leaves so.
        self._in_order = None if latest_s is None else asyncio.Lock()

    async def send(self, message: Message) -> None:
        """Send a message of the answer, or keep it for now."""
        if message["type"] == "http.response.start" and not self._is_late():
            self._headers = message
            if self._latest_s is not None and self._in_order is not None:
                self._timer = asyncio.create_task(self._send_at(self._latest_s, self._in_order))
            return
        is_nothing = message["type"] == "http.response.body" and not message.get("body") and message.get("more_body")
        if is_nothing and self._headers is not None:
            return
        if self._in_order is None:
            await self._send_headers()
        elif self._headers is not None or self._in_order.locked():
            await self._release(self._in_order)
        await self._send(message)

    def close(self) -> None:
        """The application has ended. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _is_late(self) -> bool:
        return self._latest_s is not None and time.monotonic() >= self._latest_s

    async def _send_at(self, at_s: float, in_order: asyncio.Lock) -> None:
        await asyncio.sleep(at_s - time.monotonic())
        await self._release(in_order)

    async def _release(self, in_order: asyncio.Lock) -> None:
        async with in_order:
            await self._send_headers()

    async def _send_headers(self) -> None:
        headers, self._headers = self._headers, None
        if headers is not None:
            await self._send(headers)
