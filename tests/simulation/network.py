"""The network between hosts: one clock, links that are slow, cut one way or both, and connections that break.

``SimConnection`` stands in the place of a hub's DealerConnection and ``SimRouter`` in that of a replica's Router. One
connection keeps the order of its messages and loses none but the last ones, as TCP does; two connections keep no order
between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from hub.config import NotConnectedError, QueueFullError
from omni_discovery.records.addresses import parse_address
from stage_runtime.server.outbox import SendResult
from stage_runtime.server.router import Peers
from tests.simulation.virtual_time import PROCESS, Process

if TYPE_CHECKING:
    from tests.simulation.world import World

#: Messages that ZMQ and the kernel hold on a connection whose other side does not read.
_IN_FLIGHT = 512


class Network:
    """Which hosts reach which, and who listens where."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: Ordered pairs of hosts between which nothing passes.
        self.cuts: dict[tuple[str, str], int] = {}
        self.listeners: dict[str, SimRouter] = {}
        self.pipes: dict[Pipe, None] = {}
        self._next_port = 20_000
        #: Seconds one way: the least, and the mean of what comes on top.
        self.base_s, self.jitter_s = 0.0002, 0.0005
        #: Frames that arrived, for the digest of a run.
        self.delivered = 0

    def new_port(self, process: Process) -> int:
        """A free port; with ``reuses_ports``, the lowest that is free on the host, as after a restart."""
        if self._world.plan.reuses_ports:
            port = 20_000
            while f"tcp://{process.host}:{port}" in self.listeners:
                port += 1
            return port
        self._next_port += 1
        return self._next_port

    def reaches(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) not in self.cuts

    def delay_s(self) -> float:
        chance = self._world.chance
        delay_s = self.base_s + chance.expovariate(1.0) * self.jitter_s
        # A packet that was lost is sent again.
        return delay_s + 0.2 if self._world.loss and chance.random() < self._world.loss else delay_s

    def cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Nothing passes between these ordered pairs of hosts from now on."""
        for pair in pairs:
            self.cuts[pair] = self.cuts.get(pair, 0) + 1
        for pipe in list(self.pipes):
            pipe.path_changed()

    def mend(self, pairs: Sequence[tuple[str, str]]) -> None:
        for pair in pairs:
            self.cuts[pair] -= 1
            if not self.cuts[pair]:
                del self.cuts[pair]
        for pipe in list(self.pipes):
            pipe.path_changed()

    def process_ended(self, process: Process) -> None:
        """The kernel closes what the process had open."""
        for address in [address for address, router in self.listeners.items() if router.process is process]:
            del self.listeners[address]
        for pipe in list(self.pipes):
            pipe.end_side(process)

    def process_paused(self, process: Process) -> None:
        for pipe in list(self.pipes):
            pipe.path_changed()


class _Side:
    """One end of a connection: who sends there, and what is on its way to the other."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.is_open = True
        #: When the last message sent from here arrives.
        self.arrives_s = 0.0
        #: What waits for the path, in order.
        self.held: deque[Callable[[], None]] = deque()
        self.in_flight = 0
        #: The number of the timer that finds the other side silent; 0 without one.
        self.silent = 0


