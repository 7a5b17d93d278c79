"""How an error looks over HTTP: OpenAI's shape, the right status, Retry-After where trying again makes sense."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from omni_discovery.errors import (
    DeadlineExceededError,
    EngineFailedError,
    InvalidRequestError,
    OmniError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
    StageUnavailableError,
)

#: Status, OpenAI's ``type`` and our ``code``, the first class that fits.
_KINDS: tuple[tuple[type[OmniError], int, str, str], ...] = (
    (InvalidRequestError, 400, "invalid_request_error", "invalid_request"),
    (OverloadedError, 429, "rate_limit_error", "overloaded"),
    (StageUnavailableError, 503, "service_unavailable_error", "stage_unavailable"),
    (ReplicaLostError, 503, "service_unavailable_error", "replica_lost"),
    (DeadlineExceededError, 504, "timeout_error", "deadline_exceeded"),
    (EngineFailedError, 500, "server_error", "engine_failed"),
)


def describe(error: OmniError) -> tuple[int, dict[str, Any]]:
    """The HTTP status of an error and its body."""
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            return status, error_body(str(error), name, code)
    return 500, error_body(str(error), "server_error", "internal_error")


def error_body(message: str, name: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error body."""
    return {"error": {"message": message, "type": name, "param": param, "code": code}}


def error_response(error: OmniError) -> JSONResponse:
    """The whole answer for an error that came before any output."""
    status, body = describe(error)
    headers = {}
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(body, status_code=status, headers=headers)
