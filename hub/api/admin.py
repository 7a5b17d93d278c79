"""``--admin-api``: collective calls over HTTP, for operators. Whoever reaches it rules every replica of the pipeline.

``POST /admin/<method>`` with a JSON body of ``args``, ``kwargs``, ``stage_ids`` and ``timeout_s``, all optional, gives
a JSON list with one entry for each replica; what failed is in the entries, so the status is 200 then, too.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from hub.api.chat import read_body
from hub.api.errors import error_response
from omni_discovery.errors import InvalidRequestError, RequestError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from hub.async_omni import AsyncOmni

logger = logging.getLogger(__name__)

_PREFIX = "/admin/"


class AdminCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a call."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    #: None: all stages.
    stage_ids: list[int] | None = None
    timeout_s: float = 60.0


def with_admin(app: ASGIApp, omni: AsyncOmni) -> ASGIApp:
    """The web application with the operators' calls beside what it has."""

    async def respond(request: Request) -> Response:
        return await _respond(omni, request)

    admin = Starlette(routes=[Route(_PREFIX + "{method}", respond, methods=["POST"])])

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        is_admin = scope["type"] == "http" and scope["path"].startswith(_PREFIX)
        await (admin if is_admin else app)(scope, receive, send)

    return both


async def _respond(omni: AsyncOmni, request: Request) -> Response:
    method = request.path_params["method"]
    try:
        call = await _read(request)
        logger.info("admin.call method=%r client=%s", method, request.client.host if request.client else "")
        results = await omni.collective(method, call.args, call.kwargs, call.stage_ids, call.timeout_s)
    except RequestError as error:
        return error_response(error)
    # JSON has no bytes: they are base64 here.
    body = await asyncio.to_thread(msgspec.json.encode, results)
    return Response(body, media_type="application/json")


async def _read(request: Request) -> AdminCall:
    # A page in somebody's browser can send anything else to this host without being asked first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError("the Content-Type must be application/json")
    body = await read_body(request)
    try:
        return msgspec.json.decode(body or b"{}", type=AdminCall)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not as it should be: {error}") from error
