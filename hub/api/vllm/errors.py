"""Errors of the hub in vLLM's server: the same statuses and headers as in the hub's own API."""

from __future__ import annotations

import logging
import math
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.datastructures import MutableHeaders
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError

from hub.api.errors import describe, error_response
from hub.api.generation.running import stale_header
from hub.api.vllm import forms
from hub.api.vllm.bounds import fan_out, texts
from hub.api.vllm.bounds.body import Body
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
            text = record.getMessage().rstrip(".")
            record.msg, record.args = text if str(error) in text else f"{text}: {error}", ()
            record.exc_info = record.exc_text = None
        return True


class HubHeaders:
    """ASGI middleware that adds the headers of the hub's own API: a stale view, Retry-After.

    A body that would cost too much is refused (hub/api/vllm/bounds/body.py), and so are texts that no context of
    ``most_tokens`` holds (hub/api/vllm/bounds/texts.py); vLLM's server would read any.
    """

    def __init__(self, app: ASGIApp, omni: AsyncOmni, most_tokens: int) -> None:
        self._app = app
        self._omni = omni
        self._most_tokens = most_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        retry_after_s: list[float] = []
        _retry_after_s.set(retry_after_s)
        is_websocket = scope["type"] == "websocket"
        fan_out.start_http_request(is_websocket=is_websocket)
        asked = texts.start_http_request(self._most_tokens, is_websocket=is_websocket)
        forms.start_http_request()
        body, has_begun = Body(scope, receive, self._most_tokens), False
        body.enter()

        async def send_more(message: Message) -> None:
            nonlocal has_begun
            if body.refusal is not None and not has_begun:
                # vLLM's server answers that it can't read the body; the answer with the reason is sent below.
                return
            has_begun = True
            if message["type"] == "http.response.start":
                asked.has_failed = message["status"] >= HTTPStatus.BAD_REQUEST
                headers = MutableHeaders(scope=message)
                headers.update(stale_header(self._omni))
                if retry_after_s and message["status"] >= HTTPStatus.BAD_REQUEST:
                    headers["Retry-After"] = str(math.ceil(max(retry_after_s)))
            await send(message)

        await self._app(scope, body.receive, send_more)
        if body.refusal is not None and not has_begun:
            await error_response(body.refusal)(scope, receive, send)
