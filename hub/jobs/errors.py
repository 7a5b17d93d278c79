"""The errors of jobs.

RequestError
├── JobsUnavailableError        none: retried by the client; the operator if it lasts
├── JobStoreUnavailableError    none: retried by the client, and by the hub for its jobs; the operator if it lasts
└── InvalidRequestError
    └── JobNotFoundError            the caller: there is no such job for it
OmniError
└── JobFileError                the operator: a file of the job store is gone, was changed, or its key is missing
"""

from __future__ import annotations

from omni_discovery.errors import InvalidRequestError, OmniError, RequestError


class JobFileError(OmniError):
    """A job's file is not there, can't be read, or is not what a hub with these keys has written."""


class JobsUnavailableError(RequestError):
    """The registry does not answer, or refuses: what becomes of jobs is not known."""

    retry_after_s = 2.0


class JobStoreUnavailableError(RequestError):
    """The job store does not answer, or has no room: whether it has a file is not known."""

    retry_after_s = 2.0


class JobNotFoundError(InvalidRequestError):
    """There is no such job for this client."""

    def __init__(self, job_id: str, more: str = "it has expired, was deleted, or is not yours") -> None:
        super().__init__(f"there is no video {job_id[:60]!r}: {more}", 404)
