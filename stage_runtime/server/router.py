"""One of a replica's two ROUTER sockets, and the identity of the hubs that are connected to it.

A hub connects under the routing id ``<hub_id>/<token>``. ZMQ hands a routing id over to the last connection that names
it, so that a hub that reconnects is not shut out by its own dead connection; the token, which no other hub can guess,
keeps other hubs from taking it over. The CURVE key of a connection proves the hub id, by the registry as it is now: no
routing id is trusted before a frame has shown that both agree. A routing id without a token is checked with every
frame, since its connection may change hands at any time: no hub can then send under another's name, but output to such
a routing id is only as safe as the registered hubs are honest.
"""

from __future__ import annotations

import os
import socket as sockets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from omni_discovery import wire
from omni_discovery.curve import KeyPair, secure_server
from omni_discovery.errors import ConfigError, WireError
from omni_discovery.wire.session import ForeignIdentityError, Peer
from stage_runtime.config import ServerConfig
from stage_runtime.server.outbox import Frames, SendResult

#: Shorter tokens can be guessed, and count as none.
_MIN_TOKEN: Final = 16
#: How many connections of one hub are heard, the latest: it has one, and another after each loss. ZMQ takes messages
#: from all connections in turn, and a long one takes 0.2 s to be read.
_MAX_OF_HUB: Final = 4
#: So many new ones of a hub are heard at once, and one more in each second.
_MOST_NEW: Final = 8
#: How many proved routing ids are remembered of all hubs, how many that are heard no more, and how many hubs.
_MAX_KNOWN: Final = 4096
_MAX_FORMER: Final = 16_384
_MAX_HUBS: Final = 4096


@dataclass(slots=True)
class _Heard:
    """The connections of one hub: the latest are heard, and not too many new ones."""

    since_s: float
    room: float = _MOST_NEW
    routing_ids: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def takes_new(self, now_s: float) -> bool:
        self.room = min(_MOST_NEW, self.room + now_s - self.since_s)
        self.since_s = now_s
        if self.room < 1:
            return False
        self.room -= 1
        return True


