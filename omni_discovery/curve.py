"""CURVE encryption: key pairs, and which peers may connect. Every process publishes its public key in its record.

Keys are in ZMQ's printable form (Z85, 40 characters). The secret key is never logged, shown or sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from omni_discovery.errors import ConfigError

#: Length of a key in its printable form.
KEY_LENGTH = 40


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One process's CURVE keys; the secret does not show in ``repr``."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        """Make a new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode("ascii"), secret.decode("ascii"))

    @classmethod
    def from_secret(cls, secret: str) -> KeyPair:
        """The pair of a saved secret key. Raise ConfigError if ``secret`` is not one."""
        try:
            return cls(zmq.curve_public(secret.encode("ascii")).decode("ascii"), secret)
        except (ValueError, zmq.ZMQError) as error:
            raise ConfigError("the saved CURVE secret is damaged; delete its file and a new one is made") from error


def is_public_key(text: str) -> bool:
    """Whether ``text`` can be a public key in the form that records hold."""
    if len(text) != KEY_LENGTH or not text.isascii():
        return False
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, ValueError, OverflowError):
        return False


def secure_server(socket: zmq.Socket[bytes], pair: KeyPair) -> None:
    """Encrypt a server socket, before it binds: only clients that know its public key can connect."""
    socket.curve_publickey = pair.public.encode("ascii")
    socket.curve_secretkey = pair.secret.encode("ascii")
    socket.curve_server = True


def secure_client(socket: zmq.Socket[bytes], pair: KeyPair, server_public: str) -> None:
    """Encrypt a client socket, before it connects, to the server whose public key is ``server_public``.

    Raise ConfigError if ``server_public`` is not a key.
    """
    if not is_public_key(server_public):
        raise ConfigError("the peer's record holds no usable CURVE public key")
    socket.curve_publickey = pair.public.encode("ascii")
    socket.curve_secretkey = pair.secret.encode("ascii")
    socket.curve_serverkey = server_public.encode("ascii")


class Gatekeeper:
    """Authenticates the clients of all server sockets of one ZMQ context (ZAP, RFC 27).

    Used by one thread, but for ``allow`` and ``revoke``. A refused client is disconnected without an answer and may try
    again: its key may not have arrived from the registry yet.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        #: The hubs that may connect: their ids by public key. Swapped whole, so a reader's view never moves. Records of
        #: several ids may hold one key, since anybody can copy a public key into a record.
        self._allowed: Mapping[str, frozenset[str]] = {}
        #: Ids of hubs that may not connect, whatever their key. Swapped whole, too.
        self._revoked: frozenset[str] = frozenset()
        #: How many handshakes were refused.
        self.refused = 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def allow(self, public_keys: Mapping[str, str]) -> None:
        """Set the hubs that may connect: public keys by hub id. Open connections stay. Callable from any thread."""
        allowed: defaultdict[str, set[str]] = defaultdict(set)
        for hub_id, public_key in public_keys.items():
            # Hubs that don't encrypt have an empty one.
            if public_key:
                allowed[public_key].add(hub_id)
        self._allowed = {public_key: frozenset(hub_ids) for public_key, hub_ids in allowed.items()}

    def hubs_of_key(self, public_key: str) -> frozenset[str]:
        """The hubs that whoever has this key may speak as. Callable from any thread."""
        return self._allowed.get(public_key, frozenset())

    def revoke(self, hub_ids: frozenset[str]) -> None:
        """Set the hubs that are refused although allowed. Open connections stay. Callable from any thread."""
        self._revoked = hub_ids

    def answer_handshakes(self) -> None:
        """Answer all pending ZAP requests. The public key of a client becomes the ``User-Id`` of all its frames.

        It is no hub id: which hubs a key belongs to may change while the connection stands.
        """
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # Routing id, delimiter, version, request, domain, address, identity, mechanism, credentials.
            if len(frames) < 8:
                continue
            public_key = _public_key(frames[7], frames[8:])
            may_connect = bool(self.hubs_of_key(public_key) - self._revoked)
            self.refused += not may_connect
            status = (b"200", b"OK") if may_connect else (b"300", b"unknown key")
            user_id = public_key.encode("ascii") if may_connect else b""
            self.socket.send_multipart([*frames[:2], b"1.0", frames[3], *status, user_id, b""])

    def close(self) -> None:
        """Close the ZAP socket. Idempotent."""
        self.socket.close()


def _public_key(mechanism: bytes, credentials: list[bytes]) -> str:
    """The key that a client has proved to have; empty, which is no key, if it has proved none."""
    if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
        return ""
    return z85.encode(credentials[0]).decode("ascii")
