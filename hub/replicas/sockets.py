"""ZMQ sockets on an asyncio loop, driven by their file descriptor.

The descriptor of a ZMQ socket is edge-triggered and tells only that something changed, and any send or receive may take
the edge. So after each of them the socket's own EVENTS are asked again before going back to the loop.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from hub.config import HubConfig, NotConnectedError, QueueFullError
from omni_discovery.curve import KeyPair, secure_client
from omni_discovery.errors import ConfigError
from omni_discovery.wire import MAX_ATTACHMENT_BYTES

#: As a plain number: what a mask of zmq's own kind costs is felt with every message.
_POLLIN: Final = int(zmq.POLLIN)
#: Messages taken from one socket before others get their turn.
_BATCH: Final = 64
#: Sockets that one context may hold: each replica takes six.
_MAX_SOCKETS: Final = 60_000

#: What the monitor tells: the connection became a session, lost it, could not be made, or was refused.
UP_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED
DOWN_EVENTS: Final = zmq.EVENT_DISCONNECTED
MISSED_EVENTS: Final = zmq.EVENT_CLOSED
REFUSED_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def agreed_keys(key_pair: KeyPair | None, replica_public: str) -> tuple[KeyPair, str] | None:
    """Our keys and the replica's; None where nobody encrypts. Raise ConfigError if only one side does."""
    if key_pair is not None and not replica_public:
        raise ConfigError(
            "its record holds no CURVE public key, and this hub speaks only encrypted: give all of a namespace the "
            "same --zmq-security"
        )
    if key_pair is None and replica_public:
        raise ConfigError(
            "its record holds a CURVE public key, and this hub was started with --zmq-security none: give all of a "
            "namespace the same"
        )
    return None if key_pair is None else (key_pair, replica_public)


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context that can hold the sockets of thousands of replicas."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, min(_MAX_SOCKETS, int(context.get(zmq.SOCKET_LIMIT))))
    return context


class LoopSocket:
    """One ZMQ socket on the running loop. ``on_frames`` is called with each message; it must not block."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._drain_due = self._is_draining = False
        self._loop.add_reader(self._fd, self._drain)
        # What came before the reader was set has already used up its edge.
        self._look_again()

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message. Raise QueueFullError, at once, where that is not possible."""
        try:
            if len(frames) == 1:
                self.socket.send(frames[0], zmq.NOBLOCK)
            else:
                self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            raise QueueFullError("the send queue is full or nobody is connected") from None
        except zmq.ZMQError as error:
            raise NotConnectedError(f"can't send: {error}") from error
        finally:
            # Whoever is draining finds what comes meanwhile.
            if not self._is_draining:
                self._look_again()

    def drain(self) -> None:
        """Take in everything that has arrived."""
        while not self.socket.closed and _has_messages(self.socket):
            self._drain()

    def close(self) -> None:
        """Close without waiting for unsent messages. Idempotent."""
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            self.socket.close(linger=0)

    def _look_again(self) -> None:
        if not self._drain_due and not self.socket.closed and _has_messages(self.socket):
            self._drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_due, self._is_draining = False, True
        try:
            for _ in range(_BATCH):
                if self.socket.closed:
                    return
                try:
                    frames = self.socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._on_frames(frames)
        finally:
            self._is_draining = False
        self._look_again()


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Who is told what one connection does."""

    on_frames: Callable[[list[bytes]], None]
    on_up: Callable[[], None]
    on_down: Callable[[], None]
    #: An attempt to connect again has failed.
    on_missed: Callable[[], None]


class DealerConnection:
    """One DEALER to one ROUTER, with its monitor. It connects again by itself, also after a refused handshake."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addr: str,
        identity: str,
        keys: tuple[KeyPair, str] | None,
        config: HubConfig,
        callbacks: Callbacks,
    ) -> None:
        self.connected = False
        #: The other side would not have us, or not yet: only ``reconnect`` tries again.
        self.refused = False
        #: When it last was so, on the loop's clock.
        self.refused_at_s = float("-inf")
        self._addr = addr
        self._callbacks = callbacks
        socket = context.socket(zmq.DEALER)
        try:
            _configure(socket, identity, keys, config)
            monitor = socket.get_monitor_socket(UP_EVENTS | DOWN_EVENTS | REFUSED_EVENTS | MISSED_EVENTS)
        except BaseException:
            socket.close(linger=0)
            raise
        try:
            socket.connect(addr)
        except BaseException:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
            raise
        self._dealer = LoopSocket(socket, callbacks.on_frames)
        self._monitor = LoopSocket(monitor, self._on_monitor)

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message. Raise NotConnectedError or QueueFullError."""
        if not self.connected:
            raise NotConnectedError(f"not connected to {self._addr}")
        self._dealer.send(frames)

    def reconnect(self) -> None:
        """Drop the connection, or the attempt at one, and make another."""
        self.refused = False
        socket = self._dealer.socket
        try:
            socket.disconnect(self._addr)
        except zmq.ZMQError as error:
            # libzmq gives a connection whose handshake was refused up for good, and forgets it.
            if error.errno != errno.ENOENT:
                raise
        socket.connect(self._addr)

    def close(self) -> None:
        """Close both sockets at once. Idempotent."""
        self.connected = False
        if not self._dealer.socket.closed:
            self._dealer.socket.disable_monitor()
        self._monitor.close()
        self._dealer.close()

    def _on_monitor(self, frames: list[bytes]) -> None:
        event = int(parse_monitor_message(frames)["event"])
        if event & UP_EVENTS:
            self.connected, self.refused = True, False
            self._callbacks.on_up()
            return
        if event & MISSED_EVENTS:
            if not self.connected:
                self._callbacks.on_missed()
            return
        self.refused = bool(event & REFUSED_EVENTS)
        if self.refused:
            self.refused_at_s = asyncio.get_running_loop().time()
        if self.connected:
            # What it said before it went still counts.
            self._dealer.drain()
            self.connected = False
            self._callbacks.on_down()


def _has_messages(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _configure(socket: zmq.Socket[bytes], identity: str, keys: tuple[KeyPair, str] | None, config: HubConfig) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTING_ID, identity.encode())
    # Nothing is queued for a connection that is not there: a send that fails has certainly not run.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDHWM, config.send_queue)
    socket.setsockopt(zmq.RCVHWM, config.send_queue)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_ATTACHMENT_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, _ms(config.reconnect_min_s))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _ms(config.reconnect_max_s))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _ms(config.connect_timeout_s))
    socket.setsockopt(zmq.HANDSHAKE_IVL, _ms(config.handshake_timeout_s))
    socket.setsockopt(zmq.HEARTBEAT_IVL, _ms(config.zmq_heartbeat_interval_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ms(config.zmq_heartbeat_timeout_s))
    if keys is not None:
        secure_client(socket, *keys)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
