"""A TLS client that sends KeyUpdates and records as small as it likes: OpenSSL, but below Python's ssl module."""

from __future__ import annotations

import _ssl
import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from typing import Any, Final

from tests.support.attackers import Attacker

_BUFFER_BYTES: Final = 1 << 16
_UPDATE_REQUESTED: Final = 1
_PEM: Final = 1


def _load() -> Any:
    """The functions of the OpenSSL that Python itself is linked to."""
    openssl = ctypes.CDLL(_ssl.__file__)
    for name, returned, *given in (
        ("TLS_client_method", c_void_p),
        ("SSL_CTX_new", c_void_p, c_void_p),
        ("SSL_CTX_free", None, c_void_p),
        ("SSL_CTX_use_certificate_chain_file", c_int, c_void_p, c_char_p),
        ("SSL_CTX_use_PrivateKey_file", c_int, c_void_p, c_char_p, c_int),
        ("SSL_CTX_set_block_padding", c_int, c_void_p, c_size_t),
        ("SSL_new", c_void_p, c_void_p),
        ("SSL_free", None, c_void_p),
        ("SSL_set_bio", None, c_void_p, c_void_p, c_void_p),
        ("SSL_set_connect_state", None, c_void_p),
        ("SSL_do_handshake", c_int, c_void_p),
        ("SSL_key_update", c_int, c_void_p, c_int),
        ("SSL_write", c_int, c_void_p, c_char_p, c_int),
        ("BIO_s_mem", c_void_p),
        ("BIO_new", c_void_p, c_void_p),
        ("BIO_read", c_int, c_void_p, c_char_p, c_int),
        ("BIO_write", c_int, c_void_p, c_char_p, c_int),
    ):
        function = getattr(openssl, name)
        function.restype, function.argtypes = returned, given
    return openssl


class TlsClient(Attacker):
    """A connection with which TLS 1.3 stands; it checks no certificate, and reads nothing that is encrypted.

    ``certificate`` is the file of its own, and that of the key; records are padded to multiples of ``padding`` bytes.
    """

    def __init__(
        self, url: str, receive_buffer: int = 0, certificate: tuple[str, str] | None = None, padding: int = 0
    ) -> None:
        super().__init__(url, receive_buffer)
        self._openssl = _load()
        self._context = self._openssl.SSL_CTX_new(self._openssl.TLS_client_method())
        if padding:
            assert self._openssl.SSL_CTX_set_block_padding(self._context, padding) == 1
        if certificate is not None:
            chain, key = (each.encode() for each in certificate)
            assert self._openssl.SSL_CTX_use_certificate_chain_file(self._context, chain) == 1
            assert self._openssl.SSL_CTX_use_PrivateKey_file(self._context, key, _PEM) == 1
        self._tls = self._openssl.SSL_new(self._context)
        incoming, self._outgoing = (self._openssl.BIO_new(self._openssl.BIO_s_mem()) for _ in range(2))
        self._openssl.SSL_set_bio(self._tls, incoming, self._outgoing)
        self._openssl.SSL_set_connect_state(self._tls)
        while self._openssl.SSL_do_handshake(self._tls) != 1:
            self.send(self._made())
            came = self.socket.recv(_BUFFER_BYTES)
            assert came, "refused"
            self._openssl.BIO_write(incoming, came, len(came))
        self.send(self._made())

    def records(self, *pieces: bytes) -> bytes:
        """A record of each of these pieces of HTTP."""
        for each in pieces:
            assert self._openssl.SSL_write(self._tls, each, len(each)) == len(each)
        return self._made()

    def key_updates(self, count: int) -> bytes:
        """So many records, each of which has its receiver make a key, and answer."""
        for _ in range(count):
            assert self._openssl.SSL_key_update(self._tls, _UPDATE_REQUESTED) == 1
            assert self._openssl.SSL_do_handshake(self._tls) == 1
        return self._made()

    def close(self) -> None:
        """See Attacker."""
        super().close()
        if self._tls:
            self._openssl.SSL_free(self._tls)
            self._openssl.SSL_CTX_free(self._context)
            self._tls = None

    def _made(self) -> bytes:
        """What is to be sent by now."""
        made, buffer = b"", ctypes.create_string_buffer(_BUFFER_BYTES)
        while (size := self._openssl.BIO_read(self._outgoing, buffer, _BUFFER_BYTES)) > 0:
            made += buffer.raw[:size]
        return made
