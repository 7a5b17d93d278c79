"""The hub's ZMQ sockets on an asyncio loop, driven by their file descriptors: the only place of the hub that talks ZMQ.

The descriptor of a ZMQ socket is edge-triggered and shows only that something changed, and any send or receive may take
the edge. So after each of them the socket's own EVENTS are read again before control goes back to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from hub.config import HubConfig, NotConnectedError, OutOfSocketsError, QueueFullError
from hub.replicas.long_turns import LONG_TURN_S, LongTurns
from hub.replicas.resolver import Resolver
from omni_discovery import wire
from omni_discovery.curve import KeyPair, secure_client
from omni_discovery.errors import ConfigError
from omni_discovery.records.addresses import parse_address
from omni_discovery.records.schema import ReplicaInfo
from omni_discovery.wire import MAX_ATTACHMENT_BYTES, MAX_SOCKET_FRAME_BYTES
from omni_discovery.wire.session import SocketName, same_security

logger = logging.getLogger(__name__)

ZmqContext: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

#: As plain numbers: what a mask of zmq's own kind costs is felt with every message.
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)
_NOT_LAST: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
#: Messages, and about how many bytes, taken from one socket before the other sockets and tasks get their turn: whoever
#: bounds what waits for a client must see it as it comes. A byte of a head counts for several: it is decoded.
_BATCH: Final = 64
_BATCH_BYTES: Final = 8 << 20
_HEAD_BYTE: Final = 8
#: Of a message so many frames are read, or dropped, before the time is looked at. ZMQ bounds the size of each, and not
#: their number.
_READ_AT_ONCE: Final = 64
_DROPPED_AT_ONCE: Final = 256
#: How soon a socket looks again where too much waits that sockets have brought.
_BEHIND_S: Final = 0.005
#: What a lost connection had brought is handled at once up to this, and for so much processor time; what is behind that
#: counts as lost with it.
_MOST_DRAINED_BYTES: Final = 256 << 20
_LONGEST_DRAIN_S: Final = 0.3
#: After so many attempts that have timed out, or connections that were lost within so short a time, the pauses grow, up
#: to this.
_PATIENT: Final = 5
_SHORT_S: Final = 1.0
_SLOWEST_S: Final = 15.0
#: The longest frame of a replica of a release before, unless ``former_replicas`` says otherwise: what it joins of short
#: messages is no longer.
_LONGEST_FORMER: Final = 320 << 10
#: The longest message on a connection for heartbeats alone.
_PULSE_BYTES: Final = 4096
#: A host from which nothing came for so long is asked whether it is still there.
_KEEPALIVE_S: Final = 2
#: Sockets that one context may hold: each replica takes seven.
_MAX_SOCKETS: Final = 65_000

#: What the system, or ZMQ's own limit, says when there are too many sockets.
_OUT_OF_SOCKETS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

#: Monitor events: the ZMQ handshake succeeded, the connection was lost, could not be made, or was refused.
UP_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED
DOWN_EVENTS: Final = zmq.EVENT_DISCONNECTED
MISSED_EVENTS: Final = zmq.EVENT_CLOSED
REFUSED_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def agreed_keys(key_pair: KeyPair | None, replica_public: str) -> tuple[KeyPair, str] | None:
    """Our keys and the replica's; None where neither side encrypts. Raise ConfigError if only one side does."""
    if same_security("" if key_pair is None else key_pair.public, replica_public):
        return None if key_pair is None else (key_pair, replica_public)
    if key_pair is not None:
        raise ConfigError(
            "its record holds no CURVE public key, and this hub speaks only encrypted: give all of a namespace the "
            "same --zmq-security"
        )
    raise ConfigError(
        "its record holds a CURVE public key, and this hub was started with --zmq-security none: give all of a "
        "namespace the same"
    )