class Peers:
    """The routing ids of one socket. ``has_keys``: every connection carries the key that it has proved."""

    def __init__(self, *, has_keys: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._has_keys = has_keys
        self._now = now
        self._revoked: frozenset[str] = frozenset()
        #: Connections whose hub id was proved and that can't change hands, by routing id.
        self.known: dict[bytes, Peer] = {}
        #: By hub; and routing ids of those that have later ones.
        self._heard: OrderedDict[str, _Heard] = OrderedDict()
        self._former: OrderedDict[bytes, None] = OrderedDict()

    def identify_peer(self, routing_id: bytes, hubs_of_key: Callable[[], Collection[str]]) -> Peer | None:
        """The connection that a frame came on; None for one that is not heard: of a revoked hub, or with later ones.

        Raise ForeignIdentityError for another's key.

        ``hubs_of_key`` returns the ids of the hubs that the connection's key belongs to. Without keys, the id in the
        routing id is trusted.
        """
        try:
            name = routing_id.decode("utf-8")
        except UnicodeDecodeError:
            raise ForeignIdentityError("a routing id that is no text") from None
        hub_id, _, token = name.partition("/")
        if not hub_id or (self._has_keys and hub_id not in hubs_of_key()):
            raise ForeignIdentityError(f"the key is not the one of hub {hub_id!r}")
        if hub_id in self._revoked or (self._has_keys and not self._hears(hub_id, routing_id)):
            return None
        peer = Peer(name, hub_id)
        if len(token) >= _MIN_TOKEN:
            self._remember(routing_id, peer)
        return peer

    def revoke_hubs(self, hub_ids: frozenset[str]) -> None:
        """From now on frames of these hubs, and of no others, are dropped."""
        self._revoked = hub_ids
        for routing_id in [key for key, peer in self.known.items() if peer.hub_id in hub_ids]:
            del self.known[routing_id]

    def _remember(self, routing_id: bytes, peer: Peer) -> None:
        of_hub = [key for key, known in self.known.items() if known.hub_id == peer.hub_id]
        if len(of_hub) >= _MAX_OF_HUB:
            del self.known[of_hub[0]]
        elif len(self.known) >= _MAX_KNOWN:
            del self.known[next(iter(self.known))]
        self.known[routing_id] = peer

    def _hears(self, hub_id: str, routing_id: bytes) -> bool:
        """Whether a connection of a hub is one of its latest, or a new one that may be."""
        if routing_id in self._former:
            return False
        heard = self._heard.get(hub_id)
        if heard is None:
            heard = self._heard[hub_id] = _Heard(self._now())
            if len(self._heard) > _MAX_HUBS:
                self._heard.popitem(last=False)
        if routing_id in heard.routing_ids:
            return True
        if not heard.takes_new(self._now()):
            return False
        heard.routing_ids[routing_id] = None
        if len(heard.routing_ids) > _MAX_OF_HUB:
            former, _ = heard.routing_ids.popitem(last=False)
            self.known.pop(former, None)
            self._former[former] = None
            if len(self._former) > _MAX_FORMER:
                self._former.popitem(last=False)
        return True


#: A connection that has not shown its key by then is closed. libzmq's own limit is 30 s, and each holds a descriptor.
_HANDSHAKE_MS: Final = 3000
#: A connection that is silent for so long is asked by the kernel whether its other end is there, each second.
_KEEPALIVE_S: Final = 1
#: Frames of a message with too many that are dropped in one turn. ZMQ bounds the size of each, and not their number.
_MOST_DROPPED: Final = 8192
#: From this size on, a frame is given to ZMQ as it is, without a copy.
_ZERO_COPY_BYTES: Final = 64 << 10
#: A plain int: converting zmq's own flags would cost time with every message.
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


class Router:
    """A ROUTER socket, bound at construction to a port of ZMQ's choice. Raise ConfigError. Used by one thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: ServerConfig,
        bind_host: str,
        keys: KeyPair | None,
        hubs_of_key: Callable[[str], Collection[str]],
    ) -> None:
        """``hubs_of_key`` says which hubs a public key belongs to now; without ``keys`` it is not asked."""
        self._hubs_of_key = hubs_of_key
        #: Whether the rest of a message that has too many frames is still to be read, and dropped.
        self._is_amid_message = False
        #: Whether a connection, by its routing id, takes messages that are cut.
        self.takes_cut: Callable[[str], bool] = lambda _name: False
        self.peers = Peers(has_keys=keys is not None)
        self.socket = context.socket(zmq.ROUTER)
        if keys is not None:
            secure_server(self.socket, keys)
        _configure(self.socket, config)
        #: Whether messages may come in one frame each; else those of more than 64 KiB have to be cut. Without keys
        #: nothing bounds what comes, and hubs need no record that says what they do.
        self._takes_long_frames = keys is None
        self.socket.maxmsgsize = wire.MAX_HEAD_BYTES if keys is None else wire.MAX_SOCKET_FRAME_BYTES
        self.socket.ipv6 = ":" in bind_host
        host = f"[{bind_host}]" if ":" in bind_host else bind_host
        try:
            self.listener = _bind(self.socket, f"tcp://{host}:0")
        except zmq.ZMQError as error:
            raise ConfigError(f"can't listen on {bind_host}: {error}; see --omni-replica-address") from error
        #: Where it was bound first, and where it is bound now; empty between two times.
        self._bound_to = self._endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self._bound_to.rpartition(":")[2])

    def receive_frame(self) -> tuple[Peer | None, bytes]:
        """The next message and its connection, which is None for one that is not heard.

        Raise zmq.Again if no message waits, or too much of a refused one to be dropped in one turn; WireError if it
        has more frames than it may, or a foreign identity.
        """
        socket = self.socket
        if self._is_amid_message:
            self._drop_rest()
        routing_id = socket.recv(zmq.NOBLOCK)
        peer = self.peers.known.get(routing_id)
        if peer is not None:
            head = socket.recv(zmq.NOBLOCK)
            return peer, self._receive_rest(head) if socket.getsockopt(zmq.RCVMORE) else head
        # Only a frame that was received without a copy has its connection's User-Id.
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        head = self._receive_rest(frame.bytes) if socket.getsockopt(zmq.RCVMORE) else frame.bytes
        return self.peers.identify_peer(routing_id, lambda: self._hubs_of_key(_key_of(frame))), head

    def send_frames(self, name: str, frames: Frames) -> SendResult:
        """Send one multipart to the connection of that routing id, without ever waiting."""
        is_long = max(len(frames[0]), len(frames[-1])) > wire.MAX_FRAME_BYTES
        pieces = wire.cut(frames) if is_long and self.takes_cut(name) else frames
        is_small = len(pieces) != 2 or len(pieces[1]) < _ZERO_COPY_BYTES
        try:
            # All or nothing, as the first alone can be refused.
            self.socket.send(name.encode("utf-8"), _MORE)
            for piece in pieces[:-1]:
                self.socket.send(piece, _MORE)
            self.socket.send(pieces[-1], zmq.NOBLOCK, copy=is_small)
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return SendResult.GONE
            raise
        return SendResult.SENT

    def take_long_frames(self) -> None:
        """Take messages of up to 4 MiB in one frame from now on: there are hubs that can't cut them. Idempotent.

        Connections that stand are ended by that; what waits to connect is not. Raise OSError or zmq.ZMQError, and call
        it again then.
        """
        if self._takes_long_frames:
            return
        # ZMQ closes the descriptor that it is given. Where there is none left, it goes on listening as it did.
        listener = os.dup(self.listener.fileno())
        if self._endpoint:
            self.socket.unbind(self._endpoint)
            self._endpoint = ""
        self.socket.maxmsgsize = wire.MAX_HEAD_BYTES
        self.socket.setsockopt(zmq.USE_FD, listener)
        self.socket.bind(self._bound_to)
        self._endpoint, self._takes_long_frames = self._bound_to, True

    def close(self, linger_ms: int) -> None:
        """Close; ZMQ goes on sending what is queued for at most ``linger_ms``. Idempotent."""
        self.socket.close(linger_ms)

    def _receive_rest(self, first: bytes) -> bytes:
        """The head of a message that is cut, which begins with this frame. Raise WireError for any other."""
        self._is_amid_message = True
        lengths = wire.lengths_of(first)
        if lengths is None or len(lengths) > 1:
            raise WireError("more than one frame")
        pieces: list[bytes] = []
        for _ in range(wire.most_pieces(lengths)):
            pieces.append(self.socket.recv(zmq.NOBLOCK))
            if not self.socket.getsockopt(zmq.RCVMORE):
                self._is_amid_message = False
                return wire.put_together(lengths, pieces)[0]
        raise WireError("more frames than it said")

    def _drop_rest(self) -> None:
        for _ in range(_MOST_DROPPED):
            if not self.socket.recv(zmq.NOBLOCK, copy=False).more:
                self._is_amid_message = False
                return
        raise zmq.Again


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> sockets.socket:
    """Bind, and return the socket that listens, the caller's to close: ZMQ has its own descriptor of it."""
    monitor = socket.get_monitor_socket(zmq.EVENT_LISTENING)
    try:
        socket.bind(endpoint)
        # ZMQ has sent it before it returned from the bind.
        listening = recv_monitor_message(monitor, zmq.NOBLOCK)
        return sockets.socket(fileno=os.dup(listening["value"]))
    finally:
        socket.disable_monitor()
        monitor.close(0)


def _configure(socket: zmq.Socket[bytes], config: ServerConfig) -> None:
    socket.linger = 0
    socket.sndhwm = config.send_queue
    socket.rcvhwm = config.receive_queue
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.router_mandatory = True
    # A hub that reconnects replaces its old connection, which may be dead without having noticed.
    socket.router_handover = True
    # No heartbeats of ZMQ's: libzmq 4.3.5 ends a hub that finds one behind a full receive queue once the connection is
    # broken, as after a stop of some seconds. Hubs send their own, on a connection for them; a hub's host that is gone
    # is noticed by the kernel, and a hub that stands still by the end of its lease.
    socket.tcp_maxrt = config.dead_after_ms
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = _KEEPALIVE_S
    socket.tcp_keepalive_intvl = _KEEPALIVE_S


def _key_of(frame: zmq.Frame) -> str:
    """The public key of the frame's connection; empty if it has none."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
