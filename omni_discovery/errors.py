"""The error tree. Every error of the project derives from OmniError; the tree names the party that must act.

OmniError
├── ConfigError                 the operator: a flag, a file or a value is wrong
├── RecordError                 the writer of the value: the value is skipped, nothing else changes
├── WireError                   the peer: the frame is counted and dropped
├── RegistryError
│   ├── RegistryUnavailableError    none: retried; the operator if it lasts
│   │   └── RegistryTlsError            the operator: the CA, a certificate, or TLS against plaintext
│   ├── LeaseNotFoundError          the registrar: grant again, claim again
│   ├── CompactedError              the watcher: list again
│   └── RegistryRefusedError        the operator: user, role, quota or size
│       ├── AnswerTooLargeError         the reader: ask for less at once
│       ├── RegistryLoginError          the operator: user or password, or one is needed
│       └── RegistryDeniedError         the operator: the user's role does not reach so far
├── EmbeddedEtcdError           the operator: the embedded etcd did not start
└── RequestError                the client of one request
    ├── InvalidRequestError         the caller: 400, or another of REFUSALS
    │   └── InputTimeoutError           the caller: it has sent no more of its input for too long
    ├── StageUnavailableError       the operator: no replica of a stage; retry later
    │   └── HubUnavailableError         the caller: this hub serves no requests any more, another hub may
    ├── ReplicaLostError            none: retried where that is safe
    ├── EngineFailedError           the operator: the engine raised
    │   └── PoisonousRequestError       the caller: replicas end when they run it; it must not be sent again as it is
    ├── OverloadedError             the caller: retry later
    ├── AbortFailedError            the operator: the hub could not carry out an abort
    └── DeadlineExceededError       the caller: it took too long
"""

from __future__ import annotations

from typing import Final

#: The HTTP statuses with which a request may be refused for what it is.
REFUSALS: Final = (400, 403, 404, 409, 413, 415, 422)


class OmniError(Exception):
    """Root of all errors raised on purpose by this project."""


class ConfigError(OmniError, ValueError):
    """A flag, file or value is wrong; the message names it and what would be right."""


class RecordError(OmniError, ValueError):
    """A value in the registry can't be read."""

    def __init__(self, key: str, reason: str) -> None:
        # Not at the top: this module is imported with each command's help.
        from omni_discovery.text import one_line

        super().__init__(one_line(f"{key}: {reason}"))
        self.key = key
        self.reason = reason


class WireError(OmniError, ValueError):
    """A frame of the data plane can't be read."""


class RegistryError(OmniError):
    """A call to etcd failed."""


class RegistryUnavailableError(RegistryError):
    """No etcd endpoint answered in time. ``may_have_run`` is true if the call may have taken effect."""

    def __init__(self, message: str, *, may_have_run: bool = False) -> None:
        super().__init__(message)
        self.may_have_run = may_have_run


class RegistryTlsError(RegistryUnavailableError):
    """No connection, because client and server don't agree on TLS; the message names the disagreement."""


class LeaseNotFoundError(RegistryError):
    """The server answered that there is no such lease."""


class CompactedError(RegistryError):
    """The requested revision is compacted, or belongs to another history of the registry: list again.

    ``compact_revision`` is the oldest revision that can be read, 0 if that is not known.
    """

    def __init__(self, message: str, compact_revision: int = 0) -> None:
        super().__init__(message)
        self.compact_revision = compact_revision


class RegistryRefusedError(RegistryError):
    """etcd answered and refused: credentials, role, quota or size."""


class AnswerTooLargeError(RegistryRefusedError):
    """What was asked for is more than one answer may hold."""


class RegistryLoginError(RegistryRefusedError):
    """etcd did not authenticate this client: wrong user or password, none where one is needed, or an expired token."""


class RegistryDeniedError(RegistryRefusedError):
    """The role of the etcd user does not allow the call."""


class EmbeddedEtcdError(OmniError):
    """The embedded etcd could not be started or died while starting."""


class RequestError(OmniError):
    """One request failed. ``retry_after_s`` is set where trying again later makes sense.

    ``replicas`` are those that its work was sent to, as ``stage/replica``, at most 32.
    """

    retry_after_s: float | None = None
    replicas: tuple[str, ...] = ()


class InvalidRequestError(RequestError, ValueError):
    """The request itself is wrong; no replica can serve it. ``status`` is the HTTP status that its client gets.

    Raise ValueError for a status that is none of REFUSALS.
    """

    def __init__(self, message: str = "", status: int = 400) -> None:
        if status not in REFUSALS:
            raise ValueError(f"a request is refused with one of {', '.join(map(str, REFUSALS))}, not {status!r}")
        super().__init__(message)
        self.status = status


class InputTimeoutError(InvalidRequestError):
    """The client has begun a request and has sent no more of it for too long. No engine refuses one with it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.status = 408


class StageUnavailableError(RequestError, RuntimeError):
    """A stage has no replica that can take work."""

    retry_after_s = 1.0

    def __init__(self, stage_id: int, message: str) -> None:
        super().__init__(message)
        self.stage_id = stage_id


class HubUnavailableError(StageUnavailableError):
    """The hub serves no requests any more, whatever the state of its replicas; another hub may."""


class ReplicaLostError(RequestError):
    """The replica that had the request was lost, and the work could not be retried on another."""

    retry_after_s = 1.0


class EngineFailedError(RequestError):
    """The stage's engine raised while it worked on the request."""


class PoisonousRequestError(EngineFailedError):
    """Replicas ended while they ran the request, and it is the likely cause."""


class OverloadedError(RequestError):
    """Admission refused the request: a bound was reached, too many requests at once."""

    def __init__(self, message: str, retry_after_s: float = 1.0, stage_id: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        #: The stage that has no room; None where it is another bound.
        self.stage_id = stage_id


class AbortFailedError(RequestError, RuntimeError):
    """An abort went wrong in the hub: the request may run on."""


class DeadlineExceededError(RequestError, TimeoutError):
    """The request was not finished by its deadline."""
