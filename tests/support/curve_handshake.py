"""A CURVE handshake made by hand, by the client's side: with as many properties as it likes, under a key of its own."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import zmq
from zmq.utils import z85

#: The library that pyzmq brings along.
_SODIUM: Final = ctypes.CDLL(str(next((Path(zmq.__file__).parent.parent / "pyzmq.libs").glob("libsodium*"))))
_MAC: Final = 16
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\0" + bytes(31)
#: The smallest property without a value, under a name of four bytes, and those that ZMTP asks for.
_EMPTY_VALUE: Final = bytes(4)
_NAME_BYTES: Final = 4
_USUAL: Final = b"\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"


def _box(text: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
    out = ctypes.create_string_buffer(len(text) + _MAC)
    assert _SODIUM.crypto_box_easy(out, text, ctypes.c_ulonglong(len(text)), nonce, public, secret) == 0
    return out.raw


def _unbox(boxed: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
    out = ctypes.create_string_buffer(len(boxed) - _MAC)
    assert _SODIUM.crypto_box_open_easy(out, boxed, ctypes.c_ulonglong(len(boxed)), nonce, public, secret) == 0
    return out.raw


def _key_pair() -> tuple[bytes, bytes]:
    public, secret = zmq.curve_keypair()
    return z85.decode(public), z85.decode(secret)


def properties(size_bytes: int) -> bytes:
    """As many properties as so many bytes hold."""
    count = max(0, size_bytes - len(_USUAL)) // (1 + _NAME_BYTES + len(_EMPTY_VALUE))
    names = (b"\x04" + number.to_bytes(_NAME_BYTES, "big") + _EMPTY_VALUE for number in range(count))
    return _USUAL + b"".join(names)


class CurveHandshake:
    """One connection to a port that speaks CURVE. ``server_key`` is that port's public key, in Z85."""

    def __init__(self, host: str, port: int, server_key: str) -> None:
        self._server = z85.decode(server_key)
        self._socket = socket.create_connection((host, port), timeout=10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def initiate(self, metadata: bytes) -> None:
        """Go as far as INITIATE, the first command with properties. Raise OSError where the other side ends it."""
        public, secret = _key_pair()
        short_public, short_secret = _key_pair()
        nonce = bytes(8)
        hello = _box(bytes(64), b"CurveZMQHELLO---" + nonce, self._server, short_secret)
        self._socket.sendall(_GREETING)
        self._read(len(_GREETING))
        self._send(b"\x05HELLO\x01\0" + bytes(72) + short_public + nonce + hello)
        welcome = self._read_command()
        assert welcome.startswith(b"\x07WELCOME")
        opened = _unbox(welcome[24:], b"WELCOME-" + welcome[8:24], self._server, short_secret)
        short_server, cookie = opened[:32], opened[32:]
        vouch_nonce = os.urandom(16)
        vouch = _box(short_public + self._server, b"VOUCH---" + vouch_nonce, short_server, secret)
        boxed = _box(public + vouch_nonce + vouch + metadata, b"CurveZMQINITIATE" + nonce, short_server, short_secret)
        self._send(b"\x08INITIATE" + cookie + nonce + boxed)

    def is_ended(self, within_s: float) -> bool:
        """Whether the other side closes the connection in time."""
        self._socket.settimeout(within_s)
        try:
            while self._socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def _send(self, command: bytes) -> None:
        if len(command) < 256:
            self._socket.sendall(b"\x04" + bytes([len(command)]) + command)
        else:
            self._socket.sendall(b"\x06" + len(command).to_bytes(8, "big") + command)

    def _read_command(self) -> bytes:
        flags, size = self._read(2)
        assert flags == 4, "a short command was due"
        return self._read(size)

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            more = self._socket.recv(size - len(found))
            if not more:
                raise ConnectionResetError("the other side has ended the connection")
            found += more
        return found
