"""The protocol around one transfer by an engine: a consumer that shows the token learns where the hand-off is.

It begins as a fetch over TCP does (``tcp.frames``), but the producer's answer is followed by an offer, a frame with the
address of the hand-off, in place of the hand-off. While the connection is open, the hand-off stays in place. The
consumer has its engine read it and sends one byte; when the same byte comes back, the hand-off was in place until the
end of the read.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import ssl
import struct
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from stage_runtime.connectors.errors import TransferError
from stage_runtime.connectors.mooncake.engine import ProducerReads
from stage_runtime.connectors.store.registered import STAMP_BYTES, Block, ManagedPool, PoolBlock
from stage_runtime.connectors.store.store import Kept, Store
from stage_runtime.connectors.tcp.client import Fetch, left_s, receive_into
from stage_runtime.connectors.tcp.frames import ANSWER_BYTES, RECEIVED, Status, pack_request, parse_answer
from stage_runtime.connectors.tcp.server import Connection, PayloadServer, ServerLimits

_OFFER: Final = struct.Struct(f"<8sQB7x{STAMP_BYTES}s168s")
_SAYS: Final = b"OMNIMTE1"
OFFER_BYTES: Final = _OFFER.size
_LOOK_EVERY_S: Final = 0.02

#: Starts reading from (session, address, size in bytes) into a block; the result is 0 if that succeeded.
Read = Callable[[str, int, int, Block], "Future[int]"]


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a hand-off is: its stamp at ``address`` of the engine ``session``, followed by the content."""

    session: str
    address: int
    stamp: bytes
    is_raw: bool

    def pack(self) -> bytes:
        """The offer as a frame of ``OFFER_BYTES``."""
        return _OFFER.pack(_SAYS, self.address, self.is_raw, self.stamp, self.session.encode("ascii"))

    @classmethod
    def parse(cls, content: bytes) -> Offer | None:
        """The offer in a frame of ``OFFER_BYTES``; None if the frame is no offer."""
        magic, address, is_raw, stamp, session = _OFFER.unpack(content)
        try:
            name = session.rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError:
            return None
        return cls(name, address, stamp, bool(is_raw)) if magic == _SAYS and is_raw in (0, 1) else None


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A consumer's request for one hand-off; ``size_bytes`` is the announced size, None if none was announced.

    ``host`` is where a reference says that its producer is; empty for a sender that this process was told of.
    ``producer`` is its name.
    """

    generation: bytes
    token: bytes
    consume: bool
    size_bytes: int | None
    host: str
    producer: str


class OfferServer(PayloadServer):
    """Offers one hand-off to each connection, by its own token, or by ``sender_token`` and the digest of its key."""

    def __init__(
        self,
        host: str,
        store: Store,
        tls: ssl.SSLContext | None,
        limits: ServerLimits,
        port: int,
        session: str,
        sender_token: bytes,
    ) -> None:
        self._session = session
        self._sender_token = sender_token
        #: Whether a consumer was reading when the server was closed.
        self.cut_off = False
        super().__init__(host, store, tls, limits, port)

    def _end(self) -> None:
        self.cut_off = any(connection.kept is not None for connection in self._connections.values())
        super()._end()

    def _answer(self, connection: Connection, generation: bytes, token: bytes, consume: bool) -> None:
        if hmac.compare_digest(token, self._sender_token):
            # Consumers with the sender's token show the digest of a key in place of a generation.
            generation = self._store.generation_of(generation) or generation
            token = self._store.token_of(generation) or token
        super()._answer(connection, generation, token, consume)

    def _content(self, kept: Kept) -> memoryview:
        block = kept.block
        assert isinstance(block, PoolBlock)  # noqa: S101 - for the type checker
        return memoryview(Offer(self._session, block.address, block.block.stamp, block.is_raw).pack())

    def _all_sent(self, connection: Connection) -> None:
        if connection.kept is None:
            super()._all_sent(connection)
            return
        connection.deadline_s = connection.end_s
        self._wait_for(connection, selectors.EVENT_READ)

    def _answered(self, connection: Connection, answer: bytes) -> None:
        received = answer == RECEIVED
        if received and connection.kept is not None:
            connection.kept.block.note_fetched()
            connection.stream.send(RECEIVED)
        how = "sent" if received else "refused_garbage" if answer else "broken"
        self._close(connection, how, consumed=received and connection.consume)


def receive_offered(
    connection: socket.socket,
    fetching: Fetch,
    asked: FetchRequest,
    deadline_s: float,
    pool: ManagedPool,
    read: Read,
    reads: ProducerReads,
) -> tuple[Block, int, bool] | None:
    """The consumer's side: receive a hand-off into a block of ``pool``; None if its producer has dropped it.

    Returns the block, held by the caller, the size in bytes, and whether the content is raw. ``deadline_s`` is a moment
    of the monotonic clock. ``reads`` knows of the read, also while it goes on behind the fetch. Raise TransferError, or
    OSError.
    """
    connection.settimeout(left_s(deadline_s))
    connection.sendall(pack_request(asked.generation, asked.token, consume=asked.consume))
    head = bytearray(ANSWER_BYTES)
    receive_into(connection, memoryview(head), deadline_s)
    answer = parse_answer(bytes(head))
    if answer is None:
        raise TransferError("what answers there is no producer of hand-offs")
    status, size_bytes = answer
    if status is Status.GONE:
        return None
    if asked.size_bytes is not None and size_bytes != asked.size_bytes:
        raise TransferError(f"{size_bytes} bytes are offered, {asked.size_bytes} were announced")
    frame = bytearray(OFFER_BYTES)
    receive_into(connection, memoryview(frame), deadline_s)
    offer = Offer.parse(bytes(frame))
    if offer is None:
        raise TransferError("what answers there hands over by other means than a transfer engine")
    _check_session(offer.session, asked.host, connection)
    reads.begin(asked.producer, size_bytes, pool.size_bytes, deadline_s, fetching.check)
    try:
        block = pool.allocate(size_bytes)
        try:
            reading = read(offer.session, offer.address, size_bytes, block)
        except BaseException:
            pool.let_go(block)
            raise
    except BaseException:
        reads.end(asked.producer, size_bytes)
        raise
    reading.add_done_callback(lambda _: reads.end(asked.producer, size_bytes))
    try:
        _wait(reading, fetching, deadline_s)
        if reading.result() or not pool.has_stamp(block, offer.stamp):
            raise TransferError(f"the engine could not read from {offer.session}")
        pool.stamp(block)
        connection.settimeout(left_s(deadline_s))
        connection.sendall(RECEIVED)
        receive_into(connection, memoryview(bytearray(len(RECEIVED))), deadline_s)
    except BaseException:
        # The block stays held until the read has ended: the engine may still write into it.
        reading.add_done_callback(lambda _: pool.let_go(block))
        if not reading.done():
            reads.watch(asked.producer, reading)
        raise
    return block, size_bytes, offer.is_raw


def _check_session(session: str, host: str, connection: socket.socket) -> None:
    """Raise TransferError for an engine elsewhere than its producer: this process would connect to any address."""
    its_host, _, port = session.rpartition(":")
    # The length first: a number of thousands of digits would take long, or be a ValueError.
    if not port.isdecimal() or len(port) > len("65535") or not 0 < int(port) < 65536:
        raise TransferError(f"{session!r} is no engine")
    if host and its_host not in (host, connection.getpeername()[0]):
        raise TransferError(f"the engine is said to be at {its_host!r}, and the producer is at {host!r}")


def _wait(reading: Future[int], fetching: Fetch, deadline_s: float) -> None:
    while True:
        fetching.check()
        at_most_s = min(left_s(deadline_s), _LOOK_EVERY_S)
        with contextlib.suppress(TimeoutError):
            reading.exception(at_most_s)
            return
