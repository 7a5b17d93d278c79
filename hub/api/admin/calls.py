"""Control calls to replicas over HTTP, for operators.

``POST /admin/<method>`` with a JSON body of ``args``, ``kwargs``, ``stage_ids`` and ``timeout_s``, all optional, gives
a JSON list with one entry for each replica; a failure is in its entry, and the status is 200 all the same.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from hub.api.cross_origin import check_content_type
from hub.api.errors import error_response
from hub.api.generation.body import read_body
from omni_discovery.errors import InvalidRequestError, RequestError

if TYPE_CHECKING:
    from starlette.requests import Request

    from hub.async_omni import AsyncOmni

logger = logging.getLogger(__name__)

#: Names the stages of a call that the pipeline has not; the others have answered.
_WARNING: Final = "x-omni-warning"


class AdminCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a call."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    #: None: all stages.
    stage_ids: list[int] | None = None
    timeout_s: float = 60.0


def call_routes(omni: AsyncOmni) -> list[Route]:
    """The routes of control calls."""

    async def respond(request: Request) -> Response:
        return await _respond(omni, request)

    return [Route("/admin/{method}", respond, methods=["POST"])]


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
    unknown = omni.unknown_stages(call.stage_ids or ())
    return Response(body, media_type="application/json", headers={_WARNING: unknown} if unknown else None)


async def _read(request: Request) -> AdminCall:
    check_content_type(request)
    body = await read_body(request)
    try:
        return msgspec.json.decode(body or b"{}", type=AdminCall)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not as it should be: {error}") from error
