"""Our errors as vLLM's server tells them: the same statuses and headers as over the hub's own API."""

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


class ToldErrors(logging.Filter):
    """Leaves of what vLLM's server logs of our errors one line: clients were told them, and no code is to blame."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, VLLMError) and isinstance(error.__cause__, OmniError):
            record.msg, record.args = f"{record.getMessage().rstrip('.')}: {error}", ()
            record.exc_info = record.exc_text = None
        return True


class HubHeaders:
    """Adds what the hub's own API tells in headers, and vLLM's server has no words for. ASGI middleware.

    A body of more than ``MAX_DROPPED_BYTES`` is not read: 413. vLLM's server would hold one of any length.
    """

    def __init__(self, app: ASGIApp, omni: AsyncOmni) -> None:
        self._app = app
        self._omni = omni

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        told: list[float] = []
        _retry_after_s.set(told)
        fan_out.begin()
        body, has_begun = _Body(scope, receive), False

        async def send_more(message: Message) -> None:
            nonlocal has_begun
            if body.is_too_long and not has_begun:
                # The server takes it for a body that it can't read; what is wrong is told below.
                return
            has_begun = True
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(stale_header(self._omni))
                if told and message["status"] >= HTTPStatus.BAD_REQUEST:
                    headers["Retry-After"] = str(math.ceil(max(told)))
            await send(message)

        await self._app(scope, body.receive, send_more)
        if body.is_too_long and not has_begun:
            limit = f"the body is longer than {MAX_DROPPED_BYTES} bytes: send less in one request"
            await error_response(BodyTooLongError(limit))(scope, receive, send)


class _Body:
    """The body of a request, as far as it is read."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        told = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        self._receive = receive
        self._told_bytes = int(told[:20]) if told.isdecimal() else 0
        self._read_bytes = 0

    @property
    def is_too_long(self) -> bool:
        """Whether no more of it is read."""
        return max(self._told_bytes, self._read_bytes) > MAX_DROPPED_BYTES

    async def receive(self) -> Message:
        """See ASGI. Raise HTTPException, to end whatever waits for the rest, if it is too long."""
        message = {} if self.is_too_long else await self._receive()
        self._read_bytes += len(message.get("body", b""))
        if self.is_too_long:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return message
