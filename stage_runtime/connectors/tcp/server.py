"""The producer's side of TCP: one thread that sends hand-offs in place to consumers that show their tokens.

An unknown peer can cost little: connections are bounded in number and in time, requests have one length, and a
connection without a valid request and token is closed without an answer, and counted. Silent connections keep no place
from a consumer: where there is none left, the oldest connection that has not asked for anything is reset, and so is the
oldest of one address that has too many of them. A consumer that is reset tries again.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import secrets
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from omni_discovery.sockets.listen import BACKLOG
from stage_runtime.connectors.store.layout import TOKEN_BYTES
from stage_runtime.connectors.store.store import Kept, Store
from stage_runtime.connectors.tcp.frames import RECEIVED, REQUEST_BYTES, Status, pack_answer, parse_request
from stage_runtime.connectors.tcp.tls_stream import TlsStream

logger = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE: Final = 64
_LOOK_EVERY_S: Final = 0.25
#: The most bytes of one send; other connections get their turn in between.
_PIECE_BYTES: Final = 4 << 20
#: With this option, closing a connection resets it, and its peer can tell that from an answer that ended.
_RESETS: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """``request_timeout_s`` bounds the time to a complete request; a transfer must keep ``least_rate`` on average."""

    max_connections: int = 128
    request_timeout_s: float = 5.0
    stall_timeout_s: float = 10.0
    least_rate_bytes_per_s: float = 1e6

    @property
    def max_silent_per_address(self) -> int:
        """How many connections of one address may be open that have not asked yet; many consumers may share it."""
        return max(self.max_connections // 2, 1)


@dataclass(slots=True)
class Connection:
    """The connection of one consumer. Owned by the server's thread."""

    #: What is read and written: the socket, or TLS over it.
    stream: socket.socket | TlsStream
    socket: socket.socket
    #: The address of the peer, see ``_network_of``.
    network: bytes
    #: The connection is closed when this moment passes.
    deadline_s: float
    #: The latest end of the whole transfer.
    end_s: float = float("inf")
    asked: bytearray = field(default_factory=bytearray)
    #: Whether a whole request with the right token came.
    has_asked: bool = False
    kept: Kept | None = None
    consume: bool = False
    #: The parts that are still to be sent.
    left: list[memoryview] = field(default_factory=list)
    sent: bool = False


