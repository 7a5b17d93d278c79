"""Our errors as vLLM's server tells them: the same statuses as over the hub's own API."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError

from hub.api.errors import describe
from omni_discovery.errors import InvalidRequestError, OmniError, RequestError

if TYPE_CHECKING:
    from starlette.requests import Request


class OmniHttpError(GracefulHTTPError):
    """A request that could not be served, with the status that says whose turn it is."""

    def __init__(self, error: OmniError) -> None:
        super().__init__(str(error), HTTPStatus(describe(error)[0]))
        self.retry_after_s = error.retry_after_s if isinstance(error, RequestError) else None


def as_vllm_error(error: OmniError) -> VLLMError:
    """The error for vLLM's handlers."""
    if isinstance(error, InvalidRequestError):
        return VLLMValidationError(str(error))
    return OmniHttpError(error)


async def answer_error(_: Request, error: Exception) -> JSONResponse:
    """The whole answer for an error that came before any output: as vLLM has it, and when to try again."""
    body = create_error_response(error)
    seconds = error.retry_after_s if isinstance(error, OmniHttpError) else None
    headers = {} if seconds is None else {"Retry-After": str(math.ceil(seconds))}
    return JSONResponse(body.model_dump(), status_code=body.error.code, headers=headers)
