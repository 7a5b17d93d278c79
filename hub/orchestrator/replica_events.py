"""ReplicaListener: passes the events of replica connections on to the pools and to the requests in flight there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hub.metrics import HubMetrics
from hub.orchestrator.aborts import AbortTracker
from hub.orchestrator.active import Active
from hub.pool.entry import BindingEnd
from hub.pool.hand_offs import HandOffRecord
from hub.pool.stage_pool import StagePool
from hub.replicas.events import (
    AbortEnded,
    Answered,
    AnswerEvent,
    ClientEvent,
    CreditEvent,
    EpochNamed,
    FrameDropped,
    Granted,
    PiecesCame,
    ProcessGone,
    Recalled,
    ReplicaLink,
    SessionDown,
    SessionUp,
    Unanswered,
    Unresolved,
    Unsent,
)
from hub.replicas.lost import LostReplicas
from hub.request import events as ev
from hub.request.retry import is_engine_death
from hub.request.state import Phase
from hub.request.story import shown_reason
from omni_discovery import wire
from omni_discovery.log_once import LogOnce

if TYPE_CHECKING:
    from hub.config import HubConfig
    from hub.orchestrator.requests import Requests
    from hub.pool.versions import Pools
    from omni_discovery.records.schema import ReplicaInfo

logger = logging.getLogger(__name__)

#: Requests that the log line of a lost replica names.
_MOST_NAMED: Final = 20
#: Answers that have counted already against their replica, if they do.
_REFUSALS: Final = (wire.Rejected, wire.StageFailed)
#: Answers that are the last of their attempt.
_ENDS: Final = (wire.Rejected, wire.StageDone, wire.StageFailed)


@dataclass(frozen=True, slots=True)
class StillSilent:
    """A session was lost, and the attempt got no answer within ``silence_grace_s``; ``has_ended``: see ReplicaLost."""

    request_id: str
    stage_id: int
    attempt: int
    has_ended: bool = True


@dataclass(frozen=True, slots=True)
class ReturnDue:
    """Credits that were recalled are to be given back."""

    client: ReplicaLink
    session: int
    credits: int


class ReplicaListener:
    """Part of the orchestrator's task.

    ``release`` ends a stage's binding to its replica, ``post`` puts an item into the orchestrator's inbox, and
    ``may_retry`` says whether a retry would leave at once.
    """

    def __init__(
        self,
        pools: Pools,
        requests: Requests,
        config: HubConfig,
        metrics: HubMetrics,
        aborts: AbortTracker,
        release: Callable[[Active, int], None],
        post: Callable[[StillSilent | ReturnDue], None],
        may_retry: Callable[[], bool],
        lost: LostReplicas | None = None,
    ) -> None:
        self._pools = pools
        self._requests = requests
        self._active = requests.active
        self._config = config
        self._metrics = metrics
        self._aborts = aborts
        self._release = release
        self._post = post
        self._may_retry = may_retry
        self._lost_replicas = lost or LostReplicas()
        #: Lives of replicas that were lost with work on them, and that was logged.
        self._log_once = LogOnce()
        self._hand_offs = HandOffRecord()

    def handle_client_event(self, event: ClientEvent) -> None:
        """Apply one event of one replica's connection."""
        match event:
            case Answered() | PiecesCame():
                self._answers_came(event)
            case Unanswered():
                self._unanswered(event)
            case SessionUp():
                self._session_up(event)
            case SessionDown():
                self._session_down(event)
            case Granted() | Recalled():
                self._update_credits(event)
            case AbortEnded(client=client, request_id=request_id):
                self._aborts.acknowledged(request_id, client)
            case ProcessGone(client=client):
                self._aborts.client_gone(client)
                self.lose_replica(client.info.stage_id, client.addr, "its process is gone")
            case Unsent():
                self._unsent(event)
            case FrameDropped() | Unresolved() | EpochNamed():
                self._note(event)

    def _note(self, event: FrameDropped | Unresolved | EpochNamed) -> None:
        """Only counts or status texts change; which record is connected to is the membership's affair."""
        if isinstance(event, FrameDropped):
            self._metrics.dropped.labels(event.reason).inc()
        elif isinstance(event, Unresolved):
            self._pools.of(event.client.info).core.unusable(event.client.addr, event.reason)

    def lose_replica(self, stage_id: int, addr: str, reason: str) -> None:
        """Fail every attempt in flight at an input address: none will be answered."""
        in_flight = [
            request_id for pool in self._pools.of_stage(stage_id) for request_id in pool.core.members.in_flight(addr)
        ]
        info = self._pools.record(stage_id, addr)
        if in_flight and info is not None:
            self._log_work_of_lost(info, in_flight)
        for request_id in in_flight:
            active = self._active.get(request_id)
            if active is not None:
                with self._requests.contained(request_id, "ProcessGone"):
                    self._lost(request_id, stage_id, active.machine.runs[stage_id].attempt, reason)

    def apply_item(self, item: StillSilent | ReturnDue) -> None:
        """Apply an item that this listener has posted: a grace is over, or credits are to go back now."""
        match item:
            case ReturnDue(client=client, session=session, credits=credits_):
                client.return_credits(session, credits_)
            case StillSilent(request_id=request_id, stage_id=stage_id, attempt=attempt):
                reason = f"its connection was lost and it said nothing for {self._config.silence_grace_s:.1f} s"
                self._lost(request_id, stage_id, attempt, reason, has_ended=item.has_ended)

    def _lost(self, request_id: str, stage_id: int, attempt: int, reason: str, *, has_ended: bool = True) -> None:
        self._requests.apply_event(request_id, ev.ReplicaLost(stage_id, attempt, reason, has_ended=has_ended))

    # ---- credits

    def _update_credits(self, event: CreditEvent) -> None:
        client, info = event.client, event.client.info
        pool = self._pools.of(info)
        if isinstance(event, Granted):
            pool.core.report(info.input_addr, event.queue_length, pool.now())
            pool.core.grant(info.input_addr, event.credits)
            return
        # A pick that waited and has just been served has spent its credit, and its request has not left yet: the
        # replica must receive that request first. Such a pick is ahead of this callback in the loop's queue.
        due = ReturnDue(client, event.session, pool.core.recall(info.input_addr, event.credits))
        asyncio.get_running_loop().call_soon(self._post, due)

    # ---- answers

    def _answers_came(self, event: AnswerEvent) -> None:
        if isinstance(event, PiecesCame):
            self._pieces_came(event)
        else:
            self._answered(event)

    def _pieces_came(self, event: PiecesCame) -> None:
        """Show pieces of text to their clients, as ``_answered`` would one by one, which gets all that are not usual.

        The replica's report counts once: the last of those that came together is the newest.
        """
        client, received_at_s = event.client, event.received_at_s
        info, now_s = client.info, time.perf_counter()
        pool, addr, stage_id = self._pools.of(info), info.input_addr, info.stage_id
        pool.core.members.end_silence(addr)
        for piece in event.pieces:
            active, binding = self._active.get(piece.request_id), pool.core.binding(piece.request_id)
            try:
                if (
                    active is None
                    or binding is None
                    or binding.entry.addr != addr
                    or active.graces
                    or not self._requests.show_piece(active, stage_id, piece, now_s, received_at_s)
                ):
                    self._answered(Answered(client, piece, (), received_at_s))
            except Exception as error:  # noqa: BLE001 - it is logged there, and costs this request alone
                self._requests.end_after_bug(piece.request_id, error, "PiecesCame")
        pool.core.report(addr, event.pieces[-1].queue_length, pool.now())

    def _answered(self, event: Answered) -> None:
        info, message = event.client.info, event.message
        pool, active = self._pools.of(info), self._active.get(message.request_id)
        binding = pool.core.binding(message.request_id)
        # Also by an answer that comes when another replica has the request.
        pool.core.members.end_silence(info.input_addr)
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
        if not isinstance(message, _ENDS):
            binding.accept()
        else:
            if isinstance(message, wire.StageFailed):
                if is_engine_death(message.kind, message.reason):
                    self._engine_died(pool, event.client.info, shown_reason(message))
                # An invalid request is no failure of the replica, nor is a full queue.
                if message.kind is wire.FailureKind.ENGINE:
                    self._engine_failed(pool, active, info, shown_reason(message))
                self._hand_off_failed(active, info, message)
            self._release(active, info.stage_id)
        pool.core.report(info.input_addr, message.queue_length, pool.now())
        run = active.machine.runs[info.stage_id]
        was_at_fault = info.input_addr in run.avoid
        self._requests.apply_answer(active, info.stage_id, event)
        if isinstance(message, wire.StageDone) and run.phase is Phase.DONE and run.attempt == message.attempt:
            self._served(pool, active, event)
        elif info.input_addr in run.avoid and not was_at_fault and not isinstance(message, _REFUSALS):
            self._blame(pool, info, "its output is not whole", active.request.request_id)

    def _engine_died(self, pool: StagePool, info: ReplicaInfo, reason: str) -> None:
        """Stop picks of a replica that has said so: its process lives on only to say it for each of its requests."""
        self._log_work_of_lost(info, pool.core.members.in_flight(info.input_addr))
        pool.core.session_down(info.input_addr, pool.now(), reason)

    def _served(self, pool: StagePool, active: Active, event: Answered) -> None:
        """Count a success of the replica."""
        pool.core.stage_served()
        self._blame_again(pool, active)
        self._hand_offs_read(pool, active, event.client.info)
        if not active.request.segmented:
            run = active.machine.runs[pool.stage_id]
            # The time of a request that was paused for its client says nothing of how long the stage takes.
            service_s = event.received_at_s - run.sent_at_s if run.pause_sent is None else None
            if pool.core.succeeded(event.client.info.input_addr, service_s, pool.now()):
                logger.info("replica.readmitted replica=%s", event.client.info.name)

    def _engine_failed(self, pool: StagePool, active: Active, info: ReplicaInfo, cause: str) -> None:
        """Count a failure of the replica, unless the request has failed elsewhere: then it is nobody's."""
        failed_at = active.failed_at.setdefault(pool.stage_id, set())
        failed_at.add(info.input_addr)
        if len(failed_at) == 1:
            self._blame(pool, info, cause, active.request.request_id)
            return
        for addr in failed_at:
            entry = pool.core.members.entries.get(addr)
            if pool.core.excuse(addr, active.request.request_id, pool.now()) and entry is not None:
                logger.info("replica.readmitted replica=%s: what failed here fails elsewhere, too", entry.info.name)

    def _hand_offs_read(self, pool: StagePool, active: Active, info: ReplicaInfo) -> None:
        """A replica has served a request with what others had left for it."""
        if self._hand_offs:
            for from_stage in active.request.plan.inputs[info.stage_id]:
                producer = active.machine.runs[from_stage].replica
                if producer is not None:
                    self._hand_offs.hand_off_read(producer.input_addr, info.input_addr, pool.now())

    def _hand_off_failed(self, active: Active, info: ReplicaInfo, message: wire.StageFailed) -> None:
        """Count a failure of the replica that left a hand-off which can't be read, or of the one that can read none."""
        run = active.machine.producer_of(info.stage_id, message)
        if run is None or run.replica is None:
            return
        producer = self._pools.record(run.stage_id, run.replica.input_addr)
        if producer is None:
            return
        pool, cause = self._pools.of(producer), shown_reason(message)
        if self._hand_offs.is_consumers_fault(producer.input_addr, info.input_addr, pool.now()):
            self._blame(self._pools.of(info), info, cause, active.request.request_id)
            return
        if run.phase is Phase.DONE:
            pool.core.withdraw_success(producer.input_addr)
        self._engine_failed(pool, active, producer, f"stage {info.stage_id} can't read its hand-off: {cause}")

    def _blame_again(self, pool: StagePool, active: Active) -> None:
        """The request was served after all: it was the fault of all the replicas where it failed."""
        failed_at = active.failed_at.pop(pool.stage_id, ())
        if len(failed_at) > 1:
            for addr in failed_at:
                info = self._pools.record(pool.stage_id, addr)
                if info is not None:
                    self._blame(pool, info, "another replica served what failed here", active.request.request_id)

    def _blame(self, pool: StagePool, info: ReplicaInfo, cause: str, request_id: str = "") -> None:
        """Count a failure of a replica; log it if that ejects the replica. ``cause`` quotes no prompt."""
        if pool.core.failed(info.input_addr, pool.now(), cause, request_id):
            entry = pool.core.members.entries[info.input_addr]
            text = "replica.ejected replica=%s for_s=%.1f in_force=%s: %s"
            for_s, is_in_force = entry.health.until_s - pool.now(), not pool.core.outliers.panics
            logger.warning(text, info.name, for_s, is_in_force, entry.health.reason)
        for entry in pool.core.readmit_ordinary(pool.now()):
            logger.info("replica.readmitted replica=%s: it fails no more than others", entry.info.name)

    def _unanswered(self, event: Unanswered) -> None:
        info, active = event.client.info, self._active.get(event.request_id)
        if active is None or not active.machine.is_out(info.stage_id, event.attempt):
            return
        pool = self._pools.of(info)
        run = active.machine.runs[info.stage_id]
        if not event.is_final:
            # Without another replica to go to, with one attempt left, or with a retry that would have to wait for the
            # budget, it is better to stay: where a burst makes everything slow, the answer comes sooner than a token.
            is_last = run.is_last_of(self._config.attempts)
            is_bound = active.machine.has_past(info.stage_id)
            others = {*run.avoid, *run.slow, info.input_addr}
            if is_last or is_bound or not self._may_retry() or not pool.core.has_free(others):
                return
        limit_s, now_s = self._config.accept_limit_s, pool.now()
        silence_s = limit_s if event.is_final else self._config.accept_timeout_s
        reason = f"it said nothing for {silence_s:g} s after the dispatch"
        entry = pool.core.members.entries.get(info.input_addr)
        # A replica that is only late has not failed: it may be busy with what another client sent.
        if entry is not None and entry.silence.is_failure(silence_s, now_s, limit_s):
            self._blame(pool, info, f"it answered no dispatch for {limit_s:g} s")
        lost = ev.ReplicaLost(
            info.stage_id,
            event.attempt,
            reason,
            avoid_addr=info.input_addr,
            is_slow=not event.is_final,
            has_ended=False,
        )
        self._requests.apply_event(event.request_id, lost)

    def _unsent(self, event: Unsent) -> None:
        info, active = event.client.info, self._active.get(event.request_id)
        if active is None or not active.machine.is_out(info.stage_id, event.attempt):
            return
        if active.machine.has_past(info.stage_id):
            lost = ev.ReplicaLost(info.stage_id, event.attempt, "the send queue was full", has_ended=False)
            self._requests.apply_event(event.request_id, lost)
            return
        # Before its slot is free again, so that the next pick does not go to the same full queue.
        pool = self._pools.of(info)
        pool.core.send_queue_full(info.input_addr, pool.now())
        # The replica has not seen the dispatch: the credit that it spent is available again.
        pool.core.release(event.request_id, BindingEnd.UNSENT)
        lost = ev.ReplicaLost(info.stage_id, event.attempt, "the send queue was full", may_have_run=False)
        self._requests.apply_event(event.request_id, lost)

    # ---- sessions

    def _session_up(self, event: SessionUp) -> None:
        client, info, pool = event.client, event.client.info, self._pools.of(event.client.info)
        # The session may be lost again by now: pools and requests only learn what is true at this moment.
        if client.session_up:
            logger.info("replica.session_up replica=%s epoch=%d", info.name, info.epoch)
            self._log_once.forget(_life_of(info))
            pool.core.report(client.addr, event.queue_length, pool.now())
            pool.core.session_up(client.addr, pool.now(), uses_credits=event.gated)
            self._lost_replicas.session_up(info)
            for request_id in pool.core.members.in_flight(client.addr):
                with self._requests.contained(request_id, "SessionUp"):
                    self._repeat(request_id, info.stage_id)

    def _repeat(self, request_id: str, stage_id: int) -> None:
        """Send again what the replica may not have got in the session before."""
        active = self._active.get(request_id)
        if active is not None and active.machine.must_repeat(stage_id):
            attempt = active.machine.runs[stage_id].attempt
            self._requests.apply_event(request_id, ev.SessionBack(stage_id, attempt))

    def _session_down(self, event: SessionDown) -> None:
        info = event.client.info
        text = "replica.session_down replica=%s epoch=%d addr=%s output_addr=%s: %s"
        logger.warning(text, info.name, info.epoch, info.input_addr, info.output_addr, event.reason)
        pool = self._pools.of(info)
        pool.core.session_down(info.input_addr, pool.now(), event.reason)
        self._lost_replicas.session_lost(info)
        if not event.lost:
            return
        self._metrics.session_losses.labels(info.stage_id).inc()
        in_flight = pool.core.members.in_flight(info.input_addr)
        if in_flight:
            self._log_work_of_lost(info, in_flight)
            if not event.given_up:
                # One that gives us up is not at fault: we have not read what it sent.
                self._blame(pool, info, event.reason)
        for request_id in in_flight:
            active = self._active.get(request_id)
            if active is not None:
                with self._requests.contained(request_id, "SessionDown"):
                    self._move_or_wait(active, info.stage_id, event.reason, has_ended=not event.given_up)

    def _move_or_wait(self, active: Active, stage_id: int, reason: str, *, has_ended: bool) -> None:
        """Fail work at once that another replica can do; other work waits for the session, there is nothing to lose."""
        request_id, attempt = active.request.request_id, active.machine.runs[stage_id].attempt
        if active.machine.runs[stage_id].replica is None:
            # A pick that waited has just got this replica: nothing has left yet, and the pick is repeated when it ends.
            return
        if active.machine.can_move(stage_id):
            self._lost(request_id, stage_id, attempt, reason, has_ended=has_ended)
        elif stage_id not in active.graces:
            active.graces[stage_id] = asyncio.get_running_loop().call_later(
                self._config.silence_grace_s, self._post, StillSilent(request_id, stage_id, attempt, has_ended)
            )

    def _log_work_of_lost(self, info: ReplicaInfo, request_ids: Sequence[str]) -> None:
        """Log which requests were in flight on a replica that is lost, once for each loss of it."""
        if self._log_once.should(_life_of(info)):
            names = ",".join(request_ids[:_MOST_NAMED])
            text = "replica.lost_at_work replica=%s in_flight=%d requests=%s"
            logger.warning(text, info.name, len(request_ids), names)


def _life_of(info: ReplicaInfo) -> tuple[int, int, int]:
    return info.stage_id, info.replica_id, info.epoch
