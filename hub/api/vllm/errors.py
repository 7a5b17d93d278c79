"""Errors of the hub in vLLM's server: the same statuses and headers as in the hub's own API."""

from __future__ import annotations

import logging
import math
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError

from hub.api.chat import stale_header
from hub.api.chat_schema import MAX_DROPPED_BYTES
from hub.api.errors import BodyTooLongError, describe, error_response
from hub.api.vllm import fan_out
from omni_discovery.errors import InvalidRequestError, OmniError, RequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from hub.async_omni import AsyncOmni

#: The ``retry_after_s`` of the errors of the current HTTP request.
_retry_after_s: Final[ContextVar[list[float] | None]] = ContextVar("retry_after_s", default=None)


class OmniHttpError(GracefulHTTPError):
    """A request that could not be served, with its HTTP status."""

    def __init__(self, error: OmniError) -> None:
        super().__init__(str(error), HTTPStatus(describe(error)[0]))
        retry_after_s = _retry_after_s.get()
        if retry_after_s is not None and isinstance(error, RequestError) and error.retry_after_s is not None:
            retry_after_s.append(error.retry_after_s)


def as_vllm_error(error: OmniError) -> VLLMError:
    """The error for vLLM's handlers."""
    if isinstance(error, InvalidRequestError) and error.status == HTTPStatus.BAD_REQUEST:
        return VLLMValidationError(str(error))
    return OmniHttpError(error)


class AnsweredErrors(logging.Filter):
    """Cuts vLLM's log records of the hub's errors to one line: they are answered to clients and are no bugs."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, VLLMError) and isinstance(error.__cause__, OmniError):
            record.msg, record.args = f"{record.getMessage().rstrip('.')}: {error}", ()
            record.exc_info = record.exc_text = None
        return True


class HubHeaders:
    """ASGI middleware that adds the headers of the hub's own API: a stale view, Retry-After.

    A body of more than ``MAX_DROPPED_BYTES`` is answered with 413; vLLM's server would read one of any length.
    """

    def __init__(self, app: ASGIApp, omni: AsyncOmni) -> None:
        self._app = app
        self._omni = omni

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        retry_after_s: list[float] = []
        _retry_after_s.set(retry_after_s)
        fan_out.start_http_request()
        body, has_begun = _Body(scope, receive), False

        async def send_more(message: Message) -> None:
            nonlocal has_begun
            if body.is_too_long and not has_begun:
                # vLLM's server answers that it can't read the body; the answer with the reason is sent below.
                return
            has_begun = True
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(stale_header(self._omni))
                if retry_after_s and message["status"] >= HTTPStatus.BAD_REQUEST:
                    headers["Retry-After"] = str(math.ceil(max(retry_after_s)))
            await send(message)

        await self._app(scope, body.receive, send_more)
        if body.is_too_long and not has_begun:
            limit = f"the body is longer than {MAX_DROPPED_BYTES} bytes: send less in one request"
            await error_response(BodyTooLongError(limit))(scope, receive, send)


class _Body:
    """The body of a request with a bound on its length."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        length = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        self._receive = receive
        self._announced_bytes = int(length[:20]) if length.isdecimal() else 0
        self._read_bytes = 0

    @property
    def is_too_long(self) -> bool:
        """Whether the body is longer than is read."""
        return max(self._announced_bytes, self._read_bytes) > MAX_DROPPED_BYTES

    async def receive(self) -> Message:
        """See ASGI. Raise HTTPException if the body is too long."""
        message = {} if self.is_too_long else await self._receive()
        self._read_bytes += len(message.get("body", b""))
        if self.is_too_long:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return message
