"""The web application of ``--admin-port``: control calls, and why requests went where they went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from hub.api.admin.calls import call_routes
from hub.api.admin.receipts import receipt_routes

if TYPE_CHECKING:
    from starlette.requests import Request

    from hub.async_omni import AsyncOmni


def build_admin(omni: AsyncOmni) -> Starlette:
    """The web application of the operators' calls; who may make them is decided in front of it."""
    return Starlette(routes=[*receipt_routes(omni), *call_routes(omni)])


def build_local(omni: AsyncOmni, url: str, etcd: str) -> Starlette:
    """What this user may read without a token, at a socket in a private folder: nothing is changed there.

    Beside receipts that is ``url``, where this hub's API is: nobody else can say so here, while who may write hubs'
    records may name any address. ``etcd`` is where its etcd is, empty if more than that is needed to read it. The other
    API servers behind the same port ask for metrics, the one with the number ``asker`` for those of all others.
    """

    async def whereabouts(_: Request) -> JSONResponse:
        return JSONResponse({"hub": omni.hub_id, "url": url, "etcd": etcd})

    async def metrics(request: Request) -> JSONResponse:
        exposition = omni.hub_metrics.exposition
        asker = request.query_params.get("asker", "")
        text = await (exposition.whole(int(asker)) if asker.isdigit() else exposition.own())
        return JSONResponse({"metrics": text})

    own = [Route("/admin/hub", whereabouts), Route("/admin/metrics", metrics)]
    return Starlette(routes=[*own, *receipt_routes(omni)])
