"""TLS between connectors: both sides show a certificate of the same authority.

Names in certificates are not looked at: hosts come and go, and only this deployment's authority is believed at all.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_discovery.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """The two sides' contexts."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def load_tls(settings: Any) -> Tls | None:
    """Contexts from the paths ``cert``, ``key`` and ``ca``; None without settings. Raise ConfigError."""
    if not settings:
        return None
    if not isinstance(settings, Mapping) or set(settings) != {"cert", "key", "ca"}:
        raise ConfigError(f"tls needs exactly the paths 'cert', 'key' and 'ca', not {settings!r}")
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(settings["cert"], settings["key"])
            context.load_verify_locations(settings["ca"])
        except (OSError, TypeError) as error:
            raise ConfigError(f"tls: {error}") from error
    return Tls(server, client)
