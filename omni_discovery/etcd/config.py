"""RegistryConfig: endpoints, namespace, TLS, user and times of a connection to etcd, all checked when it is built.

Endpoints are ``host:port``, a comma list of them, or a sequence; ``https://`` in front means TLS. ``unix:///path`` is a
socket of this machine, such as the one of an embedded etcd.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from omni_discovery.errors import ConfigError
from omni_discovery.records.keys import check_namespace

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?")
_RIGHT = "write host:port, for example 10.0.0.5:2379 or [fd00::5]:2379, several with commas"
_UNIX = "unix://"
#: The longest path that the kernel takes for a socket, in bytes.
LONGEST_SOCKET_PATH = 107


def parse_endpoints(endpoints: str | Sequence[str]) -> tuple[str, ...]:
    """Return each endpoint once as ``host:port`` or ``unix:///path``, in the order given. Raise ConfigError."""
    words = [endpoints] if isinstance(endpoints, str) else list(endpoints)
    if not all(isinstance(word, str) for word in words):
        raise ConfigError(f"etcd endpoints {endpoints!r} are not text: {_RIGHT}")
    parts = [part.strip() for word in words for part in word.split(",")]
    found = dict.fromkeys(_parse_one(part) for part in parts if part)
    if not found:
        raise ConfigError(f"no etcd endpoint in {endpoints!r}: {_RIGHT}")
    return tuple(found)


def socket_path(endpoint: str) -> str:
    """The path of an endpoint, as parse_endpoints returns it, that is a socket of this machine; empty for any other."""
    return endpoint.removeprefix(_UNIX) if endpoint.startswith(_UNIX) else ""


def url_of(endpoint: str, scheme: str) -> str:
    """An endpoint as parse_endpoints returns it, with ``scheme`` in front where it has none of its own."""
    return endpoint if not scheme or socket_path(endpoint) else f"{scheme}://{endpoint}"


def scheme_of(endpoints: str | Sequence[str]) -> str:
    """``https``, ``http``, or empty where no endpoint says either; sockets don't count. Raise ConfigError if mixed."""
    words = [endpoints] if isinstance(endpoints, str) else list(endpoints)
    parts = [part.strip() for word in words for part in word.split(",")]
    found = {part.partition("://")[0] for part in parts if "://" in part and not part.startswith(_UNIX)}
    if len(found) > 1:
        raise ConfigError(f"etcd endpoints {endpoints!r} mix http:// and https://; a cluster speaks one of them")
    return found.pop() if found else ""


def _parse_one(text: str) -> str:
    if text.startswith(_UNIX):
        return _parse_socket(text)
    rest = text.removeprefix("http://").removeprefix("https://").removesuffix("/")
    host, colon, port = rest.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"etcd endpoint {text!r} has no usable port: {_RIGHT}")
    if not _is_host(host):
        raise ConfigError(f"etcd endpoint {text!r} has no usable host: {_RIGHT}")
    return f"{host}:{int(port)}"


def _parse_socket(text: str) -> str:
    path = text.removeprefix(_UNIX)
    if not path.startswith("/") or path.endswith("/") or not path.isprintable():
        raise ConfigError(f"etcd endpoint {text!r} is no socket: write unix:// and its whole path, as in unix:///run/x")
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise ConfigError(
            f"etcd endpoint {text!r} is longer than the {LONGEST_SOCKET_PATH} bytes that a socket may have"
        )
    return _UNIX + path


