"""TLS of a hub's ports: the files, the checks before anything starts, and certificates that are renewed meanwhile."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from omni_discovery.errors import ConfigError

logger = logging.getLogger(__name__)

#: How often the files are looked at.
_CHECK_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """``--ssl-certfile`` and its kin; ``key`` empty: it is in ``certificate``. ``cert_reqs`` is Python's number."""

    certificate: str
    key: str = ""
    ca: str = ""
    cert_reqs: int = ssl.CERT_NONE


def load_context(files: TlsFiles) -> ssl.SSLContext:
    """A server's TLS context of these files. Raise ConfigError that says which file is wrong, and how."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_pair(context, files)
    context.verify_mode = ssl.VerifyMode(files.cert_reqs)
    if files.ca:
        try:
            context.load_verify_locations(files.ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--ssl-ca-certs {files.ca} can't be used: {_reason(error)}") from error
    return context


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    for flag, name in (("--ssl-certfile", files.certificate), ("--ssl-keyfile", files.key)):
        try:
            if name:
                Path(name).read_bytes()
        except OSError as error:
            raise ConfigError(f"{flag} {name} can't be read: {error.strerror}") from error
    try:
        context.load_cert_chain(files.certificate, files.key or None, _refuse_password)
    except (OSError, ValueError) as error:
        pair = f"--ssl-certfile {files.certificate}" + (f" and --ssl-keyfile {files.key}" if files.key else "")
        raise ConfigError(f"{pair} can't be used: {_reason(error)}") from error


def _refuse_password() -> str:
    # Without it, OpenSSL would ask on the terminal.
    raise ValueError("the key is encrypted; a hub can't ask for its passphrase")


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is not that of the certificate"
        # OpenSSL names no reason where it finds nothing in a file.
        reason = str(error.reason or "NO_START_LINE")
        nothing = "no PEM block of a certificate and of its key is in there"
        return nothing if reason == "NO_START_LINE" else reason.lower().replace("_", " ")
    return str(error)


async def follow_files(context: ssl.SSLContext, files: TlsFiles, check_s: float = _CHECK_S) -> None:
    """Have new connections use a renewed certificate; ends only by cancellation. A pair that is wrong is not used."""
    seen = _times(files)
    while True:
        await asyncio.sleep(check_s)
        now = _times(files)
        if now == seen:
            continue
        try:
            # First elsewhere: half a pair must not get into the context that is used.
            load_context(files)
            _load_pair(context, files)
        except ConfigError as error:
            logger.error("tls.not_renewed reason=%s: connections go on with the certificate that was there", error)
        else:
            logger.info("tls.renewed certificate=%s", files.certificate)
        seen = now


def _times(files: TlsFiles) -> tuple[int, ...]:
    return tuple(_time(name) for name in (files.certificate, files.key) if name)


def _time(name: str) -> int:
    try:
        return Path(name).stat().st_mtime_ns
    except OSError:
        return 0
