"""The consumer's side of TCP: one connection fetches one hand-off, directly into its final memory."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from omni_discovery.backoff import Backoff
from stage_runtime.connectors.errors import TransferCancelledError, TransferError, TransferTimeoutError
from stage_runtime.connectors.store.memory import PooledBuffer
from stage_runtime.connectors.tcp.frames import ANSWER_BYTES, RECEIVED, Status, pack_request, parse_answer
from stage_runtime.connectors.tcp.names import Names

_CONNECT_TIMEOUT_S: Final = 5.0
#: Waits before a connection that was reset is made again: the first, and the longest.
_FIRST_WAIT_S: Final = 0.02
_LONGEST_WAIT_S: Final = 0.5
_NAMES: Final = Names()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PayloadAddress:
    """Where a hand-off is, and the token that opens it."""

    host: str
    port: int
    generation: bytes
    token: bytes
    size_bytes: int


class Fetch:
    """One fetch under way; other threads may cancel it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cancelled = threading.Event()

    def use(self, connection: socket.socket | None) -> None:
        """Set the connection that ``cancel`` shuts down. Raise TransferCancelledError if it was cancelled already."""
        with self._lock:
            self._socket = connection
        self.check()

    def check(self) -> None:
        """Raise TransferCancelledError if it was cancelled."""
        if self._cancelled.is_set():
            raise TransferCancelledError("the fetch was cancelled")

    def wait(self, wait_s: float) -> None:
        """Let time pass. Raise TransferCancelledError as soon as it was cancelled."""
        self._cancelled.wait(wait_s)
        self.check()

    def cancel(self) -> None:
        """End the fetch soon, with TransferCancelledError."""
        with self._lock:
            self._cancelled.set()
            if self._socket is not None:
                # The plain socket's: that of TLS must not be called while another thread reads.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class Fetches:
    """All fetches under way. Used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fetches: set[Fetch] = set()
        self._closed = False

    @contextlib.contextmanager
    def under_way(self, key: str) -> Iterator[Fetch]:
        """Register a fetch for the length of the block. Raise TransferCancelledError after ``close``."""
        fetching = Fetch(key)
        with self._lock:
            if self._closed:
                raise TransferCancelledError("the connector is closed")
            self._fetches.add(fetching)
        try:
            yield fetching
        finally:
            with self._lock:
                self._fetches.discard(fetching)

    def cancel(self, key: str) -> None:
        """Cancel the fetches of a key."""
        with self._lock:
            found = [fetching for fetching in self._fetches if fetching.key == key]
        for fetching in found:
            fetching.cancel()

    def close(self) -> None:
        """Cancel all fetches, and those that begin later. Idempotent."""
        with self._lock:
            self._closed = True
            found = list(self._fetches)
        for fetching in found:
            fetching.cancel()


def fetch(
    source: PayloadAddress,
    fetching: Fetch,
    deadline_s: float,
    *,
    consume: bool,
    tls: ssl.SSLContext | None,
    memory: Callable[[int], PooledBuffer],
) -> PooledBuffer | None:
    """Fetch a hand-off into a buffer of ``memory``; None if its producer has dropped it.

    ``deadline_s`` is a moment of the monotonic clock. With ``consume``, the producer drops the hand-off once it was
    received. Raise TransferTimeoutError, TransferCancelledError or TransferError.
    """
    return converse(
        (source.host, source.port),
        fetching,
        deadline_s,
        tls,
        lambda connection: _receive(connection, source, deadline_s, consume=consume, memory=memory),
    )


def converse(
    address: tuple[str, int],
    fetching: Fetch,
    deadline_s: float,
    tls: ssl.SSLContext | None,
    talk: Callable[[socket.socket], T],
) -> T:
    """Connect to a producer, with TLS if given, and return the result of ``talk`` with the connection.

    A producer that has no place for a connection resets it: then this connects again, and ``talk`` begins anew, until
    the deadline. Raise TransferTimeoutError, TransferCancelledError or TransferError, also for an OSError of ``talk``.
    """
    backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S)
    while True:
        try:
            return _converse_once(address, fetching, deadline_s, tls, talk)
        except TransferError as error:
            was_reset = isinstance(error.__cause__, ConnectionResetError | BrokenPipeError)
            wait_s = backoff.next_delay_s()
            if not was_reset or time.monotonic() + wait_s >= deadline_s:
                raise
            fetching.wait(wait_s)


def _converse_once(
    address: tuple[str, int],
    fetching: Fetch,
    deadline_s: float,
    tls: ssl.SSLContext | None,
    talk: Callable[[socket.socket], T],
) -> T:
    try:
        with _connect(address, fetching, deadline_s) as plain:
            if tls is None:
                return talk(plain)
            plain.settimeout(left_s(deadline_s))
            with tls.wrap_socket(plain, do_handshake_on_connect=False) as secured:
                fetching.use(secured)
                secured.do_handshake()
                return talk(secured)
    except TransferError:
        fetching.check()
        raise
    except OSError as error:
        fetching.check()
        where = f"{address[0]} port {address[1]}"
        if isinstance(error, TimeoutError):
            raise TransferTimeoutError(f"{where}: the hand-off did not come in time") from error
        raise TransferError(f"{where}: {error}") from error
    finally:
        with contextlib.suppress(TransferCancelledError):
            fetching.use(None)


def _connect(where: tuple[str, int], fetching: Fetch, deadline_s: float) -> socket.socket:
    failure: OSError = TransferError(f"{where[0]} is no address")
    for family, kind, protocol, address in _NAMES.addresses(*where, left_s(deadline_s), fetching.check):
        fetching.check()
        connection = socket.socket(family, kind, protocol)
        try:
            fetching.use(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(min(_CONNECT_TIMEOUT_S, left_s(deadline_s)))
            connection.connect(address)
            fetching.check()
        except OSError as error:
            connection.close()
            if isinstance(error, TransferError):
                raise
            failure = error
        else:
            return connection
    raise failure


def _receive(
    connection: socket.socket,
    source: PayloadAddress,
    deadline_s: float,
    *,
    consume: bool,
    memory: Callable[[int], PooledBuffer],
) -> PooledBuffer | None:
    connection.settimeout(left_s(deadline_s))
    connection.sendall(pack_request(source.generation, source.token, consume=consume))
    head = bytearray(ANSWER_BYTES)
    receive_into(connection, memoryview(head), deadline_s)
    answer = parse_answer(bytes(head))
    if answer is None:
        raise TransferError(f"{source.host} port {source.port} is no producer of hand-offs")
    status, size_bytes = answer
    if status is Status.GONE:
        return None
    if size_bytes != source.size_bytes:
        raise TransferError(f"{size_bytes} bytes are offered, {source.size_bytes} were announced")
    buffer = memory(size_bytes)
    receive_into(connection, buffer.data, deadline_s)
    if consume:
        connection.sendall(RECEIVED)
    return buffer


def receive_into(connection: socket.socket, target: memoryview, deadline_s: float) -> None:
    """Fill ``target`` from a connection. Raise TransferError if the producer closes it, TransferTimeoutError."""
    place = 0
    while place < len(target):
        connection.settimeout(left_s(deadline_s))
        received = connection.recv_into(target[place:])
        if not received:
            raise TransferError(f"the producer hung up after {place} of {len(target)} bytes")
        place += received


def left_s(deadline_s: float) -> float:
    """The seconds to a moment of the monotonic clock. Raise TransferTimeoutError if it has passed."""
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise TransferTimeoutError("the deadline has passed")
    return left