def make_context() -> ZmqContext:
    """A context that can hold the sockets of thousands of replicas."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, min(_MAX_SOCKETS, int(context.get(zmq.SOCKET_LIMIT))))
    return context


class LoopSocket:
    """One ZMQ socket on the running loop. ``on_frames`` is called with each message; it must not block.

    ``turns`` are shared by all sockets of the loop: replicas that flood their hub take half of its time at most.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None], turns: LongTurns | None = None
    ) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._turns = turns or LongTurns()
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._drain_due = self._is_draining = False
        #: Whether the last batch ended because nothing was left.
        self._is_empty = False
        #: Whether the rest of a message is still to be read, or dropped. Until then the socket must not be
        #: disconnected: libzmq 4.3.5 ends a process that reads on behind half a message.
        self.is_amid_message = False
        #: What has been read of it; None if the rest is dropped.
        self._incoming: wire.Incoming | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._fd, self._look)
        # What came before the reader was set has already used up its edge.
        self._look_again()

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Queue one message. Raise QueueFullError, at once, where that is not possible."""
        try:
            if len(frames) == 1:
                self.socket.send(frames[0], zmq.NOBLOCK)
            else:
                self._send_cut(frames)
        except zmq.Again:
            raise QueueFullError("the send queue is full or nobody is connected") from None
        except zmq.ZMQError as error:
            raise NotConnectedError(f"can't send: {error}") from error
        finally:
            # A drain that is under way finds what comes meanwhile.
            if not self._is_draining:
                self._look_again()

    def _send_cut(self, frames: Sequence[bytes | memoryview]) -> None:
        for number, frame in enumerate(frames, 1):
            try:
                self.socket.send(frame, _NOT_LAST if number < len(frames) else zmq.NOBLOCK)
            except zmq.Again:
                if number > 1:
                    # The connection has ended amid the message, of which ZMQ drops the rest: this is its end.
                    with contextlib.suppress(zmq.Again):
                        self.socket.send(b"", zmq.NOBLOCK)
                raise

    def drain(self) -> None:
        """Take in what has arrived, up to 256 MiB of it or for 0.3 s; the rest comes in turns, as always."""
        left_bytes, began_s, posted = _MOST_DRAINED_BYTES, time.thread_time(), self._turns.posted
        while left_bytes > 0 and not self.socket.closed and _has_messages(self.socket):
            left_bytes -= self._take_batch(self._turns.posted, time.thread_time())
            if self._took_s(began_s, posted) > _LONGEST_DRAIN_S:
                break
        self._end_turn(began_s, posted)

    def close(self) -> None:
        """Close without waiting for unsent messages. Idempotent."""
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            self.socket.close(linger=0)
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _look_again(self) -> None:
        if not self._drain_due and self._rest is None and not self.socket.closed and _has_messages(self.socket):
            self._drain_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Take in a batch, then let the others have their turn. An edge that comes in a rest is found at its end."""
        self._drain_due = False
        if self.socket.closed:
            return
        if self._rest is not None:
            # The descriptor stays readable, and the loop would look at it without end, until the events are read.
            _has_messages(self.socket)
            return
        if self._turns.is_behind:
            self._rest = self._loop.call_later(_BEHIND_S, self._end_rest)
            return
        began_s, posted = time.thread_time(), self._turns.posted
        self._take_batch(posted, began_s)
        self._end_turn(began_s, posted)

    def _took_s(self, began_s: float, posted: int) -> float:
        """What a turn takes that began at this processor time, and with so many events posted."""
        return time.thread_time() - began_s + self._turns.owed_s(posted)

    def _end_turn(self, began_s: float, posted: int) -> None:
        """Rest after a long turn; look for more after any other."""
        rest_s = self._turns.rest_s(self._took_s(began_s, posted), self._loop.time())
        if rest_s and self._rest is None and not self.socket.closed:
            self._rest = self._loop.call_later(rest_s, self._end_rest)
        elif not self._is_empty:
            self._look_again()

    def _end_rest(self) -> None:
        self._rest = None
        self._look()

    def _take_batch(self, posted: int, began_s: float) -> int:
        """Take in some messages; return about how many bytes they were.

        The turn began at this processor time, when so many events had been posted.
        """
        self._is_draining, self._is_empty, size_bytes = True, False, 0
        try:
            for _ in range(_BATCH):
                if self.socket.closed or size_bytes > _BATCH_BYTES or self._turns.owed_s(posted) > LONG_TURN_S:
                    break
                if self._turns.is_behind and size_bytes:
                    break
                try:
                    frames = self._receive(began_s)
                except zmq.Again:
                    # It has looked for news itself: whatever comes from now on brings an edge.
                    self._is_empty = not self.is_amid_message
                    return size_bytes
                size_bytes += len(frames[0]) * _HEAD_BYTE + (sum(map(len, frames[1:])) if len(frames) > 1 else 0)
                try:
                    self._on_frames(frames)
                except Exception:
                    # A bug costs this message: those behind it would wait for an edge that has come already.
                    logger.exception("socket.bug")
        finally:
            self._is_draining = False
        return size_bytes

    def _receive(self, began_s: float) -> list[bytes]:
        """The next message, see ``Incoming.frames``. What it may not have is dropped.

        Raise zmq.Again if there is none, or if one takes longer than a turn that began at this processor time: the next
        turn goes on with it.
        """
        socket = self.socket
        if self._incoming is None:
            if self.is_amid_message:
                self._drop_rest(began_s)
            first = socket.recv(zmq.NOBLOCK)
            if not socket.getsockopt(zmq.RCVMORE):
                return [first]
            self._incoming, self.is_amid_message = wire.Incoming(first), True
        incoming = self._incoming
        while True:
            for _ in range(_READ_AT_ONCE):
                may_go_on = incoming.add(socket.recv(zmq.NOBLOCK))
                self.is_amid_message = bool(socket.getsockopt(zmq.RCVMORE))
                if not (may_go_on and self.is_amid_message):
                    self._incoming = None
                    return incoming.frames()
            if time.thread_time() - began_s > LONG_TURN_S:
                raise zmq.Again

    def _drop_rest(self, began_s: float) -> None:
        while True:
            for _ in range(_DROPPED_AT_ONCE):
                # A frame of 64 MiB is not copied.
                if not self.socket.recv(zmq.NOBLOCK, copy=False).more:
                    self.is_amid_message = False
                    return
            if time.thread_time() - began_s > LONG_TURN_S:
                raise zmq.Again


