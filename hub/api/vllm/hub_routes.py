"""The hub's own routes in front of vLLM's server: readiness, and the metrics of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.routing import Route
from vllm.v1.metrics.prometheus import get_prometheus_registry

from hub.api.door.guard import is_trusted
from hub.api.routes import ready_response

if TYPE_CHECKING:
    from starlette.requests import Request

    from hub.async_omni import AsyncOmni


def hub_routes(omni: AsyncOmni) -> list[Route]:
    """``/ready`` and ``/metrics``."""
    omni.hub_metrics.exposition.add(get_prometheus_registry().collect)

    async def ready(request: Request) -> Response:
        return ready_response(omni, shows_details=is_trusted(request.scope))

    async def exposition(_: Request) -> Response:
        return Response(await omni.hub_metrics.exposition.shown(), media_type=CONTENT_TYPE_LATEST)

    return [Route("/ready", ready), Route("/metrics", exposition)]
