"""StageClient: the two sockets to one replica process, and the session on them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import zmq

from hub.config import HubConfig, NotConnectedError, SendFailedError
from hub.replicas.events import (
    AbortEnded,
    Answered,
    ClientEvent,
    Controlled,
    FrameDropped,
    Granted,
    ProcessGone,
    Recalled,
    SessionDown,
    SessionUp,
    Unanswered,
    Unsent,
)
from hub.replicas.pending import AwaitedAborts, AwaitedDispatches, Outgoing, Unmet
from hub.replicas.session import Session
from hub.replicas.sockets import Callbacks, DealerConnection, agreed_keys
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.errors import ConfigError, WireError
from omni_discovery.records.schema import ReplicaInfo

logger = logging.getLogger(__name__)

#: What is not said beyond that, the replica drops by itself after a while.
_MAX_TO_RELEASE: Final = 10_000
_ON_INPUT: Final = (wire.Accepted, wire.Rejected, wire.Aborted)
_ABOUT_CREDITS: Final = (wire.Grant, wire.Recall)


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
        keys = agreed_keys(key_pair, info.curve_public_key)
        self.info = info
        self._session = Session(("input", "output"), info.epoch)
        self._hub_id, self._config, self._on_event = hub_id, config, on_event
        self._closed, self._loop = False, asyncio.get_running_loop()
        self._dispatches = AwaitedDispatches(config, lambda *what: on_event(Unanswered(self, *what)))
        self._outgoing = Outgoing(self._send_frames, self._not_sent)
        self._aborts = AwaitedAborts()
        #: Requests whose hand-offs can be dropped, as soon as there is a session to say so.
        self._to_release: list[str] = []
        self._connections: dict[str, DealerConnection] = {}
        self._ticker: asyncio.TimerHandle | None = None
        #: When each connection was last begun, on the loop's clock.
        self._begun_at_s = dict.fromkeys(("input", "output"), self._loop.time())
        self._unmet = Unmet(config.unmet_after_s, self._loop.time())
        try:
            self._connect(context, keys)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"its addresses can't be connected to: {error}") from error
        self._keep_ticking()

    @property
    def session_up(self) -> bool:
        """Whether the present life of the replica has welcomed us on both sockets."""
        return self._session.up and not self._closed

    @property
    def addr(self) -> str:
        """The input address, by which the pools know the replica."""
        return self.info.input_addr

    @property
    def has_open_aborts(self) -> bool:
        """Whether the replica has still to acknowledge an abort."""
        return bool(self._aborts)

    def renew(self, info: ReplicaInfo, *, afresh: bool = False) -> None:
        """The record has changed. Another epoch is another life of the same process: it is greeted ``afresh``."""
        is_new_life = afresh or info.epoch != self.info.epoch
        self.info = info
        if is_new_life:
            self._session.begin(info.epoch)
            self._end_session("its lease was renewed under another epoch", lost=False)
            for name in self._connections:
                self._greet(name)

    def submit(self, message: wire.Submit | wire.Update) -> None:
        """Send work. Raise SendFailedError if it did not leave, WireError if it can't be written."""
        head = wire.encode(message)
        if not self.session_up:
            raise NotConnectedError(f"no session with {self.addr}")
        key = (message.request_id, message.attempt)
        self._outgoing.push(key, head)
        self._dispatches.sent(key)

    def abort(self, request_id: str, attempt: int) -> None:
        """Stop the work on a request, now or once the session is back, until the replica acknowledges it."""
        self._dispatches.forget(request_id)
        self._aborts.ask(request_id, attempt)
        # A replica that has not welcomed us may not know of its new epoch yet, and would drop this.
        if self.session_up:
            self._send("input", wire.Abort(epoch=self.info.epoch, request_id=request_id, attempt=attempt))
        self._keep_ticking()

    def tell(self, message: wire.ToReplica) -> None:
        """Send what is not watched over here. Raise SendFailedError if it did not leave, WireError if it can't."""
        head = wire.encode(message)
        if not self.session_up:
            raise NotConnectedError(f"no session with {self.addr}")
        self._outgoing.flush()
        self._send_frames([head])

    def want_credits(self, waiting: int, oldest_wait_s: float) -> None:
        """Tell how many requests wait for a slot. Nothing happens without a session."""
        if self.session_up:
            about = {"epoch": self.info.epoch, "session": self._session.number}
            self._send("input", wire.WantCredits(**about, waiting=waiting, oldest_wait_s=oldest_wait_s))

    def return_credits(self, session: int, count: int) -> None:
        """Answer a Recall of that session."""
        if self.session_up and session == self._session.number:
            self._send("input", wire.ReturnCredits(epoch=self.info.epoch, session=session, credits=count))

    def release_payloads(self, request_id: str) -> None:
        """Say that nobody will fetch the request's hand-offs, now or once the session is back."""
        message = wire.ReleasePayloads(epoch=self.info.epoch, request_id=request_id)
        if not (self.session_up and self._send("input", message)) and len(self._to_release) < _MAX_TO_RELEASE:
            self._to_release.append(request_id)

    def close(self) -> None:
        """Close both sockets at once, without an event. Idempotent."""
        self._closed = True
        self._dispatches.clear()
        self._outgoing.clear()
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        for connection in self._connections.values():
            connection.close()

    # ---- the session

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], keys: tuple[KeyPair, str] | None) -> None:
        # Whoever names a routing id takes its connection over: a hub that knows our id must not be able to.
        routing_id = f"{self._hub_id}/{secrets.token_hex(16)}"
        for name, addr in (("input", self.info.input_addr), ("output", self.info.output_addr)):
            callbacks = Callbacks(
                partial(self._read, name), partial(self._greet, name), partial(self._lose, name), self._miss
            )
            self._connections[name] = DealerConnection(context, addr, routing_id, keys, self._config, callbacks)

    def _greet(self, name: str) -> None:
        self._send(name, wire.Hello(hub_id=self._hub_id, epoch=self.info.epoch, session=self._session.number))
        self._keep_ticking()

    def _welcome(self, name: str, message: wire.Welcome) -> None:
        if message.epoch != self.info.epoch:
            self._on_event(FrameDropped(self, "epoch"))
        elif self._session.is_forgotten(message):
            self._lose(name, "the replica has given us up")
        elif self._session.welcome(name, message):
            for given_up in self._session.take_early_returns():
                self.return_credits(self._session.number, given_up)
            self._abort_again()
            released, self._to_release = self._to_release, []
            for request_id in released:
                self.release_payloads(request_id)
            self._on_event(SessionUp(self, message.queue_length, self._session.gated))
            if early := self._session.take_early_credits():
                self._on_event(Granted(self, early, message.queue_length))

    def _lose(self, name: str, reason: str = "its connection was lost") -> None:
        self._session.begin(self.info.epoch)
        self._begun_at_s[name] = self._loop.time()
        self._end_session(reason, lost=True)

    def _miss(self) -> None:
        # Only who had a session can be missed; a replica that has just registered may not listen to us yet.
        if self._session.epochs and not self.session_up:
            for request_id in self._aborts.give_up():
                self._on_event(AbortEnded(self, request_id))
            self._on_event(ProcessGone(self))

    def _end_session(self, reason: str, *, lost: bool) -> None:
        if self._session.end(lost=lost):
            if lost:
                self._dispatches.clear()
                self._outgoing.clear()
            self._keep_ticking()
            self._on_event(SessionDown(self, reason, lost))

    def _keep_ticking(self) -> None:
        if self._ticker is None and not self._closed:
            self._ticker = self._loop.call_later(self._config.hello_interval_s, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        try:
            if self.session_up:
                self._abort_again()
            else:
                self._try_again()
        finally:
            if not self.session_up or self._aborts:
                self._keep_ticking()

    def _try_again(self) -> None:
        now_s = self._loop.time()
        self._unmet.look(self.info, self._connections.values(), now_s)
        for name, connection in self._connections.items():
            overdue = now_s - self._begun_at_s[name] > self._config.connect_timeout_s
            if connection.connected and not self._session.welcomed_on(name):
                self._greet(name)
            elif not connection.connected and (connection.refused or overdue):
                self._begun_at_s[name] = now_s
                connection.reconnect()

    def _abort_again(self) -> None:
        for request_id, attempt in self._aborts.open():
            self._send("input", wire.Abort(epoch=self.info.epoch, request_id=request_id, attempt=attempt))

    def _send_frames(self, frames: Sequence[bytes]) -> None:
        self._connections["input"].send(frames)

    def _send(self, name: str, message: wire.ToReplica) -> bool:
        try:
            if name == "input":
                self._outgoing.flush()
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
        attached = tuple(map(bytes, attachments))
        for message in messages:
            self._hear(name, message, attached, received_at_s)

    def _hear(self, name: str, message: wire.FromReplica, attachments: tuple[bytes, ...], received_at_s: float) -> None:
        if isinstance(message, wire.Welcome):
            self._welcome(name, message)
        elif isinstance(message, _ON_INPUT) != (name == "input"):
            self._on_event(FrameDropped(self, "misplaced"))
        elif isinstance(message, _ABOUT_CREDITS):
            self._take_credits(message)
        elif message.epoch not in self._session.epochs:
            self._on_event(FrameDropped(self, "epoch"))
        elif isinstance(message, wire.ControlResult):
            self._on_event(Controlled(self, message))
        elif isinstance(message, wire.Aborted):
            if self._aborts.acknowledged(message.request_id, message.attempt):
                self._on_event(AbortEnded(self, message.request_id))
        else:
            self._dispatches.answered((message.request_id, message.attempt))
            self._on_event(Answered(self, message, attachments, received_at_s))

    def _take_credits(self, message: wire.Grant | wire.Recall) -> None:
        if not self._session.is_of_this(message):
            self._on_event(FrameDropped(self, "session"))
        elif isinstance(message, wire.Recall):
            if self._session.recall(message.credits):
                self._on_event(Recalled(self, message.session, message.credits))
        elif usable := self._session.grant(message.credits):
            self._on_event(Granted(self, usable, message.queue_length))

    def _not_sent(self, key: tuple[str, int]) -> None:
        self._dispatches.answered(key)
        self._on_event(Unsent(self, *key))