class ConnectionListener(Protocol):
    """Gets what happens to the two connections of one replica. Called on the loop; must not block."""

    def frames_received(self, name: SocketName, frames: list[bytes]) -> None:
        """One message has come on the connection."""

    def connection_made(self, name: SocketName) -> None:
        """The connection, and ZMQ's handshake on it, were made."""

    def connection_lost(self, name: SocketName) -> None:
        """The connection was lost; everything that arrived before was delivered."""

    def connection_missed(self) -> None:
        """An attempt to connect has failed: no process listens there, or the network is cut."""

    def fell_silent(self) -> None:
        """The process does not answer heartbeats, or is gone: its connections are worth nothing."""


class Pulse:
    """A connection for heartbeats alone: it is lost to a process that says nothing.

    The others can't have them: libzmq 4.3.5 ends this process with the next heartbeat after a connection has broken
    whose receive queue is full. This one keeps one message, which nobody reads, so that its queue is never full.
    """

    def __init__(
        self,
        context: ZmqContext,
        identity: str,
        keys: tuple[KeyPair, str] | None,
        config: HubConfig,
        on_lost: Callable[[], None],
    ) -> None:
        self._on_lost, self._is_up = on_lost, False
        self._timeout_s = config.connect_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        #: Where it is to connect to, and what ZMQ connects to now: nothing once a connection was lost.
        self._target = self._endpoint = ""
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.DEALER)
        try:
            _configure(self._socket, identity, keys, config)
            self._socket.setsockopt(zmq.CONFLATE, 1)
            # Handshakes and heartbeats are all that is due here.
            self._socket.setsockopt(zmq.MAXMSGSIZE, _PULSE_BYTES)
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, _ms(config.zmq_heartbeat_interval_s))
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ms(config.zmq_heartbeat_timeout_s))
        except BaseException:
            self._socket.close(linger=0)
            raise
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._look)

    def connect(self, endpoint: str, longest_pause_s: float) -> None:
        """Connect there, and there alone."""
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _ms(longest_pause_s))
        self._target = endpoint
        self._dial()

    def hang_up(self) -> None:
        """Connect nowhere, until ``connect``. Idempotent."""
        self._target = ""
        self._give_up()

    def insist(self) -> None:
        """The process takes connections: try again for as long as this one is refused, which ZMQ does not."""
        if self._target and not self._endpoint:
            self._dial()
        self._timer = self._timer or self._loop.call_later(self._timeout_s, self._try_again)

    def close(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)

    def _dial(self) -> None:
        """Give up the connection that there is, which is no loss, and begin another."""
        self._give_up()
        self._socket.connect(self._target)
        self._endpoint = self._target

    def _give_up(self) -> None:
        self._is_up = False
        if self._endpoint:
            _disconnect(self._socket, self._endpoint)
            self._endpoint = ""

    def _try_again(self) -> None:
        self._timer = None
        self._look()
        if not self._is_up and self._target:
            self._dial()
            self.insist()

    def _look(self) -> None:
        """Something has changed: of a connection that stands it can be sent to, of any other it can't."""
        if self._socket.closed:
            return
        was_up, self._is_up = self._is_up, bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLOUT)
        if was_up and not self._is_up:
            # ZMQ would connect again without end to a process that takes connections and ends them.
            self._give_up()
            self._on_lost()


