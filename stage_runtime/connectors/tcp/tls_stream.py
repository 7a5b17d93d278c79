"""TlsStream: TLS over a socket that does not block, for a thread that serves many.

An ssl.SSLSocket reads as long as records come that bring nothing, as new keys do, and keeps its thread as long as its
peer likes. Here TLS gets a few KiB at a time, and a connection may send no more than it needs.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Final

#: What TLS gets at once: some 150 records at most.
_SLICE_BYTES: Final = 4 << 10
#: What a connection may send: a handshake, of whose certificates OpenSSL takes 100 KiB, a request and an answer.
_MOST_RECEIVED_BYTES: Final = 128 << 10
#: What is encrypted before it is sent: it is copied twice on its way, at best within the processor's cache.
_PIECE_BYTES: Final = 64 << 10


class TlsStream:
    """The server's side. Each call may raise OSError, among them SSLWantReadError and SSLWantWriteError of ssl.

    An end without TLS's own goodbye is an error, too.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._received_bytes = 0
        #: Encrypted, and not sent yet.
        self._unsent = memoryview(b"")
        #: How many bytes of the piece that is being sent are encrypted; 0: none.
        self._encrypted = 0

    def recv(self, size: int) -> bytes:
        """Return what has come, at most so many bytes; nothing at the stream's end. It makes the handshake, too.

        It reads one slice from the socket at most: others have their turn before the next.
        """
        try:
            return self._read(size)
        except ssl.SSLWantReadError:
            self._take()
        return self._read(size)

    def _read(self, size: int) -> bytes:
        try:
            return self._tls.read(size)
        except ssl.SSLZeroReturnError:
            return b""
        except ssl.SSLWantReadError:
            self._flush()
            raise
        except ssl.SSLError:
            # The alert says why.
            with contextlib.suppress(OSError):
                self._flush()
            raise

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
        self._received_bytes += len(came)
        if self._received_bytes > _MOST_RECEIVED_BYTES:
            raise ConnectionError(f"more than {_MOST_RECEIVED_BYTES} bytes for one request")
        if came:
            self._incoming.write(came)
        else:
            self._incoming.write_eof()

    def _flush(self) -> None:
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                raise ssl.SSLWantWriteError from None
            self._unsent = self._unsent[sent:]