class PayloadServer:
    """Listens until ``close``, on a port of the kernel's choice unless one is given. Raise OSError if it can't."""

    def __init__(
        self, host: str, store: Store, tls: ssl.SSLContext | None, limits: ServerLimits, port: int = 0
    ) -> None:
        self._store = store
        self._tls = tls
        self._limits = limits
        self._unknown_token = secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        dual = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        #: Open connections; owned by the thread.
        self._connections: dict[socket.socket, Connection] = {}
        #: Closed connections by the reason.
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="payload-server", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End all connections and the thread. Idempotent."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        try:
            self._serve_all()
        finally:
            self._end()

    def _serve_all(self) -> None:
        look_at_s = 0.0
        while True:
            for key, _ in self._selector.select(_LOOK_EVERY_S if self._connections else None):
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                # A connection may have been reset since the selector saw it.
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._connections:
                    self._serve(self._connections[key.fileobj])
            now_s = time.monotonic()
            if now_s >= look_at_s:
                look_at_s = now_s + _LOOK_EVERY_S
                for connection in [one for one in self._connections.values() if now_s > one.deadline_s]:
                    self._close(connection, "timed_out")

    def _end(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection, "closed")
        for one in (self._listener, self._woken):
            one.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, peer = self._listener.accept()
            except OSError as error:
                # Out of descriptors, or the peer has closed already. A failing accept must not spin the loop.
                if not isinstance(error, BlockingIOError | ConnectionError):
                    time.sleep(0.01)
                return
            self._admit(accepted, peer)

    def _admit(self, accepted: socket.socket, peer: Any) -> None:
        network = _network_of(peer[0])
        if not self._make_room(network):
            self.counts["refused_full"] += 1
            _reset(accepted)
            accepted.close()
            return
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            accepted.close()
            return
        deadline_s = time.monotonic() + self._limits.request_timeout_s
        stream = accepted if self._tls is None else TlsStream(accepted, self._tls)
        self._connections[accepted] = Connection(stream, accepted, network, deadline_s)
        self._selector.register(accepted, selectors.EVENT_READ)

    def _make_room(self, network: bytes) -> bool:
        """Whether there is a place for a connection from there, at the cost of a silent one if need be."""
        is_full = len(self._connections) >= self._limits.max_connections
        if not is_full and len(self._connections) < self._limits.max_silent_per_address:
            return True
        # Oldest first.
        silent = [each for each in self._connections.values() if not each.has_asked]
        beside = [each for each in silent if each.network == network]
        # An address with too many of them loses one of its own.
        if len(beside) >= self._limits.max_silent_per_address:
            silent = beside
        elif not is_full:
            return True
        if not silent:
            return False
        _reset(silent[0].socket)
        self._close(silent[0], "crowded_out")
        return True

    def _serve(self, connection: Connection) -> None:
        try:
            self._go_on(connection)
        except BlockingIOError:
            self._wait_for(connection, selectors.EVENT_WRITE if connection.left else selectors.EVENT_READ)
        except ssl.SSLWantReadError:
            self._wait_for(connection, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._wait_for(connection, selectors.EVENT_WRITE)
        except OSError as error:
            logger.info("transfer.broken reason=%s", error)
            self._close(connection, "broken")

    def _go_on(self, connection: Connection) -> None:
        if not connection.sent and not connection.left:
            self._read_request(connection)
        elif connection.left:
            self._send(connection)
        else:
            self._answered(connection, connection.stream.recv(2))

    def _read_request(self, connection: Connection) -> None:
        while len(connection.asked) < REQUEST_BYTES:
            received = connection.stream.recv(REQUEST_BYTES - len(connection.asked))
            if not received:
                self._close(connection, "refused_garbage")
                return
            connection.asked += received
        parsed = parse_request(bytes(connection.asked))
        if parsed is None:
            self._close(connection, "refused_garbage")
            return
        self._answer(connection, *parsed)

    def _answer(self, connection: Connection, generation: bytes, token: bytes, consume: bool) -> None:
        # Compared first, and also without a stored hand-off, so that the timing does not tell which of both it was.
        right = self._store.token_of(generation)
        same = hmac.compare_digest(token, right or self._unknown_token)
        if right is not None and not same:
            logger.warning("transfer.refused reason=wrong-token")
            self._close(connection, "refused_token")
            return
        connection.consume = consume
        connection.kept = self._store.pin(generation, claim=consume) if right is not None else None
        self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        connection.has_asked = True
        now_s = time.monotonic()
        kept = connection.kept
        if kept is None:
            connection.left = [memoryview(pack_answer(Status.GONE, 0))]
            connection.end_s = now_s + self._limits.request_timeout_s
        else:
            connection.left = [memoryview(pack_answer(Status.HERE, kept.size_bytes)), self._content(kept)]
            duration_s = kept.size_bytes / self._limits.least_rate_bytes_per_s
            connection.end_s = now_s + self._limits.stall_timeout_s + duration_s
        connection.deadline_s = min(now_s + self._limits.stall_timeout_s, connection.end_s)
        self._wait_for(connection, selectors.EVENT_WRITE)
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        piece = connection.left[0]
        sent = connection.stream.send(piece[:_PIECE_BYTES])
        connection.deadline_s = min(time.monotonic() + self._limits.stall_timeout_s, connection.end_s)
        rest = piece[sent:]
        piece.release()
        if rest:
            connection.left[0] = rest
            return
        rest.release()
        del connection.left[0]
        if not connection.left:
            connection.sent = True
            self._all_sent(connection)

    # The methods below differ for hand-offs that are moved by other means than this connection.

    def _content(self, kept: Kept) -> memoryview:
        """The bytes that follow the answer: the hand-off."""
        return kept.block.view(kept.size_bytes)

    def _all_sent(self, connection: Connection) -> None:
        if connection.kept is not None and connection.consume:
            self._wait_for(connection, selectors.EVENT_READ)
        else:
            if connection.kept is not None:
                connection.kept.block.note_fetched()
            self._close(connection, "sent" if connection.kept is not None else "gone")

    def _answered(self, connection: Connection, answer: bytes) -> None:
        self._close(connection, "sent" if answer == RECEIVED else "refused_garbage", consumed=answer == RECEIVED)

    def _wait_for(self, connection: Connection, events: int) -> None:
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events)

    def _close(self, connection: Connection, how: str, *, consumed: bool = False) -> None:
        self.counts[how] += 1
        self._selector.unregister(connection.socket)
        del self._connections[connection.socket]
        for piece in connection.left:
            piece.release()
        connection.left.clear()
        connection.socket.close()
        if connection.kept is not None:
            self._store.unpin(connection.kept, consumed=consumed)


def _network_of(host: str) -> bytes:
    """The bytes of an address that one peer can't change at will: of IPv6, the network."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return address.packed
    return address.packed[:8] if address.ipv4_mapped is None else address.ipv4_mapped.packed


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