class DealerConnection:
    """One DEALER to one ROUTER, with its monitor. ZMQ connects again by itself, but not after a refused handshake."""

    def __init__(
        self,
        context: ZmqContext,
        name: SocketName,
        addr: str,
        identity: str,
        keys: tuple[KeyPair, str] | None,
        config: HubConfig,
        listener: ConnectionListener,
        resolver: Resolver,
        turns: LongTurns,
        pulse: Pulse | None = None,
        *,
        cuts: bool = True,
    ) -> None:
        """``cuts``: the replica cuts long messages, and takes such."""
        self.connected = False
        self._cuts = cuts
        #: Connects to the same address, if this is the one of the two that has it.
        self._pulse = pulse
        #: Why there is no number for the host's name; empty where there is one.
        self.unresolved = ""
        #: The replica refused the handshake, perhaps because it does not know this hub yet: ZMQ does not try again.
        self.refused = False
        #: When the handshake was last refused, and when the present attempt began, on the loop's clock.
        self.refused_at_s = float("-inf")
        self._begun_at_s = asyncio.get_running_loop().time()
        self._name, self._address = name, parse_address(addr)
        self._listener, self._resolver = listener, resolver
        #: What ZMQ connects to, a number and a port; empty while the host's name has no number.
        self._endpoint = ""
        #: Attempts so far: each takes the next number of the host.
        self._attempts = 0
        #: Attempts that have timed out since the last connection.
        self._misses = 0
        #: When the last connection was made, how many in a row were lost soon, and until when the next has to wait.
        self._made_at_s = self._not_before_s = float("-inf")
        self._short_ones = 0
        self._config = config
        self._has_others = False
        socket = context.socket(zmq.DEALER)
        try:
            _configure(socket, identity, keys, config)
            socket.setsockopt(zmq.MAXMSGSIZE, _longest_frame(config, cuts=cuts))
            monitor = socket.get_monitor_socket(UP_EVENTS | DOWN_EVENTS | REFUSED_EVENTS | MISSED_EVENTS)
        except BaseException:
            socket.close(linger=0)
            raise
        try:
            self._dial(socket)
        except BaseException:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
            raise
        self._dealer = LoopSocket(socket, lambda frames: listener.frames_received(name, frames), turns)
        self._monitor = LoopSocket(monitor, self._on_monitor, turns)

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message. Raise NotConnectedError or QueueFullError."""
        if not self.connected:
            raise NotConnectedError(f"not connected to {self._address.host} port {self._address.port}")
        self._dealer.send(wire.cut(frames) if self._cuts else frames)

    def reconnect_if_due(self, now_s: float) -> None:
        """Begin another attempt if the handshake was refused or the present attempt has timed out."""
        if now_s < self._not_before_s:
            if not self.connected:
                self._hang_up()
            return
        timeout_s = max(self._config.connect_timeout_s, self._longest_pause_s)
        is_late = now_s - self._begun_at_s > timeout_s
        if self.connected or self._dealer.is_amid_message or not (self.refused or not self._endpoint or is_late):
            return
        self._misses += is_late and bool(self._endpoint)
        self.refused, self._begun_at_s = False, now_s
        self._dial_again()

    def drop(self) -> None:
        """Lose a connection that stands, as if it were broken, and connect again."""
        if self.connected:
            self._lose()
            if self._dealer.is_amid_message:
                # Due as soon as that is read.
                self._begun_at_s = float("-inf")
            elif self._endpoint:
                self._dial_again()

    def _dial_again(self) -> None:
        if self._endpoint:
            _disconnect(self._dealer.socket, self._endpoint)
        self._dial(self._dealer.socket)

    @property
    def _longest_pause_s(self) -> float:
        """ZMQ's longest pause between two attempts: it grows where nobody has answered for long."""
        return _growing(self._config.reconnect_max_s, self._misses)

    def _dial(self, socket: zmq.Socket[bytes]) -> None:
        """Begin an attempt to connect, unless the host's name has no number yet."""
        self._endpoint, self.unresolved = "", ""
        numbers: Sequence[str] = (self._address.host,)
        if not self._address.is_numeric:
            found = self._resolver.resolve(self._address.host)
            numbers = found.addresses
            if not numbers:
                self.unresolved = f"its host name {self._address.host!r} can't be resolved here: {found.problem}"
                return
        self._has_others = len(numbers) > 1
        self._endpoint = self._address.endpoint(numbers[self._attempts % len(numbers)])
        self._attempts += 1
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _ms(self._longest_pause_s))
        socket.connect(self._endpoint)
        if self._pulse is not None:
            self._pulse.connect(self._endpoint, self._longest_pause_s)

    def close(self) -> None:
        """Close its sockets at once. Idempotent."""
        self.connected = False
        if self._pulse is not None:
            self._pulse.close()
        if not self._dealer.socket.closed:
            self._dealer.socket.disable_monitor()
        self._monitor.close()
        self._dealer.close()

    def _on_monitor(self, frames: list[bytes]) -> None:
        event = int(parse_monitor_message(frames)["event"])
        if event & UP_EVENTS:
            if not self._endpoint:
                # ZMQ had connected again before it was told not to; nothing stands any more.
                return
            self.connected, self.refused, self._misses = True, False, 0
            self._made_at_s = asyncio.get_running_loop().time()
            if self._pulse is not None:
                self._pulse.insist()
            self._listener.connection_made(self._name)
            return
        if event & MISSED_EVENTS:
            if not self.connected:
                if self._has_others:
                    # The next attempt is due at once: at the next number of the host.
                    self._begun_at_s = float("-inf")
                self._listener.connection_missed()
            return
        self.refused = bool(event & REFUSED_EVENTS)
        if self.refused:
            self.refused_at_s = asyncio.get_running_loop().time()
        if self.connected:
            self._lose()

    def _lose(self) -> None:
        # What the replica sent before the connection was lost still counts.
        self._dealer.drain()
        self.connected = False
        self._begun_at_s = now_s = asyncio.get_running_loop().time()
        self._short_ones = self._short_ones + 1 if now_s - self._made_at_s < _SHORT_S else 0
        if self._short_ones > _PATIENT:
            # ZMQ itself waits no longer, however often the other side ends what it has let in.
            self._not_before_s = now_s + _growing(self._config.reconnect_max_s, self._short_ones)
            self._hang_up()
        self._listener.connection_lost(self._name)

    def _hang_up(self) -> None:
        """Connect nowhere, until the next attempt is due; amid a message that has to wait for its end."""
        if self._endpoint and not self._dealer.is_amid_message:
            _disconnect(self._dealer.socket, self._endpoint)
            self._endpoint = ""
            if self._pulse is not None:
                self._pulse.hang_up()


