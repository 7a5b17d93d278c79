"""The ZMQ thread: two ROUTER sockets, one that hubs send requests to and one that they get output from.

This thread owns the sockets, the ledger and the queues towards the hubs. The engine's thread gives it outcomes and
gets jobs; neither ever waits for the other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import zmq

from omni_discovery.errors import ConfigError, WireError
from omni_discovery.security import Gatekeeper, KeyPair, secure_server
from omni_discovery.wire import MAX_HEAD_BYTES
from stage_runtime.config import ServerConfig
from stage_runtime.jobs import Job, Outcome
from stage_runtime.outbox import Frames, Outbox, SendResult
from stage_runtime.sessions import ReplicaState, Sessions

logger = logging.getLogger(__name__)

_TICK_MS = 100
_IDLE_TICK_MS = 100


class ReplicaServer:
    """Binds at once, serves from ``start`` to ``close``. All methods may be called from any thread."""

    def __init__(
        self, config: ServerConfig, bind_host: str, keys: KeyPair, state: ReplicaState, jobs: Callable[[Job], None]
    ) -> None:
        self._config = config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gatekeeper(self._context)
        self._input, self.input_port = self._bind(bind_host, keys)
        self._output, self.output_port = self._bind(bind_host, keys)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: Held around the write to and the closing of the descriptor, whose number may be given to another file.
        self._wake_lock = threading.Lock()
        self._outcomes: deque[Sequence[Outcome]] = deque()
        self._closing = threading.Event()
        self._closed = False
        #: What was refused or lost, by name. Written by the ZMQ thread only.
        self.counters: Counter[str] = Counter()
        self._acks = Outbox(lambda hub, frames: _send(self._input, hub, frames), 4096, 16 << 20)
        self._replies = Outbox(
            lambda hub, frames: _send(self._output, hub, frames), config.outbox_messages, config.outbox_bytes
        )
        self._sessions = Sessions(config, state, self.counters, jobs, self._acks, self._replies)
        self._thread = threading.Thread(target=self._run, name="replica-zmq", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def set_epoch(self, epoch: int) -> None:
        """The registry knows this replica under a new life."""
        self._sessions.epoch = epoch
        self._wake()

    def set_allowed_hubs(self, hubs_by_key: Mapping[str, str]) -> None:
        """Who may connect from now on: hub id by public key."""
        self._gate.allow(hubs_by_key)

    def emit(self, outcomes: Sequence[Outcome]) -> None:
        """Send what came out of the engine to the hubs that wait for it."""
        if outcomes:
            self._outcomes.append(outcomes)
            self._wake()

    @property
    def queue_length(self) -> int:
        """How many requests are accepted and not ended."""
        return len(self._sessions.ledger)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and everything said has left."""
        return not (self.queue_length or self._outcomes or self._replies.waiting() or self._acks.waiting())

    def close(self, flush_timeout_s: float = 0.0) -> None:
        """Stop, after at most ``flush_timeout_s`` for what is still to be sent. Idempotent."""
        if self._closed:
            return
        self._closed = True
        deadline_s = time.monotonic() + flush_timeout_s
        while not self.idle and self._thread.is_alive() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self._closing.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        # Long enough for what was sent to leave the process; a peer that takes nothing can't hold us longer.
        linger_ms = 200 if flush_timeout_s else 0
        for socket in (self._input, self._output):
            socket.close(linger_ms)
        self._gate.close()
        self._context.term()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        logger.info("server.closed %s", " ".join(f"{name}={count}" for name, count in sorted(self.counters.items())))

    def _bind(self, bind_host: str, keys: KeyPair) -> tuple[zmq.Socket[bytes], int]:
        socket = self._context.socket(zmq.ROUTER)
        secure_server(socket, keys)
        socket.linger = 0
        socket.ipv6 = ":" in bind_host
        socket.router_mandatory = True
        # A hub that comes back replaces its old connection, which may not have noticed yet that it is dead.
        socket.router_handover = True
        socket.maxmsgsize = MAX_HEAD_BYTES
        socket.heartbeat_ivl = self._config.heartbeat_interval_ms
        socket.heartbeat_timeout = self._config.heartbeat_timeout_ms
        socket.heartbeat_ttl = self._config.heartbeat_timeout_ms
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = 30
        socket.tcp_keepalive_intvl = 10
        host = f"[{bind_host}]" if ":" in bind_host else bind_host
        try:
            return socket, _bind_any(socket, host)
        except zmq.ZMQError as error:
            raise ConfigError(f"can't listen on {bind_host}: {error}; see --omni-replica-address") from error

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._input, self._output, self._gate.socket, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        next_tick_s = 0.0
        while not self._closing.is_set():
            waiting = self._replies.waiting() or self._acks.waiting()
            try:
                ready = dict(poller.poll(_TICK_MS if waiting else _IDLE_TICK_MS))
                self._serve(ready)
                now_s = time.monotonic()
                if now_s >= next_tick_s:
                    next_tick_s = now_s + _TICK_MS / 1000
                    self._sessions.tick(now_s)
            except Exception:
                # One hub's nonsense must never end the service of all others.
                self.counters["internal_errors"] += 1
                logger.exception("server.error")

    def _serve(self, ready: Mapping[object, int]) -> None:
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._gate.socket in ready:
            self._gate.answer()
            self.counters["refused_handshakes"] = self._gate.refused
        now_s = time.monotonic()
        self._sessions.greet_waiting(now_s)
        while self._outcomes:
            self._sessions.deliver(self._outcomes.popleft(), now_s)
        if self._input in ready:
            self._receive(self._input, self._sessions.on_input)
        if self._output in ready:
            self._receive(self._output, self._sessions.on_output)
        self._sessions.settle_credits(now_s)

    def _receive(self, socket: zmq.Socket[bytes], handle: Callable[[str, list[bytes], float], None]) -> None:
        # A bounded batch: output must not wait until a hub stops talking.
        for _ in range(256):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                hub_id = frames[0].bytes.decode("utf-8")
                if frames[0].get("User-Id") != hub_id:
                    raise WireError(f"the key is not the one of hub {hub_id!r}")
                handle(hub_id, [frame.bytes for frame in frames[1:]], time.monotonic())
            except (WireError, UnicodeDecodeError) as error:
                self._sessions.count_bad_frame(str(error))


def _bind_any(socket: zmq.Socket[bytes], host: str) -> int:
    socket.bind(f"tcp://{host}:0")
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])


def _send(socket: zmq.Socket[bytes], hub_id: str, frames: Frames) -> SendResult:
    try:
        socket.send_multipart([hub_id.encode("utf-8"), *frames], zmq.NOBLOCK)
    except zmq.Again:
        return SendResult.FULL
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return SendResult.GONE
        raise
    return SendResult.SENT