class Pipe:
    """One connection between a hub and a replica. Called from the world and from both processes."""

    def __init__(self, world: World, hub: SimConnection, router: SimRouter) -> None:
        self._world = world
        self.hub, self.router = hub, router
        self.sides = {"hub": _Side(hub.process), "router": _Side(router.process)}
        self._timers = 0
        world.network.pipes[self] = None

    def send(self, side: str, deliver: Callable[[], None]) -> None:
        """Have ``deliver`` called in the other process when the message is there."""
        sender, receiver = self._both(side)
        sender.in_flight += 1
        if self._is_passable(sender, receiver) and not sender.held:
            self._pass_on(sender, receiver, deliver)
        else:
            sender.held.append(deliver)

    def close(self, side: str) -> None:
        """The end is closed: the other one hears of it once all before has arrived, if the path stands."""
        mine, other = self._both(side)
        if not mine.is_open:
            return
        mine.is_open = False
        if other.is_open:
            self.send(side, lambda: self._lost("router" if side == "hub" else "hub"))
        else:
            self._world.network.pipes.pop(self, None)

    def end_side(self, process: Process) -> None:
        for name, side in self.sides.items():
            if side.process is process:
                self.close(name)

    def path_changed(self) -> None:
        """The path was cut or mended, or a process was paused or goes on."""
        for name in ("hub", "router"):
            side, other = self._both(name)
            if self._is_passable(side, other):
                while side.held:
                    self._pass_on(side, other, side.held.popleft())
        for name in ("hub", "router"):
            side, other = self._both(name)
            is_heard = self._is_passable(other, side) and self._is_passable(side, other)
            if name == "hub":
                # Its heartbeats are answered by a process that runs; a replica has none, but its kernel's questions.
                is_heard = is_heard and not other.process.is_stopped
            if is_heard or not side.is_open:
                side.silent = 0
            elif not side.silent:
                self._timers += 1
                side.silent = self._timers
                delay_s = self._world.heartbeat_timeout_s + self._world.chance.random()
                self._world.after(delay_s, self._found_silent, name, side.silent)

    def _found_silent(self, name: str, timer: int) -> None:
        side, _ = self._both(name)
        if side.silent == timer and side.is_open:
            self._world.run_in(side.process, self.hub.fell_silent if name == "hub" else lambda: self._lost(name))

    def _lost(self, name: str) -> None:
        """The end finds that the connection is over."""
        side, _ = self._both(name)
        if not side.is_open:
            return
        self.close(name)
        (self.hub.pipe_lost if name == "hub" else self.router.pipe_lost)(self)

    def _is_passable(self, sender: _Side, receiver: _Side) -> bool:
        return self._world.network.reaches(sender.process.host, receiver.process.host)

    def _pass_on(self, sender: _Side, receiver: _Side, deliver: Callable[[], None]) -> None:
        world = self._world
        sender.arrives_s = max(sender.arrives_s, world.now_s + world.network.delay_s())

        def arrive() -> None:
            sender.in_flight -= 1
            if receiver.is_open:
                world.network.delivered += 1
                deliver()

        world.run_in(receiver.process, arrive, at_s=sender.arrives_s)

    def _both(self, name: str) -> tuple[_Side, _Side]:
        return self.sides[name], self.sides["router" if name == "hub" else "hub"]


class SimConnection:
    """A hub's connection to one socket of a replica: the interface of DealerConnection."""

    def __init__(self, world: World, name: Any, addr: str, identity: str, config: Any, listener: Any) -> None:
        process = PROCESS.get()
        assert process is not None, "connections belong to a hub"
        self.process = process
        self.connected = self.refused = False
        self.unresolved = ""
        self.refused_at_s = float("-inf")
        self._world, self._name, self._addr, self._identity = world, name, addr, identity
        self._config, self._listener = config, listener
        parse_address(addr)
        self._pipe: Pipe | None = None
        self._attempt = 0
        self._pause_s = config.reconnect_min_s
        self._is_closed = False
        self._begun_at_s = world.now_s
        self._begin()

    def send(self, frames: Sequence[bytes]) -> None:
        pipe = self._pipe
        if not self.connected or pipe is None:
            raise NotConnectedError(f"not connected to {self._addr}")
        if pipe.sides["hub"].in_flight >= min(self._config.send_queue, 4 * _IN_FLIGHT):
            raise QueueFullError("the send queue is full")
        head, router, identity = b"".join(frames), pipe.router, self._identity.encode()
        sent_at_s = self._world.now_s
        pipe.send("hub", lambda: router.frame_arrived(identity, head, sent_at_s))

    def reconnect_if_due(self, now_s: float) -> None:
        """ZMQ's own attempts go on; one that hangs is begun again."""
        if not self.connected and now_s - self._begun_at_s > self._config.connect_timeout_s:
            self._begin()

    def fell_silent(self) -> None:
        """No heartbeat has come for too long."""
        if self.connected and not self._is_closed:
            self._listener.fell_silent()

    def drop(self) -> None:
        """The connection is over, and another one is made."""
        pipe = self._pipe
        if pipe is not None and self.connected:
            pipe.close("hub")
            self.pipe_lost(pipe)

    def close(self) -> None:
        self._is_closed = True
        self.connected = False
        if self._pipe is not None:
            self._pipe.close("hub")

    def _begin(self) -> None:
        """Begin another attempt; the one before counts no more."""
        self._attempt += 1
        self._begun_at_s = self._world.now_s
        self._world.after(self._world.network.delay_s(), self._arrive, self._attempt)

    def _arrive(self, attempt: int) -> None:
        """The first packet is at the other host. In the world's context."""
        world, host = self._world, parse_address(self._addr).host
        if self._is_closed or not self.process.is_alive or attempt != self._attempt:
            return
        if not (world.network.reaches(self.process.host, host) and world.network.reaches(host, self.process.host)):
            return
        router = world.network.listeners.get(self._addr)
        if router is None:
            if host not in world.dead_hosts:
                world.run_in(self.process, lambda: self._missed(attempt), delay_s=world.network.delay_s())
            return
        if router.process.is_stopped:
            return
        pipe = Pipe(world, self, router)
        router.pipe_made(self._identity, pipe)
        pipe.send("router", lambda: self._made(attempt, pipe))

    def _missed(self, attempt: int) -> None:
        if self._is_closed or attempt != self._attempt or self.connected:
            return
        self._pause_s = min(self._config.reconnect_max_s, 2 * self._pause_s)
        self._world.loop.call_later(self._pause_s, self._again, attempt)
        self._listener.connection_missed()

    def _again(self, attempt: int) -> None:
        if not self._is_closed and attempt == self._attempt and not self.connected:
            self._begin()

    def _made(self, attempt: int, pipe: Pipe) -> None:
        if self._is_closed or attempt != self._attempt:
            pipe.close("hub")
            return
        self._pipe, self.connected, self.refused = pipe, True, False
        self._pause_s = self._config.reconnect_min_s
        self._listener.connection_made(self._name)

    def frames_arrived(self, pipe: Pipe, frames: list[bytes]) -> None:
        if pipe is self._pipe and self.connected:
            self._listener.frames_received(self._name, frames)

    def pipe_lost(self, pipe: Pipe) -> None:
        if pipe is not self._pipe or self._is_closed:
            return
        self._pipe, self.connected = None, False
        self._begun_at_s = self._world.now_s
        self._listener.connection_lost(self._name)
        self._world.loop.call_later(self._pause_s, self._again, self._attempt)


