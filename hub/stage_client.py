"""StageClient: the two sockets to one replica process, and the session on them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import zmq

from hub.client_events import Answered, ClientEvent, FrameDropped, ProcessGone, SessionDown, SessionUp, Unanswered
from hub.config import HubConfig
from hub.errors import NotConnectedError, SendFailedError
from hub.zmq_loop import Callbacks, DealerConnection
from omni_discovery import wire
from omni_discovery.errors import ConfigError, WireError
from omni_discovery.messages import ReplicaInfo
from omni_discovery.security import KeyPair

logger = logging.getLogger(__name__)

_ON_INPUT: Final = (wire.Accepted, wire.Rejected)


class StageClient:
    """Talks to one replica process. Lives on the hub's loop; every event goes to ``on_event``, nothing blocks."""

    def __init__(
        self,
        info: ReplicaInfo,
        hub_id: str,
        key_pair: KeyPair | None,
        config: HubConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        on_event: Callable[[ClientEvent], None],
    ) -> None:
        if key_pair is not None and not info.curve_public_key:
            raise ConfigError("its record holds no CURVE public key, and this hub speaks only encrypted")
        self.info = info
        self.session_up = False
        #: Whether it is known that nothing sent before will be answered without a new session.
        self._is_lost = True
        self._hub_id = hub_id
        self._config = config
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        #: The lives of this process that have welcomed us: work that was sent to an earlier one goes on.
        self._epochs: set[int] = set()
        #: Timers of the dispatches that have no answer yet, by request and attempt.
        self._unanswered: dict[tuple[str, int], asyncio.TimerHandle] = {}
        #: Requests to abort once there is a session again.
        self._to_abort: set[str] = set()
        self._welcomed: set[str] = set()
        self._connections: dict[str, DealerConnection] = {}
        self._ticker: asyncio.TimerHandle | None = None
        #: When each connection was last begun, on the loop's clock.
        self._begun_at_s = dict.fromkeys(("input", "output"), self._loop.time())
        keys = None if key_pair is None else (key_pair, info.curve_public_key)
        try:
            self._connect(context, keys)
        except ConfigError:
            self.close()
            raise
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ConfigError(f"its addresses can't be connected to: {error}") from error
        self._keep_ticking()

    @property
    def addr(self) -> str:
        """The input address, by which the pools know the replica."""
        return self.info.input_addr

    def is_same_process(self, info: ReplicaInfo) -> bool:
        """Whether a record speaks of the process that this client is connected to."""
        ours = self.info
        return (ours.input_addr, ours.output_addr, ours.curve_public_key, ours.stage_id) == (
            info.input_addr,
            info.output_addr,
            info.curve_public_key,
            info.stage_id,
        )

    def renew(self, info: ReplicaInfo) -> None:
        """The record has changed. Another epoch is another life of the same process: greet it anew."""
        is_new_life = info.epoch != self.info.epoch
        self.info = info
        if is_new_life:
            self._welcomed.clear()
            self._end_session("its lease was renewed under another epoch", lost=False)
            for name in self._connections:
                self._greet(name)

    def submit(self, message: wire.Submit) -> None:
        """Send work. Raise SendFailedError if it did not leave, WireError if it can't be written."""
        head = wire.encode(message)
        if not self.session_up:
            raise NotConnectedError(f"no session with {self.addr}")
        self._connections["input"].send([head])
        key = (message.request_id, message.attempt)
        self._unanswered[key] = self._loop.call_later(self._config.accept_timeout_s, self._time_out, key)

    def abort(self, request_id: str) -> None:
        """Stop the work on a request, now or once the session is back."""
        self._forget(request_id)
        # A replica that has not welcomed us may not know of its new epoch yet, and would drop this.
        if not (self.session_up and self._send("input", wire.Abort(epoch=self.info.epoch, request_id=request_id))):
            self._to_abort.add(request_id)
            self._keep_ticking()

    def release_payloads(self, request_id: str) -> None:
        """Say that nobody will fetch the request's hand-offs. Nothing happens without a session."""
        self._send("input", wire.ReleasePayloads(epoch=self.info.epoch, request_id=request_id))

    def close(self) -> None:
        """Close both sockets at once, without an event. Idempotent."""
        self.session_up = False
        for timer in self._unanswered.values():
            timer.cancel()
        self._unanswered.clear()
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        for connection in self._connections.values():
            connection.close()

    # ---- the session

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], keys: tuple[KeyPair, str] | None) -> None:
        for name, addr in (("input", self.info.input_addr), ("output", self.info.output_addr)):
            callbacks = Callbacks(
                partial(self._read, name), partial(self._greet, name), partial(self._lose, name), self._miss
            )
            self._connections[name] = DealerConnection(context, addr, self._hub_id, keys, self._config, callbacks)

    def _greet(self, name: str) -> None:
        self._send(name, wire.Hello(hub_id=self._hub_id, epoch=self.info.epoch))
        self._keep_ticking()

    def _welcome(self, name: str, message: wire.Welcome) -> None:
        if message.epoch != self.info.epoch:
            self._on_event(FrameDropped(self, "epoch"))
            return
        self._welcomed.add(name)
        if self.session_up or len(self._welcomed) < len(self._connections):
            return
        self.session_up, self._is_lost = True, False
        self._epochs.add(message.epoch)
        self._abort_the_rest()
        self._on_event(SessionUp(self, message.queue_length))

    def _lose(self, name: str) -> None:
        self._welcomed.discard(name)
        self._begun_at_s[name] = self._loop.time()
        self._end_session("its connection was lost", lost=True)

    def _miss(self) -> None:
        # Only who had a session can be missed; a replica that has just registered may not listen to us yet.
        if self._epochs and not self.session_up:
            self._on_event(ProcessGone(self))

    def _end_session(self, reason: str, *, lost: bool) -> None:
        # After a change of epoch, work goes on without a session: the loss of the connection is news then, too.
        if not self.session_up and (self._is_lost or not lost):
            return
        self.session_up, self._is_lost = False, lost
        if lost:
            for timer in self._unanswered.values():
                timer.cancel()
            self._unanswered.clear()
        self._keep_ticking()
        self._on_event(SessionDown(self, reason, lost))

    def _keep_ticking(self) -> None:
        if self._ticker is None:
            self._ticker = self._loop.call_later(self._config.hello_interval_s, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        if self.session_up:
            self._abort_the_rest()
        else:
            self._try_again()
        if not self.session_up or self._to_abort:
            self._keep_ticking()

    def _try_again(self) -> None:
        now_s = self._loop.time()
        for name, connection in self._connections.items():
            overdue = now_s - self._begun_at_s[name] > self._config.connect_timeout_s
            if connection.connected and name not in self._welcomed:
                self._greet(name)
            elif not connection.connected and (connection.refused or overdue):
                self._begun_at_s[name] = now_s
                connection.reconnect()

    def _abort_the_rest(self) -> None:
        for request_id in sorted(self._to_abort):
            if self._send("input", wire.Abort(epoch=self.info.epoch, request_id=request_id)):
                self._to_abort.discard(request_id)

    def _send(self, name: str, message: wire.ToReplica) -> bool:
        try:
            self._connections[name].send([wire.encode(message)])
        except SendFailedError as error:
            logger.debug("replica.unsent addr=%s message=%s reason=%s", self.addr, type(message).__name__, error)
            return False
        return True

    # ---- what comes in

    def _read(self, name: str, frames: list[bytes]) -> None:
        received_at_s = time.perf_counter()
        try:
            messages, attachments = wire.decode_from_replica(frames)
        except WireError:
            self._on_event(FrameDropped(self, "malformed"))
            return
        for message in messages:
            self._hear(name, message, attachments, received_at_s)

    def _hear(
        self, name: str, message: wire.FromReplica, attachments: Sequence[bytes | memoryview], received_at_s: float
    ) -> None:
        if isinstance(message, wire.Aborted | wire.Grant | wire.Recall):
            return
        if isinstance(message, wire.Welcome):
            self._welcome(name, message)
        elif isinstance(message, _ON_INPUT) != (name == "input"):
            self._on_event(FrameDropped(self, "misplaced"))
        elif message.epoch not in self._epochs:
            self._on_event(FrameDropped(self, "epoch"))
        else:
            timer = self._unanswered.pop((message.request_id, message.attempt), None)
            if timer is not None:
                timer.cancel()
            pieces = tuple(bytes(attachment) for attachment in attachments)
            self._on_event(Answered(self, message, pieces, received_at_s))

    def _time_out(self, key: tuple[str, int]) -> None:
        del self._unanswered[key]
        self._on_event(Unanswered(self, *key))

    def _forget(self, request_id: str) -> None:
        for key in [key for key in self._unanswered if key[0] == request_id]:
            self._unanswered.pop(key).cancel()
