"""Drives a Lease: sends its grants and renewals, tells what became of it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from omni_discovery.backoff import wait_for_event
from omni_discovery.clock import Clock
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
    Renewed,
    RenewFailed,
    SendGrant,
    SendKeepAlive,
    ServerForgot,
    Tick,
)

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """Holds one lease for as long as ``run`` runs. All methods belong to one event loop."""

    def __init__(
        self,
        kv: KVStore,
        ttl_s: float,
        *,
        clock: Clock,
        may_renew: Callable[[], bool],
        on_held: Callable[[int], None],
        on_lost: Callable[[str], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._kv = kv
        self._clock = clock
        self._may_renew = may_renew
        self._on_held = on_held
        self._on_lost = on_lost
        self._asked_ttl_s = ttl_s
        self._lease = Lease(ttl_s, jitter=jitter)
        self._wake = asyncio.Event()
        self._log_once = LogOnce()

    @property
    def lease_id(self) -> int:
        """The lease to write under; 0 while there is none."""
        return self._lease.lease_id

    def forget(self, lease_id: int) -> None:
        """A write under ``lease_id`` was told that there is no such lease."""
        self._apply(ServerForgot(lease_id, self._clock.monotonic_s()))
        self._wake.set()

    async def run(self) -> None:
        """Grant, renew, grant again. Ends only by cancellation."""
        while True:
            self._wake.clear()
            event: LeaseEvent = Tick(self._clock.monotonic_s(), self._ask_gate())
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
        """Do it; what was sent ends as exactly one event."""
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
            # A defect of our own must not end the renewals.
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
                self._say_if_raised(self._lease.granted_ttl_s)
                self._on_held(lease_id)
            case DeclareSuspect(lease_id, reason):
                logger.warning("lease.suspect lease=%x reason=%s", lease_id, reason)
            case DeclareLost(lease_id, reason):
                logger.warning("lease.lost lease=%x reason=%s", lease_id, reason)
                self._on_lost(reason)
            case SendGrant() | SendKeepAlive():
                self._wake.set()

    def _say_if_raised(self, granted_ttl_s: float) -> None:
        # etcd counts whole seconds; and with slow elections it grants no short leases.
        if granted_ttl_s >= self._asked_ttl_s + 1.0 and self._log_once.should("ttl_raised"):
            logger.warning("lease.ttl_raised asked_s=%g granted_s=%g by=etcd", self._asked_ttl_s, granted_ttl_s)

    def _ask_gate(self) -> bool:
        try:
            return self._may_renew()
        except Exception:
            # A gate that is broken itself says nothing about the engine.
            if self._log_once.should("gate_failed"):
                logger.exception("lease.gate_failed")
            return True
