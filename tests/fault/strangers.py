"""Clients that behave badly, beside those whose answers are judged."""

from __future__ import annotations

import json
import socket
import struct

from tests.fault.site import Site

_ABORT = struct.pack("ii", 1, 0)


class Stranger:
    """Asks for a stream of so many words; it reads the first bytes of it, or nothing."""

    def __init__(self, site: Site, *, words: int, word_bytes: int, reads: bool) -> None:
        host, port = site.address
        prompt = " ".join(f"{number:0{word_bytes}}" for number in range(words))
        body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": True}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with site.hosts["front"].inside():
            self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(10.0)
        self._socket.connect((host, port))
        self._socket.sendall(head.encode() + body)
        if reads:
            self._socket.recv(64)

    def leave(self) -> None:
        """Reset the connection."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self._socket.close()