def cuts_messages(info: ReplicaInfo) -> bool:
    """Whether a replica cuts long messages, and takes such; one of a release before sends each frame in one."""
    return wire.takes_cut(info.wire_version)


def _longest_frame(config: HubConfig, *, cuts: bool) -> int:
    if cuts:
        return MAX_SOCKET_FRAME_BYTES
    return MAX_ATTACHMENT_BYTES if config.former_replicas else _LONGEST_FORMER


def open_connections(
    context: ZmqContext,
    info: ReplicaInfo,
    hub_id: str,
    keys: tuple[KeyPair, str] | None,
    config: HubConfig,
    listener: ConnectionListener,
    resolver: Resolver,
    turns: LongTurns,
) -> dict[SocketName, DealerConnection]:
    """Begin to connect to both sockets of a replica.

    Raise ConfigError if its record's addresses can't be used, OutOfSocketsError if this process has no descriptor left.
    """
    # A process that names a routing id takes its connection over: one that knows only our hub id must not be able to.
    identity = f"{hub_id}/{secrets.token_hex(16)}"
    addrs: dict[SocketName, str] = {"input": info.input_addr, "output": info.output_addr}
    connections: dict[SocketName, DealerConnection] = {}
    pulse: Pulse | None = None
    try:
        pulse = Pulse(context, f"{identity}/pulse", keys, config, listener.fell_silent)
        for name, addr in addrs.items():
            own = pulse if name == "output" else None
            connections[name] = DealerConnection(
                context, name, addr, identity, keys, config, listener, resolver, turns, own, cuts=cuts_messages(info)
            )
    except BaseException as error:
        for connection in connections.values():
            connection.close()
        if pulse is not None:
            pulse.close()
        if isinstance(error, ConfigError) or not isinstance(error, zmq.ZMQError | ValueError):
            raise
        if isinstance(error, zmq.ZMQError) and error.errno in _OUT_OF_SOCKETS:
            raise OutOfSocketsError(f"this hub has no file descriptor left for it ({error})") from error
        raise ConfigError(f"its addresses can't be connected to: {error}") from error
    return connections


def _disconnect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        socket.disconnect(endpoint)
    except zmq.ZMQError as error:
        # libzmq gives a connection whose handshake was refused up for good, and forgets it.
        if error.errno != errno.ENOENT:
            raise


def _growing(usual_s: float, failures: int) -> float:
    """A pause that grows with the failures beyond the first few."""
    more = max(0, failures - _PATIENT)
    return max(usual_s, min(_SLOWEST_S, usual_s * 2.0 ** min(more, 10)))


def _has_messages(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _configure(socket: zmq.Socket[bytes], identity: str, keys: tuple[KeyPair, str] | None, config: HubConfig) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTING_ID, identity.encode())
    # Nothing is queued for a connection that is not there: a send that fails has certainly not run.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDHWM, config.send_queue)
    socket.setsockopt(zmq.RCVHWM, config.receive_queue)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, _ms(config.reconnect_min_s))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _ms(config.reconnect_max_s))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _ms(config.connect_timeout_s))
    socket.setsockopt(zmq.HANDSHAKE_IVL, _ms(config.handshake_timeout_s))
    socket.setsockopt(zmq.TCP_MAXRT, _ms(config.zmq_heartbeat_timeout_s))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    if keys is not None:
        secure_client(socket, *keys)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
