"""Clients that mean harm, on plain sockets: they send what no library would, and read only when they are told to."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

#: What a connection says that was closed by the other side without a last word.
GONE = (ConnectionError, BrokenPipeError)
#: The state of a listening socket in the kernel's tables.
_LISTENING = "0A"


class Attacker:
    """One connection to the hub at ``url``; ``receive_buffer`` bounds what the kernel takes for one that reads not."""

    def __init__(self, url: str, receive_buffer: int = 0, source: str = "") -> None:
        parts = urlsplit(url)
        self.host = parts.netloc
        self.sent_bytes = 0
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if source:
            self.socket.bind((source, 0))
        self.socket.settimeout(30.0)
        self.socket.connect((parts.hostname, parts.port))

    def send(self, data: bytes) -> None:
        """Send all of it."""
        self.socket.sendall(data)
        self.sent_bytes += len(data)

    def request(self, body: bytes | None = None, **headers: str) -> None:
        """Send a request for a chat, or only its header if there is no body."""
        lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {self.host}"]
        given = {"Content-Type": "application/json", **{name.replace("_", "-"): each for name, each in headers.items()}}
        if body is not None:
            given.setdefault("Content-Length", str(len(body)))
        head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in given.items())]) + "\r\n\r\n"
        self.send(head.encode() + (body or b""))

    def answer(self, timeout_s: float = 30.0) -> bytes:
        """Everything that comes until the hub closes the connection; fails with TimeoutError if it does not."""
        found = b""
        deadline_s = time.monotonic() + timeout_s
        with suppress(*GONE):
            while True:
                self.socket.settimeout(max(0.01, deadline_s - time.monotonic()))
                piece = self.socket.recv(1 << 16)
                if not piece:
                    break
                found += piece
        return found

    def is_closed(self) -> bool:
        """Whether the hub has closed the connection, by what can be read or sent now."""
        self.socket.settimeout(0.01)
        try:
            return self.socket.recv(1 << 16) == b""
        except TimeoutError:
            return False
        except GONE:
            return True

    def open_stream(self) -> None:
        """Become a WebSocket of /v1/stream."""
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET /v1/stream HTTP/1.1\r\nHost: {self.host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        self.send(f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode())
        head_bytes = b""
        while not head_bytes.endswith(b"\r\n\r\n"):
            piece = self.socket.recv(1)
            assert piece, f"refused: {head_bytes!r}"
            head_bytes += piece
        assert head_bytes.startswith(b"HTTP/1.1 101"), head_bytes

    def send_frame(self, **fields: Any) -> None:
        """Send one text frame of the stream."""
        self.send(frame(1, json.dumps(fields).encode()))

    def close(self) -> None:
        """Leave at once."""
        self.socket.close()


def frame(opcode: int, payload: bytes) -> bytes:
    """One masked WebSocket frame; the mask is 0."""
    size = len(payload)
    if size < 126:
        return struct.pack("!BB", 0x80 | opcode, 0x80 | size) + bytes(4) + payload
    return struct.pack("!BBH", 0x80 | opcode, 0x80 | 126, size) + bytes(4) + payload


#: A ping that fills its frame.
PING = frame(9, b"x" * 125)


@contextmanager
def attackers(url: str, count: int, **options: Any) -> Iterator[list[Attacker]]:
    """So many connections, closed at the end."""
    opened: list[Attacker] = []
    try:
        opened.extend(Attacker(url, **options) for _ in range(count))
        yield opened
    finally:
        for each in opened:
            each.close()


def rss_bytes(pid: int) -> int:
    """The memory that a process has now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def listeners(pid: int) -> list[tuple[str, int]]:
    """The TCP addresses that a process on this machine listens on."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(str(entry.readlink()))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets:
                host, _, port = fields[1].partition(":")
                # Words of 32 bits, each in the machine's order of bytes.
                words = struct.pack(f"={len(host) // 8}I", *struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host)))
                found.append((socket.inet_ntop(family, words), int(port, 16)))
    return found


def descriptors(pid: int) -> int:
    """How many files a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
