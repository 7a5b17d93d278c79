"""StagePool: picks a replica of one stage, waiting for one where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from hub.config import PoolOptions
from hub.pool.core import PoolCore
from hub.pool.status import StageStatus
from hub.pool.wait_queue import Asking, PoolLine, Want
from omni_discovery.records.schema import ReplicaInfo

if TYPE_CHECKING:
    from omni_discovery.balancing.policies import LoadBalancer, Task

__all__ = ["PoolOptions", "StagePool", "StageStatus", "Want"]


class StagePool:
    """The replicas of one stage. Lives on the hub's loop; nothing in it is thread-safe."""

    def __init__(
        self,
        stage_id: int,
        balancer: LoadBalancer,
        options: PoolOptions | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage_id = stage_id
        self._options = options or PoolOptions()
        self.pick_timeout_s = self._options.pick_timeout_s
        self._core = PoolCore(balancer, self._options)
        self._now = now
        self._line = PoolLine(stage_id, self._core, self.pick_timeout_s, now)
        self._asking = Asking()

    # ---- the seeds' face

    async def pick(
        self,
        request_id: str,
        task: Task,
        affinity_request_id: str | None = None,
        *,
        avoid: Collection[str] = (),
        priority: int = 0,
    ) -> ReplicaInfo:
        """Choose a replica and bind the request to it.

        First the replica that the request is bound to, then the one of ``affinity_request_id``, then the balancer's
        choice of those that are UP, answer and have a free slot, none of ``avoid``. Where all are full it waits for
        one, in the order of ``priority`` (the lowest first) and arrival. Where none can be picked at all for
        ``pick_timeout_s`` it raises StageUnavailableError; at once if every replica that could serve is to be avoided.
        """
        found = self.try_pick(request_id, task, affinity_request_id, avoid=avoid, priority=priority)
        if found is not None:
            return found
        return await self._line.wait(request_id, task, affinity_request_id, avoid, priority)

    def bind(self, request_id: str, addr: str) -> None:
        """Bind the request to the replica with that input address. Raise ValueError if nobody has it."""
        self._core.bind(request_id, addr)

    def release(self, request_id: str) -> str | None:
        """End the request's binding; return the address it was bound to. Unknown requests are fine."""
        addr = self._core.release(request_id)
        self._line.serve()
        return addr

    def unsent(self, request_id: str) -> str | None:
        """End the binding of a request that never left: as ``release``, and the credit it spent is there again."""
        addr = self._core.release(request_id, unsent=True)
        self._line.serve()
        return addr

    def invalidate_addr(self, addr: str) -> list[str]:
        """End all bindings to an address; return exactly the requests that had one."""
        request_ids = self._core.invalidate(addr)
        self._line.serve()
        return request_ids

    # ---- picking without waiting

    def try_pick(
        self,
        request_id: str,
        task: Task,
        affinity_request_id: str | None = None,
        *,
        avoid: Collection[str] = (),
        priority: int = 0,
    ) -> ReplicaInfo | None:
        """Choose and bind as ``pick`` does, or return None where it would wait.

        A free slot is nobody else's: whoever waits could not use it, whatever the ``priority``.
        """
        found = self._core.pick(request_id, task, affinity_request_id, avoid, patient=True)
        if found is None and self._core.all_avoided(avoid):
            raise self._line.all_avoided()
        return found

    # ---- what the orchestrator tells it

    def upsert(self, info: ReplicaInfo) -> None:
        """The registry lists a replica, new or changed."""
        self._core.upsert(info, self._now())
        self._line.changed()

    def remove(self, addr: str) -> None:
        """The registry does not list the replica any more."""
        self._core.remove(addr)
        self._line.changed()

    def hold(self, addr: str) -> None:
        """The registry does not list the replica any more; it is served all the same, while it answers."""
        self._core.hold(addr)
        self._line.changed()

    def session_up(self, addr: str, *, gated: bool = False) -> None:
        """The replica answers on its data plane; a gated one is picked as far as it grants credits."""
        self._core.session_up(addr, self._now(), gated=gated)
        self._line.changed()

    def unusable(self, addr: str, why: str) -> None:
        """There can be no session with the replica as its record is; only what is said of it changes."""
        self._core.unusable(addr, why)

    def refuse(self, addr: str, why: str) -> None:
        """Keep picks off the replica for what it runs; with an empty ``why``, no more."""
        self._core.refuse(addr, why)
        self._line.changed()

    def session_down(self, addr: str) -> None:
        """The replica does not answer; its credits are void."""
        self._core.session_down(addr)
        self._line.changed()

    def report(self, addr: str, queue_length: int) -> None:
        """A frame told the replica's queue length."""
        self._core.report(addr, queue_length, self._now())
        self._line.serve()

    def accepted(self, request_id: str) -> None:
        """The replica that the request is bound to has taken the work."""
        self._core.accepted(request_id)

    def succeeded(self, addr: str, service_s: float | None = None) -> None:
        """A replica has served a request, in ``service_s`` if that is known."""
        self._core.succeeded(addr, service_s, self._now())
        self._line.serve()

    def failed(self, addr: str) -> None:
        """A transport error, a timeout or an engine's failure; nothing that the request itself is to blame for."""
        self._core.failed(addr, self._now())
        self._line.changed()

    def clogged(self, addr: str) -> None:
        """A message did not go into the queue to a replica: it gets none for a moment, and is tried again then."""
        self._core.clogged(addr, self._now())

    def set_live_hubs(self, count: int) -> None:
        """So many hubs share the replicas, this one included."""
        self._core.set_live_hubs(count)

    def review(self, now_s: float) -> None:
        """Time has passed; due at ``next_review_s``."""
        self._core.review(now_s)
        self._line.changed()

    # ---- credits

    def grant(self, addr: str, count: int) -> None:
        """The replica lets this hub send so many more requests."""
        self._core.grant(addr, count)
        self._line.serve()

    def recall(self, addr: str, count: int) -> int:
        """The replica wants credits back; return how many unspent ones are given up."""
        return self._core.recall(addr, count)

    def spent_credit(self, request_id: str) -> bool:
        """Whether the request's binding spent a credit."""
        return self._core.spent_credit(request_id)

    def credits(self, addr: str) -> int:
        """The unspent credits of a replica."""
        return self._core.credits(addr)

    def wants(self, now_s: float) -> list[Want]:
        """Whom to ask for how many credits now; ``waiting`` 0 takes back what was asked. Due at ``next_wants_s``."""
        waiting, hurry = len(self._line), self._line.only_patient
        if not self._asking.is_due(now_s, waiting, hurry=hurry):
            return []
        return self._asking.due(now_s, waiting, self._line.oldest_wait_s(now_s), self._givers(), hurry=hurry)

    @property
    def next_wants_s(self) -> float | None:
        """When ``wants`` has something to say; None while nothing changes."""
        waiting = len(self._line)
        givers = len(self._givers()) if waiting and not self._asking.asked else 0
        return self._asking.next_s(waiting, givers, hurry=self._line.only_patient)

    def _givers(self) -> tuple[str, ...]:
        if self._line.only_patient and len(self._line) <= self._core.withheld.room():
            return self._core.withheld.addrs()
        return self._core.givers(with_spared=self._line.needs_spared)

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
        """Whether the replica can take work, full or not."""
        return self._core.serviceable(addr)

    def has_free(self, avoid: Collection[str] = ()) -> bool:
        """Whether a pick that avoids these would have somebody at once."""
        return self._core.has_free(avoid)

    def in_flight(self, addr: str) -> list[str]:
        """The requests bound to an address."""
        return self._core.in_flight(addr)

    def report_age_s(self, addr: str) -> float | None:
        """How old the last report of a frame is; None before the first."""
        return self._core.report_age_s(addr, self._now())

    @property
    def status(self) -> StageStatus:
        """How many replicas there are."""
        return StageStatus(self.stage_id, self.registered_count, self.pickable_count, self._core.why_absent())

    @property
    def registered_count(self) -> int:
        """How many replicas the registry lists."""
        return self._core.registered_count()

    @property
    def is_unused(self) -> bool:
        """Whether nobody is in it, and nobody waits."""
        return not (self._core.is_populated or self._line)

    @property
    def held_count(self) -> int:
        """How many replicas are served though the registry lists them no more."""
        return self._core.held_count()

    @property
    def pickable_count(self) -> int:
        """How many replicas can take work, full or not."""
        return self._core.pickable_count()

    @property
    def ejected_count(self) -> int:
        """How many replicas are left out for their failures."""
        return self._core.ejected_count()

    @property
    def waiting_count(self) -> int:
        """How many picks wait."""
        return len(self._line)

    @property
    def slots(self) -> int:
        """How many requests those who can take work run at one time."""
        return self._core.slots

    @property
    def mean_service_s(self) -> float | None:
        """How long a request lately took at a replica; None before the first."""
        return self._core.mean_service_s

    @property
    def next_review_s(self) -> float | None:
        """When ``review`` is due though nothing happens; None while time changes nothing."""
        return self._core.next_review_s
