"""Hubs and replicas on a virtual clock, with the shipped pool in each hub and the shipped credit book in each replica.

What travels between them takes ``MESSAGE_S`` and keeps its order, as on a connection; everything else takes no time.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, Final
from unittest.mock import patch

import hub.pool.members
from hub.config import PoolOptions
from hub.pool.core import Pool
from hub.pool.credits import CreditRequester
from hub.pool.entry import Entry
from hub.pool.wait_queue import PriorityQueue, Waiter
from omni_discovery.balancing.base import LoadBalancer
from omni_discovery.balancing.policies import build_load_balancer_factory
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from stage_runtime.server.credits import CreditBook, GrantCredits
from tests.bench.balancing_arrivals import MESSAGE_S, Arrival, Setting
from tests.support.pools import accept, spent_credit

#: After the last arrival; far more than the longest queue takes.
_PATIENCE_S: Final = 10_000.0


class OwnTimesHubs(Entry):
    """The other form of the estimate: all of one's own work stands for that of the other hubs."""

    __slots__ = ()

    def reload(self, hubs: int) -> None:
        own = len(self.in_flight)
        self.load = max(own, self.reported - self.accepted_at_report + own * hubs)


@dataclass(frozen=True, slots=True)
class Mode:
    """Which parts of the shipped code are at work."""

    #: Late binding: replicas lend their slots to hubs; else each request is sent at once.
    credits: bool = True
    #: Reports also come with every frame from a replica.
    piggyback: bool = True
    #: Whether the estimate knows how many hubs there are.
    knows_hubs: bool = True
    estimate: type[Entry] = Entry


class Simulation:
    """One run. ``waits`` is how long each started request waited for its slot, one message included."""

    def __init__(self, setting: Setting, mode: Mode, seed: int = 0) -> None:
        # The balancers draw lots from the module's own source.
        random.seed(seed)
        self.setting, self.mode = setting, mode
        self.now_s = 0.0
        self.waits: list[float] = []
        self.waits_by_hub: dict[str, list[float]] = defaultdict(list)
        #: How many requests the chosen replica then ran, that one included; for each request.
        self.crowds: list[int] = []
        self.messages = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        factory = build_load_balancer_factory("least-load")
        with _estimate(mode.estimate):
            self.hubs = [SimulatedHub(self, number, factory()) for number in range(setting.hubs)]
            self.replicas = [SimulatedReplica(self, number) for number in range(setting.replicas)]
            for each in self.hubs:
                each.join()
        for replica in self.replicas:
            replica.open()

    def run(self, requests: Sequence[Arrival]) -> list[float]:
        """Serve all requests and return their waits."""
        for number, request in enumerate(requests):
            self._play_until(request.at_s)
            self.hubs[request.hub].arrive(number, request)
        while len(self.waits) < len(requests):
            if self.now_s > requests[-1].at_s + _PATIENCE_S:
                raise RuntimeError(f"{len(requests) - len(self.waits)} requests wait for ever")
            self._play_next()
        return self.waits

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call it at a later moment; calls of one moment keep their order."""
        self._count += 1
        heappush(self._events, (self.now_s + delay_s, self._count, call, arguments))

    def send(self, call: Callable[..., None], *arguments: Any) -> None:
        """A message to the other side."""
        self.messages += 1
        self.after(MESSAGE_S, call, *arguments)

    def _play_until(self, until_s: float) -> None:
        while self._events[0][0] <= until_s:
            self._play_next()
        self.now_s = until_s

    def _play_next(self) -> None:
        # Never empty: the replicas' records are renewed for ever.
        self.now_s, _, call, arguments = heappop(self._events)
        call(*arguments)


class SimulatedHub:
    """What StagePool, its line, and the orchestrator do for one stage."""

    def __init__(self, world: Simulation, number: int, balancer: LoadBalancer) -> None:
        self._world = world
        self.name = f"hub-{number}"
        self.pool = Pool(0, balancer, PoolOptions())
        self._line: PriorityQueue[Arrival] = PriorityQueue()
        self._asking = CreditRequester()
        self._look_due_s: float | None = None

    def join(self) -> None:
        """All replicas are listed and answer."""
        world = self._world
        for replica in world.replicas:
            self.pool.upsert(replica.info, world.now_s)
            self.pool.session_up(replica.addr, world.now_s, uses_credits=world.mode.credits)
        if world.mode.knows_hubs:
            self.pool.set_live_hubs(world.setting.hubs)

    def arrive(self, number: int, request: Arrival) -> None:
        """A client's request."""
        waiter = Waiter(f"r{number}", {}, None, (), 0, self._world.now_s, request)
        if not self._dispatch(waiter):
            self._line.add(waiter)
        self._look()

    def on_registry(self, info: ReplicaInfo) -> None:
        """A record with a new queue length."""
        self.pool.upsert(info, self._world.now_s)
        self._serve()

    def on_accepted(self, addr: str, request_id: str, queue_length: int) -> None:
        """The replica has taken a request."""
        accept(self.pool, request_id)
        self._report(addr, queue_length)
        self._serve()

    def on_done(self, addr: str, request_id: str, queue_length: int) -> None:
        """The replica has finished a request."""
        self.pool.release(request_id)
        self._report(addr, queue_length)
        self._serve()

    def on_grant(self, addr: str, credits_: int, queue_length: int) -> None:
        """The replica lends some of its slots."""
        self._report(addr, queue_length)
        self.pool.grant(addr, credits_)
        self._serve()

    def on_recall(self, replica: SimulatedReplica, session: int, credits_: int) -> None:
        """The replica wants some of them back."""
        given_up = self.pool.recall(replica.addr, credits_)
        self._world.send(replica.on_return, self, session, given_up)
        self._look()

    def _report(self, addr: str, queue_length: int) -> None:
        if self._world.mode.piggyback:
            self.pool.report(addr, queue_length, self._world.now_s)

    def _serve(self) -> None:
        while self.pool.free_count and (waiter := self._line.pop()) is not None:
            if not self._dispatch(waiter):
                raise RuntimeError("a slot is free, and nobody can be picked")
        self._look()

    def _dispatch(self, waiter: Waiter[Arrival]) -> bool:
        found = self.pool.pick(waiter.request_id, waiter.task)
        if found is None:
            return False
        credit = spent_credit(self.pool, waiter.request_id)
        self._world.send(self._world.replicas[found.info.replica_id].on_submit, self, waiter, credit)
        return True

    def _look(self) -> None:
        """A turn is over: ask for slots, and look again when that is due."""
        if not self._world.mode.credits:
            return
        now_s, waiting = self._world.now_s, len(self._line)
        for want in self._asking.due(now_s, waiting, self._line.oldest_wait_s(now_s), self.pool.credit_replicas()):
            replica = self._world.replicas[self.pool.members.get(want.addr).replica_id]  # type: ignore[union-attr]
            self._world.send(replica.on_want, self, want.waiting, want.oldest_wait_s)
        due_s = self._asking.next_s(len(self._line), len(self.pool.credit_replicas()))
        if due_s is not None and due_s != self._look_due_s:
            self._look_due_s = due_s
            self._world.after(max(0.0, due_s - now_s), self._time_out)

    def _time_out(self) -> None:
        self._look_due_s = None
        self._look()


