"""Simulated replica processes: the shipped Replica, with its threads as callbacks of one loop, and its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any

import zmq

from omni_discovery.clients.stage import OmniCoordClientForStage
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.deploy.trust.bounds import Bounds
from omni_discovery.wire import Submit
from omni_discovery.wire.session import Peer
from stage_runtime.config import EngineDeadError, ReplicaConfig
from stage_runtime.connectors.base import OmniConnectorBase
from stage_runtime.connectors.errors import TransferError, TransferTimeoutError
from stage_runtime.engine_loop import loop as engine_loop_module
from stage_runtime.engine_loop.jobs import Job
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Edge, Payloads
from stage_runtime.engines.base import EngineOutput
from stage_runtime.engines.echo.engine import EchoEngine
from stage_runtime.lifecycle import LifeState
from stage_runtime.replica import replica as replica_module
from stage_runtime.replica.publisher import StatusPublisher
from stage_runtime.replica.replica import Replica
from stage_runtime.server import server as server_module
from stage_runtime.server.ledger import Ticket
from stage_runtime.server.server import ReplicaServer
from stage_runtime.supervisor.restarts import LeaveDown, Restarts, StartAgain
from tests.simulation.network import SimRouter
from tests.simulation.virtual_time import PROCESS, Process

if TYPE_CHECKING:
    from tests.simulation.world import World

_TICK_S = 0.1
#: The same of a server without requests, which has only idle sessions to look after.
_IDLE_TICK_S = 1.0
_IDLE_TURN_S = 5.0
_DRAINING_TURN_S = 0.05
_PUBLISH_S = 0.05
#: Hand-offs that no hub releases, since it has died, are dropped after this; outside of simulations after 15 minutes.
HAND_OFFS_KEPT_S = 75.0
#: While nothing is in flight, the status is looked at so often.
_IDLE_PUBLISH_S = 1.0


def current_world() -> World:
    """The world of the running process."""
    from tests.simulation.world import WORLD

    assert WORLD.now is not None, "no simulation runs"
    return WORLD.now


def current_process() -> Process:
    process = PROCESS.get()
    assert process is not None, "this belongs to a process"
    return process


class SimEngine(EchoEngine):
    """The echo engine, which can be made to crash. ``waits`` are requests to a step that would sleep."""

    def __init__(self, stage: StageConfig) -> None:
        super().__init__(stage)
        self.crashes = False
        self.deterministic = stage.stage_id in current_world().plan.deterministic

    def step(self) -> list[EngineOutput]:
        if self.crashes:
            raise RuntimeError("the simulated engine crashes")
        return super().step()


class SimConnector(OmniConnectorBase):
    """Hand-offs that stay with the process that made them, and go with it."""

    def __init__(self, world: World) -> None:
        self._world, self._process = world, current_process()
        self._stored = world.hand_offs.setdefault(self._process, {})

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        raw = self.serialize_obj(data)
        self._stored[put_key] = raw
        return True, len(raw), {"producer": self._process.name}

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        world = self._world
        producer = next((each for each in world.hand_offs if each.name == (metadata or {})["producer"]), None)
        if producer is None or not producer.is_alive:
            raise TransferError("the producer is gone")
        path = world.network
        is_cut = not (
            path.reaches(producer.host, self._process.host) and path.reaches(self._process.host, producer.host)
        )
        if producer.is_paused or is_cut:
            raise TransferTimeoutError("the producer does not answer")
        raw = world.hand_offs[producer].get(get_key)
        return None if raw is None else (self.deserialize_obj(raw), len(raw))

    def cleanup(self, request_id: str) -> None:
        for key in [key for key in self._stored if key == request_id or key.startswith(f"{request_id}_")]:
            del self._stored[key]

    def health(self) -> dict[str, Any]:
        return {"status": "healthy"}

    def close(self) -> None:
        self._stored.clear()


def sim_edges(
    deploy: DeployConfig, stage_id: int, namespace: str, bind_host: str = "", advertise_host: str = ""
) -> dict[tuple[int, int], Edge]:
    """In place of ``build_edges``."""
    del namespace, bind_host, advertise_host
    pairs = [(before, stage_id) for before in deploy.inputs_of(stage_id)]
    pairs += [(stage_id, stage.stage_id) for stage in deploy.stages if stage_id in deploy.inputs_of(stage.stage_id)]
    connector = SimConnector(current_world())
    return {pair: Edge(deploy.connector_of(*pair).name, connector, deploy.window_of(*pair)) for pair in pairs}


def _aside(run: Callable[[], None]) -> None:
    """In place of a thread that fetches a hand-off."""
    world = current_world()
    world.loop.call_later(world.network.delay_s() * 2, run)


class SimJobs:
    """In place of the queue between a replica's threads: who takes from it never waits, and hears of what comes."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self.on_put: Callable[[], None] = lambda: None

    def put(self, job: Job) -> None:
        self._jobs.append(job)
        self.on_put()

    def get(self, timeout: float) -> Job:
        del timeout
        return self.get_nowait()

    def get_nowait(self) -> Job:
        if not self._jobs:
            raise Empty
        return self._jobs.popleft()

    def empty(self) -> bool:
        return not self._jobs

    def qsize(self) -> int:
        return len(self._jobs)