class SimRouter:
    """A replica's ROUTER socket: the interface of Router."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self.process = world, process
        self.peers = Peers(has_keys=False)
        self.socket = self
        self.listener = None
        #: A process may get the ports of one that was there before.
        self.port = world.network.new_port(process)
        #: When the frame that was received last was sent.
        self.frame_sent_at_s = 0.0
        world.network.listeners[f"tcp://{process.host}:{self.port}"] = self
        self._inbox: deque[tuple[bytes, bytes, float]] = deque()
        self._pipes: dict[str, Pipe] = {}
        #: Called when a frame has come.
        self.on_frame: Callable[[], None] = lambda: None
        #: No frame is cut here.
        self.takes_cut: Callable[[str], bool] = lambda _name: False

    def take_long_frames(self) -> None:
        """See Router. Frames have any length here."""

    @property
    def has_frames(self) -> bool:
        return bool(self._inbox)

    def receive_frame(self) -> tuple[Any, bytes]:
        if not self._inbox:
            raise zmq.Again
        routing_id, head, self.frame_sent_at_s = self._inbox.popleft()
        known = self.peers.known.get(routing_id)
        return (known or self.peers.identify_peer(routing_id, tuple)), head

    def send_frames(self, name: str, frames: Sequence[bytes]) -> SendResult:
        pipe = self._pipes.get(name)
        if pipe is None or not pipe.sides["router"].is_open:
            return SendResult.GONE
        if pipe.sides["router"].in_flight >= _IN_FLIGHT:
            return SendResult.FULL
        copied = [bytes(frame) for frame in frames]
        pipe.send("router", lambda: pipe.hub.frames_arrived(pipe, copied))
        return SendResult.SENT

    def close(self, linger_ms: int) -> None:
        self._world.network.listeners.pop(f"tcp://{self.process.host}:{self.port}", None)
        for pipe in list(self._pipes.values()):
            pipe.close("router")

    def pipe_made(self, identity: str, pipe: Pipe) -> None:
        """ZMQ hands a routing id over to the connection that names it last."""
        former = self._pipes.get(identity)
        self._pipes[identity] = pipe
        if former is not None:
            former.close("router")

    def pipe_lost(self, pipe: Pipe) -> None:
        for name, each in list(self._pipes.items()):
            if each is pipe:
                del self._pipes[name]

    def frame_arrived(self, identity: bytes, head: bytes, sent_at_s: float) -> None:
        self._inbox.append((identity, head, sent_at_s))
        self.on_frame()
