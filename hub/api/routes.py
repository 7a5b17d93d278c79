"""All HTTP routes of a hub."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, WebSocketRoute

from hub.api.audio.speech import Speech
from hub.api.audio.threads import EncoderThreads
from hub.api.chat.completions import ChatCompletions
from hub.api.docs_page import HEADERS, DocsPage
from hub.api.door.guard import is_trusted
from hub.api.errors import ModelNotFoundError, error_body, error_response
from hub.api.images.edits import ImageEdits
from hub.api.images.generations import ImageGenerations
from hub.api.openapi import openapi
from hub.api.prompts.completions import Completions
from hub.api.realtime.connection import Realtime
from hub.api.stream import Stream
from hub.api.videos.endpoint import Videos
from omni_discovery.records.health import TroubleKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request

    from hub.async_omni import AsyncOmni
    from hub.jobs.service import JobService
    from hub.pool.stage_pool import StageStatus
    from omni_discovery.deploy.document import DeployConfig


def build_app(omni: AsyncOmni, deploy: DeployConfig, started_s: int, jobs: JobService | None = None) -> Starlette:
    """The web application over one AsyncOmni; ``started_s`` is wall-clock seconds.

    ``jobs``: of a pipeline with a stage of video.
    """
    served = {"id": deploy.served_name, "object": "model", "created": started_s, "owned_by": "omni-discovery"}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [served]})

    async def model(request: Request) -> Response:
        asked: str = request.path_params["model"]
        if asked != deploy.served_name:
            return error_response(ModelNotFoundError(asked, deploy.served_name))
        return JSONResponse(served)

    async def voices(_: Request) -> Response:
        return JSONResponse({"voices": omni.voices(), "uploaded_voices": []})

    # Made once: to make them takes some 20 ms of the loop.
    document = openapi(deploy.served_name)
    described, pages = msgspec.json.encode(document), DocsPage(document)

    async def description(_: Request) -> Response:
        return Response(described, media_type="application/json")

    async def docs(request: Request) -> Response:
        return HTMLResponse(pages.of(request.scope["scheme"], request.headers.get("host", "")), headers=HEADERS)

    async def health(_: Request) -> Response:
        """The liveness check: 200 also without replicas, because a restart of the hub would not help."""
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        return ready_response(omni, shows_details=is_trusted(request.scope))

    async def exposition(_: Request) -> Response:
        return Response(await omni.hub_metrics.exposition.shown(), media_type=CONTENT_TYPE_LATEST)

    sounds, videos = EncoderThreads(), Videos(omni, deploy, jobs)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", ChatCompletions(omni, deploy, sounds).respond, methods=["POST"]),
            Route("/v1/completions", Completions(omni, deploy).respond, methods=["POST"]),
            Route("/v1/images/generations", ImageGenerations(omni, deploy).respond, methods=["POST"]),
            Route("/v1/images/edits", ImageEdits(omni, deploy).respond, methods=["POST"]),
            Route("/v1/audio/speech", Speech(omni, deploy, sounds).respond, methods=["POST"]),
            Route("/v1/audio/voices", voices),
            Route("/v1/videos", videos.respond, methods=["GET", "POST"]),
            Route("/v1/videos/{video_id}", videos.respond_to_one, methods=["GET", "DELETE"]),
            Route("/v1/videos/{video_id}/content", videos.content),
            Route("/openapi.json", description),
            Route("/docs", docs),
            WebSocketRoute("/v1/stream", Stream(omni, deploy).respond),
            WebSocketRoute("/v1/realtime", Realtime(omni, deploy, sounds).respond),
            Route("/v1/models", models),
            # The names of models may have slashes.
            Route("/v1/models/{model:path}", model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", exposition),
        ],
        exception_handlers={HTTPException: _not_found_or_not_allowed, Exception: _bug},
    )


def ready_response(omni: AsyncOmni, *, shows_details: bool = True) -> Response:
    """The readiness check: 200 if this hub can serve every stage and none keeps failing, else 503 with the reason.

    Without ``shows_details`` only whether it is ready.
    """
    stages, now_s, ejected = omni.stage_status(), time.monotonic(), _ejected(omni)
    empty = [stage for stage in stages if not stage.pickable]
    failing = {stage.stage_id: how for stage in stages if (how := stage.failures.describe(now_s))}
    body: dict[str, Any] = {
        "ready": omni.is_running and not empty and not failing and not omni.is_revoked,
        "stages": {str(stage.stage_id): _shown(stage, ejected, now_s, revoked=omni.is_revoked) for stage in stages},
    }
    if failing:
        named = (f"stage {stage_id}: {how}" for stage_id, how in failing.items())
        body["reason"] = f"requests keep failing; {'; '.join(named)}; the log's lines 'request.failed' say why"
    if empty:
        named = (f"stage {stage.stage_id} ({stage.why_absent or 'none is registered'})" for stage in empty)
        body["reason"] = f"no replica can take work of {', '.join(named)}; omni doctor looks for what is wrong"
    if omni.problem:
        body["reason"] = omni.problem
    if not omni.is_running:
        body["reason"] = "this hub takes no requests any more: its log says why"
    if omni.releases.problem:
        body["pipeline"] = f"the pipeline in force is not served by this hub: {omni.releases.problem}"
    stale_s = omni.view_stale_s
    if stale_s is not None:
        body["view_stale_s"] = round(stale_s, 1)
        body["view"] = f"the view of the registry has not been proved fresh for {stale_s:.0f} s; serving goes on by it"
    shown = body if shows_details else {"ready": body["ready"]}
    return JSONResponse(shown, status_code=200 if body["ready"] else 503)


def _shown(
    stage: StageStatus, ejected: Mapping[int, Sequence[dict[str, Any]]], now_s: float, *, revoked: bool
) -> dict[str, Any]:
    shown: dict[str, Any] = {"registered": stage.registered, "pickable": 0 if revoked else stage.pickable}
    if stage.why_absent:
        shown["why"] = stage.why_absent
    if failing := stage.failures.describe(now_s):
        shown["failing"] = failing
    if stage.stage_id in ejected:
        shown["ejected"] = ejected[stage.stage_id]
    return shown


def _ejected(omni: AsyncOmni) -> dict[int, list[dict[str, Any]]]:
    """The ejected replicas by stage. ``until`` null: the ejection is over, and the next request decides."""
    shown: dict[int, list[dict[str, Any]]] = {}
    for trouble in omni.troubles():
        if trouble.kind in (TroubleKind.EJECTED, TroubleKind.PROBED):
            until = datetime.fromtimestamp(trouble.until, UTC).isoformat(timespec="seconds") if trouble.until else None
            entry: dict[str, Any] = {"replica": trouble.name, "until": until, "why": trouble.reason}
            if trouble.is_picked:
                entry["still_used"] = "too few other replicas are left"
            shown.setdefault(trouble.stage_id, []).append(entry)
    return shown


async def _not_found_or_not_allowed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - Starlette calls it for nothing else
    text = f"{request.method} {request.url.path}: {error.detail}"
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    body = error_body(text, "invalid_request_error", code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _bug(_: Request, error: Exception) -> Response:
    return JSONResponse(
        error_body(f"an internal error: {type(error).__name__}", "server_error", "internal_error"), status_code=500
    )
