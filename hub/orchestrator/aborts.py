"""AbortTracker: the aborts that replicas have not acknowledged yet, and the futures that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from omni_discovery.errors import DeadlineExceededError


@dataclass(slots=True, eq=False)
class _Waiter:
    done: asyncio.Future[None]
    #: The ids of the requests that are not quiet yet.
    open_ids: set[str]
    timer: asyncio.TimerHandle | None = None


class AbortTracker:
    """Tracks aborts on the orchestrator's task. A request is quiet once no replica may still work on it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        #: The StageClients whose replica has not acknowledged the abort, with its name, by request id.
        self._open: dict[str, dict[Hashable, str]] = {}
        #: The waiters for a request to be quiet, by its id.
        self._waiters: dict[str, list[_Waiter]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def abort_sent(self, request_id: str, client: Hashable, replica: str = "") -> None:
        """An abort of the request was handed to the StageClient of a replica, which is ``<stage>/<replica id>``."""
        self._open.setdefault(request_id, {})[client] = replica

    def acknowledged(self, request_id: str, client: Hashable) -> None:
        """The replica has acknowledged the abort, or never will. Does nothing for unknown requests."""
        clients = self._open.get(request_id)
        if clients is None:
            return
        clients.pop(client, None)
        if not clients:
            del self._open[request_id]
            for waiter in self._waiters.pop(request_id, ()):
                waiter.open_ids.discard(request_id)
                if not waiter.open_ids:
                    _resolve(waiter)

    def client_gone(self, client: Hashable) -> None:
        """The replica's process is gone: nothing runs there any more."""
        for request_id in [request_id for request_id, clients in self._open.items() if client in clients]:
            self.acknowledged(request_id, client)

    def when_quiet(self, request_ids: Collection[str], done: asyncio.Future[None]) -> None:
        """Resolve ``done`` when all these requests are quiet; with DeadlineExceededError if a replica stays silent."""
        waiter = _Waiter(done, {request_id for request_id in request_ids if request_id in self._open})
        if not waiter.open_ids:
            _resolve(waiter)
            return
        for request_id in waiter.open_ids:
            self._waiters.setdefault(request_id, []).append(waiter)
        waiter.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._time_out, waiter)

    def _time_out(self, waiter: _Waiter) -> None:
        silent = {name for request_id in waiter.open_ids for name in self._open.get(request_id, {}).values()}
        for request_id in waiter.open_ids:
            waiters = self._waiters.get(request_id, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._waiters.pop(request_id, None)
        if not waiter.done.done():
            waiter.done.set_exception(
                DeadlineExceededError(
                    f"replica {', '.join(sorted(silent))} has not acknowledged the abort within {self._timeout_s:g} s; "
                    "the request has ended in this hub, and the replica stops it when it hears of that"
                )
            )


def _resolve(waiter: _Waiter) -> None:
    if waiter.timer is not None:
        waiter.timer.cancel()
    if not waiter.done.done():
        waiter.done.set_result(None)
