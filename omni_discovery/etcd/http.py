"""What etcd answers in plain HTTP beside gRPC, to everybody who reaches it: its health and its release."""

from __future__ import annotations

import http.client
import socket
import ssl
from typing import Final

from omni_discovery.etcd.config import RegistryTls, socket_path

#: The name under which an etcd on a socket is asked: it refuses others.
LOCAL_NAME: Final = "localhost"
_MOST_BYTES: Final = 4 * 1024 * 1024


def get_text(endpoint: str, path: str, *, tls: RegistryTls | None = None, timeout_s: float = 1.0) -> str:
    """GET ``path`` from an endpoint as parse_endpoints returns it. Raise OSError. Blocks."""
    connection = _connection(endpoint, tls, timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read(_MOST_BYTES).decode(errors="replace") if answer.status == http.client.OK else ""
    except http.client.HTTPException as error:
        raise OSError(f"{endpoint} does not answer in HTTP: {error!r}") from error
    finally:
        connection.close()


def _connection(endpoint: str, tls: RegistryTls | None, timeout_s: float) -> http.client.HTTPConnection:
    if path := socket_path(endpoint):
        return _SocketConnection(path, timeout_s)
    host, _, port = endpoint.rpartition(":")
    if tls is None:
        return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
    context = ssl.create_default_context(cafile=tls.ca_file or None)
    if tls.cert_file:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    return _NamedConnection(host.strip("[]"), int(port), timeout_s, context, tls.server_name)


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a socket of this machine."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__(LOCAL_NAME, timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _NamedConnection(http.client.HTTPSConnection):
    """HTTPS to a server whose certificate may be for another name than the host's."""

    def __init__(self, host: str, port: int, timeout_s: float, context: ssl.SSLContext, name: str) -> None:
        super().__init__(host, port, timeout=timeout_s, context=context)
        self._tls, self._name = context, name or host

    def connect(self) -> None:
        plain = socket.create_connection((self.host, self.port), self.timeout)
        self.sock = self._tls.wrap_socket(plain, server_hostname=self._name)