class _NoContext:
    """In place of zmq.Context."""

    def term(self) -> None:
        return

    def destroy(self, linger: int = 0) -> None:
        del linger


class SimServer(ReplicaServer):
    """The server, with callbacks in place of its thread: a frame, an outcome or a tick makes it take a turn."""

    def __init__(self, *args: Any) -> None:
        self.is_due = self._has_stopped = False
        super().__init__(*args)
        self._world = current_world()
        self._asleep = True
        #: Requests that came when their connection held no credit, or went on after they had given their slot back.
        self.unbacked: set[str] = set()
        for router in self._routers:
            router.on_frame = self._wake

    @property
    def frame_sent_at_s(self) -> float:
        """When the frame that is handled now was sent."""
        return self._routers[0].frame_sent_at_s

    @property
    def _routers(self) -> tuple[SimRouter, SimRouter]:
        return self._input, self._output  # type: ignore[return-value]

    def start(self) -> None:
        self._world.loop.call_soon(self._tick)

    @property
    def unbacked_count(self) -> int:
        """How many of its requests have a slot that was not lent for them."""
        self.unbacked.intersection_update(self._sessions.ledger.tickets)
        return len(self.unbacked)

    def _wake(self) -> None:
        if not self.is_due and not self._has_stopped:
            self.is_due = True
            self._world.loop.call_later(self._world.turn_delay_s(), self._turn)

    def _turn(self) -> None:
        self.is_due = False
        if self._has_stopped:
            return
        ready: dict[object, int] = {router.socket: 1 for router in self._routers if router.has_frames}
        is_behind = self._take_turn(ready, self._world.now_s)
        self._world.judge.turn_taken(self)
        if is_behind or self._outcomes or any(router.has_frames for router in self._routers):
            self._wake()

    def _tick(self) -> None:
        if not self._has_stopped:
            self._turn()
            self._world.loop.call_later(_IDLE_TICK_S if self.idle else _TICK_S, self._tick)

    async def flush_and_close(self, flush_timeout_s: float) -> None:
        """What ``close`` does."""
        for _ in range(round(flush_timeout_s / 0.01)):
            if self.idle:
                break
            await asyncio.sleep(0.01)
        self._has_stopped = True
        self._input.close(200)
        self._output.close(200)


class SimPublisher(StatusPublisher):
    """The status, published from a callback in place of a thread."""

    _is_over = False

    def start(self) -> None:
        world, process = current_world(), current_process()
        self._end_process = lambda code: world.exit_at_once(process, code)
        self._again()

    def stop(self, timeout_s: float = 5.0) -> None:
        del timeout_s
        self._is_over = True

    def _again(self) -> None:
        if self._is_over:
            return
        snapshot = self._take_snapshot()
        self._publish(snapshot)
        is_idle = not snapshot.queue_length and not snapshot.is_stalled
        current_world().loop.call_later(_IDLE_PUBLISH_S if is_idle else _PUBLISH_S, self._again)


