"""The ZMQ thread: two ROUTER sockets, one for requests of hubs and one for output to them.

This thread owns the sockets, the ledger and the send queues. It takes outcomes from the engine's thread and gives it
jobs; neither ever waits for the other.
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
from omni_discovery.log_once import LogOnce
from omni_discovery.wire.session import ForeignIdentityError, MisplacedError, Peer
from stage_runtime.config import ServerConfig
from stage_runtime.engine_loop.jobs import Job, Outcome
from stage_runtime.lifecycle import LifeState
from stage_runtime.server.credits import LostSlots
from stage_runtime.server.descriptors import ConnectionPause
from stage_runtime.server.handshake import ReplicaState
from stage_runtime.server.outbox import Outbox
from stage_runtime.server.router import Router
from stage_runtime.server.sessions import Sessions

logger = logging.getLogger(__name__)

_TICK_MS: Final = 100
#: Messages taken from one socket before the engine's outcomes get their turn.
_RECEIVE_BATCH: Final = 64
#: As many bytes of messages, and the last of them: what is made of 4 MB may take 0.1 s.
_RECEIVE_BYTES: Final = 512 << 10
_ACKS_MESSAGES: Final = 4096
_ACKS_BYTES: Final = 16 << 20


def _no_hubs(_public_key: str) -> frozenset[str]:
    return frozenset()


class ReplicaServer:
    """Binds at construction, serves from ``start`` to ``close``. All methods may be called from any thread.

    Without ``keys`` connections are neither encrypted nor authenticated: the hub id in a routing id and in Hello is
    trusted. Use that on trusted networks only.
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
        hubs_of_key = _no_hubs if self._gate is None else self._gate.hubs_of_key
        self._input = Router(self._context, config, bind_host, keys, hubs_of_key)
        self._output = Router(self._context, config, bind_host, keys, hubs_of_key)
        self.input_port, self.output_port = self._input.port, self._output.port
        self._pause = ConnectionPause([self._input.listener, self._output.listener])
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: Held while the descriptor is written to or closed: a closed descriptor's number may be another file's.
        self._wake_lock = threading.Lock()
        #: Whether the ZMQ thread has to be woken to see new outcomes. Set before its last look at the queue.
        self._asleep = False
        self._outcomes: deque[Sequence[Outcome]] = deque()
        #: When the ZMQ thread runs its timers next.
        self._next_tick_s = 0.0
        self._closing = threading.Event()
        self._closed = False
        #: Refused and lost messages, by kind. Written by the ZMQ thread only.
        self.counters: Counter[str] = Counter()
        self._acks = Outbox(self._input.send_frames, _ACKS_MESSAGES, _ACKS_BYTES)
        self._replies = Outbox(self._output.send_frames, config.outbox_messages, config.outbox_bytes)
        self._sessions = Sessions(config, state, self.counters, jobs, self._acks, self._replies)
        self._input.takes_cut = self._output.takes_cut = self._sessions.handshake.takes_cut
        self._is_to_take_long_frames = False
        self._revoked: frozenset[str] = frozenset()
        #: The last argument of ``set_revoked_hubs``; the ZMQ thread applies it.
        self._to_revoke: frozenset[str] = frozenset()
        #: Whether a hub of a release before was seen.
        self._has_former_hubs = False
        self._log_once = LogOnce()
        self._thread = threading.Thread(target=self._run, name="replica-zmq", daemon=True)

    def start(self) -> None:
        """Start the ZMQ thread."""
        self._thread.start()

    def set_epoch(self, epoch: int) -> None:
        """The registry has this replica under a new epoch: hubs that greet under it are welcomed."""
        self._sessions.handshake.registered_epoch = epoch
        self._wake()

    def set_replica_name(self, name: str) -> None:
        """Set what log lines call this replica, ``<stage>/<replica id>``."""
        self._sessions.replica_name = name

    def set_allowed_hubs(self, public_keys: Mapping[str, str]) -> None:
        """Let exactly these hubs connect from now on: public keys by hub id. Hubs that have sessions keep them."""
        if self._gate is not None:
            self._gate.allow(public_keys)

    @property
    def revoked_hubs(self) -> frozenset[str]:
        """Those that were revoked last."""
        return self._to_revoke

    def take_long_frames(self, hub_id: str) -> None:
        """A hub of a release before may come, which sends each message in one frame. Connections are made anew."""
        if self._has_former_hubs:
            return
        self._has_former_hubs = self._is_to_take_long_frames = True
        text = "server.takes_long_frames hub=%s: it is of a release before 0.2; restart once none is left"
        logger.warning(text, hub_id)
        self._wake()

    def set_revoked_hubs(self, hub_ids: frozenset[str]) -> None:
        """Revoke exactly these hubs: nothing from or to them passes, and their requests here end."""
        if self._gate is not None:
            self._gate.revoke(hub_ids)
        self._to_revoke = hub_ids
        self._wake()

    def state_changed(self) -> None:
        """The replica is ready, drains, or has another capacity: read its state at once."""
        self._wake()

    def emit(self, outcomes: Sequence[Outcome]) -> None:
        """Send outcomes of the engine to the hubs whose requests they belong to."""
        if outcomes:
            self._outcomes.append(outcomes)
            if self._asleep:
                self._wake()

    @property
    def queue_length(self) -> int:
        """How many requests are in flight."""
        return len(self._sessions.ledger)

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many attempts ended, by ``ok``, ``cancelled`` or the failure kind."""
        return self._sessions.outcomes

    @property
    def credits(self) -> tuple[int, int]:
        """How many slots run a request, and how many are lent to hubs that have not spent them."""
        book = self._sessions.handshake.credits
        return book.used, book.unspent

    @property
    def credits_by_hub(self) -> dict[str, int]:
        """How many slots are lent to each hub that has not spent them, by hub id."""
        by_hub: Counter[str] = Counter()
        for name, unspent in self._sessions.handshake.credits.held().items():
            by_hub[name.partition("/")[0]] += unspent
        return dict(by_hub)

    @property
    def lost_slots(self) -> LostSlots:
        """The slots that serve nobody though requests wait."""
        return self._sessions.lost_slots

    @property
    def life_state(self) -> LifeState:
        """The replica's stage as hubs see it: ASLEEP if it is ready and was put to sleep."""
        return self._sessions.calls.life_state()

    @property
    def idle(self) -> bool:
        """Whether no request is in flight and no message waits to be sent."""
        return not (self.queue_length or self._outcomes or self._replies.waiting or self._acks.waiting)

    def close(self, flush_timeout_s: float = 0.0) -> None:
        """Stop, after at most ``flush_timeout_s`` for what is in flight and what waits to be sent. Idempotent."""
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
        # Long enough for what was sent to leave the process; a hub that reads nothing can't delay the close longer.
        linger_ms = 200 if flush_timeout_s else 0
        self._pause.close()
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
        is_behind = False
        while not self._closing.is_set():
            self._asleep = True
            ready = dict(poller.poll(0 if is_behind or self._outcomes else _TICK_MS))
            self._asleep = False
            is_behind = self._take_turn(ready, time.monotonic())
        self._sessions.failures.close()

    def _take_turn(self, ready: Mapping[object, int], now_s: float) -> bool:
        """Handle what is ready, run the timers if they are due, send. Return whether more messages may wait."""
        is_behind = False
        try:
            is_behind = self._serve(ready, now_s)
            if now_s >= self._next_tick_s:
                self._next_tick_s = now_s + _TICK_MS / 1000
                self._pause.check_descriptors()
                self._sessions.run_timers(now_s)
            self._sessions.flush_messages(now_s)
            if self._outcomes:
                # The engine has answered meanwhile: send that before the sockets are polled again.
                self._deliver_waiting()
                self._sessions.flush_messages(now_s)
        except Exception:
            # A faulty message of one hub must not end the service of all others.
            logger.exception("server.error")
            self.counters["internal_errors"] += 1
        return is_behind

    def _serve(self, ready: Mapping[object, int], now_s: float) -> bool:
        """Handle what is ready, at most one batch of each socket. Return whether more messages may wait."""
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._gate is not None and self._gate.socket in ready:
            self._gate.answer_handshakes()
            self.counters["refused_handshakes"] = self._gate.refused
        if self._is_to_take_long_frames:
            self._take_long_frames()
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
        # Outcomes that arrive meanwhile are left to the next turn: a busy engine must not hold up messages of hubs.
        for _ in range(len(self._outcomes)):
            self._deliver(self._outcomes.popleft())

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        try:
            self._sessions.deliver_outcomes(outcomes)
        except Exception:
            logger.exception("server.error where=deliver")
            self.counters["internal_errors"] += 1

    def _take_long_frames(self) -> None:
        try:
            # Hubs send nothing but Hello to the other socket.
            self._input.take_long_frames()
            self._is_to_take_long_frames = False
        except (OSError, zmq.ZMQError) as error:
            # It is tried again in the next turn: until then nobody can connect.
            if self._log_once.should("server.not_listening"):
                logger.warning("server.not_listening reason=%s: it is tried again (said once)", error)

    def _revoke(self, hub_ids: frozenset[str]) -> None:
        self._revoked = hub_ids
        logger.warning("server.revoked hubs=%s", ",".join(sorted(hub_ids)) or "none")
        self._input.peers.revoke_hubs(hub_ids)
        self._output.peers.revoke_hubs(hub_ids)
        self._sessions.revoke_hubs(hub_ids)

    def _receive(self, router: Router, handle: Callable[[Peer, bytes, float], None], now_s: float) -> bool:
        """Handle a bounded batch, since output must not wait for it. Return whether more messages may wait."""
        left_bytes = _RECEIVE_BYTES
        for _ in range(_RECEIVE_BATCH):
            if left_bytes <= 0:
                break
            try:
                peer, head = router.receive_frame()
                left_bytes -= len(head)
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
        if self._log_once.should(kind):
            logger.warning("server.%s reason=%s (others are only counted)", kind.removesuffix("s"), error)