def _is_host(host: str) -> bool:
    if not host.startswith("["):
        return _HOST.fullmatch(host) is not None
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return False
    return host.endswith("]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryTls:
    """TLS to etcd. Files are PEM. Raises ConfigError when built from files that can't work together."""

    #: CA certificates that etcd's certificate must be signed by; empty for those that this system trusts.
    ca_file: str = ""
    #: The client certificate and its key, where etcd requires one.
    cert_file: str = ""
    key_file: str = ""
    #: The name in etcd's certificate, where that is not the endpoint's host.
    server_name: str = ""

    def __post_init__(self) -> None:
        """Check that the files are there, are what they should be, and belong together."""
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("a client certificate needs its key: give both --etcd-cert and --etcd-key, or neither")
        if self.cert_file and not self.ca_file:
            # Some clients take this for "no TLS" and send everything in the clear.
            raise ConfigError("a client certificate without a CA: say with --etcd-ca who has signed etcd's certificate")
        self._check_files()

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """The CA, the key and the certificate, each None where there is no such file."""
        files = (self.ca_file, self.key_file, self.cert_file)
        ca, key, cert = (Path(file).read_bytes() if file else None for file in files)
        return ca, key, cert

    def _check_files(self) -> None:
        named = {"--etcd-ca": self.ca_file, "--etcd-cert": self.cert_file, "--etcd-key": self.key_file}
        for flag, file in named.items():
            try:
                if file:
                    Path(file).read_bytes()
            except OSError as error:
                raise ConfigError(f"{flag} {file} can't be read: {error.strerror}") from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.ca_file:
                context.load_verify_locations(self.ca_file)
        except ssl.SSLError as error:
            raise ConfigError(f"--etcd-ca {self.ca_file} holds no certificate: {error.reason or error}") from error
        try:
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except ssl.SSLError as error:
            reason = error.reason or error
            text = f"--etcd-cert {self.cert_file} and --etcd-key {self.key_file} don't go together: {reason}"
            raise ConfigError(text) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySecurity:
    """TLS and user of a connection to etcd. The default is plaintext without a user."""

    tls: RegistryTls | None = None
    user: str = ""
    #: Never shown, never logged, never in an argument list.
    password: str = field(default="", repr=False)
    #: The file that ``password`` was read from, absolute: it may hold another one by the time a child starts.
    password_file: str = ""

    def __post_init__(self) -> None:
        """Raise ConfigError for half a credential."""
        if self.user and not self.password:
            text = f"etcd user {self.user!r} has no password: set OMNI_ETCD_PASSWORD or give --etcd-password-file"
            raise ConfigError(text)
        if self.password and not self.user:
            raise ConfigError("a password for etcd without a user: give --etcd-user")

    def for_endpoints(self, endpoints: str | Sequence[str]) -> RegistrySecurity:
        """The same with TLS if the endpoints ask for it. Raise ConfigError if they ask for plaintext and we for TLS."""
        scheme = scheme_of(endpoints)
        if (self.tls or scheme == "https") and any(map(socket_path, parse_endpoints(endpoints))):
            raise ConfigError(
                f"etcd endpoints {endpoints!r} name a socket, which has no TLS: leave out the flags for it"
            )
        if scheme == "http" and self.tls is not None:
            raise ConfigError(f"etcd endpoints {endpoints!r} say http:// and the other flags say TLS: write https://")
        if scheme == "https" and self.tls is None:
            return replace(self, tls=RegistryTls())
        return self


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """Frozen and complete. Raises ConfigError when built from values that can't work together."""

    #: In any form that parse_endpoints reads; kept as the tuple that it returns.
    endpoints: str | Sequence[str]
    namespace: str = "default"
    #: With TLS if the endpoints say ``https://``.
    security: RegistrySecurity = field(default_factory=RegistrySecurity)
    #: TTL of leases; the record of a replica that stops renewing is gone after this.
    ttl_s: float = 10.0
    #: A record in which only the load changed is published at most this often.
    load_interval_s: float = 0.5
    #: A withdrawal waits this long for etcd, then leaves the record to expire.
    close_timeout_s: float = 3.0

    def __post_init__(self) -> None:
        """Check each value and how they fit together."""
        object.__setattr__(self, "security", self.security.for_endpoints(self.endpoints))
        object.__setattr__(self, "endpoints", parse_endpoints(self.endpoints))
        check_namespace(self.namespace)
        # etcd counts leases in whole seconds, and three renewals must fit into one.
        _check_length("ttl_s", self.ttl_s, 1.0, 3600.0)
        # A load older than a lease could be that of a dead replica.
        _check_length("load_interval_s", self.load_interval_s, 0.01, self.ttl_s)
        _check_length("close_timeout_s", self.close_timeout_s, 0.1, 60.0)

    @property
    def try_timeout_s(self) -> float:
        """Limit of one attempt of one call: three renewals must fit into one TTL."""
        return min(2.0, self.ttl_s / 3)

    @property
    def call_timeout_s(self) -> float:
        """No attempt of a call begins later than this after the first."""
        return 2 * self.try_timeout_s


def _check_length(name: str, value_s: float, least_s: float, most_s: float) -> None:
    # Written so that NaN fails too.
    if not least_s <= value_s <= most_s:
        right = f"from {least_s:g} to {most_s:g} with the other times as they are"
        name = f"{name} (--omni-heartbeat-timeout)" if name == "ttl_s" else name
        raise ConfigError(f"{name} is {value_s!r}; right would be {right}")
