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
from typing import Final

import zmq

from omni_discovery.curve import Gatekeeper, KeyPair
from omni_discovery.errors import WireError
from omni_discovery.wire.session import ForeignIdentityError, MisplacedError, Peer
from stage_runtime.config import ServerConfig
from stage_runtime.engine_loop.jobs import Job, Outcome
from stage_runtime.lifecycle import Stage
from stage_runtime.server.handshake import ReplicaState
from stage_runtime.server.outbox import Outbox
from stage_runtime.server.router import Router
from stage_runtime.server.sessions import Sessions

logger = logging.getLogger(__name__)

_TICK_MS: Final = 100
#: Messages taken from one socket before what the engine said gets its turn.
_RECEIVE_BATCH: Final = 64
_ACKS_MESSAGES: Final = 4096
_ACKS_BYTES: Final = 16 << 20


class ReplicaServer:
    """Binds at once, serves from ``start`` to ``close``. All methods may be called from any thread.

    Without ``keys`` nothing is encrypted, anybody may connect, and a hub is whoever its routing id and its Hello say
    it is: for networks that only friends are on.
    """

    def __init__(
        self,
        config: ServerConfig,
        bind_host: str,
        keys: KeyPair | None,
        state: ReplicaState,
        jobs: Callable[[Job], None],
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = None if keys is None else Gatekeeper(self._context)
        self._input = Router(self._context, config, bind_host, keys)
        self._output = Router(self._context, config, bind_host, keys)
        self.input_port, self.output_port = self._input.port, self._output.port
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: Held around the write to and the closing of the descriptor, whose number may be given to another file.
        self._wake_lock = threading.Lock()
        #: Whether the ZMQ thread has to be woken to see what was left for it. Set before it looks a last time.
        self._asleep = False
        self._outcomes: deque[Sequence[Outcome]] = deque()
        self._closing = threading.Event()
        self._closed = False
        #: What was refused or lost, by name. Written by the ZMQ thread only.
        self.counters: Counter[str] = Counter()
        self._acks = Outbox(self._input.send, _ACKS_MESSAGES, _ACKS_BYTES)
        self._replies = Outbox(self._output.send, config.outbox_messages, config.outbox_bytes)
        self._sessions = Sessions(config, state, self.counters, jobs, self._acks, self._replies)
        self._revoked: frozenset[str] = frozenset()
        #: What ``set_revoked_hubs`` said last; the ZMQ thread makes it true.
        self._to_revoke: frozenset[str] = frozenset()
        self._logged: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="replica-zmq", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def set_epoch(self, epoch: int) -> None:
        """The registry knows this replica under a new life."""
        self._sessions.handshake.registered_epoch = epoch
        self._wake()

    def set_allowed_hubs(self, hubs_by_key: Mapping[str, str]) -> None:
        """Who may connect from now on: hub id by public key."""
        if self._gate is not None:
            self._gate.allow(hubs_by_key)

    def set_revoked_hubs(self, hub_ids: frozenset[str]) -> None:
        """These hubs, and no others, are cut off: nothing from or to them passes, and what they have here ends."""
        if self._gate is not None:
            self._gate.revoke(hub_ids)
        self._to_revoke = hub_ids
        self._wake()

    def state_changed(self) -> None:
        """Look at the state at once: the replica is ready, drains, or has another capacity."""
        self._wake()

    def emit(self, outcomes: Sequence[Outcome]) -> None:
        """Send what came out of the engine to the hubs that wait for it."""
        if outcomes:
            self._outcomes.append(outcomes)
            if self._asleep:
                self._wake()

    @property
    def queue_length(self) -> int:
        """How many requests are accepted and not ended."""
        return len(self._sessions.ledger)

    @property
    def stage(self) -> Stage:
        """Where in its life the replica is, as hubs are to see it: it may have been put to sleep."""
        return self._sessions.calls.stage()

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and everything said has left."""
        return not (self.queue_length or self._outcomes or self._replies.waiting or self._acks.waiting)

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
        self._input.close(linger_ms)
        self._output.close(linger_ms)
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        logger.info("server.closed %s", " ".join(f"{name}={count}" for name, count in sorted(self.counters.items())))

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        sources = [self._input.socket, self._output.socket, self._wake_fd]
        for source in sources if self._gate is None else [*sources, self._gate.socket]:
            poller.register(source, zmq.POLLIN)
        next_tick_s = 0.0
        is_behind = False
        while not self._closing.is_set():
            try:
                self._asleep = True
                ready = dict(poller.poll(0 if is_behind or self._outcomes else _TICK_MS))
                self._asleep = False
                now_s = time.monotonic()
                is_behind = self._serve(ready, now_s)
                if now_s >= next_tick_s:
                    next_tick_s = now_s + _TICK_MS / 1000
                    self._sessions.tick(now_s)
                self._sessions.flush(now_s)
                if self._outcomes:
                    # The engine was as quick as we: that is not worth another look at the sockets.
                    self._deliver_waiting()
                    self._sessions.flush(now_s)
            except Exception:
                # One hub's nonsense must never end the service of all others.
                logger.exception("server.error")
                self.counters["internal_errors"] += 1

    def _serve(self, ready: Mapping[object, int], now_s: float) -> bool:
        """Take in what there is; True if there may be more."""
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._gate is not None and self._gate.socket in ready:
            self._gate.answer_handshakes()
            self.counters["refused_handshakes"] = self._gate.refused
        if self._to_revoke != self._revoked:
            self._revoke(self._to_revoke)
        self._sessions.handshake.follow_epoch()
        self._deliver_waiting()
        is_behind = False
        if self._input.socket in ready:
            is_behind = self._receive(self._input, self._sessions.on_input, now_s)
        if self._output.socket in ready:
            is_behind |= self._receive(self._output, self._sessions.on_output, now_s)
        return is_behind

    def _deliver_waiting(self) -> None:
        # What comes while this is done is for the next time: hubs must not wait until the engine falls silent.
        for _ in range(len(self._outcomes)):
            self._deliver(self._outcomes.popleft())

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        try:
            self._sessions.deliver(outcomes)
        except Exception:
            logger.exception("server.error where=deliver")
            self.counters["internal_errors"] += 1

    def _revoke(self, hub_ids: frozenset[str]) -> None:
        self._revoked = hub_ids
        logger.warning("server.revoked hubs=%s", ",".join(sorted(hub_ids)) or "none")
        self._input.peers.revoke(hub_ids)
        self._output.peers.revoke(hub_ids)
        self._sessions.revoke(hub_ids)

    def _receive(self, router: Router, handle: Callable[[Peer, bytes, float], None], now_s: float) -> bool:
        """Take a bounded batch: output must not wait until a hub stops talking. True if there may be more."""
        for _ in range(_RECEIVE_BATCH):
            try:
                peer, head = router.receive()
                if peer is None:
                    self.counters["revoked"] += 1
                else:
                    handle(peer, head, now_s)
            except zmq.Again:
                return False
            except WireError as error:
                self._count_refused(error)
            except Exception:
                logger.exception("server.error where=receive")
                self.counters["internal_errors"] += 1
        return True

    def _count_refused(self, error: WireError) -> None:
        match error:
            case ForeignIdentityError():
                kind = "foreign_identity"
            case MisplacedError():
                kind = "misplaced"
            case _:
                kind = "bad_frames"
        self.counters[kind] += 1
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("server.%s reason=%s (others are only counted)", kind.removesuffix("s"), error)
