"""LeaseKeeper: drives a Lease. Sends its grants and renewals, and reports each change of its state."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from omni_discovery.backoff import wait_for_event
from omni_discovery.clock import Clock, utc_time
from omni_discovery.errors import LeaseNotFoundError, RegistryError
from omni_discovery.kv import KVStore
from omni_discovery.log_once import LogOnce
from omni_discovery.registration.lease import (
    DeclareHeld,
    DeclareLost,
    DeclareSuspect,
    Granted,
    GrantFailed,
    Lease,
    LeaseAction,
    LeaseEvent,
    LeaseState,
    Renewed,
    RenewFailed,
    SendGrant,
    SendKeepAlive,
    ServerForgot,
    Tick,
)

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """Holds one lease for as long as ``run`` runs. All methods belong to one event loop.

    ``may_renew`` is called before each renewal: while it returns false, the lease runs out. ``on_change`` is called
    with each new state of the lease; ``lease_id`` and ``reason`` are those of the new state by then.
    """

    def __init__(
        self,
        kv: KVStore,
        ttl_s: float,
        *,
        clock: Clock,
        may_renew: Callable[[], bool],
        on_change: Callable[[LeaseState], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._kv = kv
        self._clock = clock
        self._may_renew = may_renew
        self._on_change = on_change
        self._asked_ttl_s = ttl_s
        self._lease = Lease(ttl_s, jitter=jitter)
        self._wake = asyncio.Event()
        self._log_once = LogOnce()

    @property
    def lease_id(self) -> int:
        """The lease to write under; 0 while none is granted."""
        return self._lease.lease_id

    @property
    def left_s(self) -> float:
        """How long the lease lasts if it is not renewed; 0 without a lease. May be read from any thread."""
        lease = self._lease
        return max(0.0, lease.deadline_s - self._clock.monotonic_s()) if lease.lease_id else 0.0

    @property
    def reason(self) -> str:
        """Why the lease is in its state."""
        return self._lease.reason

    def __repr__(self) -> str:
        return f"LeaseKeeper({self._lease.describe(self._clock.monotonic_s())})"

    def story_lines(self) -> list[str]:
        """The events of the lease, oldest first, each line with its wall-clock time in UTC."""
        offset_s = self._clock.wall_s() - self._clock.monotonic_s()
        return [f"{utc_time(offset_s + at_s)} {text}" for at_s, text in self._lease.story]

    def forget_lease(self, lease_id: int) -> None:
        """The server answered a write under ``lease_id`` that there is no such lease."""
        self._apply(ServerForgot(lease_id, self._clock.monotonic_s()))
        self._wake.set()

    async def run(self) -> None:
        """Grant, renew, grant again. Ends only by cancellation."""
        while True:
            self._wake.clear()
            event: LeaseEvent = Tick(self._clock.monotonic_s(), self._may_renew_now())
            for action in self._lease.handle(event):
                answer = await self._carry_out(action)
                if answer is not None:
                    self._apply(answer)
            moment_s = self._lease.next_tick_s
            delay_s = None if moment_s is None else moment_s - self._clock.monotonic_s()
            await wait_for_event(self._wake, self._clock, delay_s)

    async def revoke(self) -> None:
        """End the lease, if there is one, and by that its keys."""
        if self.lease_id:
            await self._kv.revoke(self.lease_id)

    def _apply(self, event: LeaseEvent) -> None:
        for action in self._lease.handle(event):
            self._declare(action)

    async def _carry_out(self, action: LeaseAction) -> LeaseEvent | None:
        """Carry out one action. What was sent to the server ends as exactly one event; None: nothing was sent."""
        match action:
            case SendGrant(ttl_s):
                return await self._grant(ttl_s)
            case SendKeepAlive(lease_id):
                return await self._renew(lease_id)
            case DeclareHeld() | DeclareSuspect() | DeclareLost():
                self._declare(action)
                return None

    async def _grant(self, ttl_s: float) -> LeaseEvent:
        sent_at_s = self._clock.monotonic_s()
        try:
            grant = await self._kv.grant(ttl_s)
        except RegistryError as error:
            return GrantFailed(str(error), self._clock.monotonic_s())
        except Exception as error:
            # A defect in this program must not end the renewals.
            logger.exception("lease.grant_defect")
            return GrantFailed(repr(error), self._clock.monotonic_s())
        return Granted(grant.lease_id, grant.ttl_s, sent_at_s)

    async def _renew(self, lease_id: int) -> LeaseEvent:
        sent_at_s = self._clock.monotonic_s()
        try:
            ttl_s = await self._kv.keep_alive(lease_id)
        except LeaseNotFoundError:
            return ServerForgot(lease_id, self._clock.monotonic_s())
        except RegistryError as error:
            return RenewFailed(lease_id, str(error), self._clock.monotonic_s())
        except Exception as error:
            logger.exception("lease.renew_defect")
            return RenewFailed(lease_id, repr(error), self._clock.monotonic_s())
        return Renewed(lease_id, ttl_s, sent_at_s)

    def _declare(self, action: LeaseAction) -> None:
        match action:
            case DeclareHeld(lease_id):
                logger.info("lease.held lease=%x ttl_s=%g", lease_id, self._lease.granted_ttl_s)
                self._warn_if_raised(self._lease.granted_ttl_s)
                self._on_change(LeaseState.HELD)
            case DeclareSuspect(lease_id, reason):
                logger.warning("lease.suspect lease=%x reason=%s", lease_id, reason)
                self._log_story()
                self._on_change(LeaseState.SUSPECT)
            case DeclareLost(lease_id, reason):
                logger.warning("lease.lost lease=%x reason=%s", lease_id, reason)
                self._log_story()
                self._on_change(LeaseState.LOST)
            case SendGrant() | SendKeepAlive():
                self._wake.set()

    def _log_story(self) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            for line in self.story_lines():
                logger.debug("lease.story %s", line)

    def _warn_if_raised(self, granted_ttl_s: float) -> None:
        # etcd counts whole seconds, and grants no lease shorter than its elections take.
        if granted_ttl_s >= self._asked_ttl_s + 1.0 and self._log_once.should("ttl_raised"):
            logger.warning("lease.ttl_raised asked_s=%g granted_s=%g by=etcd", self._asked_ttl_s, granted_ttl_s)

    def _may_renew_now(self) -> bool:
        try:
            return self._may_renew()
        except Exception:
            # A health check that raises says nothing about the health of its owner.
            if self._log_once.should("gate_failed"):
                logger.exception("lease.gate_failed")
            return True
