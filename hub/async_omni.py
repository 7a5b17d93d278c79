"""AsyncOmni: the pipeline as one asynchronous generator, in this process.

The input of a request is one mapping or an asynchronous iterator of segments; each segment is sent to the orchestrator
once the first stage has accepted the one before.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry

from hub.asked import arranged, check_unread, inputs_of
from hub.config import ClientBounds, HubConfig, RealtimeBounds
from hub.engine_control import CollectiveCalls
from hub.engine_protocol import EngineProtocol
from hub.metrics import HubMetrics
from hub.orchestrator.active import AbortRequest, Active, AddRequest, UpdateRequest
from hub.orchestrator.admission import Admission, RequestParts
from hub.orchestrator.deploy_versions import DeployVersions
from hub.orchestrator.orchestrator import Orchestrator
from hub.orchestrator.rejection_log import RejectionLog, log_revocation
from hub.output_queue import Delivery, OutputQueue, Unread
from hub.pool.stage_pool import PoolOptions, StageStatus
from hub.pool.versions import make_pools
from hub.receipts.book import ReceiptBook
from hub.receipts.ring import ReceiptRing
from hub.replicas.long_turns import LongTurns
from hub.replicas.resolver import Resolver
from hub.replicas.sockets import make_context
from hub.replicas.stage_client import StageClient
from hub.request.nesting import check_nesting
from hub.request.outputs import OmniOutput
from hub.request.plan import StageGraph
from omni_discovery.balancing.policies import DEFAULT_POLICY, build_load_balancer_factory
from omni_discovery.curve import KeyPair
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.errors import (
    AbortFailedError,
    DeadlineExceededError,
    HubUnavailableError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
)

if TYPE_CHECKING:
    from hub.orchestrator.tracing import Tracing
    from hub.replicas.events import ClientEvent
    from hub.replicas.factory import RemoteReplicaFactory
    from omni_discovery.records.health import HubHealth, ReplicaTrouble
    from omni_discovery.records.params import ParamBounds
    from omni_discovery.records.schema import ReplicaInfo
    from omni_discovery.stories import Stories
    from omni_discovery.view.table import Delta, View

logger = logging.getLogger(__name__)

#: A prompt in any form of ``inputs_of``, or segments of a request's input.
Inputs = str | Sequence[Any] | Mapping[str, Any] | AsyncIterable[Any]


class SegmentFeeder:
    """The input of one request: a mapping, or segments from an iterator. ``stop`` it when the request has ended."""

    def __init__(self, inputs: Inputs) -> None:
        self._segments = aiter(inputs) if isinstance(inputs, AsyncIterable) else None
        self._mapping = None if isinstance(inputs, AsyncIterable) else inputs_of(inputs)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_segmented(self) -> bool:
        """Whether the input comes in segments."""
        return self._segments is not None

    async def first(self) -> Mapping[str, Any]:
        """The whole input, or its first segment. Raise InvalidRequestError if there is none."""
        if self._segments is None:
            return self._mapping or {}
        try:
            return _checked(await anext(self._segments))
        except StopAsyncIteration:
            raise InvalidRequestError("the input ended before its first segment") from None

    def start(
        self,
        update: Callable[[Mapping[str, Any] | None], Awaitable[None]],
        fail: Callable[[RequestError], None],
    ) -> None:
        """Pass the later segments to ``update``, then None; ``fail`` ends the request with an error of the iterator."""
        if self._segments is not None:
            self._task = asyncio.create_task(self._run(update, fail))

    def stop(self) -> None:
        """Read no more segments. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _run(
        self,
        update: Callable[[Mapping[str, Any] | None], Awaitable[None]],
        fail: Callable[[RequestError], None],
    ) -> None:
        assert self._segments is not None  # noqa: S101 - it is not started otherwise
        try:
            async for segment in self._segments:
                await update(_checked(segment))
            await update(None)
        except RequestError as error:
            fail(error)
        except Exception as error:  # noqa: BLE001 - the client's iterator may raise anything
            fail(InvalidRequestError(f"the input broke off: {type(error).__name__}: {error}"))


