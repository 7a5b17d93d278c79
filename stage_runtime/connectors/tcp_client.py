"""The consumer's side of TCP: one connection fetches one hand-off, straight into memory made for it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stage_runtime.connectors.errors import TransferCancelledError, TransferError, TransferTimeoutError
from stage_runtime.connectors.receive import Buffer
from stage_runtime.connectors.tcp_frames import ANSWER_BYTES, RECEIVED, Status, pack_request, parse_answer

_CONNECT_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Source:
    """Where a hand-off lies and what opens it."""

    host: str
    port: int
    generation: bytes
    token: bytes
    size_bytes: int


class Cancellation:
    """Lets other threads end fetches that are under way, by key. Used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: dict[socket.socket, str] = {}
        self._cancelled: set[socket.socket] = set()
        self._closed = False

    def add(self, key: str, sock: socket.socket) -> None:
        """A fetch begins. Raise TransferCancelledError once all were cancelled for good."""
        with self._lock:
            if self._closed:
                raise TransferCancelledError("the connector is closed")
            self._sockets[sock] = key

    def remove(self, sock: socket.socket) -> bool:
        """A fetch ends; say whether it was cancelled."""
        with self._lock:
            self._sockets.pop(sock, None)
            cancelled = sock in self._cancelled
            self._cancelled.discard(sock)
            return cancelled

    def cancel(self, key: str) -> None:
        """End the fetches of a key."""
        self._cut(lambda found: found == key)

    def close(self) -> None:
        """End all, and any that begins later. Idempotent."""
        with self._lock:
            self._closed = True
        self._cut(lambda _: True)

    def _cut(self, wanted: Callable[[str], bool]) -> None:
        with self._lock:
            for sock, key in self._sockets.items():
                if wanted(key):
                    self._cancelled.add(sock)
                    # A socket that is not connected yet is looked at again when it is.
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    def check(self, sock: socket.socket) -> None:
        """Raise TransferCancelledError if it was cancelled."""
        with self._lock:
            if sock in self._cancelled:
                raise TransferCancelledError("the fetch was cancelled")


def fetch(
    source: Source,
    key: str,
    deadline_s: float,
    *,
    consume: bool,
    tls: ssl.SSLContext | None,
    memory: Callable[[int], Buffer],
    cancellation: Cancellation,
) -> Buffer | None:
    """The hand-off's bytes; None if its producer has it no more. ``deadline_s`` is on the monotonic clock.

    Raise TransferTimeoutError, TransferCancelledError or TransferError.
    """
    raw = None
    cancelled = False
    try:
        raw = _open(source, deadline_s, key, cancellation)
        cancellation.check(raw)
        with _secured(raw, source, tls, deadline_s) as connection:
            return _receive(connection, source, deadline_s, consume=consume, memory=memory)
    except OSError as error:
        cancelled = raw is not None and cancellation.remove(raw)
        raise _typed(error, source, cancelled=cancelled) from error
    finally:
        if raw is not None:
            cancellation.remove(raw)
            raw.close()


def _typed(error: OSError, source: Source, *, cancelled: bool) -> TransferError:
    if cancelled:
        return TransferCancelledError("the fetch was cancelled")
    if isinstance(error, TransferError):
        return error
    where = f"{source.host} port {source.port}"
    if isinstance(error, TimeoutError):
        return TransferTimeoutError(f"{where}: the hand-off did not come in time")
    return TransferError(f"{where}: {error}")


def _open(source: Source, deadline_s: float, key: str, cancellation: Cancellation) -> socket.socket:
    failure: OSError = TransferError(f"{source.host} is no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            cancellation.add(key, connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(min(_CONNECT_TIMEOUT_S, _left_s(deadline_s)))
            connection.connect(address)
        except OSError as error:
            cancelled = cancellation.remove(connection)
            connection.close()
            if cancelled or isinstance(error, TransferError):
                raise
            failure = error
        else:
            return connection
    raise failure


def _secured(raw: socket.socket, source: Source, tls: ssl.SSLContext | None, deadline_s: float) -> socket.socket:
    if tls is None:
        return raw.dup() if False else raw
    raw.settimeout(_left_s(deadline_s))
    return tls.wrap_socket(raw, server_hostname=source.host)


def _receive(
    connection: socket.socket, source: Source, deadline_s: float, *, consume: bool, memory: Callable[[int], Buffer]
) -> Buffer | None:
    connection.settimeout(_left_s(deadline_s))
    connection.sendall(pack_request(source.generation, source.token, consume=consume))
    head = bytearray(ANSWER_BYTES)
    _receive_into(connection, memoryview(head), deadline_s)
    answer = parse_answer(bytes(head))
    if answer is None:
        raise TransferError(f"{source.host} port {source.port} is no producer of hand-offs")
    status, size_bytes = answer
    if status is Status.GONE:
        return None
    if size_bytes != source.size_bytes:
        raise TransferError(f"{size_bytes} bytes are offered, {source.size_bytes} were announced")
    buffer = memory(size_bytes)
    _receive_into(connection, buffer.data, deadline_s)
    if consume:
        connection.sendall(RECEIVED)
    return buffer


def _receive_into(connection: socket.socket, target: memoryview, deadline_s: float) -> None:
    place = 0
    while place < len(target):
        connection.settimeout(_left_s(deadline_s))
        received = connection.recv_into(target[place:])
        if not received:
            raise TransferError(f"the producer hung up after {place} of {len(target)} bytes")
        place += received


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TransferTimeoutError("the deadline has passed")
    return left_s