class SimulatedReplica:
    """What the replica's sessions do, over an engine that serves so many requests at a time, in their order."""

    def __init__(self, world: Simulation, number: int) -> None:
        self._world = world
        slots = world.setting.slots
        self.addr = f"tcp://10.0.0.{number + 1}:1"
        self.info = ReplicaInfo(
            input_addr=self.addr,
            output_addr=f"tcp://10.0.0.{number + 1}:2",
            stage_id=0,
            status=ReplicaStatus.UP,
            queue_length=0,
            last_heartbeat=0.0,
            registered_at=0.0,
            replica_id=number,
            epoch=1,
            capacity=slots,
        )
        self.book = CreditBook()
        self.running = 0
        self._waiting: deque[tuple[SimulatedHub, Waiter[Arrival]]] = deque()
        self._hubs = {each.name: each for each in world.hubs}

    @property
    def queue_length(self) -> int:
        """What it reports."""
        return self.running + len(self._waiting)

    def open(self) -> None:
        """Every hub has greeted it; its record is renewed from time to time, each replica's at another moment."""
        setting = self._world.setting
        if self._world.mode.credits:
            self.book.set_capacity(setting.slots)
            for name in self._hubs:
                self.book.open_account(name, 1)
            self._settle()
        self._world.after(setting.report_s * self.info.replica_id / setting.replicas, self._publish)

    def on_submit(self, sender: SimulatedHub, waiter: Waiter[Arrival], credit: bool) -> None:
        """A request comes."""
        self._waiting.append((sender, waiter))
        if self._world.mode.credits:
            self.book.begin_request(sender.name, credit=credit)
        self._world.send(sender.on_accepted, self.addr, waiter.request_id, self.queue_length)
        self._start()
        self._settle()

    def on_want(self, sender: SimulatedHub, waiting: int, oldest_wait_s: float) -> None:
        """A hub has requests that wait."""
        self.book.record_demand(sender.name, 1, waiting, oldest_wait_s, self._world.now_s)
        self._settle()

    def on_return(self, sender: SimulatedHub, session: int, credits_: int) -> None:
        """A hub answers a recall."""
        self.book.take_back(sender.name, session, credits_)
        self._settle()

    def _start(self) -> None:
        world = self._world
        while self._waiting and self.running < world.setting.slots:
            sender, waiter = self._waiting.popleft()
            self.running += 1
            waited_s = world.now_s - waiter.token.at_s
            world.waits.append(waited_s)
            world.waits_by_hub[sender.name].append(waited_s)
            world.crowds.append(self.running)
            world.after(waiter.token.service_s, self._finish, sender, waiter.request_id)

    def _finish(self, sender: SimulatedHub, request_id: str) -> None:
        self.running -= 1
        if self._world.mode.credits:
            self.book.end_request(sender.name)
        self._world.send(sender.on_done, self.addr, request_id, self.queue_length)
        self._start()
        self._settle()

    def _settle(self) -> None:
        if not self._world.mode.credits:
            return
        for action in self.book.lend_and_recall(self._world.now_s):
            hub_ = self._hubs[action.peer]
            if isinstance(action, GrantCredits):
                self._world.send(hub_.on_grant, self.addr, action.credits, self.queue_length)
            else:
                self._world.send(hub_.on_recall, self, action.session, action.credits)
        if self.queue_length + self.book.unspent > self._world.setting.slots:
            raise RuntimeError("more is lent than there is")

    def _publish(self) -> None:
        self.info = replace(self.info, queue_length=self.queue_length)
        for each in self._hubs.values():
            self._world.send(each.on_registry, self.info)
        self._world.after(self._world.setting.report_s, self._publish)


@contextmanager
def _estimate(kind: type[Entry]) -> Any:
    with patch.object(hub.pool.members, "Entry", kind):
        yield
