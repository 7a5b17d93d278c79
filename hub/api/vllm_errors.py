"""Our errors as vLLM's server tells them: the same statuses and headers as over the hub's own API."""

from __future__ import annotations

import math
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.datastructures import MutableHeaders
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError

from hub.api.chat import stale_header
from hub.api.errors import describe
from omni_discovery.errors import InvalidRequestError, OmniError, RequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from hub.async_omni import AsyncOmni

#: Of the HTTP request under way: in how many seconds to try again, as its errors said.
_retry_after_s: Final[ContextVar[list[float] | None]] = ContextVar("retry_after_s", default=None)


class OmniHttpError(GracefulHTTPError):
    """A request that could not be served, with the status that says whose turn it is."""

    def __init__(self, error: OmniError) -> None:
        super().__init__(str(error), HTTPStatus(describe(error)[0]))
        told = _retry_after_s.get()
        if told is not None and isinstance(error, RequestError) and error.retry_after_s is not None:
            told.append(error.retry_after_s)


def as_vllm_error(error: OmniError) -> VLLMError:
    """The error for vLLM's handlers."""
    if isinstance(error, InvalidRequestError):
        return VLLMValidationError(str(error))
    return OmniHttpError(error)


class HubHeaders:
    """Adds what the hub's own API tells in headers, and vLLM's server has no words for. ASGI middleware."""

    def __init__(self, app: ASGIApp, omni: AsyncOmni) -> None:
        self._app = app
        self._omni = omni

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        told: list[float] = []
        _retry_after_s.set(told)

        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(stale_header(self._omni))
                if told and message["status"] >= HTTPStatus.BAD_REQUEST:
                    headers["Retry-After"] = str(math.ceil(max(told)))
            await send(message)

        await self._app(scope, receive, send_more)