class SimReplica(Replica):
    """One replica process, from its start to its exit code."""

    def __init__(self, world: World, process: Process, stage_id: int, index: int) -> None:
        self._world, self.process, self.stage_id, self.index = world, process, stage_id, index
        self.up_at_s: float | None = None
        self.acknowledged_at_s: float | None = None
        self._hung_until_s = 0.0
        #: Set while the engine's loop waits for a job.
        self._waits: asyncio.Future[None] | None = None
        self._is_told = asyncio.Event()
        plan = world.plan
        config = ReplicaConfig(
            stage_id=stage_id,
            endpoints="10.9.0.0:2379",
            namespace=world.namespace,
            ttl_s=plan.ttl_s,
            zmq_security="none",
            bind_host=process.host,
            advertise_host=process.host,
            drain_timeout_s=plan.drain_timeout_s,
            stall_after_s=plan.stall_after_s,
            bounds=Bounds(allow=("all",)),
        )
        super().__init__(config, world.deploy)
        self._loop.jobs.on_put = self._end_wait  # type: ignore[attr-defined]
        self._tap()

    def _tap(self) -> None:
        """Let the judge see each request that a hub sends."""
        sessions, judge = self.server._sessions, self._world.judge
        take, park = sessions._submit, sessions._park

        def tapped(peer: Peer, submit: Submit, now_s: float) -> None:
            judge.submitted(self, peer.hub_id, submit, self.server.frame_sent_at_s)
            is_backed = sessions._credits.unspent_of(peer.name) > 0
            take(peer, submit, now_s)
            ticket = sessions.ledger.current_ticket(peer.hub_id, submit.request_id)
            if ticket is not None and not is_backed:
                self.server.unbacked.add(ticket.key)

        def parked(ticket: Ticket, *, is_parked: bool) -> None:
            if not is_parked:
                self.server.unbacked.add(ticket.key)
            park(ticket, is_parked=is_parked)

        sessions._park = parked  # type: ignore[method-assign]
        sessions._submit = tapped  # type: ignore[method-assign]

    @property
    def name(self) -> str:
        return f"{self.stage_id}/{self._replica_id}"

    @property
    def registered_id(self) -> int:
        """Its number within the stage; -1 before it was registered."""
        return -1 if self._replica_id is None else self._replica_id

    @property
    def server(self) -> SimServer:
        return self._server  # type: ignore[return-value]

    @property
    def takes_work(self) -> bool:
        return self.process.is_alive and self._lifecycle.state is LifeState.READY

    @property
    def state(self) -> LifeState:
        return self._lifecycle.state

    @property
    def client(self) -> OmniCoordClientForStage | None:
        return self._client  # type: ignore[return-value]

    @property
    def engine(self) -> SimEngine:
        return self._engine  # type: ignore[return-value]

    @property
    def is_hung(self) -> bool:
        return self._world.now_s < self._hung_until_s

    def leftovers(self) -> dict[str, int]:
        """What is kept of requests; all 0 when there are none."""
        loop, sessions = self._loop, self.server._sessions
        return {
            "tickets": len(sessions.ledger.tickets),
            "running": len(loop),
            "jobs": loop.jobs.qsize(),
            "hand-offs": len(self._payloads._kept),
            "used slots": self.server.credits[0],
        }

    def hang(self, for_s: float) -> None:
        """The engine stands still in a step."""
        self._hung_until_s = self._world.now_s + for_s

    def terminate(self) -> None:
        """SIGTERM, in the context of the process."""
        self._world.run_in(self.process, self._on_stop_signal, 15, None)

    def _start_drain(self, timeout_s: float) -> None:
        if self._lifecycle.state is LifeState.STARTING:
            self._is_told.set()
        with contextlib.suppress(BaseException):
            super()._start_drain(timeout_s)

    def _on_drain(self) -> None:
        # In place of a signal to the main thread.
        self._world.loop.call_soon(self._on_drain_signal, 10, None)

    def _on_acknowledged(self) -> None:
        super()._on_acknowledged()
        self.acknowledged_at_s = self._world.now_s
        self._world.judge.drain_acknowledged(self)

    async def live(self) -> int:
        """Everything that the process does; return its exit code."""
        code = 1
        try:
            code = await self._live()
        finally:
            await self._close_in_order()
        return code

    async def _live(self) -> int:
        code = 0
        try:
            self._begin()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._world.plan.load_s):
                    await self._is_told.wait()
            if self._is_told.is_set():
                return code
            self._load_engine()
            self.up_at_s = self._world.now_s
            await self._serve_on_loop()
        except Exception as error:  # noqa: BLE001 - as the shipped method
            if not isinstance(error, EngineDeadError):
                self._world.judge.defect(f"replica {self.name} failed: {error!r}")
            code = self._end_by(error)
        return 3 if self._drained_by_key else code

    async def _serve_on_loop(self) -> None:
        world, step_s = self._world, self._world.plan.step_s
        while self._lifecycle.state in (LifeState.READY, LifeState.DRAINING):
            if self.is_hung:
                await asyncio.sleep(self._hung_until_s - world.now_s)
            self._loop.turn()
            self._after_turn()
            if self._engine.has_unfinished():
                await asyncio.sleep(step_s)
            elif self._loop.jobs.empty():
                is_draining = self._lifecycle.state is LifeState.DRAINING
                await self._wait_for_job(_DRAINING_TURN_S if is_draining else _IDLE_TURN_S)
                await asyncio.sleep(world.turn_delay_s())

    async def _wait_for_job(self, timeout_s: float) -> None:
        """The queue's own wait, which would stop the world."""
        self._waits = self._world.loop.create_future()
        timer = self._world.loop.call_later(timeout_s, self._end_wait)
        await self._waits
        timer.cancel()

    def _end_wait(self) -> None:
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)

    async def _close_in_order(self) -> None:
        """What ``_close_parts`` does, without blocking."""
        if self._publisher is not None:
            self._publisher.stop()
        if self._client is not None:
            await close_client(self._client)
        await self.server.flush_and_close(2.0)
        self._payloads.close()
        self._engine.close()


