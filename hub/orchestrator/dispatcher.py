"""Dispatcher: carries out the actions of request machines that concern replicas: pick, send, abort, release."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from msgspec.structs import replace

from hub.config import NotConnectedError, SendFailedError
from hub.metrics import HubMetrics
from hub.orchestrator.aborts import AbortTracker
from hub.orchestrator.active import Active, Pick
from hub.orchestrator.retry_budget import PacedRetries, RetryDue
from hub.orchestrator.trials import TrialDue, Trials, tried
from hub.pool.entry import Binding, BindingEnd
from hub.pool.probation import GiveUp, Together
from hub.pool.stage_pool import StagePool
from hub.receipts.raw import CONTINUES, IS_RETRY, MOST_MARKS, REPEATS, RETRY_BUDGET, SLOT, TRIAL, DispatchMark
from hub.replicas.membership import Membership
from hub.request import events as ev
from omni_discovery import wire
from omni_discovery.errors import StageUnavailableError, WireError

if TYPE_CHECKING:
    from omni_discovery.balancing.base import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PickEnded:
    """A pick that had to wait has ended."""

    request_id: str
    dispatch: ev.Dispatch
    task: asyncio.Task[None] | None
    #: The binding of the request to the replica that was picked, or why there is none.
    result: Binding | StageUnavailableError


class Dispatcher:
    """Part of the orchestrator's task. Each dispatch ends as one event: returned at once, or through ``post``."""

    def __init__(
        self,
        membership: Membership,
        metrics: HubMetrics,
        aborts: AbortTracker,
        post: Callable[[PickEnded | RetryDue | TrialDue], None],
        *,
        keeps_marks: bool = False,
    ) -> None:
        #: The retry budget, and retries that wait for it.
        self.retries = PacedRetries(post)
        #: Suspects that wait for their trial.
        self.trials = Trials(post)
        self._membership = membership
        self._metrics = metrics
        self._aborts = aborts
        self._post = post
        #: Whether a request keeps when its work was sent where, for its receipt.
        self._keeps_marks = keeps_marks

    def dispatch(self, active: Active, action: ev.Dispatch) -> ev.Event | None:
        """Pick a replica and send the work; None while the pick, the retry budget or a probation makes it wait."""
        if action.is_retry and not self.retries.may_go(active.request.request_id, action):
            self._mark_wait(active, action, RETRY_BUDGET)
            return None
        return self._dispatch(active, action)

    def retry_due(self, active: Active, due: RetryDue) -> ev.Event | None:
        """Dispatch a retry that has waited for the budget; None if it is obsolete, or the pick has to wait."""
        action = due.dispatch
        return self._dispatch(active, action) if active.machine.is_out(action.stage_id, action.attempt) else None

    def trial_due(self, active: Active, due: TrialDue) -> list[ev.Event]:
        """Dispatch a suspect's work whose wait is over, or note that it is tried beside others; return the events."""
        action, step = due.dispatch, due.step
        if isinstance(step, Together):
            return [ev.TriedTogether(action.stage_id, action.attempt)]
        if not active.machine.is_out(action.stage_id, action.attempt):
            self.trials.forget(active.request.request_id, action.stage_id)
            return []
        if isinstance(step, GiveUp):
            pool = active.pools[action.stage_id]
            core = pool.core
            is_avoiding = core.all_avoided(action.avoid)
            error = core.queue.all_avoided_error() if is_avoiding else core.queue.unavailable_error(pool.now())
            return [ev.StageUnavailable(action.stage_id, action.attempt, str(error))]
        cleared = [] if step.is_trial else [ev.FoundInnocent(action.stage_id, action.attempt)]
        event = self._dispatch(active, tried(action, step))
        return [*cleared, *([] if event is None else [event])]

    def _dispatch(self, active: Active, action: ev.Dispatch) -> ev.Event | None:
        if action.blamed_for:
            self._mark_wait(active, action, TRIAL)
            self.trials.hold(active, action)
            return None
        pool, request_id = active.pools[action.stage_id], active.request.request_id
        task, affinity_request_id = _task(active, action), active.request.parent_id or None
        try:
            binding = pool.core.try_pick(request_id, task, affinity_request_id, _avoid(action, pool))
            while binding is not None and self._is_lost(pool, binding):
                binding = pool.core.try_pick(request_id, task, affinity_request_id, _avoid(action, pool))
        except StageUnavailableError as error:
            return self._unavailable(active, action, error)
        if binding is not None:
            return self._send(active, action, pool, binding)
        self._mark_wait(active, action, SLOT)
        waiting = asyncio.create_task(self._pick(active, action, pool, task))
        active.picks[action.stage_id] = Pick(waiting, action)
        return None

    def pick_ended(self, active: Active, ended: PickEnded) -> ev.Event | None:
        """Send the work of a pick that has waited; None if the pick is obsolete, or has to wait again."""
        action = ended.dispatch
        pick = active.picks.get(action.stage_id)
        if pick is None or pick.task is not ended.task:
            return None
        del active.picks[action.stage_id]
        if isinstance(ended.result, StageUnavailableError):
            return self._unavailable(active, action, ended.result)
        pool = active.pools[action.stage_id]
        if self._is_lost(pool, ended.result):
            return self._dispatch(active, action)
        return self._send(active, action, pool, ended.result)

    def _unavailable(
        self, active: Active, action: ev.Dispatch, error: StageUnavailableError
    ) -> ev.StageUnavailable | None:
        """No replica could be picked; None if the work is a suspect's, which waits again."""
        pool = active.pools[action.stage_id]
        has_others = bool(pool.core.healthy_addrs)
        if has_others and self.trials.hold_again(active.request.request_id, action.stage_id):
            return None
        return ev.StageUnavailable(action.stage_id, action.attempt, str(error))

    def drop_pick(self, ended: PickEnded) -> None:
        """Release the binding of a pick whose request has ended; nothing was sent."""
        if isinstance(ended.result, Binding):
            self._end(ended.dispatch.stage_id, ended.result, BindingEnd.UNSENT)

    def cancel_pick(self, active: Active, stage_id: int) -> None:
        """Cancel the pick of a stage, or its retry, that waits. Does nothing where none does."""
        self.retries.forget(active.request.request_id, stage_id)
        self.trials.forget(active.request.request_id, stage_id)
        pick = active.picks.pop(stage_id, None)
        if pick is not None:
            pick.task.cancel()
            # It may have been served a moment ago.
            self._release_unsent(active, active.pools[stage_id])

    def move(self, active: Active, pools: Mapping[int, StagePool]) -> list[ev.Event]:
        """Move a request to other pools; picks that wait are repeated there. Return the events of those that ended."""
        old_pools, active.pools = active.pools, pools
        moved = [stage_id for stage_id in old_pools if pools.get(stage_id) is not old_pools[stage_id]]
        # A suspect waits for its trial in the other pool; where one is on trial already it goes on there.
        trials = {stage_id: self.trials.take_back(active.request.request_id, stage_id) for stage_id in moved}
        events = []
        for stage_id in moved:
            pick, dispatch = active.picks.pop(stage_id, None), trials[stage_id]
            if pick is not None:
                pick.task.cancel()
                # It may have been served a moment ago.
                self._release_unsent(active, old_pools[stage_id])
                dispatch = dispatch or pick.dispatch
            if dispatch is not None:
                event = self._dispatch(active, replace(dispatch, params=active.request.params.get(stage_id, {})))
                events += [] if event is None else [event]
        return events

    def update(self, active: Active, action: ev.Update) -> ev.Event | None:
        """Send a stage's next segment to its replica; None if it was sent, or will be repeated in the next session."""
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
            self._note_full(active, action.stage_id, addr)
            return ev.ReplicaLost(action.stage_id, action.attempt, str(error), has_ended=False)
        except WireError as error:
            return ev.DispatchRefused(action.stage_id, action.attempt, str(error))
        return None

    def pass_on(self, active: Active, action: ev.Update | ev.FeedInput | ev.PieceRoom | ev.Pause) -> ev.Event | None:
        """Send a replica a message about its work; None if it was sent, or will be repeated in the next session."""
        if isinstance(action, ev.Update):
            return self.update(active, action)
        client = self._membership.clients.get(action.replica.input_addr)
        try:
            if client is None:
                raise SendFailedError("its record was removed")
            client.send_message(_message(action, client.info.epoch, active.request.request_id))
        except NotConnectedError:
            return None
        except (SendFailedError, WireError) as error:
            if isinstance(action, ev.Pause) and action.paused:
                # The replica goes on; what waits for the client is bounded in the hub, too.
                return None
            self._note_full(active, action.stage_id, action.replica.input_addr)
            reason = f"it can't be told to go on: {error}"
            return ev.ReplicaLost(action.stage_id, action.attempt, reason, has_ended=False)
        return None

    def _note_full(self, active: Active, stage_id: int, addr: str) -> None:
        """Keep the next picks off a replica that takes no message: where it is dead, that is not known yet."""
        pool = active.pools[stage_id]
        pool.core.send_queue_full(addr, pool.now())

    def carry_out(self, active: Active, action: ev.Abort | ev.ReleasePayload | ev.Acquit | ev.Convict) -> None:
        """Carry out an action that ends something, and that no event comes of."""
        match action:
            case ev.Abort():
                self.abort(active, action)
            case ev.ReleasePayload():
                self.release_payload(active, action)
            case ev.Acquit(stage_id=stage_id):
                self.trials.forget(active.request.request_id, stage_id)
            case ev.Convict():
                self._convict(active, action)

    def abort(self, active: Active, action: ev.Abort) -> None:
        """Abort an attempt that was sent, or cancel its pick."""
        pick, grace = active.picks.pop(action.stage_id, None), active.graces.pop(action.stage_id, None)
        if pick is not None:
            pick.task.cancel()
        if grace is not None:
            grace.cancel()
        self.retries.forget(active.request.request_id, action.stage_id)
        self.trials.forget(active.request.request_id, action.stage_id)
        if action.replica is not None:
            client = self._membership.clients.get(action.replica.input_addr)
            if client is not None:
                client.abort_request(active.request.request_id, action.attempt)
                self._aborts.abort_sent(active.request.request_id, client, str(action.replica))
            self.release(active, action.stage_id)
        else:
            self._release_unsent(active, active.pools[action.stage_id])

    def give_up(self, active: Active, stage_id: int) -> None:
        """After a bug: have the stage's replica stop what it may run for the request, and free its slot."""
        request_id = active.request.request_id
        binding = active.pools[stage_id].core.binding(request_id)
        if binding is None:
            return
        client = self._membership.clients.get(binding.addr)
        try:
            if client is not None:
                client.abort_request(request_id, active.machine.runs[stage_id].attempt)
                self._aborts.abort_sent(request_id, client, binding.info.name)
        finally:
            self._end(stage_id, binding, BindingEnd.DONE)

    def _convict(self, active: Active, action: ev.Convict) -> None:
        request_id = active.request.request_id
        self.trials.explain(active.pools[action.stage_id], action.blamed_for)
        replicas = ev.lives_text(action.blamed_for)
        text = "request.poisonous request=%s stage=%d replicas=%s: they ended while they ran it; it is not tried again"
        logger.error(text, request_id, action.stage_id, replicas)

    def release(self, active: Active, stage_id: int) -> None:
        """End the binding of a stage's work that is over."""
        binding = active.pools[stage_id].core.binding(active.request.request_id)
        if binding is not None:
            self._end(stage_id, binding, BindingEnd.DONE)

    def _is_lost(self, pool: StagePool, binding: Binding) -> bool:
        """Whether the session of a replica that was just picked is lost; the pick is undone if so."""
        client = self._membership.clients.get(binding.entry.addr)
        if client is not None and client.session_up:
            return False
        # The event comes in a later turn; until then picks of lost replicas would use up the request's attempts.
        self._undo_pick(pool, binding)
        pool.core.session_down(binding.addr, pool.now())
        return True

    def _undo_pick(self, pool: StagePool, binding: Binding) -> None:
        """Release the binding of a pick of which nothing was sent."""
        self._end(pool.stage_id, binding, BindingEnd.UNSENT)

    def _end(self, stage_id: int, binding: Binding, end: BindingEnd) -> None:
        if self.trials.held and end is BindingEnd.DONE:
            self.trials.forget(binding.request_id, stage_id)
        # The connection to a replica that is listed is kept in any case.
        if binding.release(end) and not binding.entry.listed:
            self._membership.close_if_unused(stage_id, binding.addr)

    def _release_unsent(self, active: Active, pool: StagePool) -> None:
        """End the binding of a pick that may have been served a moment ago; nothing was sent."""
        binding = pool.core.binding(active.request.request_id)
        if binding is not None:
            self._undo_pick(pool, binding)

    def release_payload(self, active: Active, action: ev.ReleasePayload) -> None:
        """Have a replica drop the payloads that it keeps for the request."""
        client = self._membership.clients.get(action.replica.input_addr)
        if client is not None:
            client.release_payloads(active.request.request_id)

    async def _pick(self, active: Active, action: ev.Dispatch, pool: StagePool, task: Task) -> None:
        request_id, affinity_request_id = active.request.request_id, active.request.parent_id or None
        result: Binding | StageUnavailableError
        try:
            result = await pool.acquire(
                request_id, task, affinity_request_id, avoid=action.avoid, priority=action.priority
            )
        except StageUnavailableError as error:
            result = error
        except Exception as error:
            logger.exception("pick.bug stage=%d", action.stage_id)
            result = StageUnavailableError(action.stage_id, f"a bug while picking a replica: {error!r}")
        self._post(PickEnded(request_id, action, asyncio.current_task(), result))

    def _send(self, active: Active, action: ev.Dispatch, pool: StagePool, binding: Binding) -> ev.Event:
        try:
            failure = self._submit(active, action, pool, binding)
        except Exception:
            # A bug: the credit that the pick has spent was not used.
            self._undo_pick(pool, binding)
            raise
        if failure is not None:
            return failure
        if not active.first_sent:
            active.first_sent = True
            hub_in_s = time.perf_counter() - active.request.received_s
            self._metrics.observe_in(hub_in_s)
            active.machine.state.public.pipeline_timings["hub_in"] = hub_in_s
        info = binding.entry.info
        if self._keeps_marks and len(active.marks) < 2 * MOST_MARKS:
            self._mark_sent(active, action, binding)
        if self.trials.held:
            self.trials.placed(active.request.request_id, action.stage_id, info.input_addr)
        replica = ev.ReplicaRef(info.stage_id, info.replica_id, info.epoch, info.input_addr)
        return ev.Sent(action.stage_id, action.attempt, replica, info.deterministic)

    def _mark_sent(self, active: Active, action: ev.Dispatch, binding: Binding) -> None:
        """Keep, for the request's receipt, where an attempt was sent and what the pool looked like then."""
        run, info = active.machine.runs[action.stage_id], binding.entry.info
        bits = IS_RETRY if action.is_retry else 0
        if action.resume is not None:
            bits |= CONTINUES
        elif run.replay is not None or run.skip:
            bits |= REPEATS
        revision = self._membership.applied_revision
        now_s, due_s, snapshot = time.perf_counter(), run.dispatched_at_s, binding.snapshot
        where = info.host, info.version, snapshot
        active.marks.append(DispatchMark("", now_s, action.stage_id, action.attempt, due_s, revision, bits, *where))

    def _mark_wait(self, active: Active, action: ev.Dispatch, what: str) -> None:
        """Keep, for the request's receipt, that an attempt has to wait, and for what."""
        if not self._keeps_marks or len(active.marks) >= MOST_MARKS:
            return
        pool, due_s = active.pools[action.stage_id], active.machine.runs[action.stage_id].dispatched_at_s
        snapshot = pool.core.snapshot_of_wait(action.avoid) if what == SLOT else None
        active.marks.append(
            DispatchMark(what, time.perf_counter(), action.stage_id, action.attempt, due_s, snapshot=snapshot)
        )

    def _submit(self, active: Active, action: ev.Dispatch, pool: StagePool, binding: Binding) -> ev.Event | None:
        now_s, info = time.perf_counter(), binding.entry.info
        client = self._membership.clients.get(info.input_addr)
        message = wire.Submit(
            epoch=info.epoch,
            request_id=active.request.request_id,
            attempt=action.attempt,
            inputs=dict(action.inputs),
            params=action.params_for(deterministic=info.deterministic, partial_images=info.partial_images),
            payloads=action.payloads,
            next_stages=action.next_stages,
            credit=binding.spent_credit,
            remaining_s=max(0.0, active.deadline_s - now_s),
            resume=action.resume,
            priority=action.priority,
            segmented=action.segmented,
            stream_from=action.stream_from,
            stream_to=action.stream_to,
            trace=active.trace_of(action.stage_id),
            label=active.request.label or UNSET,
            client=active.request.client or UNSET,
        )
        try:
            if client is None:
                raise SendFailedError("its record was removed while it was picked")
            client.submit(message)
        except WireError as error:
            self._undo_pick(pool, binding)
            return ev.DispatchRefused(action.stage_id, action.attempt, str(error))
        except SendFailedError as error:
            # The send queue is full for all requests, and the replica is not to blame.
            self._note_full(active, action.stage_id, info.input_addr)
            self._undo_pick(pool, binding)
            return ev.ReplicaLost(action.stage_id, action.attempt, str(error), may_have_run=False)
        return None


def _message(
    action: ev.FeedInput | ev.PieceRoom | ev.Pause, epoch: int, request_id: str
) -> wire.Feed | wire.PieceRoom | wire.Pause:
    head: dict[str, Any] = {"epoch": epoch, "request_id": request_id, "attempt": action.attempt}
    match action:
        case ev.FeedInput(from_stage=from_stage, number=number, payload=payload):
            return wire.Feed(from_stage=from_stage, number=number, payload=payload, is_last=payload is None, **head)
        case ev.PieceRoom(to_stage=to_stage, number=number, again=again):
            return wire.PieceRoom(to_stage=to_stage, number=number, again=again, **head)
        case ev.Pause(paused=paused):
            return wire.Pause(paused=paused, **head)


def _avoid(action: ev.Dispatch, pool: StagePool) -> frozenset[str]:
    """The replicas that a pick must avoid; those that were only slow are avoided while another has a free slot."""
    with_slow = action.avoid | action.slow
    return with_slow if action.slow and pool.core.has_free(with_slow) else action.avoid


def _task(active: Active, action: ev.Dispatch) -> Task:
    return {
        "request_id": active.request.request_id,
        "engine_inputs": action.inputs,
        "sampling_params": action.params,
    }
