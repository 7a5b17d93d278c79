"""Receipts over HTTP, for operators: what became of a request, and why it went where it went.

| route | what it gives |
|---|---|
| ``GET /admin/requests?limit=N`` | the requests that ended last; with ``failed=1`` only those that failed |
| ``GET /admin/requests?waiting=1`` | the work that can't leave now, and what it waits for |
| ``GET /admin/requests/ID`` | the receipts of a request: by its id, that of its answer, or its ``x-request-id`` |
| ``GET /admin/replicas/STAGE/REPLICA`` | why a replica gets what it gets |

All of it is about this hub's own requests. No prompt and no output is in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from hub.api.errors import NotServedError, error_response
from hub.receipts.book import MOST_LISTED
from omni_discovery.errors import InvalidRequestError, OmniError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from hub.async_omni import AsyncOmni

#: Requests of a list, if the caller says nothing.
_USUAL_LIMIT: Final = 50
_DIGITS: Final = 9
#: What a page may not keep: it is true for this moment.
_HEADERS: Final = {"Cache-Control": "no-store"}
_YES: Final = frozenset({"1", "true", "yes"})


def receipt_routes(omni: AsyncOmni) -> list[Route]:
    """The routes of receipts."""

    def answering(answer: Callable[[AsyncOmni, Request], Any]) -> Callable[[Request], Response]:
        def respond(request: Request) -> Response:
            try:
                problem = {"problem": omni.problem} if omni.problem else {}
                body = {"hub": omni.hub_id, **problem, **answer(omni, request)}
            except OmniError as error:
                return error_response(error)
            return Response(msgspec.json.encode(body), media_type="application/json", headers=_HEADERS)

        return respond

    async def requests(request: Request) -> Response:
        return answering(_requests)(request)

    async def one(request: Request) -> Response:
        return answering(_request)(request)

    async def replica(request: Request) -> Response:
        return answering(_replica)(request)

    return [
        Route("/admin/requests", requests, methods=["GET"]),
        Route("/admin/requests/{name:path}", one, methods=["GET"]),
        Route("/admin/replicas/{stage:int}/{replica:int}", replica, methods=["GET"]),
    ]


def _requests(omni: AsyncOmni, request: Request) -> dict[str, Any]:
    query = request.query_params
    if unknown := sorted(query.keys() - {"failed", "waiting", "limit"}):
        raise InvalidRequestError(f"{unknown[0]!r} is no parameter here; there are failed, waiting and limit")
    limit = _limit(query.get("limit"))
    if query.get("waiting", "").lower() in _YES:
        return {"waiting": omni.receipts.waiting(limit)}
    _check_kept(omni)
    return {"requests": omni.receipts.latest(limit, failed=query.get("failed", "").lower() in _YES)}


def _limit(text: str | None) -> int:
    if text is None:
        return _USUAL_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and 1 <= int(text) <= MOST_LISTED):
        raise InvalidRequestError(f"'limit' is {text[:40]!r}; take 1 to {MOST_LISTED}")
    return int(text)


def _request(omni: AsyncOmni, request: Request) -> dict[str, Any]:
    _check_kept(omni)
    name: str = request.path_params["name"]
    receipts = omni.receipts.find(name)
    if not receipts:
        raise InvalidRequestError(
            f"this hub has no receipt of {name[:200]!r}: it never began here, or too long ago; ask the other hubs,"
            " and see its log for what was refused before it began" + (f"; {omni.problem}" if omni.problem else ""),
            404,
        )
    return {"receipts": receipts}


def _check_kept(omni: AsyncOmni) -> None:
    if not omni.receipts.is_kept:
        raise NotServedError("this hub keeps no receipts: start it without --receipts 0")


def _replica(omni: AsyncOmni, request: Request) -> dict[str, Any]:
    stage_id, replica_id = request.path_params["stage"], request.path_params["replica"]
    try:
        report = omni.receipts.replica(stage_id, replica_id)
        known = omni.receipts.known(stage_id)
    except KeyError:
        stages = ", ".join(map(str, omni.graph.stage_ids))
        raise InvalidRequestError(f"the pipeline has no stage {stage_id}; it has {stages}", 404) from None
    if report is None:
        there = f"it knows {', '.join(known[:20])}" if known else "it knows none of that stage"
        raise InvalidRequestError(
            f"this hub knows no replica {stage_id}/{replica_id}; {there}: omni replicas shows what is registered,"
            f" omni history {stage_id}/{replica_id} how its processes ended",
            404,
        )
    return {"replica": report}
