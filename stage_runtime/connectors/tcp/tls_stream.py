"""TlsStream: TLS over a socket that does not block, for a thread that serves many.

An ssl.SSLSocket reads as long as records come that bring nothing, and keeps its thread as long as its peer likes. Here
TLS gets what has come a few KiB at a time, and the records are counted.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from omni_discovery.sockets.tls_records import RecordLimit

#: What TLS gets at once: some 150 records at most.
_SLICE_BYTES: Final = 4 << 10
#: What is encrypted before it is sent: it is copied twice on its way, at best within the processor's cache.
_PIECE_BYTES: Final = 64 << 10


class TlsStream:
    """The server's side. Each call may raise OSError, among them SSLWantReadError and SSLWantWriteError of ssl."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._limit = RecordLimit()
        #: Encrypted, and not sent yet.
        self._unsent = memoryview(b"")
        #: How many bytes of the piece that is being sent are encrypted; 0: none.
        self._encrypted = 0

    def recv(self, size: int) -> bytes:
        """Return what has come, at most so many bytes; nothing at the stream's end. It makes the handshake, too."""
        while True:
            try:
                return self._tls.read(size)
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLWantReadError:
                self._flush()
                self._take()

    def send(self, data: memoryview | bytes) -> int:
        """Return how many bytes of the begin are sent. After SSLWantWriteError, call it with the same data again."""
        if not self._encrypted:
            piece = memoryview(data)[:_PIECE_BYTES]
            # A record at a time.
            while self._encrypted < len(piece):
                self._encrypted += self._tls.write(piece[self._encrypted :])
        self._flush()
        sent, self._encrypted = self._encrypted, 0
        return sent

    def _take(self) -> None:
        try:
            came = self._socket.recv(_SLICE_BYTES)
        except BlockingIOError:
            raise ssl.SSLWantReadError from None
        if not came:
            self._incoming.write_eof()
        # A request and an answer are two records: nothing pays for more.
        elif self._limit.came(came, 0):
            raise ConnectionError("the peer sends records without content")
        else:
            self._incoming.write(came)

    def _flush(self) -> None:
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                raise ssl.SSLWantWriteError from None
            self._unsent = self._unsent[sent:]
