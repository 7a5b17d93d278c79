"""Orchestrator: the one task that owns every request of a hub.

It takes what clients ask, what replicas answer and what the registry says from queues, feeds the machines of the
requests and carries out what they decide. It waits for nothing but those queues: a pick that has to wait is a task of
its own, which ends as one event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from hub import request_events as ev
from hub.active import AbortRequest, Active, AddRequest, Ended
from hub.backlog import Backlog
from hub.cancels import Cancels
from hub.client_events import AbortEnded, Answered, ClientEvent, ProcessGone, SessionDown, SessionUp, Unsent
from hub.dispatcher import Dispatcher, PickEnded
from hub.membership import Membership
from hub.metrics import HubMetrics
from hub.outputs import OmniOutput
from hub.paced_retries import RetryDue
from hub.replica_listener import ReplicaListener, ReturnDue, StillSilent
from hub.request import RequestMachine
from hub.request_state import OrchestratorRequestState, StreamingInputState
from hub.stage_client import StageClient
from hub.stage_pool import StagePool
from hub.tending import ReviewDue, Tending
from hub.waking_queue import WakingQueue, drain
from omni_discovery.errors import RequestError, StageUnavailableError
from omni_discovery.messages import ReplicaInfo
from omni_discovery.table import View

if TYPE_CHECKING:
    from hub.config import HubConfig
    from omni_discovery.table import Delta

__all__ = ["Orchestrator", "OrchestratorRequestState", "StreamingInputState"]

logger = logging.getLogger(__name__)

_InboxItem: TypeAlias = "ClientEvent | PickEnded | RetryDue | ReturnDue | StillSilent | _TimeUp | ReviewDue | View"
_Connect = Callable[[ReplicaInfo, Callable[[ClientEvent], None]], StageClient]


@dataclass(frozen=True, slots=True)
class _TimeUp:
    request_id: str


class Orchestrator:
    """Give ``run`` a task of its own; everything else is called on the same loop.

    ``request_async_queue`` takes AddRequest, ``rpc_async_queue`` AbortRequest and is served first
    (but for a request that came in the same turn);
    ``output_async_queue`` gives (request id, OmniOutput or Ended) and must be read, or the orchestrator waits.
    """

    def __init__(
        self,
        stage_pools: Sequence[StagePool],
        connect: _Connect,
        config: HubConfig,
        metrics: HubMetrics,
        backlog: Backlog | None = None,
    ) -> None:
        self.stage_pools = list(stage_pools)
        self.num_stages = len(self.stage_pools)
        self.request_states: dict[str, OrchestratorRequestState] = {}
        self._wake = asyncio.Event()
        self.request_async_queue: asyncio.Queue[AddRequest] = WakingQueue(config.max_in_flight, self._wake)
        self.rpc_async_queue: asyncio.Queue[AbortRequest] = WakingQueue(4 * config.max_in_flight, self._wake)
        self.output_async_queue: asyncio.Queue[tuple[str, OmniOutput | Ended]] = asyncio.Queue(4 * config.max_in_flight)
        self._backlog = Backlog() if backlog is None else backlog
        self._config = config
        self._metrics = metrics
        self._pools = {pool.stage_id: pool for pool in self.stage_pools}
        #: Emptied on each turn of the task; what fills it reads sockets in bounded batches between two turns.
        self._inbox: deque[_InboxItem] = deque()
        self._closed = False
        self._outbox: deque[tuple[str, OmniOutput | Ended]] = deque()
        self._active: dict[str, Active] = {}
        self._cancels = Cancels(config.abort_timeout_s)
        self._membership = Membership(
            self._pools,
            lambda info: connect(info, self._post),
            self._lose,
            config.registry_ttl_s,
            on_closed=self._cancels.gone,
        )
        self._tending = Tending(self.stage_pools, self._membership, self._post)
        self._dispatcher = Dispatcher(
            self._pools, self._membership, metrics, self._cancels, self._post, self._tending.look_soon
        )
        self._listener = ReplicaListener(
            self._pools, self._active, config, metrics, self._cancels, self._tell, self._dispatcher.release, self._post
        )

    async def run(self) -> None:
        """Serve until cancelled; then every request ends and every socket is closed."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._take_turn()
                while self._outbox:
                    await self.output_async_queue.put(self._outbox.popleft())
        finally:
            self._closed = True
            self._tending.close()
            self.end_all()
            self._dispatcher.retries.close()
            self._membership.close()

    def apply_view(self, view: View, delta: Delta) -> None:
        """Follow the registry; call it on the loop. The view alone decides, so that a missed ``delta`` can't hurt."""
        self._post(view)

    def end_all(self, reason: str = "the hub is stopping") -> None:
        """Abort every stage of every request; each ends with StageUnavailableError."""
        for request_id in list(self._active):
            self._tell(request_id, ev.Cancelled(StageUnavailableError(self.stage_pools[0].stage_id, reason)))

    def _lose(self, stage_id: int, addr: str, reason: str) -> None:
        self._listener.lose(stage_id, addr, reason)

    # ---- one turn

    def _post(self, item: _InboxItem) -> None:
        if not self._closed:
            self._inbox.append(item)
            self._wake.set()

    def _take_turn(self) -> None:
        aborts, requests = drain(self.rpc_async_queue), drain(self.request_async_queue)
        new = {request.request_id for request in requests}
        for abort in aborts:
            if abort.request_id not in new:
                self._take(abort)
        # Before new requests: sessions that were lost are not to be picked any more.
        for _ in range(len(self._inbox)):
            self._take(self._inbox.popleft())
        for request in requests:
            self._take(request)
        for abort in aborts:
            if abort.request_id in new:
                self._take(abort)
        self._tending.look()
        if self._inbox:
            self._wake.set()

    def _take(self, item: AbortRequest | AddRequest | _InboxItem) -> None:
        try:
            self._follow(item)
        except Exception as error:
            # A bug, here or in a third party's balancer, must cost one request and not the hub.
            logger.exception("orchestrator.bug event=%s", type(item).__name__)
            request_id = item.message.request_id if isinstance(item, Answered) else getattr(item, "request_id", "")
            self._bury(request_id, RequestError(f"a bug in the hub: {error!r}"))

    def _bury(self, request_id: str, error: RequestError) -> None:
        with suppress(Exception):
            self._tell(request_id, ev.Cancelled(error))
        active = self._active.get(request_id)
        if active is not None:
            for pool in self.stage_pools:
                pool.release(request_id)
            self._finish(active, ev.Outcome.FAILED, error)

    def _follow(self, item: AbortRequest | AddRequest | _InboxItem) -> None:
        match item:
            case AddRequest():
                self._add(item)
            case AbortRequest():
                self._abort(item)
            case _TimeUp(request_id=request_id):
                self._tell(request_id, ev.DeadlinePassed())
            case PickEnded():
                self._go_on(item.request_id, lambda active: self._dispatcher.pick_ended(active, item))
            case RetryDue():
                self._go_on(item.request_id, lambda active: self._dispatcher.retry_due(active, item))
            case StillSilent():
                self._listener.still_silent(item)
            case ReturnDue():
                item.client.return_credits(item.session, item.credits)
            case ReviewDue():
                self._tending.review()
            case View():
                self._membership.apply(item)
            case _:
                self._hear(item)

    def _hear(self, event: ClientEvent) -> None:
        # A client that has been replaced speaks of a process that is gone.
        if self._membership.clients.get(event.client.addr) is event.client:
            self._listener.hear(event)
        if isinstance(event, AbortEnded | ProcessGone | Unsent):
            self._membership.close_if_unused(event.client.info.stage_id, event.client.addr)
        if isinstance(event, SessionUp | SessionDown | ProcessGone):
            self._tending.review()

    # ---- who is served

    @property
    def live_hubs(self) -> int:
        """How many hubs share the replicas, this one included."""
        return self._membership.live_hubs

    @property
    def applied_revision(self) -> int:
        """The registry's revision that picks go by."""
        return self._membership.applied_revision

    # ---- requests

    def _add(self, request: AddRequest) -> None:
        machine = RequestMachine(
            request.request_id,
            request.inputs,
            request.plan,
            request.params,
            attempts=self._config.attempts,
            request_timestamp=time.time(),
            shown_id=request.shown_id,
            priority=request.priority,
        )
        deadline_s = request.received_s + request.timeout_s
        left_s = max(0.0, deadline_s - time.perf_counter())
        timer = asyncio.get_running_loop().call_later(left_s, self._post, _TimeUp(request.request_id))
        self._active[request.request_id] = Active(request, machine, deadline_s, timer)
        self.request_states[request.request_id] = machine.state
        self._metrics.in_flight.set(len(self._active))
        self._dispatcher.retries.admitted()
        self._tell(request.request_id, ev.Submitted())

    def _abort(self, abort: AbortRequest) -> None:
        self._tell(abort.request_id, ev.Cancelled(abort.error))
        if abort.done is not None:
            self._cancels.when_quiet(abort.request_id, abort.done)

    def _go_on(self, request_id: str, dispatch: Callable[[Active], ev.Event | None]) -> None:
        active = self._active.get(request_id)
        event = None if active is None else dispatch(active)
        if event is not None:
            self._tell(request_id, event)

    def _tell(self, request_id: str, event: ev.Event) -> None:
        """Feed one request's machine and carry out what it decides. Requests that have ended are left alone."""
        active = self._active.get(request_id)
        if active is None:
            return
        events = deque([event])
        while events:
            for action in active.machine.handle(events.popleft(), time.perf_counter()):
                follows = self._carry_out(active, action)
                if follows is not None:
                    events.append(follows)
        if isinstance(event, ev.StageDone):
            settled = [stage_id for stage_id, run in active.machine.runs.items() if run.settled]
            self._backlog.passed(request_id, settled)

    def _carry_out(self, active: Active, action: ev.Action) -> ev.Event | None:
        match action:
            case ev.Dispatch():
                return self._dispatcher.dispatch(active, action)
            case ev.Abort():
                self._dispatcher.abort(active, action)
            case ev.ReleasePayload():
                self._dispatcher.release_payload(active, action)
            case ev.Emit(output=output):
                self._say(active.request.request_id, output)
            case ev.Drop(reason=reason):
                self._metrics.dropped.labels(reason).inc()
            case ev.Retry(stage_id=stage_id, resumed=resumed):
                self._metrics.count_retry(stage_id, resumed=resumed)
            case ev.Finish(outcome=outcome, error=error):
                self._finish(active, outcome, error)
        return None

    def _finish(self, active: Active, outcome: ev.Outcome, error: RequestError | None) -> None:
        request_id = active.request.request_id
        for timer in (active.timer, *active.graces.values()):
            timer.cancel()
        del self._active[request_id], self.request_states[request_id]
        self._backlog.leave(request_id)
        self._metrics.in_flight.set(len(self._active))
        self._metrics.requests.labels(outcome if error is None else type(error).__name__).inc()
        self._say(request_id, Ended(error))

    def _say(self, request_id: str, what: OmniOutput | Ended) -> None:
        self._outbox.append((request_id, what))
        self._wake.set()
