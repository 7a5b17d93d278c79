"""Orchestrator: the one task that owns every request of a hub, its pools and its connections to replicas.

Its inputs are queues: requests and RPCs of clients, and one inbox for answers of replicas, views of the registry and
timers. In each turn it hands every item to the part that handles it. It waits for nothing but its queues: a pick that
has to wait is a task of its own, which ends as one item of the inbox.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from hub.metrics import HubMetrics
from hub.orchestrator.aborts import AbortTracker
from hub.orchestrator.active import AbortRequest, Active, AddRequest, BackpressureChanged, Ended, UpdateRequest, answer
from hub.orchestrator.admission import Backlog
from hub.orchestrator.collective import CallDue, Collective, CollectiveCall, reject_call
from hub.orchestrator.dispatcher import Dispatcher, PickEnded
from hub.orchestrator.housekeeping import Housekeeping, TimersDue
from hub.orchestrator.replica_events import ReplicaListener, ReturnDue, StillSilent
from hub.orchestrator.requests import CompanionEnded, InputIdle, Requests, TimeUp
from hub.orchestrator.retry_budget import RetryDue
from hub.orchestrator.rollout import Rollout
from hub.orchestrator.trials import TrialDue
from hub.pool.stage_pool import StagePool
from hub.pool.versions import Pools
from hub.replicas.events import (
    AbortEnded,
    Answered,
    ClientEvent,
    Controlled,
    EpochNamed,
    FrameDropped,
    Granted,
    PiecesCame,
    ProcessGone,
    Recalled,
    SessionDown,
    SessionUp,
    Unsent,
)
from hub.replicas.factory import ClientAttacher, RemoteReplicaFactory
from hub.replicas.health import HealthReporter
from hub.replicas.long_turns import LongTurns
from hub.replicas.membership import Membership, ViewChanged
from hub.replicas.stage_client import StageClient
from hub.replicas.view_pace import ViewPace
from hub.request.events import ClientBackpressure
from hub.request.outputs import OmniOutput
from hub.request.state import OrchestratorRequestState, StreamingInputState
from omni_discovery.errors import AbortFailedError, HubUnavailableError, StageUnavailableError
from omni_discovery.records.schema import ReplicaInfo

if TYPE_CHECKING:
    from hub.config import HubConfig
    from hub.orchestrator.deploy_versions import DeployVersions
    from hub.orchestrator.tracing import Tracing
    from hub.receipts.ring import ReceiptRing
    from omni_discovery.stories import Stories
    from omni_discovery.view.table import Delta, View

__all__ = ["Orchestrator", "OrchestratorRequestState", "RemoteReplicaFactory", "StreamingInputState"]

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")


class WakingQueue(asyncio.Queue[_Item]):
    """A bounded queue that sets an event with each item, so that one task can wait for several queues."""

    def __init__(self, maxsize: int, wake: asyncio.Event) -> None:
        super().__init__(maxsize)
        self._wake = wake

    def _put(self, item: _Item) -> None:
        super()._put(item)
        self._wake.set()


def drain(queue: asyncio.Queue[_Item]) -> list[_Item]:
    """Remove and return all items that are in the queue now."""
    return [queue.get_nowait() for _ in range(queue.qsize())]


_InboxItem: TypeAlias = (
    "ClientEvent | PickEnded | RetryDue | TrialDue | ReturnDue | StillSilent | TimeUp | InputIdle | CompanionEnded"
    " | BackpressureChanged | TimersDue | ViewDue | CallDue"
)
_Request: TypeAlias = AddRequest | UpdateRequest
_Rpc: TypeAlias = AbortRequest | CollectiveCall
_Connect = Callable[[ReplicaInfo, Callable[[ClientEvent], None]], StageClient]


#: The most of what comes, and of no concern to anything but requests and pools.
_USUAL: Final = (PiecesCame, Answered, Granted)
#: What a replica can send without end, and no request pays for.
_CHARGED: Final = (FrameDropped, Granted, Recalled, EpochNamed)
#: How long the inbox may have the loop in one turn.
_TURN_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class ViewDue:
    """The view that waits is to be applied."""


class Orchestrator:
    """``run`` needs a task of its own; all other methods are called on the same loop.

    ``request_async_queue`` takes AddRequest and UpdateRequest, ``rpc_async_queue`` CollectiveCall and AbortRequest.
    Aborts are handled first, but for those of a request that came in the same turn. ``emit`` gets each output with its
    request's id, in the turn in which it comes; without it, ``output_async_queue`` gives (request id, OmniOutput or
    Ended), and the orchestrator waits while it is full. ``remote_replica_factory`` makes the
    client of each new replica process in place of ``connect``; ``connect_replica`` has the form of one.
    """

    def __init__(
        self,
        stage_pools: Sequence[StagePool],
        connect: _Connect,
        config: HubConfig,
        metrics: HubMetrics,
        backlog: Backlog | None = None,
        *,
        async_chunk: bool = False,
        tracing: Tracing | None = None,
        remote_replica_factory: RemoteReplicaFactory | None = None,
        releases: DeployVersions | None = None,
        stories: Stories | None = None,
        receipts: ReceiptRing | None = None,
        turns: LongTurns | None = None,
        emit: Callable[[str, OmniOutput | Ended], None] | None = None,
    ) -> None:
        self.stage_pools = list(stage_pools)
        self.num_stages = len(self.stage_pools)
        self.async_chunk = bool(async_chunk)
        self._wake = asyncio.Event()
        self.request_async_queue: asyncio.Queue[_Request] = WakingQueue(config.max_in_flight, self._wake)
        self.rpc_async_queue: asyncio.Queue[_Rpc] = WakingQueue(4 * config.max_in_flight, self._wake)
        self.output_async_queue: asyncio.Queue[tuple[str, OmniOutput | Ended]] = asyncio.Queue(4 * config.max_in_flight)
        self._pools = Pools(self.stage_pools) if releases is None else releases.every
        #: Bounded: a socket that has brought much rests until that is handled. And how many events are in it.
        self._inbox: deque[_InboxItem] = deque()
        self._waiting = 0
        self._turns = turns or LongTurns()
        #: The view that is applied next, once the pace allows it.
        self._next_view: ViewChanged | None = None
        self._view_pace = ViewPace()
        self._closed = False
        self._outbox: deque[tuple[str, OmniOutput | Ended]] = deque()
        self._aborts = AbortTracker(config.abort_timeout_s)
        self._connect = connect
        self._releases = releases
        #: What this hub reports of requests and replicas.
        self.health = HealthReporter(self._pools)
        self._membership = Membership(self._pools, self, config.registry_ttl_s, lost=self.health.lost)
        factory, attach = remote_replica_factory, self._membership.attach
        self._attaching = None if factory is None else ClientAttacher(factory, attach)
        self._collective = Collective(self._pools, self._membership, metrics, self._post)
        self._housekeeping = Housekeeping(self._pools, self._membership, self._post)
        keeps_marks = receipts is not None
        self._dispatcher = Dispatcher(self._membership, metrics, self._aborts, self._post, keeps_marks=keeps_marks)
        self._requests = Requests(
            {pool.stage_id: pool for pool in self.stage_pools},
            self._dispatcher,
            self._aborts,
            config,
            metrics,
            Backlog() if backlog is None else backlog,
            self._post,
            self._emit_output if emit is None else emit,
            tracing,
            stories,
            recent=self.health.recent,
            receipts=receipts,
        )
        self.request_states = self._requests.states
        self._rollout = Rollout(releases, self._pools, self._membership, self._requests, self.stage_pools)
        metrics.watch_rollout(self._rollout.older_count, self._membership.mismatched.count, self._pools.stage_ids)
        self._listener = ReplicaListener(
            self._pools,
            self._requests,
            config,
            metrics,
            self._aborts,
            self._dispatcher.release,
            self._post,
            self._dispatcher.retries.is_free,
            self.health.lost,
        )

    async def run(self) -> None:
        """Serve until cancelled; then every request ends and every socket is closed."""
        self.health.start()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._take_turn()
                while self._outbox:
                    await self.output_async_queue.put(self._outbox.popleft())
                if self._inbox:
                    # It is not empty by far: others have their turn before it goes on.
                    await asyncio.sleep(0)
        finally:
            self._closed = True
            self._housekeeping.close()
            self.health.close()
            if self._attaching is not None:
                self._attaching.close()
            self.end_all()
            self._requests.close()
            self._dispatcher.retries.close()
            self._dispatcher.trials.close()
            self._membership.close()
            self._end_rpcs()

    def apply_view(self, view: View, delta: Delta) -> None:
        """Follow the registry; call it on the loop. A ``delta`` that doesn't lead from the last view is not used."""
        waiting, changed = self._next_view, ViewChanged(view, delta)
        if waiting is None:
            self._next_view = changed
            if delay_s := self._view_pace.delay_s(time.monotonic()):
                asyncio.get_running_loop().call_later(delay_s, self._post, ViewDue())
            else:
                self._post(ViewDue())
        elif not changed.is_before(waiting):
            # One view waits at a time: of those that come faster than they are gone through the latest tells all.
            self._next_view = waiting.followed_by(changed)

    def set_backpressure(self, request_id: str, backpressure: ClientBackpressure) -> None:
        """Note whether the client of a request keeps up with its output. Requests that have ended are fine."""
        self._post(BackpressureChanged(request_id, backpressure))

    def stories(self) -> dict[str, list[str]]:
        """The latest events of each request under way, as lines of text by request id; for a diagnosis."""
        return self._requests.stories()

    def running(self) -> list[Active]:
        """The requests under way, for a diagnosis."""
        return list(self._requests.active.values())

    def encode_receipt(self, request_id: str) -> bytes:
        """The receipt of a request under way. Raise KeyError for an unknown one."""
        return self._requests.encode_receipt(self._requests.active[request_id])

    def end_all(self, reason: str = "the hub is stopping") -> None:
        """Abort every stage of every request; each ends with HubUnavailableError."""
        self._requests.end_all(HubUnavailableError(self.stage_pools[0].stage_id, reason))

    def _end_rpcs(self) -> None:
        """Answer every RPC and update that is still queued, so that no caller waits for ever."""
        self._collective.close()
        for request in drain(self.request_async_queue):
            if isinstance(request, UpdateRequest):
                answer(request.done, "the hub is stopping")
        for rpc in drain(self.rpc_async_queue):
            _answer_rpc(rpc)

    async def connect_replica(self, stage_id: int, replica_id: int) -> StageClient:
        """Make a client for a replica that the registry lists; a RemoteReplicaFactory can build on it.

        Raise StageUnavailableError if none is listed under these ids, ConfigError if its record can't be used.
        """
        info = self._membership.record_of(stage_id, replica_id)
        if info is None:
            raise StageUnavailableError(stage_id, f"the registry shows no replica {stage_id}/{replica_id}")
        return self._connect(info, self._post)

    def connect_replica_of(self, info: ReplicaInfo) -> StageClient | None:
        """See MembershipOwner."""
        if self._attaching is None:
            return self._connect(info, self._post)
        self._attaching.make_client(info)
        return None

    def client_closed(self, client: StageClient) -> None:
        """See MembershipOwner."""
        self._aborts.client_gone(client)
        self._collective.lose_replica(client)

    def serves_document(self, info: ReplicaInfo) -> bool:
        """See MembershipOwner."""
        return self._releases is None or self._releases.knows(info)

    def replica_lost(self, stage_id: int, addr: str, reason: str) -> None:
        """See MembershipOwner."""
        self._listener.lose_replica(stage_id, addr, reason)

    # ---- one turn

    def _post(self, item: _InboxItem) -> None:
        if not self._closed:
            self._inbox.append(item)
            self._turns.posted += isinstance(item, _CHARGED)
            self._waiting += _count(item)
            self._turns.note_waiting(self._waiting)
            self._wake.set()

    def _take_turn(self) -> None:
        rpcs, requests = drain(self.rpc_async_queue), drain(self.request_async_queue)
        new = {request.request_id for request in requests}
        for rpc in rpcs:
            if isinstance(rpc, AbortRequest) and rpc.request_id not in new:
                self._handle(rpc)
        # Before new requests, so that replicas whose session was lost are not picked for them.
        self._empty_inbox()
        for request in requests:
            self._handle(request)
        for rpc in rpcs:
            if isinstance(rpc, CollectiveCall) or rpc.request_id in new:
                self._handle(rpc)
        if self._inbox:
            self._wake.set()

    def _empty_inbox(self) -> None:
        """Handle what waits now, for as long as others may wait for the loop; the rest has the next turn."""
        inbox, left, handled = self._inbox, len(self._inbox), 0
        began_s, until_s = time.thread_time(), time.perf_counter() + _TURN_S
        for _ in range(left):
            item = inbox.popleft()
            self._handle(item)
            handled += _count(item)
            if time.perf_counter() > until_s:
                break
        self._waiting -= handled
        self._turns.note_handled(handled, time.thread_time() - began_s)
        self._turns.note_waiting(self._waiting)

    def _handle(self, item: _Rpc | _Request | _InboxItem) -> None:
        try:
            self._route(item)
        except Exception as error:  # noqa: BLE001 - it is logged there
            # A bug, here or in a third party's balancer, must cost one request and not the hub.
            request_id = item.message.request_id if isinstance(item, Answered) else getattr(item, "request_id", "")
            request = item if isinstance(item, AddRequest) else request_id
            self._requests.end_after_bug(request, error, type(item).__name__)
            if isinstance(item, CollectiveCall):
                _answer_rpc(item)
            elif isinstance(item, UpdateRequest):
                answer(item.done, "a bug in the hub has ended the request")
            elif isinstance(item, AbortRequest) and item.done is not None and not item.done.done():
                item.done.set_exception(AbortFailedError(f"the abort failed: a bug in the hub: {error!r}"))

    def _route(self, item: _Rpc | _Request | _InboxItem) -> None:
        if isinstance(item, _USUAL):
            self._handle_usual_event(item)
            return
        match item:
            case AddRequest():
                self._requests.add_request(item)
            case AbortRequest():
                self._requests.abort_request(item)
            case TimeUp() | InputIdle() | CompanionEnded() | UpdateRequest() | BackpressureChanged():
                self._requests.apply_item(item)
            case PickEnded() | RetryDue() | TrialDue():
                self._requests.resume_dispatch(item)
            case StillSilent() | ReturnDue():
                self._listener.apply_item(item)
            case CollectiveCall() | CallDue():
                self._collective.handle_call(item)
            case TimersDue():
                self._housekeeping.run_timers(item)
            case ViewDue():
                self._apply_next_view()
            case _:
                self._handle_client_event(item)

    def _apply_next_view(self) -> None:
        began_s = time.monotonic()
        changed, self._next_view = self._next_view, None
        try:
            if changed is not None:
                self._rollout.apply_view(changed.view, changed.delta)
        finally:
            self._view_pace.applied(began_s, time.monotonic())
            # A mass loss that the view shows needs its review, even if a third party's client raises here.
            self._housekeeping.follow_membership()

    def _handle_usual_event(self, event: ClientEvent) -> None:
        # The process of a client that was replaced is gone.
        if self._membership.clients.get(event.client.info.input_addr) is event.client:
            self._listener.handle_client_event(event)

    def _handle_client_event(self, event: ClientEvent) -> None:
        if isinstance(event, Controlled | SessionDown | ProcessGone):
            self._collective.handle_client_event(event)
        self._handle_usual_event(event)
        if isinstance(event, AbortEnded | ProcessGone | Unsent):
            self._membership.close_if_unused(event.client.info.stage_id, event.client.addr)
        if isinstance(event, EpochNamed | SessionDown):
            self._membership.owner_may_change(event.client.addr)
            self._housekeeping.follow_membership()
        if isinstance(event, SessionUp | SessionDown | ProcessGone):
            self._housekeeping.review_membership()
            self._rollout.move_on()

    # ---- state

    @property
    def live_hubs(self) -> int:
        """How many hubs share the replicas, this one included."""
        return self._membership.live_hubs

    @property
    def applied_revision(self) -> int:
        """The registry revision of the view that picks are made by."""
        return self._membership.applied_revision

    # ---- output

    def _emit_output(self, request_id: str, output: OmniOutput | Ended) -> None:
        self._outbox.append((request_id, output))
        self._wake.set()


def _count(item: _InboxItem) -> int:
    """How many events an item stands for."""
    return len(item.pieces) if isinstance(item, PiecesCame) else 1


def _answer_rpc(rpc: _Rpc) -> None:
    """Resolve the future of an RPC that will not be carried out."""
    if isinstance(rpc, CollectiveCall):
        reject_call(rpc)
    elif rpc.done is not None and not rpc.done.done():
        rpc.done.set_result(None)
