"""Maps gRPC's errors to the project's: with the endpoint, and with the party that must act."""

from __future__ import annotations

from typing import Final

import grpc

from omni_discovery.errors import (
    AnswerTooLargeError,
    CompactedError,
    LeaseNotFoundError,
    RegistryDeniedError,
    RegistryError,
    RegistryLoginError,
    RegistryRefusedError,
    RegistryTlsError,
    RegistryUnavailableError,
)
from omni_discovery.etcd.config import RegistryTls, socket_path

_UNAVAILABLE: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        # The server's own deadline arrives so; our own cancellations never come through here.
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
#: Texts of failures that happen before etcd looks at the request.
_NEVER_RAN: Final = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "DNS resolution failed",
    "errors resolving",
    "Name resolution failure",
    "etcdserver: no leader",
    "etcdserver: not ready",
    "etcdserver: too many requests",
)
#: gRPC's own, of an answer that is longer than this client reads.
_TOO_LARGE: Final = "larger than max"
_OTHER_NAME: Final = "its certificate is for another name: correct the endpoint or --etcd-server-name"
_OUR_CERTIFICATE: Final = "it {asks_or_refuses} client certificate: {give_or_correct} --etcd-cert and --etcd-key"
#: gRPC's text for a connection that was never established, and its meaning for the operator. The first match counts.
_NO_TLS: Final = (("Socket closed", "it hangs up as one that speaks TLS does: write https:// or give --etcd-ca"),)
_TLS: Final = (
    ("Handshake read failed", "it does not answer in TLS: write http:// and give no --etcd-ca"),
    ("WRONG_VERSION_NUMBER", "it does not answer in TLS: write http:// and give no --etcd-ca"),
    ("Hostname Verification Check failed", _OTHER_NAME),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by {authority}: correct --etcd-ca"),
    ("BAD_CERTIFICATE", _OUR_CERTIFICATE),
    ("CERTIFICATE_REQUIRED", _OUR_CERTIFICATE),
    ("UNKNOWN_CA", _OUR_CERTIFICATE),
    # The server's verdict on our certificate comes after the handshake; gRPC can't read it there.
    ("TSI_DATA_CORRUPTED", _OUR_CERTIFICATE),
    ("handshake failed", "the TLS handshake failed"),
)
_LOGIN: Final = {
    "user name is empty": "etcd asks who we are: give --etcd-user and its password",
    "invalid user ID or password": "etcd does not know this user with this password",
    "invalid auth token": "the login has ended",
    "revision of auth store is old": "users or roles were changed since the login",
}


def map_error(error: grpc.RpcError, endpoint: str, tls: RegistryTls | None = None) -> RegistryError:
    """Map what gRPC reported of a call to ``endpoint`` to one of errors.py."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND and "lease not found" in details:
        return LeaseNotFoundError(details)
    if code is grpc.StatusCode.OUT_OF_RANGE:
        return CompactedError(details)
    if code in _UNAVAILABLE or "too many requests" in details:
        return _unavailable(code.name, details, endpoint, tls)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return AnswerTooLargeError(f"{endpoint}: {details}")
    return refusal(f"{code.name}: {details}", endpoint)


def refusal(details: str, endpoint: str) -> RegistryRefusedError:
    """Map a refusal by etcd, with its own text ``details``, to one of errors.py."""
    for text, meaning in _LOGIN.items():
        if text in details:
            return RegistryLoginError(f"{endpoint}: {meaning} ({details})")
    if "permission denied" in details:
        return RegistryDeniedError(
            f"{endpoint}: the user's role does not allow this; hubs, replicas, operators and observers have one each, "
            f"which an administrator gives: omni etcd grant-role ({details})"
        )
    return RegistryRefusedError(f"{endpoint}: {details}")


def _unavailable(code: str, details: str, endpoint: str, tls: RegistryTls | None) -> RegistryUnavailableError:
    never_stood = "failed to connect to all addresses" in details
    signs = () if socket_path(endpoint) else _TLS if tls else _NO_TLS
    for sign, meaning in signs if never_stood else ():
        if sign in details:
            return RegistryTlsError(f"{endpoint}: {_filled_in(meaning, tls)} ({details.rpartition(': ipv4:')[2]})")
    never_ran = any(sign in details for sign in _NEVER_RAN)
    return RegistryUnavailableError(f"{endpoint}: {code}: {details}", may_have_run=not never_ran)


def _filled_in(meaning: str, tls: RegistryTls | None) -> str:
    has_certificate = tls is not None and tls.cert_file
    return meaning.format(
        authority=(tls.ca_file if tls else "") or "an authority that this system trusts",
        asks_or_refuses="does not take our" if has_certificate else "asks for a",
        give_or_correct="correct" if has_certificate else "give",
    )