async def close_client(client: Any) -> None:
    """What ``RegistryClient.close`` does, without blocking."""
    client._is_closed = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(client._config.close_timeout_s + 2.0):
            await client._close_on_loop()
    client._has_ended = True


class SimLoopThread:
    """In place of LoopThread: the one loop there is."""

    def __init__(self, name: str, new_loop: object = None) -> None:
        del new_loop
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    def start(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.create_task(work)

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run a coroutine that does not wait."""
        del timeout_s
        try:
            work.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("a simulated client can't wait here")

    def call(self, function: Callable[..., object], *args: object) -> None:
        self._loop.call_soon(function, *args)

    def close(self, timeout_s: float = 2.0) -> None:
        del timeout_s


class SimSupervisor:
    """Keeps one replica up, by the shipped restart policy."""

    def __init__(self, world: World, stage_id: int, index: int, host: str) -> None:
        self.host: str = host
        self._world, self.stage_id, self.index = world, stage_id, index
        self._restarts = Restarts()
        self._lives = 0
        #: The present process; None between two.
        self.replica: SimReplica | None = None
        #: Set while no process is to be started: the host is off.
        self.is_off = False
        self.is_left_down = False

    def start(self) -> None:
        """Start a process, unless one runs."""
        if self.is_off or self.is_left_down or (self.replica is not None and self.replica.process.is_alive):
            return
        self._lives += 1
        process = Process(f"replica-{self.stage_id}.{self.index}.{self._lives}", self.host)
        self._world.processes.append(process)

        def begin() -> None:
            self.replica = SimReplica(self._world, process, self.stage_id, self.index)
            self._world.loop.create_task(self._live(self.replica), context=process.context.copy())

        self._world.run_in(process, begin)

    async def _live(self, replica: SimReplica) -> None:
        code = await replica.live()
        self._world.exit_process(replica.process)
        self._world.ended_in_order(self, replica, code)

    def ended(self, code: int, replica: SimReplica) -> None:
        """In the world's context: the process is gone."""
        if self.replica is not replica:
            return
        self.replica = None
        served_s = 0.0 if replica.up_at_s is None else self._world.now_s - replica.up_at_s
        match self._restarts.record_end(code, served_s):
            case LeaveDown() if self._world.is_asking:
                self.is_left_down = True
            case LeaveDown():
                # All is being mended: the operator who had it drained starts it.
                self._world.after(1.0, self.start)
            case StartAgain(delay_s):
                self._world.after(delay_s, self.start)


def _no_pause(_listeners: Sequence[object]) -> Any:
    class _Pause:
        def check_descriptors(self) -> None:
            return

        def close(self) -> None:
            return

    return _Pause()


def patches() -> list[tuple[Any, str, Any]]:
    """The names of the replica's modules that a simulation replaces, each with its stand-in."""

    class _Zmq:
        Context = _NoContext
        Again = zmq.Again
        POLLIN = zmq.POLLIN

    class _Os:
        EFD_NONBLOCK = EFD_CLOEXEC = 0

        @staticmethod
        def eventfd(_start: int, _flags: int) -> int:
            return -1

        @staticmethod
        def eventfd_read(_fd: int) -> int:
            return 0

    def router(*_: object) -> SimRouter:
        return SimRouter(current_world(), current_process())

    return [
        (server_module, "zmq", _Zmq),
        (server_module, "os", _Os),
        (server_module, "Router", router),
        (server_module, "ConnectionPause", _no_pause),
        (replica_module, "ReplicaServer", SimServer),
        (replica_module, "StatusPublisher", SimPublisher),
        (replica_module, "create_engine", SimEngine),
        (replica_module, "build_edges", sim_edges),
        (replica_module, "Payloads", partial(Payloads, keep_s=HAND_OFFS_KEPT_S)),
        (engine_loop_module, "SimpleQueue", SimJobs),
        (replica_module, "EngineLoop", partial(EngineLoop, run_aside=_aside)),
        (replica_module, "model_details", lambda model, engine: {"content": "simulated"}),
    ]
