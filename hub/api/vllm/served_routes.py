"""The routes of vLLM's and vLLM-Omni's servers that were looked at; a new one of a later release is closed."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any, Final

from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from hub.api.errors import NotServedError, error_response

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.websockets import WebSocket

logger = logging.getLogger(__name__)

#: Routes of text, of both servers. What they tokenize is bounded by hub/api/vllm/bounds/texts.py.
_OF_TEXT: Final = (
    *("/tokenize", "/detokenize", "/tokenizer_info", "/v1/models", "/invocations", "/v1/systemone"),
    *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions"),
    *("/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
    *("/v1/messages", "/v1/messages/count_tokens", "/generative_scoring"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
_OF_NUMBERS: Final = (
    *("/pooling", "/classify", "/v1/embeddings", "/v2/embed", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank"),
)
#: Prompts and answers as tokens, or made from and into them.
_OF_TOKENS: Final = (
    *("/v1/chat/completions/render", "/v1/messages/render", "/v1/completions/render", "/v1/responses/render"),
    *("/inference/v1/generate", "/inference/v1/abort_requests", "/abort_requests"),
)
_OF_THE_SERVER: Final = (
    *("/ready", "/metrics", "/health", "/ping", "/load", "/version", "/server_info", "/kv_event_sources"),
    *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/static"),
)
#: What they do is done by hub/api/vllm/control.py, or answered with 501.
_OF_OPERATORS: Final = (
    *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/collective_rpc"),
    *("/start_profile", "/stop_profile", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    *("/release_kv_cache_memory", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
    *("/fault_tolerance/status", "/fault_tolerance/apply", "/get_world_size"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"),
    *("/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
    *("/weight_info", "/weight_checker", "/v1/omni/sleep", "/v1/omni/wakeup"),
)
#: vLLM-Omni's; some are refused by hub/api/vllm/omni/unserved.py.
_OF_MEDIA: Final = (
    *("/v1/audio/speech", "/v1/audio/speech/batch", "/v1/audio/speech/stream", "/v1/audio/generate"),
    *("/v1/audio/voices", "/v1/audio/voices/{name}", "/v1/images/generations", "/v1/images/edits"),
    *("/v1/videos", "/v1/videos/sync", "/v1/videos/{video_id}", "/v1/videos/{video_id}/content"),
    *("/v1/video/chat/stream", "/v1/realtime", "/v1/realtime/video", "/v1/realtime/robot/openpi", "/v1/duplex"),
    *("/v1/realtime/sessions", "/v1/realtime/sessions/{session_id}/step", "/v1/realtime/sessions/{session_id}/reset"),
    *("/v1/realtime/sessions/{session_id}/close", "/v1/realtime/sessions/{session_id}/status"),
)
#: They make text of any number of a client's tokens, in the thread that renders all chats, and nothing ends that.
UNBOUNDED: Final = frozenset({"/v1/chat/completions/derender", "/v1/completions/derender"})
KNOWN: Final = frozenset((*_OF_TEXT, *_OF_NUMBERS, *_OF_TOKENS, *_OF_THE_SERVER, *_OF_OPERATORS, *_OF_MEDIA))


def close_unknown_routes(app: FastAPI) -> None:
    """Answer with 501 what is not known here, and say so in the log; and what nothing bounds."""
    routes: list[Any] = app.router.routes
    for position, route in enumerate(routes):
        path = getattr(route, "path", "")
        if path in KNOWN:
            continue
        if path in UNBOUNDED:
            closed = _ClosedRoute(f"{path}: nothing bounds what it does here; use /detokenize")
        else:
            logger.warning("api.route_closed path=%s: this release of omni-discovery does not know it", path)
            closed = _ClosedRoute(f"{path}: this release does not know this route of its server")
        is_websocket = isinstance(route, APIWebSocketRoute | WebSocketRoute)
        methods = list(route.methods or ()) if isinstance(route, APIRoute | Route) else None
        routes[position] = (
            WebSocketRoute(path, closed.hang_up) if is_websocket else Route(path, closed.refuse, methods=methods)
        )


def describe_aside(app: FastAPI) -> None:
    """Have the description of all routes made in a thread, once: that takes seconds."""
    description = _Description(app)
    routes: list[Any] = app.router.routes
    for position, route in enumerate(routes):
        if getattr(route, "path", "") == app.openapi_url:
            routes[position] = Route(route.path, description.show, include_in_schema=False)


class _Description:
    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._made: asyncio.Task[bytes] | None = None

    async def show(self, request: Request) -> Response:
        if self._made is None or (self._made.done() and self._made.exception() is not None):
            self._made = asyncio.create_task(asyncio.to_thread(self._make, _root_of(request)), name="openapi")
        return Response(await asyncio.shield(self._made), media_type="application/json")

    def _make(self, root: str) -> bytes:
        described = self._app.openapi()
        servers = [{"url": root}, *described.get("servers", ())] if root else described.get("servers")
        return json.dumps(described | ({"servers": servers} if servers else {})).encode()


def _root_of(request: Request) -> str:
    """Where the server is behind a proxy; empty at its root."""
    return str(request.scope.get("root_path", "")).rstrip("/")


class _ClosedRoute:
    def __init__(self, reason: str) -> None:
        self._error = NotServedError(reason)

    async def refuse(self, _: Request) -> Response:
        return error_response(self._error)

    async def hang_up(self, socket: WebSocket) -> None:
        await socket.close(1008)
