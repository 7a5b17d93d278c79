"""Dispatcher: carries out what concerns replicas: pick and send, abort, release."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hub.config import NotConnectedError, SendFailedError
from hub.metrics import HubMetrics
from hub.orchestrator.aborts import AbortTracker
from hub.orchestrator.active import Active, Pick
from hub.orchestrator.retries import PacedRetries, RetryDue
from hub.pool.stage_pool import StagePool
from hub.replicas.membership import Membership
from hub.request import events as ev
from omni_discovery import wire
from omni_discovery.errors import StageUnavailableError, WireError
from omni_discovery.records.schema import ReplicaInfo

if TYPE_CHECKING:
    from omni_discovery.balancing.policies import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PickEnded:
    """A pick that had to wait is over."""

    request_id: str
    dispatch: ev.Dispatch
    task: asyncio.Task[None] | None
    found: ReplicaInfo | StageUnavailableError


class Dispatcher:
    """Part of the orchestrator's task. Each dispatch ends as exactly one event, at once or through ``post``."""

    def __init__(
        self,
        membership: Membership,
        metrics: HubMetrics,
        aborts: AbortTracker,
        post: Callable[[PickEnded | RetryDue], None],
        on_wait: Callable[[], None],
    ) -> None:
        #: How fast work is repeated.
        self.retries = PacedRetries(post)
        self._membership = membership
        self._metrics = metrics
        self._aborts = aborts
        self._post = post
        #: Called when a pick has to wait, after its task was made.
        self._on_wait = on_wait

    def dispatch(self, active: Active, action: ev.Dispatch) -> ev.Event | None:
        """Pick and send; None if the pick, or a retry before it, has to wait."""
        if action.is_retry and not self.retries.may_go(active.request.request_id, action):
            return None
        return self._dispatch(active, action)

    def retry_due(self, active: Active, due: RetryDue) -> ev.Event | None:
        """Go on with a retry that has waited; None if nobody wants it any more, or the pick has to wait."""
        action = due.dispatch
        return self._dispatch(active, action) if active.machine.is_out(action.stage_id, action.attempt) else None

    def _dispatch(self, active: Active, action: ev.Dispatch) -> ev.Event | None:
        pool, request_id = active.pools[action.stage_id], active.request.request_id
        try:
            task = _task(active, action)
            near = active.request.parent_id or None
            found = pool.try_pick(request_id, task, near, avoid=_avoid(action, pool), priority=action.priority)
            while found is not None and self._is_lost(active, action, found):
                found = pool.try_pick(request_id, task, near, avoid=_avoid(action, pool), priority=action.priority)
        except StageUnavailableError as error:
            return ev.StageUnavailable(action.stage_id, action.attempt, str(error))
        if found is not None:
            return self._send(active, action, found)
        waiting = asyncio.create_task(self._pick(active, action, pool))
        active.picks[action.stage_id] = Pick(waiting, action)
        self._on_wait()
        return None

    def pick_ended(self, active: Active, ended: PickEnded) -> ev.Event | None:
        """Go on with a pick that has waited; None if nobody wants it any more."""
        action = ended.dispatch
        pick = active.picks.get(action.stage_id)
        if pick is None or pick.task is not ended.task:
            return None
        del active.picks[action.stage_id]
        if isinstance(ended.found, StageUnavailableError):
            return ev.StageUnavailable(action.stage_id, action.attempt, str(ended.found))
        if self._is_lost(active, action, ended.found):
            return self._dispatch(active, action)
        return self._send(active, action, ended.found)

    def move(self, active: Active, pools: Mapping[int, StagePool]) -> list[ev.Event]:
        """Have a request served from other pools from now on; its picks that wait are made anew there."""
        before, active.pools = active.pools, pools
        events = []
        for stage_id, pick in list(active.picks.items()):
            if pools[stage_id] is not before[stage_id]:
                del active.picks[stage_id]
                pick.task.cancel()
                # It may have been served a moment ago.
                self._take_back(active, stage_id, before[stage_id])
                params = active.request.params.get(stage_id, {})
                event = self._dispatch(active, replace(pick.dispatch, params=params))
                events += [] if event is None else [event]
        return events

    def update(self, active: Active, action: ev.Update) -> ev.Event | None:
        """Send a stage's next segment to its replica; None if it left, or is said again when the session is back."""
        addr = "" if action.replica is None else action.replica.input_addr
        client = self._membership.clients.get(addr)
        try:
            if client is None:
                raise SendFailedError("its record was removed")
            client.submit(
                wire.Update(
                    epoch=client.info.epoch,
                    request_id=active.request.request_id,
                    attempt=action.attempt,
                    segment=action.segment,
                    inputs=dict(action.inputs),
                    payloads=action.payloads,
                    is_last=action.is_last,
                    kept_from=action.kept_from,
                )
            )
        except NotConnectedError:
            return None
        except SendFailedError as error:
            return ev.ReplicaLost(action.stage_id, action.attempt, str(error))
        except WireError as error:
            return ev.DispatchRefused(action.stage_id, action.attempt, str(error))
        return None

    def pass_on(self, active: Active, action: ev.Update | ev.FeedInput | ev.PieceRoom | ev.Pause) -> ev.Event | None:
        """Tell a replica more of what it works on; None if it left, or is said again when the session is back."""
        if isinstance(action, ev.Update):
            return self.update(active, action)
        client = self._membership.clients.get(action.replica.input_addr)
        try:
            if client is None:
                raise SendFailedError("its record was removed")
            client.send_message(_order(action, client.info.epoch, active.request.request_id))
        except NotConnectedError:
            return None
        except (SendFailedError, WireError) as error:
            if isinstance(action, ev.Pause) and action.paused:
                # It goes on, and what waits for the client is bounded all the same.
                return None
            return ev.ReplicaLost(action.stage_id, action.attempt, f"it can't be told to go on: {error}")
        return None

    def abort(self, active: Active, action: ev.Abort) -> None:
        """Stop an attempt that was sent, or whose replica is still being picked."""
        pick, grace = active.picks.pop(action.stage_id, None), active.graces.pop(action.stage_id, None)
        if pick is not None:
            pick.task.cancel()
        if grace is not None:
            grace.cancel()
        self.retries.forget(active.request.request_id, action.stage_id)
        if action.replica is not None:
            client = self._membership.clients.get(action.replica.input_addr)
            if client is not None:
                client.abort_request(active.request.request_id, action.attempt)
                self._aborts.abort_sent(active.request.request_id, client)
            self.release(active, action.stage_id)
        else:
            self._take_back(active, action.stage_id)

    def release(self, active: Active, stage_id: int) -> None:
        """A stage's work is over: its binding ends."""
        addr = active.pools[stage_id].release(active.request.request_id)
        if addr is not None:
            self._membership.close_if_unused(stage_id, addr)

    def _is_lost(self, active: Active, action: ev.Dispatch, info: ReplicaInfo) -> bool:
        """Whether the session of a replica that was just picked is lost; then the pick is undone."""
        client = self._membership.clients.get(info.input_addr)
        if client is not None and client.session_up:
            return False
        # The pool is told in a later turn; until then one lost replica after the other would use up the attempts.
        self._take_back(active, action.stage_id)
        active.pools[action.stage_id].session_down(info.input_addr)
        return True

    def _take_back(self, active: Active, stage_id: int, pool: StagePool | None = None) -> None:
        """A replica was picked and nothing was sent to it."""
        addr = (pool or active.pools[stage_id]).unsent(active.request.request_id)
        if addr is not None:
            self._membership.close_if_unused(stage_id, addr)

    def release_payload(self, active: Active, action: ev.ReleasePayload) -> None:
        """Let a replica forget what it holds for the request."""
        client = self._membership.clients.get(action.replica.input_addr)
        if client is not None:
            client.release_payloads(active.request.request_id)

    async def _pick(self, active: Active, action: ev.Dispatch, pool: StagePool) -> None:
        found: ReplicaInfo | StageUnavailableError
        try:
            found = await pool.pick(
                active.request.request_id,
                _task(active, action),
                active.request.parent_id or None,
                avoid=action.avoid,
                priority=action.priority,
            )
        except StageUnavailableError as error:
            found = error
        except Exception as error:
            logger.exception("pick.bug stage=%d", action.stage_id)
            found = StageUnavailableError(action.stage_id, f"a bug while picking a replica: {error!r}")
        self._post(PickEnded(active.request.request_id, action, asyncio.current_task(), found))

    def _send(self, active: Active, action: ev.Dispatch, info: ReplicaInfo) -> ev.Event:
        now_s = time.perf_counter()
        client = self._membership.clients.get(info.input_addr)
        message = wire.Submit(
            epoch=info.epoch,
            request_id=active.request.request_id,
            attempt=action.attempt,
            inputs=dict(action.inputs),
            params=dict(action.params),
            payloads=action.payloads,
            next_stages=action.next_stages,
            credit=active.pools[action.stage_id].spent_credit(active.request.request_id),
            remaining_s=max(0.0, active.deadline_s - now_s),
            resume=action.resume,
            priority=action.priority,
            segmented=action.segmented,
            stream_from=action.stream_from,
            stream_to=action.stream_to,
            trace=active.trace_of(action.stage_id),
        )
        try:
            if client is None:
                raise SendFailedError("its record was removed while it was picked")
            client.submit(message)
        except WireError as error:
            self._take_back(active, action.stage_id)
            return ev.DispatchRefused(action.stage_id, action.attempt, str(error))
        except SendFailedError as error:
            # The way to the replica is full, for whoever wants to send now; that says nothing of the replica.
            active.pools[action.stage_id].clogged(info.input_addr)
            self._take_back(active, action.stage_id)
            return ev.ReplicaLost(action.stage_id, action.attempt, str(error), may_have_run=False)
        if not active.first_sent:
            active.first_sent = True
            hub_in_s = time.perf_counter() - active.request.received_s
            self._metrics.observe_in(hub_in_s)
            active.machine.state.public.pipeline_timings["hub_in"] = hub_in_s
        replica = ev.ReplicaRef(info.stage_id, info.replica_id, info.epoch, info.input_addr)
        return ev.Sent(action.stage_id, action.attempt, replica)


def _order(
    action: ev.FeedInput | ev.PieceRoom | ev.Pause, epoch: int, request_id: str
) -> wire.Feed | wire.PieceRoom | wire.Pause:
    about: dict[str, Any] = {"epoch": epoch, "request_id": request_id, "attempt": action.attempt}
    match action:
        case ev.FeedInput(from_stage=from_stage, number=number, payload=payload):
            return wire.Feed(from_stage=from_stage, number=number, payload=payload, is_last=payload is None, **about)
        case ev.PieceRoom(to_stage=to_stage, number=number, again=again):
            return wire.PieceRoom(to_stage=to_stage, number=number, again=again, **about)
        case ev.Pause(paused=paused):
            return wire.Pause(paused=paused, **about)


def _avoid(action: ev.Dispatch, pool: StagePool) -> frozenset[str]:
    """Whom the pick is kept off: one that was only slow is better than to wait."""
    with_slow = action.avoid | action.slow
    return with_slow if action.slow and pool.has_free(avoid=with_slow) else action.avoid


def _task(active: Active, action: ev.Dispatch) -> Task:
    return {
        "request_id": active.request.request_id,
        "engine_inputs": action.inputs,
        "sampling_params": action.params,
    }
