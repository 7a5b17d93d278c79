"""StagePool: picks a replica of one stage, waiting for one where there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from hub.pool_core import PoolCore
from omni_discovery.errors import StageUnavailableError
from omni_discovery.messages import ReplicaInfo

if TYPE_CHECKING:
    from omni_discovery.balancers import LoadBalancer, Task


class StagePool:
    """The replicas of one stage. Lives on the hub's loop; nothing in it is thread-safe."""

    def __init__(
        self,
        stage_id: int,
        balancer: LoadBalancer,
        pick_timeout_s: float = 10.0,
        load_fresh_s: float = 1.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage_id = stage_id
        self.pick_timeout_s = pick_timeout_s
        self._balancer = balancer
        self._core = PoolCore(load_fresh_s)
        self._now = now
        #: One future for each pick that waits, the longest first; all are woken when anything may have become pickable.
        self._waiters: dict[asyncio.Future[None], None] = {}

    # ---- the seeds' face

    async def pick(
        self,
        request_id: str,
        task: Task,
        affinity_request_id: str | None = None,
        *,
        avoid: Collection[str] = (),
    ) -> ReplicaInfo:
        """Choose a replica and bind the request to it.

        First the replica that the request is bound to, then the one of ``affinity_request_id``, then the balancer's
        choice of those that are UP and answer, none of ``avoid``. Waits for one up to ``pick_timeout_s``, then raises
        StageUnavailableError; raises it at once if every replica that could serve is to be avoided.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self.pick_timeout_s
        while True:
            found = self.try_pick(request_id, task, affinity_request_id, avoid=avoid)
            if found is not None:
                return found
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters[waiter] = None
            try:
                async with asyncio.timeout_at(deadline_s):
                    await waiter
            except TimeoutError:
                text = f"no UP replica for stage {self.stage_id} after {self.pick_timeout_s:.1f}s"
                raise StageUnavailableError(self.stage_id, text) from None
            finally:
                del self._waiters[waiter]

    def bind(self, request_id: str, addr: str) -> None:
        """Bind the request to the replica with that input address. Raise ValueError if nobody has it."""
        self._core.bind(request_id, addr)

    def release(self, request_id: str) -> str | None:
        """End the request's binding; return the address it was bound to. Unknown requests are fine."""
        return self._core.release(request_id)

    def invalidate_addr(self, addr: str) -> list[str]:
        """End all bindings to an address; return exactly the requests that had one."""
        return self._core.invalidate(addr)

    # ---- picking without waiting

    def try_pick(
        self,
        request_id: str,
        task: Task,
        affinity_request_id: str | None = None,
        *,
        avoid: Collection[str] = (),
    ) -> ReplicaInfo | None:
        """Choose and bind as ``pick`` does, or return None where it would wait."""
        for bound_id in (request_id, affinity_request_id):
            addr = self._core.bound(bound_id) if bound_id is not None else None
            if addr is not None and addr not in avoid and self._core.serviceable(addr):
                self._core.bind(request_id, addr)
                return self._core.get(addr)
        self._core.release(request_id)
        candidates = self._core.candidates(avoid)
        if not candidates:
            if avoid and self._core.pickable_count():
                text = f"every replica of stage {self.stage_id} that can take work has failed this request"
                raise StageUnavailableError(self.stage_id, text)
            return None
        chosen = candidates[self._balancer.select(task, candidates)]
        self._core.bind(request_id, chosen.input_addr)
        return chosen

    # ---- what the orchestrator tells it

    def upsert(self, info: ReplicaInfo) -> None:
        """The registry lists a replica, new or changed."""
        self._core.upsert(info, self._now())
        self._wake()

    def remove(self, addr: str) -> None:
        """The registry does not list the replica any more."""
        self._core.remove(addr)

    def hold(self, addr: str) -> None:
        """The registry does not list the replica any more; it is served all the same, while it answers."""
        self._core.hold(addr)
        self._wake()

    def session_up(self, addr: str) -> None:
        """The replica answers on its data plane."""
        self._core.session_up(addr)
        self._wake()

    def session_down(self, addr: str) -> None:
        """The replica does not answer."""
        self._core.session_down(addr)

    def report(self, addr: str, queue_length: int) -> None:
        """A frame told the replica's queue length."""
        self._core.report(addr, queue_length, self._now())

    def accepted(self, request_id: str) -> None:
        """The replica that the request is bound to has taken the work."""
        self._core.accepted(request_id)

    # ---- what it knows

    def bound(self, request_id: str) -> str | None:
        """The input address that the request is bound to."""
        return self._core.bound(request_id)

    def get(self, addr: str) -> ReplicaInfo | None:
        """The replica at that address, listed or with work still in flight."""
        return self._core.get(addr)

    def answers(self, addr: str) -> bool:
        """Whether the replica at that address answers, listed or not."""
        return self._core.answers(addr)

    def serviceable(self, addr: str) -> bool:
        """Whether a pick may choose the replica."""
        return self._core.serviceable(addr)

    def in_flight(self, addr: str) -> list[str]:
        """The requests bound to an address."""
        return self._core.in_flight(addr)

    @property
    def registered_count(self) -> int:
        """How many replicas the registry lists."""
        return self._core.registered_count()

    @property
    def held_count(self) -> int:
        """How many replicas are served though the registry lists them no more."""
        return self._core.held_count()

    @property
    def pickable_count(self) -> int:
        """How many replicas a pick may choose from."""
        return self._core.pickable_count()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
