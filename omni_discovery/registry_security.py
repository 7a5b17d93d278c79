"""RegistrySecurity: who we are for etcd and how the way to it is protected. Checked at the door, files and all."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from omni_discovery.endpoints import scheme_of
from omni_discovery.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryTls:
    """TLS to etcd. Files are PEM. Raises ConfigError when built from files that can't work together."""

    #: Who must have signed etcd's certificate; empty for the authorities that this system trusts.
    ca_file: str = ""
    #: Our own certificate and its key, where etcd asks clients for one.
    cert_file: str = ""
    key_file: str = ""
    #: The name that etcd's certificate must bear, where that is not the endpoint's host.
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
    """What a connection to etcd needs besides its endpoints. The default is plaintext and nobody."""

    tls: RegistryTls | None = None
    user: str = ""
    #: Never shown, never logged, never in an argument list.
    password: str = field(default="", repr=False)

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
        if scheme == "http" and self.tls is not None:
            raise ConfigError(f"etcd endpoints {endpoints!r} say http:// and the other flags say TLS: write https://")
        if scheme == "https" and self.tls is None:
            return replace(self, tls=RegistryTls())
        return self
