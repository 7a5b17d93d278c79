"""World: one simulated cluster, from its first process to the judge's last look."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import hashlib
import logging
import math
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import msgspec

from omni_discovery.deploy.document import decode_deploy
from omni_discovery.errors import OmniError, OverloadedError
from tests.simulation import faults, hub, replica
from tests.simulation.hub import SimHub
from tests.simulation.judge import MOST_REFUSED, Judge
from tests.simulation.mistakes import made
from tests.simulation.network import Network
from tests.simulation.plan import Ask, Plan
from tests.simulation.registry import EtcdModel
from tests.simulation.replica import SimReplica, SimSupervisor
from tests.simulation.virtual_time import SOURCE, Process, VirtualLoop, used_s

#: How long the cluster may take to come up, and to come to rest after its last fault.
START_S: Final = 60.0
REST_S: Final = 120.0
#: What views may take to agree with the registry beyond the TTL of what has died.
AGREE_S: Final = 15.0
#: How often the world looks whether it may go on.
_LOOK_S: Final = 0.25


class _Current:
    now: World | None = None


#: The world that runs; there is one at a time.
WORLD: Final = _Current()


class Result(msgspec.Struct, frozen=True):
    """The outcome of one run."""

    violations: tuple[str, ...]
    #: Equal for two runs of one plan.
    digest: str = ""
    simulated_s: float = 0.0
    requests: int = 0
    ended: dict[str, int] = {}
    callbacks: int = 0
    #: Seconds of a processor that it took.
    used_s: float = 0.0


class HubPlace:
    """Where one hub runs, with the process that runs there now."""

    def __init__(self, world: World, index: int) -> None:
        self._world, self.index = world, index
        self.host: str = f"10.1.0.{index}"
        self.hub: SimHub | None = None
        self._lives = 0

    def start(self) -> None:
        self._lives += 1
        process = Process(f"hub-{self.index}.{self._lives}", self.host)
        self._world.processes.append(process)

        def begin() -> None:
            self.hub = SimHub(self._world, process, f"hub-{self.index}")
            self._world.loop.create_task(self.hub.start())

        self._world.run_in(process, begin)


class World:
    """Everything there is. ``after`` and ``run_in`` are how things happen later."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = VirtualLoop()
        self.chance = random.Random(f"world {plan.seed}")
        self.namespace = "sim"
        self.heartbeat_timeout_s = 3.0
        self.loss = plan.loss
        self.processes: list[Process] = []
        self.dead_hosts: set[str] = set()
        self.hand_offs: dict[Process, dict[str, bytes]] = {}
        self.judge = Judge(self)
        self._context = contextvars.Context()
        self.network = Network(self)
        self.network.jitter_s = plan.jitter_s
        self.deploy = decode_deploy(_document(plan), "simulation")
        self._history = hashlib.blake2b(digest_size=8)
        #: Numbers of requests that are asked again; and whether there still are any.
        self._numbers = 100_000
        self.is_asking = True
        #: Set when the cluster has come up, and plans' times begin.
        self.began_s = 0.0

    @property
    def now_s(self) -> float:
        return self.loop.now_s

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """Have the world do something, whoever asks for it."""
        self.loop.call_later(delay_s, call, *args, context=self._context)

    def run_in(
        self, process: Process, call: Callable[..., object], *args: Any, delay_s: float = 0.0, at_s: float | None = None
    ) -> None:
        """Call something in a process, if that still lives by then; one that is paused does it when it goes on."""
        when_s = self.now_s + delay_s if at_s is None else at_s
        self.loop.call_at(when_s, call, *args, context=process.context)

    def turn_delay_s(self) -> float:
        """How long a thread takes to notice what another one has left for it."""
        return self.chance.random() * self.plan.wake_s

    def kv_reaches(self, member: int, process: Process, *, both_ways: bool = False) -> bool:
        host = self.etcd.hosts[member]
        if member in self.etcd.down:
            return False
        reaches = self.network.reaches(host, process.host)
        return reaches and (not both_ways or self.network.reaches(process.host, host))

    # ---- processes

    def exit_process(self, process: Process) -> None:
        """The process is gone, by itself or by SIGKILL: the kernel closes its connections, nothing of it runs on."""
        self.loop.bury(process)
        self.network.process_ended(process)
        for watch in [watch for watch in self.etcd.watches if watch._process is process]:
            del self.etcd.watches[watch]
        self.hand_offs.pop(process, None)
        self.note("exit", process.name)

    def exit_at_once(self, process: Process, code: int) -> None:
        """``os._exit`` in a replica."""
        self.exit_process(process)
        for supervisor in self.supervisors:
            if supervisor.replica is not None and supervisor.replica.process is process:
                self.ended_in_order(supervisor, supervisor.replica, code)

    def pause(self, process: Process, for_s: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        if process.is_alive and not process.is_paused:
            process.is_paused = process.is_stopped = True
            self.network.process_paused(process)
            self.after(for_s, self._go_on, process)

    def hold(self, process: Process, for_s: float) -> None:
        """Something keeps the interpreter: no Python runs, and ZMQ's own threads answer heartbeats and take frames."""
        if process.is_alive and not process.is_paused:
            process.is_paused = True
            self.after(for_s, self._go_on, process)

    def _go_on(self, process: Process) -> None:
        self.loop.wake(process)
        self.network.process_paused(process)

    def ended_in_order(self, supervisor: SimSupervisor, ended: SimReplica, code: int) -> None:
        self.after(0.0, supervisor.ended, code, ended)

    def note(self, *what: object) -> None:
        """Fold something that happened into the digest of the run."""
        self._history.update(f"{self.now_s:.6f} {what}\n".encode())

    # ---- the run

    def live_replicas(self) -> list[SimReplica]:
        found = [place.replica for place in self.supervisors]
        return [each for each in found if each is not None and each.process.is_alive]

    def live_hubs(self) -> list[SimHub]:
        found = [place.hub for place in self.hub_places]
        return [each for each in found if each is not None and each.process.is_alive]

    def _live(self) -> list[SimHub | SimReplica]:
        return [*self.live_hubs(), *self.live_replicas()]

    def task_counts(self) -> dict[Process, int]:
        """How many tasks each process has."""
        counts = dict.fromkeys((each.process for each in self._live()), 0)
        for task in asyncio.all_tasks(self.loop):
            process = getattr(task, "process", None)
            if process in counts:
                counts[process] += 1
        return counts

    def _build(self) -> None:
        self.etcd = EtcdModel(self)
        self.etcd.on_write.append(self.judge.written)
        self.hub_places = [HubPlace(self, index) for index in range(self.plan.hubs)]
        self.supervisors = [
            SimSupervisor(self, stage, index, f"10.{2 + stage}.0.{index}")
            for stage, count in enumerate(self.plan.stages)
            for index in range(count)
        ]

    async def _run(self) -> None:
        self._build()
        places: list[Any] = [*self.hub_places, *self.supervisors]
        self.chance.shuffle(places)
        for place in places:
            self.after(self.chance.random() * 2.0, place.start)
        await self._until(self._is_whole, START_S, "the cluster did not come up")
        self.began_s = self.now_s
        self.judge.cluster_is_up(self.task_counts())
        for fault in self.plan.faults:
            self.after(fault.at_s, faults.begin, self, fault)
        for number, ask in enumerate(self.plan.asks):
            self.after(ask.at_s, self._ask, number, ask)
        last_s = max([self.plan.length_s, *(each.at_s + each.for_s for each in self.plan.faults)])
        await asyncio.sleep(last_s)
        faults.mend_all(self)
        self.is_asking = False
        mended_s = self.now_s
        await self._until(self._is_whole, REST_S, "the cluster did not come back")
        await self._until(
            self.judge.views_differ, self.plan.ttl_s + AGREE_S, "views did not become those of the registry"
        )
        # All that is old has ended by then: leases, grace times, requests with their deadlines, ejections.
        await self._until(self._is_at_rest, max(REST_S, self.judge.last_deadline_s - mended_s + 5.0), "no rest came")
        for number, place in enumerate(self.hub_places):
            self._ask(len(self.plan.asks) + number, Ask(0.0, place.index, 5, 30.0), is_probe=True)
        await asyncio.sleep(10.0)
        await self._until(self._is_at_rest, 60.0, "the last requests left something behind")
        self.judge.final_look()

    async def _until(self, is_so: Callable[[], str], timeout_s: float, what: str) -> None:
        """Wait until ``is_so`` returns nothing to complain of."""
        until_s = self.now_s + timeout_s
        while complaint := is_so():
            if self.now_s > until_s:
                self.judge.defect(f"{what} within {timeout_s:g} s: {complaint}")
                return
            await asyncio.sleep(_LOOK_S)

    def _is_whole(self) -> str:
        """Every hub and replica runs, and each hub can pick every replica."""
        for place in self.hub_places:
            if place.hub is None or not place.hub.process.is_alive or not place.hub.is_ready:
                return f"hub {place.index} does not run"
        for supervisor in self.supervisors:
            if supervisor.replica is None or not supervisor.replica.takes_work:
                return f"replica {supervisor.stage_id}.{supervisor.index} does not run"
        for hub_now in self.live_hubs():
            if hub_now.omni.is_revoked:
                return f"{hub_now.hub_id} is revoked"
            for status, count in zip(hub_now.omni.stage_status(), self.plan.stages, strict=True):
                if status.pickable != count:
                    return f"{hub_now.hub_id} can pick {status.pickable} of {count} replicas of stage {status.stage_id}"
        return ""

    def _is_at_rest(self) -> str:
        """Nothing is left of any request."""
        if self.judge.open_asks:
            return f"{len(self.judge.open_asks)} requests have not ended"
        for each in self._live():
            left = {name: count for name, count in each.leftovers().items() if count}
            if left:
                return f"{each.process.name} keeps {left}"
        return ""

    # ---- clients

    def _ask(self, number: int, ask: Ask, *, is_probe: bool = False, refused: int = 0) -> None:
        place = self.hub_places[ask.hub]
        hub_now = place.hub
        case = self.judge.asked(number, ask, hub_now, is_probe=is_probe, refused=refused)
        if hub_now is None or not hub_now.process.is_alive or not hub_now.is_ready:
            self.judge.ended(case, "refused")
            return
        # The client's way to its hub is short: what is simulated are hubs and replicas.
        context = hub_now.process.context.copy()
        task = self.loop.create_task(self._serve(case, hub_now, ask), context=context)
        if ask.leaves_s is not None:
            self.run_in(hub_now.process, self._leave, case, task, delay_s=ask.leaves_s)

    def _ask_again(self, number: int, ask: Ask, refused: int) -> None:
        self._ask(number, ask, refused=refused)

    def _leave(self, case: Any, task: asyncio.Task[Any]) -> None:
        if not task.done():
            case.has_left = True
            task.cancel()

    async def _serve(self, case: Any, hub_now: SimHub, ask: Ask) -> None:
        judge = self.judge
        try:
            async for output in hub_now.answer(case.prompt, request_id=case.name, timeout_s=ask.timeout_s):
                judge.shown(case, output)
                if ask.reads_s and self.is_asking:
                    await asyncio.sleep(ask.reads_s)
            judge.ended(case, "ok")
        except OmniError as error:
            judge.ended(case, "error", error)
            if isinstance(error, OverloadedError) and case.refused < MOST_REFUSED and self.is_asking:
                # A well-behaved client comes back when it was told to.
                self._numbers += 1
                again = msgspec.structs.replace(ask, leaves_s=None)
                delay_s = math.ceil(error.retry_after_s or 0.0)
                self.after(delay_s, self._ask_again, self._numbers, again, case.refused + 1)
        except asyncio.CancelledError:
            judge.ended(case, "left")
            raise


def _document(plan: Plan) -> bytes:
    stages = [
        {
            "stage_id": number,
            "engine": "echo",
            "engine_args": {"capacity": plan.capacity},
            "final_output": "text",
            "runtime": {"num_replicas": count},
        }
        for number, count in enumerate(plan.stages)
    ]
    return msgspec.json.encode({"async_chunk": plan.async_chunk, "stages": stages})


class _LogWatch(logging.Handler):
    """Passes errors in the log to the judge: none is expected."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self._world.judge.logged(record)


@contextlib.contextmanager
def _replaced(world: World) -> Iterator[None]:
    """The shipped modules use the simulation's parts; logs go to the judge; nothing is collected meanwhile."""
    handler = _LogWatch(world)
    root = logging.getLogger()
    before, disabled = root.handlers[:], logging.root.manager.disable
    root.handlers[:] = [handler]
    logging.disable(logging.WARNING - 1)
    gc.collect()
    gc.disable()
    state = random.getstate()
    random.seed(f"packages {world.plan.seed}")
    SOURCE.loop, SOURCE.chance = world.loop, random.Random(f"system {world.plan.seed}")
    WORLD.now = world
    try:
        with contextlib.ExitStack() as stack:
            for module, name, stand_in in [*hub.patches(), *replica.patches()]:
                stack.enter_context(mock.patch.object(module, name, stand_in))
            yield
    finally:
        WORLD.now = None
        SOURCE.loop = None
        random.setstate(state)
        root.handlers[:] = before
        logging.disable(disabled)


def run(plan: Plan) -> Result:
    """Run one plan to its end."""
    began_s = used_s()
    world = World(plan)
    loop = world.loop
    loop.set_exception_handler(lambda _, context: world.judge.unhandled(context))
    with _replaced(world):
        main = loop.spawn(None, world._run())
        try:
            loop.run_until_complete(main)
        except Exception as error:  # noqa: BLE001 - the judge has it
            world.judge.defect(f"the run broke off: {error!r}")
        return Result(
            tuple(world.judge.violations),
            world._history.hexdigest(),
            loop.now_s,
            len(plan.asks),
            dict(sorted(world.judge.ends.items())),
            loop.callbacks,
            used_s() - began_s,
        )


def run_apart(plan: Plan, mistake: str = "") -> Result:
    """Run one plan in a child process, which has nothing of any other run in it and leaves nothing behind."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(read_fd)
            with made(mistake):
                result = run(plan)
            with os.fdopen(write_fd, "wb") as pipe:
                pipe.write(msgspec.json.encode(result))
            code = 0
        finally:
            # Nothing is finalized: no part of the cluster runs on.
            os._exit(code)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        raw = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not raw:
        return Result(violations=(f"bug: the run ended with status {status}",))
    return msgspec.json.decode(raw, type=Result)
