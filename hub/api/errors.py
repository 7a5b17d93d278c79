"""Errors over HTTP: OpenAI's body, the status, and Retry-After where a retry makes sense."""

from __future__ import annotations

import math
from typing import Any, Final

from starlette.responses import JSONResponse

from hub.jobs.errors import JobFileError, JobStoreUnavailableError, JobsUnavailableError
from omni_discovery.errors import (
    DeadlineExceededError,
    EngineFailedError,
    HubUnavailableError,
    InvalidRequestError,
    OmniError,
    OverloadedError,
    PoisonousRequestError,
    ReplicaLostError,
    RequestError,
    StageUnavailableError,
)


class BodyTooLongError(InvalidRequestError):
    """The body of a request is longer than this server reads."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 413)


class UnauthorizedError(InvalidRequestError):
    """The request brings no key that opens this door."""

    def __init__(self, *, is_missing: bool) -> None:
        what = "a key is needed" if is_missing else "this key opens nothing here"
        super().__init__(f"{what}: send the one that the operator gave you as 'Authorization: Bearer KEY'")
        self.status = 401


class NotServedError(InvalidRequestError):
    """The request is right, and this server can't serve it: it says what is missing."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.status = 501


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"the model {asked!r} is not served here; there is {served!r}", 404)


class RetryConflictError(InvalidRequestError):
    """A request is not what it says it repeats, or is under way already. ``code`` says which."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, 409)
        self.code = code
        self.retry_after_s = retry_after_s


#: Status, OpenAI's ``type`` and our ``code``, the first class that fits.
_KINDS: tuple[tuple[type[OmniError], int, str, str], ...] = (
    (OverloadedError, 429, "rate_limit_error", "overloaded"),
    (StageUnavailableError, 503, "service_unavailable_error", "stage_unavailable"),
    (ReplicaLostError, 503, "service_unavailable_error", "replica_lost"),
    (DeadlineExceededError, 504, "timeout_error", "deadline_exceeded"),
    (EngineFailedError, 500, "server_error", "engine_failed"),
    (JobsUnavailableError, 503, "service_unavailable_error", "registry_unavailable"),
    (JobStoreUnavailableError, 503, "service_unavailable_error", "job_store_unavailable"),
    (JobFileError, 500, "server_error", "job_store_failed"),
)


#: OpenAI's ``type`` and our ``code`` of refusals, by status.
_REFUSED: Final = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("invalid_request_error", "not_found"),
    408: ("timeout_error", "input_timeout"),
    409: ("invalid_request_error", "conflict"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    422: ("invalid_request_error", "unprocessable_request"),
    501: ("invalid_request_error", "not_served"),
}


def describe(error: OmniError) -> tuple[int, dict[str, Any]]:
    """The HTTP status of an error and its body."""
    if isinstance(error, ModelNotFoundError):
        return error.status, error_body(message_of(error), "invalid_request_error", "model_not_found", "model")
    if isinstance(error, RetryConflictError):
        return error.status, error_body(message_of(error), "invalid_request_error", error.code)
    if isinstance(error, InvalidRequestError):
        return error.status, error_body(message_of(error), *_REFUSED[error.status])
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            return status, error_body(message_of(error), name, code)
    return 500, error_body(str(error), "server_error", "internal_error")


def message_of(error: OmniError) -> str:
    """The error's text and what to do next."""
    steps = []
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        steps.append(f"try again in {math.ceil(error.retry_after_s)} s")
    if isinstance(error, HubUnavailableError):
        steps.append("or ask another hub")
    elif isinstance(error, StageUnavailableError):
        steps.append(f"omni replicas shows who serves stage {error.stage_id}, omni doctor what is wrong")
    elif isinstance(error, DeadlineExceededError):
        steps.append("give the request a longer 'timeout', or send it again later")
    elif isinstance(error, PoisonousRequestError):
        steps.append("don't send it again as it is; the logs of these replicas say more")
    elif isinstance(error, EngineFailedError):
        steps.append("the log of that replica says more")
    return f"{error}: {'; '.join(steps)}" if steps else str(error)


def error_body(message: str, name: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error body."""
    return {"error": {"message": message, "type": name, "param": param, "code": code}}


def error_response(error: OmniError) -> JSONResponse:
    """The answer to a request that failed before its first output."""
    status, body = describe(error)
    headers = {}
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, PoisonousRequestError) or (isinstance(error, RetryConflictError) and not headers):
        # OpenAI's clients repeat other answers with status 500 or 409 by themselves.
        headers["x-should-retry"] = "false"
    return JSONResponse(body, status_code=status, headers=headers)