async def send_update(queue: asyncio.Queue[Any], request_id: str, inputs: Mapping[str, Any] | None) -> None:
    """Send the next segment, or None after the last, to the orchestrator; return once the first stage has accepted it.

    Raise InvalidRequestError if the segment is nested too deep, or the request has ended or has had its last segment.
    """
    check_nesting("the segment", inputs)
    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    await queue.put(UpdateRequest(request_id, inputs, done))
    refusal = await done
    if refusal:
        raise InvalidRequestError(refusal)


def _checked(segment: object) -> Mapping[str, Any]:
    if not isinstance(segment, Mapping):
        raise InvalidRequestError(f"a segment is a mapping such as {{'prompt': ...}}, not {type(segment).__name__}")
    return segment


_REVOKED: Final = "this hub is revoked: no replica listens to it"
#: How long the last aborts may take to be sent before the sockets are closed.
_FLUSH_S: Final = 0.05
#: How old the oldest output that a client has not read must be before its request ends for others to have room.
_PATIENCE_S: Final = 5.0
#: Requests that the error of an abort names.
_MOST_NAMED: Final = 10


class AsyncOmni(EngineProtocol, CollectiveCalls):
    """One hub's requests. Used on the loop on which ``start`` was called; ``apply_view`` also from any thread.

    ``hub.join`` makes one that follows an etcd. ``remote_replica_factory`` makes the clients of replicas in place of
    this hub's own, see ``hub.replicas.factory``.
    """

    def __init__(
        self,
        deploy: DeployConfig,
        hub_id: str,
        key_pair: KeyPair | None,
        config: HubConfig | None = None,
        policy: str = DEFAULT_POLICY,
        labels: Mapping[str, str] | None = None,
        tracing: Tracing | None = None,
        *,
        fixed_models: bool = False,
        stories: Stories | None = None,
        resolver: Resolver | None = None,
        remote_replica_factory: RemoteReplicaFactory | None = None,
    ) -> None:
        self.hub_id = hub_id
        self.graph = StageGraph(deploy)
        self.hub_metrics = HubMetrics()
        self.rejections = RejectionLog(self.hub_metrics, on_overload=self._count_refusal)
        self._key_pair = key_pair
        self._resolver = resolver or Resolver()
        self._turns = LongTurns()
        self._config = config or HubConfig()
        self._tracing = tracing
        self._remote_replica_factory = remote_replica_factory
        #: Receives what happened to requests that failed; None: not kept.
        self._stories = stories
        #: Whether requests become spans, so that their trace headers matter.
        self.is_traced = tracing is not None
        #: The output queue of each request in flight, by its id inside the hub.
        self._queues: dict[str, OutputQueue] = {}
        self._unread = Unread(self._config.max_unread_bytes)
        #: The id inside the hub of each request in flight, by the client's id.
        self._inner_ids: dict[str, str] = {}
        keeps = self._config.receipts > 0
        times_s = self._config.pick_timeout_s, self._config.load_fresh_s
        options = PoolOptions(*times_s, labels=labels or {}, keeps_snapshots=keeps)
        pools = make_pools(self.graph.stage_ids, build_load_balancer_factory(policy), options)
        #: The versions of the deploy document that have requests or take them.
        self.releases = DeployVersions(deploy, pools, fixed_models=fixed_models)
        self._admission = Admission(self.releases, self._config)
        self._ring = ReceiptRing(self._config.receipts) if keeps else None
        #: What became of requests, and why they went where they went. Used on the hub's loop.
        self.receipts = ReceiptBook(
            hub_id, policy, self._ring, pools, self._running, self._encode_receipt, self._unread_since_s
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._orchestrator: Orchestrator | None = None
        #: Guards the next two, which the registry's thread uses, too.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._view_before_start: tuple[View, Delta] | None = None
        #: Since when the view is stale, wall-clock seconds; None while it is fresh.
        self._stale_since_s: float | None = None
        #: Whether an operator has revoked this hub: replicas close its sessions.
        self.is_revoked = False
        self.hub_metrics.view_stale.set_function(lambda: self.view_stale_s or 0.0)

    @property
    def client_bounds(self) -> ClientBounds:
        """What clients may ask for over HTTP."""
        return self._config.client_bounds

    @property
    def realtime_bounds(self) -> RealtimeBounds:
        """What the sessions of /v1/realtime may take."""
        return self._config.realtime_bounds

    @property
    def public_key(self) -> str:
        """The CURVE key of this hub, which replicas must allow; empty without encryption."""
        return "" if self._key_pair is None else self._key_pair.public

    @property
    def metrics(self) -> CollectorRegistry:
        """The registry of this hub's Prometheus metrics."""
        return self.hub_metrics.registry

    @property
    def is_running(self) -> bool:
        """Whether the orchestrator runs, so that requests are accepted."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    @property
    def problem(self) -> str:
        """Why no request of this hub can be served, with what to do; empty if that is not so."""
        return f"this hub is revoked, no replica listens to it: omni hub allow {self.hub_id}" if self.is_revoked else ""

    @property
    def in_flight(self) -> int:
        """How many requests of callers have not ended."""
        return len(self._queues)

    def check_serving(self) -> None:
        """Raise RequestError if this hub can't serve any request, with whatever replicas."""
        if not self.is_running:
            raise RequestError("the hub is not running")
        if self.is_revoked:
            raise HubUnavailableError(self.graph.stage_ids[0], _REVOKED)

    async def start(self) -> None:
        """Start to serve on the running loop. Raise RuntimeError if it was started before."""
        if self._orchestrator is not None:
            raise RuntimeError("AsyncOmni is started once")
        loop = asyncio.get_running_loop()
        self._context = make_context()
        config = self._config
        self.hub_metrics.watch(self.releases.every, lambda: self.is_revoked)
        self.hub_metrics.watch_wanted(self.releases.wanted_count, self.graph.stage_ids)
        self.hub_metrics.pipeline_not_followed.set_function(lambda: bool(self.releases.problem))
        self._orchestrator = Orchestrator(
            list(self.releases.newest.pools.values()),
            self._connect,
            config,
            self.hub_metrics,
            self._admission.backlog,
            async_chunk=self.graph.deploy.async_chunk,
            tracing=self._tracing,
            releases=self.releases,
            stories=self._stories,
            receipts=self._ring,
            turns=self._turns,
            emit=Delivery(self._queues, self._ask).deliver,
            remote_replica_factory=self._remote_replica_factory,
        )
        self._orchestrator.health.unread_since_s = self._unread_since_s
        self._tasks = [loop.create_task(self._orchestrator.run())]
        for task in self._tasks:
            task.add_done_callback(self._end_queues)
        with self._lock:
            self._loop = loop
            if self._view_before_start is not None:
                self._orchestrator.apply_view(*self._view_before_start)

    async def connect_replica(self, stage_id: int, replica_id: int) -> StageClient:
        """The hub's own client of a replica, on which a ``remote_replica_factory`` may build. Raise OmniError."""
        return await self._running_orchestrator().connect_replica(stage_id, replica_id)

    def apply_view(self, view: View, delta: Delta) -> None:
        """Apply a new view of the registry. From any thread, also before ``start`` and after ``close``."""
        self._stale_since_s = view.stale_since_s
        self.hub_metrics.count_changes(view, delta)
        was_revoked, self.is_revoked = self.is_revoked, self.hub_id in view.revoked
        log_revocation(self.hub_id, before=was_revoked, now=self.is_revoked)
        with self._lock:
            if self._loop is None:
                self._view_before_start = (view, delta)
            elif self._orchestrator is not None:
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._orchestrator.apply_view, view, delta)
                    if self.is_revoked:
                        self._loop.call_soon_threadsafe(self._orchestrator.end_all, _REVOKED)

    @property
    def view_stale_s(self) -> float | None:
        """For how many seconds the view of the registry has been stale; None while it is fresh."""
        since_s = self._stale_since_s
        return None if since_s is None else max(0.0, time.time() - since_s)

    def _count_refusal(self, error: OverloadedError) -> None:
        self.hub_metrics.count_refusal(error.stage_id)
        if self._orchestrator is not None:
            self._orchestrator.health.recent.count_refusal(error.stage_id, time.monotonic())

    def health(self) -> HubHealth | None:
        """What this hub reports of requests and replicas; None before ``start``. May be called from any thread."""
        return None if self._orchestrator is None else self._orchestrator.health.report

    def watch_health(self, on_change: Callable[[], None]) -> None:
        """Have ``on_change`` called, on the loop, when the report should be seen soon. Call it after ``start``."""
        if self._orchestrator is not None:
            self._orchestrator.health.on_change = on_change

    def troubles(self) -> list[ReplicaTrouble]:
        """The registered replicas that are ejected, or that don't answer though they are up, at this moment."""
        now_s, wall_s = time.monotonic(), time.time()
        return [trouble for pool in self.releases.every for trouble in pool.core.troubles(now_s, wall_s).shown]

    def applied_revision(self) -> int:
        """The registry's revision that picks are based on. May be called from any thread."""
        return 0 if self._orchestrator is None else self._orchestrator.applied_revision

    def stage_status(self) -> tuple[StageStatus, ...]:
        """The numbers of replicas of each stage, in pipeline order."""
        return self.releases.status()

    def serving_replicas(self) -> dict[str, Hashable]:
        """By name, the processes of the replicas that can take a new request's work, ordered by stage and id."""
        return self.releases.serving_replicas()

    def stages_begun(self, request_id: str) -> tuple[int, int]:
        """How many stages of a running request have begun, and how many it has; (0, 1) for an unknown id."""
        inner_id = self._inner_ids.get(request_id)
        states = {} if self._orchestrator is None else self._orchestrator.request_states
        state = states.get(inner_id) if inner_id is not None else None
        return (0, 1) if state is None else (len(state.stage_submit_ts), len(state.sampling_params_list))

    def voices(self) -> list[str]:
        """The voices that this pipeline's replicas can speak with, sorted."""
        return self.releases.voices()

    def params_taken(self, stage_id: int) -> list[Mapping[str, ParamBounds] | None]:
        """What each replica of a stage that takes work says that its parameters may be; None: it says nothing."""
        return self.releases.params_taken(stage_id)

    async def generate(
        self,
        prompt: Inputs,
        request_id: Any = None,
        sampling_params_list: Any = None,
        output_modalities: Sequence[str] | None = None,
        *,
        modalities: Sequence[str] | None = None,
        params: Mapping[int, Mapping[str, Any]] | None = None,
        sampling_params: Any = None,
        timeout_s: float | None = None,
        received_s: float | None = None,
        priority: int = 0,
        companions: Mapping[str, Mapping[str, Any]] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        segmented: bool = False,
        async_chunk: bool | None = None,
        label: str = "",
        key: str = "",
        client: str = "",
        on_input_wait: Callable[[bool], None] | None = None,
        seed: int | None = None,
        taker: Callable[[OmniOutput], bool] | None = None,
        **more: Any,
    ) -> AsyncGenerator[OmniOutput, None]:
        """Run one request; yield its outputs as they come, then one summary. Raise RequestError.

        ``prompt`` is a text, a list of token ids or of chat messages, or a mapping with ``messages``, ``prompt`` or
        ``prompt_token_ids``. ``output_modalities``, or ``modalities``, None means all of the pipeline. ``params`` is by
        stage id; in its place, ``sampling_params_list`` has one entry for each stage, in pipeline order, a mapping,
        vLLM's SamplingParams or None for the defaults; it may end early. ``sampling_params`` is the first stage's; the
        order of vLLM's EngineClient, prompt, sampling_params and request_id, is understood, and of its other arguments
        those that can't be followed are refused by name. ``timeout_s`` None means the hub's
        ``request_timeout_s``. Of queued requests, those with a lower ``priority`` go first. ``companions`` are further
        inputs by role, such as a negative prompt: they run through the first stage on the same replica, and later
        stages get their hand-offs, too. ``received_s`` (``time.perf_counter``) is when the client's bytes came,
        ``trace_headers`` the W3C headers that came with them. ``async_chunk``: whether stages start on pieces of each
        other's output; None: as the pipeline says. ``label`` is one more name of the request in log lines, ``key``
        that of the client's API key, ``client`` what all requests of its client have in common. ``seed`` is for
        whatever deterministic stages draw, where their parameters name none; by default it is made of the hub's id of
        the request. Closing the generator early, or cancelling its reader, aborts every stage.

        ``prompt`` may also be an asynchronous iterator of segments: each is answered, by the same replicas, before the
        next is sent; an output's ``segment`` is the index of its segment. With ``segmented``, ``prompt`` is the first
        segment, and ``update`` sends the others. ``on_input_wait`` is called on the loop with True when nothing is left
        to do until the next segment comes, and with False when there is again. ``taker`` is called on the loop with an
        output that the generator's reader waits for; one for which it returns True is not yielded.
        """
        check_unread(more)
        request_id, each = arranged(request_id, sampling_params_list, sampling_params)
        feeder = SegmentFeeder(prompt)
        parts = RequestParts(
            await feeder.first(),
            request_id,
            output_modalities if modalities is None else modalities,
            self.graph.params_of(params, each),
            timeout_s,
            received_s,
            priority,
            companions or {},
            trace_headers or {},
            segmented or feeder.is_segmented,
            async_chunk,
            label,
            key,
            client,
            on_input_wait,
            seed,
        )
        orchestrator = self._running_orchestrator()
        live_hubs = orchestrator.live_hubs
        with self.rejections.counted():
            if parts.request_id in self._inner_ids:
                raise InvalidRequestError(f"a request with the id {parts.request_id!r} is already running")
            request = self._admission.check(parts, live_hubs)
            self.check_serving()
            unread = self._longest_unread() if len(self._queues) >= self._config.max_in_flight else None
            self._admission.admit(request, len(self._queues) - (unread is not None), live_hubs)
            if unread is not None:
                # Not before: who is refused for another reason needs no room.
                with suppress(asyncio.QueueFull):
                    self._end_unread(unread)
            queue = self._enqueue(orchestrator, request, taker)
        inner_id = request.request_id
        try:
            update = partial(send_update, orchestrator.request_async_queue, inner_id)
            feeder.start(update, lambda error: self._ask(AbortRequest(inner_id, error)))
            while (output := await queue.get()) is not None:
                yield output
        finally:
            feeder.stop()
            self._forget_queue(request.shown_id, inner_id)
            if not queue.has_ended:
                self._ask(AbortRequest(inner_id))

    def _forget_queue(self, shown_id: str, inner_id: str) -> None:
        queue = self._queues.pop(inner_id, None)
        if queue is not None:
            queue.forget()
        # Another request may have the client's name by now.
        if self._inner_ids.get(shown_id) == inner_id:
            del self._inner_ids[shown_id]

    def _longest_unread(self) -> str | None:
        """The request whose client has left its output unread for longest; None if that is not long at all."""
        inner_id, queue = min(self._queues.items(), key=lambda item: item[1].unread_since_s)
        return inner_id if time.monotonic() - queue.unread_since_s >= _PATIENCE_S else None

    def _end_unread(self, inner_id: str) -> None:
        """Make room: end a request whose client does not read."""
        queue = self._queues[inner_id]
        error = OverloadedError("the client reads too slowly, and this hub needs the place for others")
        if not queue.has_ended:
            self._ask(AbortRequest(inner_id, error))
        queue.discard(error)
        # The client's name, then the number that admission gave it.
        self._forget_queue(inner_id.rpartition("~")[0], inner_id)

    async def update(self, request_id: str, inputs: Mapping[str, Any] | None, *, is_last: bool = False) -> None:
        """Send a ``segmented`` request its next segment, if any; ``is_last``: the last one. Return once it is accepted.

        Raise InvalidRequestError, without any effect, for a request that is not running or has had its last segment.
        """
        inner_id, orchestrator = self._inner_ids.get(request_id), self._running_orchestrator()
        if inner_id is None or not self.is_running:
            raise InvalidRequestError(f"no request {request_id!r} is running: it has ended, or never was")
        for each in ([inputs] if inputs is not None else []) + ([None] if is_last else []):
            await send_update(orchestrator.request_async_queue, inner_id, each)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort a request, or several, at every stage; their generators end after the queued outputs.

        Return once no replica works on any of them. Does nothing for ids that are unknown. Raise DeadlineExceededError,
        a TimeoutError, if a replica does not acknowledge that in time (it stops when it hears of the abort), and
        AbortFailedError, a RuntimeError, if the hub could not carry an abort out; all others are carried out.
        """
        wanted = [request_id] if isinstance(request_id, str) else list(request_id)
        inner_ids = {each: self._inner_ids[each] for each in wanted if each in self._inner_ids}
        if not inner_ids or not self.is_running:
            return
        done = [self._begin_abort(inner_id) for inner_id in inner_ids.values()]
        ends = zip(inner_ids, await asyncio.gather(*done, return_exceptions=True), strict=True)
        errors = {each: end for each, end in ends if isinstance(end, Exception)}
        if errors:
            text = "; ".join(f"{each!r}: {error}" for each, error in islice(errors.items(), _MOST_NAMED))
            more = f"; and {len(errors) - _MOST_NAMED} more" if len(errors) > _MOST_NAMED else ""
            is_late = all(isinstance(error, TimeoutError) for error in errors.values())
            raise (DeadlineExceededError if is_late else AbortFailedError)(f"{text}{more}")

    def _begin_abort(self, inner_id: str) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._ask(AbortRequest(inner_id, done=done))
        except asyncio.QueueFull:
            done.set_exception(AbortFailedError("too many calls wait in this hub"))
        return done

    def end_requests(self) -> None:
        """End every request with an error that says that the hub is stopping. Sessions stay open until ``close``."""
        self._running_orchestrator().end_all()

    async def close(self) -> None:
        """End every request and close every socket. Idempotent."""
        tasks, self._tasks = self._tasks, []
        if not tasks or self._orchestrator is None:
            return
        self._orchestrator.end_all()
        await asyncio.sleep(_FLUSH_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        self.rejections.close()
        logger.info("hub.closed hub=%s", self.hub_id)

    # ---- inside

    def _end_queues(self, task: asyncio.Task[None]) -> None:
        """End all generators: a task that serves them has ended."""
        if not task.cancelled() and task.exception() is not None:
            logger.error("hub.died", exc_info=task.exception())
        for queue in self._queues.values():
            queue.end(HubUnavailableError(self.graph.stage_ids[0], "the hub is stopping"))

    def _connect(self, info: ReplicaInfo, on_event: Callable[[ClientEvent], None]) -> StageClient:
        return StageClient(
            info,
            self.hub_id,
            self._key_pair,
            self._config,
            self._context,
            on_event,
            resolver=self._resolver,
            turns=self._turns,
        )

    def _enqueue(
        self, orchestrator: Orchestrator, request: AddRequest, taker: Callable[[OmniOutput], bool] | None
    ) -> OutputQueue:
        """Give an admitted request to the orchestrator. Raise OverloadedError if too much waits for it."""
        bounds = self._config.max_queued_outputs, self._config.max_queued_bytes
        try:
            queue = OutputQueue(
                *bounds, partial(orchestrator.set_backpressure, request.request_id), taker, self._unread
            )
            orchestrator.request_async_queue.put_nowait(request)
        except BaseException as error:
            # From here on the orchestrator would give its place back.
            self._admission.backlog.leave(request.request_id)
            if isinstance(error, asyncio.QueueFull):
                raise OverloadedError("too many requests and segments wait in this hub") from None
            raise
        self._queues[request.request_id], self._inner_ids[request.shown_id] = queue, request.request_id
        return queue

    def _running(self) -> list[Active]:
        return [] if self._orchestrator is None else self._orchestrator.running()

    def _unread_since_s(self) -> dict[str, float]:
        return {inner_id: queue.unread_since_s for inner_id, queue in self._queues.items()}

    def _encode_receipt(self, request_id: str) -> bytes:
        return self._running_orchestrator().encode_receipt(request_id)

    def _running_orchestrator(self) -> Orchestrator:
        if self._orchestrator is None:
            raise RequestError("the hub is not running")
        return self._orchestrator

    def _ask(self, abort: AbortRequest) -> None:
        if self._orchestrator is not None and self.is_running:
            self._orchestrator.rpc_async_queue.put_nowait(abort)
