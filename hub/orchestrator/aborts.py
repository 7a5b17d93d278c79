"""AbortTracker: the aborts that replicas have not acknowledged yet, and the futures that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Waiter:
    done: asyncio.Future[None]
    #: The ids of the requests that are not quiet yet.
    open_ids: set[str]


class AbortTracker:
    """Tracks aborts on the orchestrator's task. A request is quiet once no replica may still work on it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        #: The StageClients whose replica has not acknowledged the abort, by request id.
        self._open: dict[str, set[Hashable]] = {}
        #: The waiters for a request to be quiet, by its id.
        self._waiters: dict[str, list[_Waiter]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def abort_sent(self, request_id: str, client: Hashable) -> None:
        """An abort of the request was handed to the StageClient of a replica."""
        self._open.setdefault(request_id, set()).add(client)

    def acknowledged(self, request_id: str, client: Hashable) -> None:
        """The replica has acknowledged the abort, or never will. Does nothing for unknown requests."""
        clients = self._open.get(request_id)
        if clients is None:
            return
        clients.discard(client)
        if not clients:
            del self._open[request_id]
            self._resolve_waiters(request_id)

    def client_gone(self, client: Hashable) -> None:
        """The replica's process is gone: nothing runs there any more."""
        for request_id in [request_id for request_id, clients in self._open.items() if client in clients]:
            self.acknowledged(request_id, client)

    def when_quiet(self, request_ids: Collection[str], done: asyncio.Future[None]) -> None:
        """Resolve ``done`` when all these requests are quiet, or after the timeout, in case a replica is silent."""
        waiter = _Waiter(done, {request_id for request_id in request_ids if request_id in self._open})
        if not waiter.open_ids:
            _resolve(done)
        for request_id in waiter.open_ids:
            self._waiters.setdefault(request_id, []).append(waiter)
            asyncio.get_running_loop().call_later(self._timeout_s, self._resolve_waiters, request_id)

    def _resolve_waiters(self, request_id: str) -> None:
        for waiter in self._waiters.pop(request_id, ()):
            waiter.open_ids.discard(request_id)
            if not waiter.open_ids:
                _resolve(waiter.done)


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
