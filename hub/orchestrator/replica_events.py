"""ReplicaListener: what replicas say and how their sessions fare, told to pools and requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hub.metrics import HubMetrics
from hub.orchestrator.aborts import Cancels
from hub.orchestrator.active import Active
from hub.pool.entry import BindingEnd
from hub.pool.stage_pool import StagePool
from hub.replicas.events import (
    AbortEnded,
    Answered,
    ClientEvent,
    CreditEvent,
    FrameDropped,
    Granted,
    ProcessGone,
    Recalled,
    SessionDown,
    SessionUp,
    Unanswered,
    Unsent,
)
from hub.request import events as ev
from omni_discovery import wire

if TYPE_CHECKING:
    from hub.config import HubConfig
    from hub.pool.versions import Pools
    from hub.replicas.stage_client import StageClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StillSilent:
    """A session was lost, and its work got no answer within the grace."""

    request_id: str
    stage_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ReturnDue:
    """Credits that were recalled are to be given back."""

    client: StageClient
    session: int
    credits: int


class ReplicaListener:
    """Part of the orchestrator's task. ``tell`` feeds a request's machine, ``release`` ends a binding."""

    def __init__(
        self,
        pools: Pools,
        active: Mapping[str, Active],
        config: HubConfig,
        metrics: HubMetrics,
        cancels: Cancels,
        tell: Callable[[str, ev.Event], None],
        release: Callable[[Active, int], None],
        post: Callable[[StillSilent | ReturnDue], None],
    ) -> None:
        self._pools = pools
        self._active = active
        self._config = config
        self._metrics = metrics
        self._cancels = cancels
        self._tell = tell
        self._release = release
        self._post = post

    def hear(self, item: ClientEvent) -> None:
        """Take in what one client has to say."""
        match item:
            case Answered():
                self._answered(item)
            case Unanswered():
                self._unanswered(item)
            case SessionUp():
                self._session_up(item)
            case SessionDown():
                self._session_down(item)
            case Granted() | Recalled():
                self._take_credits(item)
            case AbortEnded(client=client, request_id=request_id):
                self._cancels.ended(request_id, client)
            case ProcessGone(client=client):
                self._cancels.gone(client)
                self.lose(client.info.stage_id, client.addr, "its process is gone")
            case Unsent():
                self._unsent(item)
            case FrameDropped(reason=reason):
                self._metrics.dropped.labels(reason).inc()

    def _take_credits(self, item: CreditEvent) -> None:
        client, info = item.client, item.client.info
        pool = self._pools.of(info)
        if isinstance(item, Granted):
            pool.core.report(info.input_addr, item.queue_length, pool.now())
            pool.core.grant(info.input_addr, item.credits)
            return
        # A pick that waited and has just been served has spent its credit, and its request has not left yet: the
        # replica must hear of it first. Such a pick is ahead of us in the loop's queue.
        due = ReturnDue(client, item.session, pool.core.recall(info.input_addr, item.credits))
        asyncio.get_running_loop().call_soon(self._post, due)

    def _unsent(self, item: Unsent) -> None:
        info, active = item.client.info, self._active.get(item.request_id)
        if active is None or not active.machine.is_out(info.stage_id, item.attempt):
            return
        if active.machine.has_past(info.stage_id):
            self._tell(item.request_id, ev.ReplicaLost(info.stage_id, item.attempt, "the send queue was full"))
            return
        # Before its slot is free again: nothing is to be sent there for a moment.
        pool = self._pools.of(info)
        pool.core.send_queue_full(info.input_addr, pool.now())
        # The replica never received it: the credit that it spent can be spent again.
        pool.core.release(item.request_id, BindingEnd.UNSENT)
        lost = ev.ReplicaLost(info.stage_id, item.attempt, "the send queue was full", may_have_run=False)
        self._tell(item.request_id, lost)

    def lose(self, stage_id: int, addr: str, reason: str) -> None:
        """What is in flight at an address will not be answered."""
        in_flight = [
            request_id for pool in self._pools.of_stage(stage_id) for request_id in pool.core.members.in_flight(addr)
        ]
        for request_id in in_flight:
            active = self._active.get(request_id)
            if active is not None:
                self._tell(request_id, ev.ReplicaLost(stage_id, active.machine.runs[stage_id].attempt, reason))

    def due(self, item: StillSilent | ReturnDue) -> None:
        """The grace of one request is over, or credits are to go back now."""
        if isinstance(item, ReturnDue):
            item.client.return_credits(item.session, item.credits)
            return
        reason = f"its connection was lost and it said nothing for {self._config.silence_grace_s:.1f} s"
        self._tell(item.request_id, ev.ReplicaLost(item.stage_id, item.attempt, reason))

    def _answered(self, answer: Answered) -> None:
        info, message = answer.client.info, answer.message
        pool, active = self._pools.of(info), self._active.get(message.request_id)
        binding = pool.core.binding(message.request_id)
        if (
            active is None
            or not active.machine.is_out(info.stage_id, message.attempt)
            or binding is None
            or binding.entry.addr != info.input_addr
        ):
            pool.core.report(info.input_addr, message.queue_length, pool.now())
            if not isinstance(message, wire.Accepted | wire.Rejected):
                self._metrics.dropped.labels("stale").inc()
            return
        grace = active.graces.pop(info.stage_id, None)
        if grace is not None:
            grace.cancel()
        if not isinstance(message, wire.Rejected | wire.StageDone | wire.StageFailed):
            binding.accept()
        else:
            self._judge(pool, active, answer)
            self._release(active, info.stage_id)
        pool.core.report(info.input_addr, message.queue_length, pool.now())
        self._tell(message.request_id, answer.event())

    def _judge(self, pool: StagePool, active: Active, answer: Answered) -> None:
        """How the replica did: a request that is itself at fault says nothing about it, nor does being full."""
        addr, message = answer.client.info.input_addr, answer.message
        if isinstance(message, wire.StageDone) and message.finish_reason != "abort" and not active.request.segmented:
            run = active.machine.runs[pool.stage_id]
            # What waited for its client says nothing of how long the stage takes.
            service_s = answer.received_at_s - run.sent_at_s if run.told_paused is None else None
            pool.core.succeeded(addr, service_s, pool.now())
        elif isinstance(message, wire.StageFailed) and message.kind is wire.FailureKind.ENGINE:
            pool.core.failed(addr, pool.now())

    def _unanswered(self, item: Unanswered) -> None:
        info, active = item.client.info, self._active.get(item.request_id)
        if active is None or not active.machine.is_out(info.stage_id, item.attempt):
            return
        pool = self._pools.of(info)
        run = active.machine.runs[info.stage_id]
        if not item.is_final:
            # Who has nowhere else to go, or one try left, is better served by waiting.
            is_last = run.attempt + 1 >= self._config.attempts
            is_bound = active.machine.has_past(info.stage_id)
            if is_last or is_bound or not pool.core.has_free({*run.avoid, *run.slow, info.input_addr}):
                return
        pool.core.failed(info.input_addr, pool.now())
        silence_s = self._config.accept_limit_s if item.is_final else self._config.accept_timeout_s
        reason = f"it said nothing for {silence_s:g} s after the dispatch"
        lost = ev.ReplicaLost(
            info.stage_id, item.attempt, reason, avoid_addr=info.input_addr, is_slow=not item.is_final
        )
        self._tell(item.request_id, lost)

    def _session_up(self, item: SessionUp) -> None:
        client, info, pool = item.client, item.client.info, self._pools.of(item.client.info)
        # It may be lost again by now: only what is true at this moment is told.
        if client.session_up:
            logger.info("replica.session_up stage=%d replica=%d epoch=%d", info.stage_id, info.replica_id, info.epoch)
            pool.core.report(client.addr, item.queue_length, pool.now())
            pool.core.session_up(client.addr, pool.now(), uses_credits=item.gated)
            for request_id in pool.core.members.in_flight(client.addr):
                active = self._active.get(request_id)
                if active is not None and active.machine.must_repeat(info.stage_id):
                    attempt = active.machine.runs[info.stage_id].attempt
                    self._tell(request_id, ev.SessionBack(info.stage_id, attempt))

    def _session_down(self, item: SessionDown) -> None:
        info = item.client.info
        logger.warning("replica.session_down stage=%d replica=%d: %s", info.stage_id, info.replica_id, item.reason)
        pool = self._pools.of(info)
        pool.core.session_down(info.input_addr, pool.now())
        if not item.lost:
            return
        self._metrics.session_losses.labels(info.stage_id).inc()
        in_flight = pool.core.members.in_flight(info.input_addr)
        if in_flight:
            pool.core.failed(info.input_addr, pool.now())
        for request_id in in_flight:
            active = self._active.get(request_id)
            if active is not None:
                self._interrupt(active, info.stage_id, item.reason)

    def _interrupt(self, active: Active, stage_id: int, reason: str) -> None:
        """Work that can be done elsewhere moves at once; other work waits for the session, there is nothing to lose."""
        request_id, attempt = active.request.request_id, active.machine.runs[stage_id].attempt
        if active.machine.runs[stage_id].replica is None:
            # A pick that waited has just got this replica: nothing has left yet, and it is made again when it ends.
            return
        if active.machine.can_move(stage_id):
            self._tell(request_id, ev.ReplicaLost(stage_id, attempt, reason))
        elif stage_id not in active.graces:
            active.graces[stage_id] = asyncio.get_running_loop().call_later(
                self._config.silence_grace_s, self._post, StillSilent(request_id, stage_id, attempt)
            )
