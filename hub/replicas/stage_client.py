"""StageClient: drives the hub's role of the session protocol over the two sockets to one replica process.

The rules of the session are in omni_discovery/wire/session.py, the sockets in sockets.py; what was sent and is not
acknowledged is in pending.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from hub.config import HubConfig, NotConnectedError, SendFailedError
from hub.replicas.content import flaw_of_content
from hub.replicas.events import (
    AbortEnded,
    Answered,
    ClientEvent,
    Controlled,
    EpochNamed,
    FrameDropped,
    Granted,
    PiecesCame,
    ProcessGone,
    Recalled,
    SessionDown,
    SessionUp,
    Unanswered,
    Unresolved,
    Unsent,
)
from hub.replicas.long_turns import LongTurns
from hub.replicas.pending import ConnectDiagnostics, DispatchBatcher, PendingAborts, PendingDispatches
from hub.replicas.references import flaw_of_references
from hub.replicas.resolver import Resolver
from hub.replicas.sockets import ZmqContext, agreed_keys, cuts_messages, open_connections
from hub.request.events import StageMessage
from hub.request.outputs import is_plain_text
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.errors import WireError
from omni_discovery.log_once import LogOnce
from omni_discovery.records.schema import ReplicaInfo
from omni_discovery.wire.session import (
    CreditsGranted,
    CreditsRecalled,
    HubAction,
    HubSession,
    MessageRefused,
    SendToReplica,
    SessionClosed,
    SessionOpened,
    SocketName,
)

logger = logging.getLogger(__name__)

#: Releases kept for the next session; those beyond it are dropped, and the replica frees the hand-offs by their age.
_MAX_TO_RELEASE: Final = 10_000


class StageClient:
    """Talks to one replica process. Lives on the hub's loop; every event goes to ``on_event``, and nothing blocks."""

    def __init__(
        self,
        info: ReplicaInfo,
        hub_id: str,
        key_pair: KeyPair | None,
        config: HubConfig,
        context: ZmqContext,
        on_event: Callable[[ClientEvent], None],
        resolver: Resolver | None = None,
        turns: LongTurns | None = None,
    ) -> None:
        keys = agreed_keys(key_pair, info.curve_public_key)
        self.info = info
        resolver, turns = resolver or Resolver(), turns or LongTurns()
        self._connections = open_connections(context, info, hub_id, keys, config, self, resolver, turns)
        if not cuts_messages(info) and not config.former_replicas:
            text = (
                "replica.former replica=%s release=%s: a message of more than 320 KiB from it, as a large picture, "
                "ends its connection. Upgrade it, or start this hub with --former-replicas meanwhile"
            )
            logger.warning(text, info.name, info.version or "unknown")
        self._config, self._on_event = config, on_event
        self._session = HubSession(hub_id, info.epoch)
        self._closed, self._loop = False, asyncio.get_running_loop()
        self._dispatches = PendingDispatches(config, lambda *silence: on_event(Unanswered(self, *silence)))
        self._batcher = DispatchBatcher(self._send_frames, self._not_sent)
        self._aborts = PendingAborts()
        #: Requests whose hand-offs can be dropped, to be sent as soon as a session is open.
        self._to_release: list[str] = []
        #: Why its host's name can't be resolved, as the last event said.
        self._unresolved: list[str] = []
        self._ticker: asyncio.TimerHandle | None = None
        self._log_once = LogOnce(self._loop.time)
        self._diagnostics = ConnectDiagnostics(config.unmet_after_s, self._loop.time())
        self._keep_ticking()

    def __repr__(self) -> str:
        return f"StageClient({self.addr}, {self._session!r}, to_abort={len(self._aborts.open_aborts())})"

    @property
    def session_up(self) -> bool:
        """Whether the present life of the replica has welcomed this hub on both sockets."""
        return self._session.is_open and not self._closed

    @property
    def named_epoch(self) -> int:
        """The epoch that the replica named last on the connection that stands; 0 if none yet."""
        return self._session.named_epoch

    @property
    def is_connected(self) -> bool:
        """Whether both connections stand, with their encryption, welcomed or not."""
        return all(connection.connected for connection in self._connections.values())

    @property
    def addr(self) -> str:
        """The input address, by which the pools know the replica."""
        return self.info.input_addr

    @property
    def has_open_aborts(self) -> bool:
        """Whether the replica has still to acknowledge an abort."""
        return bool(self._aborts)

    # ---- what the orchestrator asks for

    def renew(self, info: ReplicaInfo, *, afresh: bool = False) -> None:
        """Store the replica's changed record. A new epoch, or ``afresh``, begins a new session with its process."""
        is_new_life = afresh or info.epoch != self.info.epoch
        self.info = info
        if is_new_life:
            self._carry_out(self._session.begin_epoch(info.epoch))
            self._keep_ticking()

    def submit(self, message: wire.Submit | wire.Update) -> None:
        """Send work. Raise SendFailedError if it did not leave, WireError if it can't be encoded."""
        head = wire.encode(message)
        if not self.session_up:
            raise NotConnectedError(f"no session with {self.addr}")
        key = (message.request_id, message.attempt)
        self._batcher.push_dispatch(key, head)
        self._dispatches.add_dispatch(key)

    def abort_request(self, request_id: str, attempt: int) -> None:
        """Stop the work on a request up to ``attempt``: repeated over all sessions until the replica acknowledges."""
        self._dispatches.forget_request(request_id)
        self._aborts.add_abort(request_id, attempt)
        # A replica that has not welcomed us may not know of its new epoch yet, and would drop this.
        if self.session_up:
            self._send("input", wire.Abort(epoch=self.info.epoch, request_id=request_id, attempt=attempt))
        self._keep_ticking()

    def send_message(self, message: wire.ToReplica) -> None:
        """Send a message once. Raise SendFailedError if it did not leave, WireError if it can't be encoded."""
        head = wire.encode(message)
        if not self.session_up:
            raise NotConnectedError(f"no session with {self.addr}")
        self._batcher.flush_waiting()
        self._send_frames([head])

    def want_credits(self, waiting: int, oldest_wait_s: float) -> None:
        """Tell the replica how many requests wait for a slot of it, 0 for none. Does nothing without a session."""
        self._carry_out(self._session.want_credits(waiting, oldest_wait_s))

    def return_credits(self, session: int, count: int) -> None:
        """Answer a Recall of that session. Does nothing if the session has ended."""
        self._carry_out(self._session.return_credits(session, count))

    def release_payloads(self, request_id: str) -> None:
        """Let the replica free the request's hand-offs, soon or once a session is open."""
        if self.session_up:
            message = wire.ReleasePayloads(epoch=self.info.epoch, request_id=request_id)
            self._batcher.push_release(request_id, wire.encode(message))
        else:
            self._release_later(request_id)

    def close(self) -> None:
        """Close both sockets at once, without an event. Idempotent."""
        self._closed = True
        self._forget_sent()
        self._batcher.close()
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        for connection in self._connections.values():
            connection.close()

    # ---- connections and the timer

    def connection_made(self, name: SocketName) -> None:
        """Greet the replica on the connection."""
        self._carry_out(self._session.connected(name))
        self._keep_ticking()

    def connection_lost(self, name: SocketName) -> None:
        """End the session."""
        self._carry_out(self._session.disconnected(name))

    def connection_missed(self) -> None:
        """Report the process as gone, if it ever had a session: one that has just registered may not listen yet."""
        if self._session.was_ever_open and not self.session_up:
            for request_id in self._aborts.abandon_aborts():
                self._on_event(AbortEnded(self, request_id))
            self._on_event(ProcessGone(self))

    def fell_silent(self) -> None:
        """End the session, and connect anew."""
        for connection in self._connections.values():
            connection.drop()

    def _keep_ticking(self) -> None:
        if self._ticker is None and not self._closed:
            self._ticker = self._loop.call_later(self._config.hello_interval_s, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        try:
            if self.session_up:
                self._send_aborts(self._aborts.aborts_to_repeat())
            else:
                self._try_again()
        finally:
            if not self.session_up or self._aborts:
                self._keep_ticking()

    def _try_again(self) -> None:
        now_s = self._loop.time()
        self._diagnostics.warn_if_overdue(self.info, self._connections.values(), now_s)
        self._carry_out(self._session.repeat_hellos())
        for connection in self._connections.values():
            connection.reconnect_if_due(now_s)
        unresolved = [each.unresolved for each in self._connections.values() if each.unresolved]
        if unresolved[:1] != self._unresolved:
            self._unresolved = unresolved[:1]
            self._on_event(Unresolved(self, "".join(self._unresolved)))

    # ---- the session's actions, and what the replica sends

    def _carry_out(self, actions: Sequence[HubAction]) -> None:
        for action in actions:
            match action:
                case SendToReplica(socket, message):
                    self._send(socket, message)
                case SessionOpened(queue_length, is_gated):
                    self._send_aborts(self._aborts.open_aborts())
                    released, self._to_release = self._to_release, []
                    for request_id in released:
                        self.release_payloads(request_id)
                    self._on_event(SessionUp(self, queue_length, is_gated))
                case SessionClosed(reason, lost, given_up):
                    if lost:
                        self._forget_sent()
                        self._diagnostics.session_lost()
                    self._keep_ticking()
                    self._on_event(SessionDown(self, reason, lost, given_up))
                case CreditsGranted(credits_, queue_length):
                    self._on_event(Granted(self, credits_, queue_length))
                case CreditsRecalled(session, credits_):
                    self._on_event(Recalled(self, session, credits_))
                case MessageRefused(flaw):
                    self._on_event(FrameDropped(self, flaw))

    def frames_received(self, name: SocketName, frames: list[bytes]) -> None:
        """Decode one ZMQ message of the replica, and handle what is in it."""
        received_at_s = time.perf_counter()
        try:
            messages, attachments = wire.decode_from_replica(frames)
        except WireError:
            self._on_event(FrameDropped(self, "malformed"))
            return
        if attachments or name != "output":
            attached = tuple(map(bytes, attachments))
            for message in messages:
                self._handle(name, message, attached, received_at_s)
            return
        pieces: list[wire.Chunk] = []
        for message in messages:
            if is_plain_text(message) and self._session.knows_epoch(message.epoch):
                pieces.append(message)
                continue
            self._pass_on(pieces, received_at_s)
            pieces = []
            self._handle(name, message, (), received_at_s)
        self._pass_on(pieces, received_at_s)

    def _pass_on(self, pieces: list[wire.Chunk], received_at_s: float) -> None:
        """Pieces of text that came one behind the other: nothing is wrong with them, and they are the most of all."""
        if not pieces:
            return
        if self._dispatches.are_pending:
            for piece in pieces:
                self._dispatches.resolve_dispatch((piece.request_id, piece.attempt))
        self._on_event(PiecesCame(self, pieces, received_at_s))

    def _handle(
        self, name: SocketName, message: wire.FromReplica, attachments: tuple[bytes, ...], received_at_s: float
    ) -> None:
        if isinstance(message, (wire.Welcome, wire.Grant, wire.Recall)):
            named_before = self._session.named_epoch
            self._carry_out(self._session.receive(name, message))
            if self._session.named_epoch != named_before:
                self._on_event(EpochNamed(self))
        elif flaw := self._session.flaw_of(name, message):
            self._on_event(FrameDropped(self, flaw))
        elif isinstance(message, wire.ControlResult):
            self._on_event(Controlled(self, message))
        elif isinstance(message, wire.Aborted):
            if self._aborts.acknowledge_abort(message.request_id, message.attempt):
                self._on_event(AbortEnded(self, message.request_id))
        else:
            self._dispatches.resolve_dispatch((message.request_id, message.attempt))
            if forged := flaw_of_references(self.info, message):
                self._on_event(FrameDropped(self, "reference"))
                message = self._refuse(message, "reference", forged)
            elif unknown := flaw_of_content(message, len(attachments)):
                self._on_event(FrameDropped(self, "content"))
                message, attachments = self._refuse(message, "content", unknown), ()
            self._on_event(Answered(self, message, attachments, received_at_s))

    def _refuse(self, message: StageMessage, what: str, flaw: str) -> wire.StageFailed:
        """The failure in place of a message whose hand-offs, or content, must not be passed on."""
        info = self.info
        if self._log_once.should(what, 60.0):
            logger.warning("replica.%s_refused replica=%s: %s", what, info.name, flaw)
        if not isinstance(message, wire.StageDone):
            # The replica works on; its acknowledgement is awaited by nobody.
            self._send("input", wire.Abort(epoch=info.epoch, request_id=message.request_id, attempt=message.attempt))
        return wire.StageFailed(
            epoch=message.epoch,
            request_id=message.request_id,
            attempt=message.attempt,
            kind=wire.FailureKind.ENGINE,
            reason=flaw,
            queue_length=message.queue_length,
        )

    # ---- what is sent to the replica

    def _send(self, name: SocketName, message: wire.ToReplica) -> bool:
        try:
            if name == "input":
                self._batcher.flush_waiting()
            self._connections[name].send([wire.encode(message)])
        except SendFailedError as error:
            logger.debug("replica.unsent addr=%s message=%s reason=%s", self.addr, type(message).__name__, error)
            return False
        return True

    def _send_frames(self, frames: Sequence[bytes]) -> None:
        self._connections["input"].send(frames)

    def _send_aborts(self, aborts: Iterable[tuple[str, int]]) -> None:
        for request_id, attempt in aborts:
            self._send("input", wire.Abort(epoch=self.info.epoch, request_id=request_id, attempt=attempt))

    def _forget_sent(self) -> None:
        self._dispatches.forget_all()
        for request_id in self._batcher.forget_waiting():
            self._release_later(request_id)

    def _release_later(self, request_id: str) -> None:
        if len(self._to_release) < _MAX_TO_RELEASE:
            self._to_release.append(request_id)

    def _not_sent(self, key: tuple[str, int] | str) -> None:
        if isinstance(key, str):
            self._release_later(key)
            return
        self._dispatches.resolve_dispatch(key)
        self._on_event(Unsent(self, *key))
