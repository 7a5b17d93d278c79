"""StagePool: the asyncio side of a pool, in which a pick is a coroutine that waits for a free slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from hub.config import PoolOptions
from hub.pool.core import Pool
from hub.pool.credits import CreditRequest
from hub.pool.entry import Binding, BindingEnd
from hub.pool.probation import Probation
from hub.pool.status import StageStatus
from hub.pool.wait_queue import MAX_WAIT_FOR_BEST_S, PendingPick, Waiter

if TYPE_CHECKING:
    from omni_discovery.balancing.base import LoadBalancer, Task
    from omni_discovery.records.schema import ReplicaInfo

__all__ = ["CreditRequest", "PoolOptions", "StagePool", "StageStatus"]


class StagePool:
    """The replicas of one stage. Lives on the hub's loop; not thread-safe.

    ``core`` has all rules and answers all questions; a pool without a running loop can be used through it alone.
    """

    def __init__(
        self,
        stage_id: int,
        balancer: LoadBalancer,
        options: PoolOptions | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        options = options or PoolOptions()
        self.stage_id = stage_id
        self.pick_timeout_s = options.pick_timeout_s
        self.core = Pool(stage_id, balancer, options)
        #: The requests that may have ended a replica.
        self.probation = Probation(options.pick_timeout_s)
        #: The clock that ``core`` goes by, monotonic seconds.
        self.now = now

    def __repr__(self) -> str:
        return f"StagePool({self.core})"

    async def pick(
        self,
        request_id: str,
        task: Task,
        affinity_request_id: str | None = None,
        *,
        avoid: Collection[str] = (),
        priority: int = 0,
    ) -> ReplicaInfo:
        """Choose a replica, bind the request to it and return its record. As ``acquire``."""
        binding = await self.acquire(request_id, task, affinity_request_id, avoid=avoid, priority=priority)
        return binding.info

    async def acquire(
        self,
        request_id: str,
        task: Task,
        affinity_request_id: str | None = None,
        *,
        avoid: Collection[str] = (),
        priority: int = 0,
    ) -> Binding:
        """Choose a replica and bind the request to it.

        First the replica that the request is bound to, then the one of ``affinity_request_id``, then the balancer's
        choice of those that are UP, answer and have a free slot, none of ``avoid``. Where all are full it waits for
        one, in the order of ``priority`` (the lowest first) and arrival. Where none can be picked at all for
        ``pick_timeout_s`` it raises StageUnavailableError; at once if every replica that could serve is to be avoided.
        """
        binding = self.core.try_pick(request_id, task, affinity_request_id, avoid)
        if binding is not None:
            return binding
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Binding] = loop.create_future()
        waiter: Waiter[PendingPick]
        waiter = Waiter(request_id, task, affinity_request_id, avoid, priority, self.now(), future)
        timers = _WaitTimers(self, waiter)
        self.core.wait(waiter)
        try:
            return await future
        except asyncio.CancelledError:
            # It was served a moment ago, and will not be sent. A later binding of the request is left alone.
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release(BindingEnd.UNSENT)
            raise
        finally:
            self.core.withdraw(waiter)
            timers.cancel()

    def bind(self, request_id: str, addr: str) -> None:
        """Bind the request to the replica with that input address. Raise ValueError if there is none."""
        self.core.bind(request_id, addr)

    def release(self, request_id: str) -> str | None:
        """End the request's binding; return the address it was bound to. Unknown requests are fine."""
        return self.core.release(request_id)

    def invalidate_addr(self, addr: str) -> list[str]:
        """End all bindings to an address; return exactly the requests that had one."""
        return self.core.invalidate(addr)


class _WaitTimers:
    """The timers of one waiting pick: when it takes any replica, and when it fails for want of one."""

    def __init__(self, pool: StagePool, waiter: Waiter[PendingPick]) -> None:
        self._pool = pool
        self._waiter = waiter
        self._loop = asyncio.get_running_loop()
        self._timeout = self._loop.call_later(pool.pick_timeout_s, self._time_out)
        self._preference = self._loop.call_later(MAX_WAIT_FOR_BEST_S, pool.core.stop_preferring, waiter)

    def cancel(self) -> None:
        """The pick is over. Idempotent."""
        self._timeout.cancel()
        self._preference.cancel()

    def _time_out(self) -> None:
        left_s = self._pool.core.time_out(self._waiter, self._pool.now())
        if left_s is not None:
            self._timeout = self._loop.call_later(left_s, self._time_out)
