"""What anybody on the same network would see: every byte of TCP to and from some ports of the loopback."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from collections import defaultdict
from types import TracebackType
from typing import Final, Self

import pytest

_ALL_PROTOCOLS: Final = 0x0003
_OUTGOING: Final = 4
_SOL_PACKET: Final = 263
_STATISTICS: Final = 6
_RCVBUFFORCE: Final = 33
_ATTACH_FILTER: Final = 26
_NO_MORE_S: Final = 0.2


class Sniffer:
    """Listens while it is entered; then ``streams`` holds what each side said, put together again."""

    def __init__(self, ports: set[int]) -> None:
        self._ports = ports
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
        except PermissionError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"listening to the loopback needs CAP_NET_RAW: {error}")
        self._socket.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 64 << 20)
        self._filter = _only(ports)
        program = struct.pack("HL", len(self._filter) // 8, ctypes.addressof(self._filter))
        self._socket.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
        self._socket.bind(("lo", 0))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="sniffer", daemon=True)
        #: Pieces by (from port, to port) and TCP sequence number.
        self._pieces: dict[tuple[int, int], dict[int, bytes]] = defaultdict(dict)
        self.lost = 0

    @property
    def streams(self) -> dict[tuple[int, int], bytes]:
        """What was said, by (from port, to port)."""
        return {way: b"".join(pieces[key] for key in sorted(pieces)) for way, pieces in self._pieces.items()}

    def seen(self, what: bytes) -> set[int]:
        """On which of the ports that text went by, whoever said it."""
        ways = [way for way, stream in self.streams.items() if what in stream]
        return {port for way in ways for port in way} & self._ports

    def size_bytes(self, port: int) -> int:
        """How much went to and from a port."""
        return sum(len(stream) for way, stream in self.streams.items() if port in way)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(5.0)
        _, self.lost = struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _STATISTICS, 8))
        self._socket.close()

    def _listen(self) -> None:
        self._socket.settimeout(_NO_MORE_S)
        closed_s = None
        while closed_s is None or time.monotonic() - closed_s < _NO_MORE_S:
            if self._closing.is_set() and closed_s is None:
                closed_s = time.monotonic()
            try:
                packet, address = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                continue
            # Each packet of the loopback comes by twice.
            if address[2] == _OUTGOING:
                self._take(packet)

    def _take(self, packet: bytes) -> None:
        ip = packet[14:]
        if len(ip) < 40 or packet[12:14] != b"\x08\x00" or ip[9] != socket.IPPROTO_TCP:
            return
        (total,) = struct.unpack_from("!H", ip, 2)
        tcp = ip[4 * (ip[0] & 15) : total or None]
        way = struct.unpack_from("!HH", tcp)
        if not self._ports.intersection(way):
            return
        (number,) = struct.unpack_from("!I", tcp, 4)
        said = tcp[4 * (tcp[12] >> 4) :]
        if said:
            self._pieces[way][number] = said


def _only(ports: set[int]) -> ctypes.Array[ctypes.c_char]:
    """The kernel's filter for TCP over IPv4 from and to these ports: others of this machine may talk a lot."""
    count = len(ports)
    # Each step is an operation, how far to jump if it is true and if not, and a number.
    program = [
        (0x28, 0, 0, 12),
        (0x15, 0, 2 * count + 5, 0x0800),
        (0x30, 0, 0, 23),
        (0x15, 0, 2 * count + 3, socket.IPPROTO_TCP),
        (0xB1, 0, 0, 14),
        (0x48, 0, 0, 14),
        *((0x15, 2 * count + 1 - index, 0, port) for index, port in enumerate(ports)),
        (0x48, 0, 0, 16),
        *((0x15, count - index, 0, port) for index, port in enumerate(ports)),
        (0x06, 0, 0, 0),
        (0x06, 0, 0, 1 << 18),
    ]
    return ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program), 8 * len(program))
