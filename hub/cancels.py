"""Cancels: which aborts are not acknowledged yet, and who waits until they are."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable


class Cancels:
    """Part of the orchestrator's task. A request is quiet once no replica may still work on it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        #: The clients that have not acknowledged, by request.
        self._open: dict[str, set[Hashable]] = {}
        #: Who waits for a request to be quiet.
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def asked(self, request_id: str, client: Hashable) -> None:
        """A replica was told to stop the request."""
        self._open.setdefault(request_id, set()).add(client)

    def ended(self, request_id: str, client: Hashable) -> None:
        """It has acknowledged, or will never. Unknown ones are fine."""
        clients = self._open.get(request_id)
        if clients is None:
            return
        clients.discard(client)
        if not clients:
            del self._open[request_id]
            self._tell(request_id)

    def gone(self, client: Hashable) -> None:
        """There is nobody left to ask there."""
        for request_id in [request_id for request_id, clients in self._open.items() if client in clients]:
            self.ended(request_id, client)

    def when_quiet(self, request_id: str, done: asyncio.Future[None]) -> None:
        """Resolve ``done`` when nothing runs on, or after the timeout: a replica that is silent can't hold us."""
        if request_id not in self._open:
            _resolve(done)
            return
        self._waiters.setdefault(request_id, []).append(done)
        asyncio.get_running_loop().call_later(self._timeout_s, self._tell, request_id)

    def _tell(self, request_id: str) -> None:
        for done in self._waiters.pop(request_id, ()):
            _resolve(done)


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
