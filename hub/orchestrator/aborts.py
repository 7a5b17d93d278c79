"""Cancels: which aborts are not acknowledged yet, and who waits until they are."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Waiter:
    done: asyncio.Future[None]
    #: The requests that are not quiet yet.
    left: set[str]


class Cancels:
    """Part of the orchestrator's task. A request is quiet once no replica may still work on it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        #: The clients that have not acknowledged, by request.
        self._open: dict[str, set[Hashable]] = {}
        #: Who waits for a request to be quiet, with others.
        self._waiters: dict[str, list[_Waiter]] = {}

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

    def when_quiet(self, request_ids: Collection[str], done: asyncio.Future[None]) -> None:
        """Resolve ``done`` when nothing of these runs on, or after the timeout: a silent replica can't hold us."""
        waiter = _Waiter(done, {request_id for request_id in request_ids if request_id in self._open})
        if not waiter.left:
            _resolve(done)
        for request_id in waiter.left:
            self._waiters.setdefault(request_id, []).append(waiter)
            asyncio.get_running_loop().call_later(self._timeout_s, self._tell, request_id)

    def _tell(self, request_id: str) -> None:
        for waiter in self._waiters.pop(request_id, ()):
            waiter.left.discard(request_id)
            if not waiter.left:
                _resolve(waiter.done)


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
