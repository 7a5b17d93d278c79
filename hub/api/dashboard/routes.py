"""The routes of the dashboard, below /dashboard on the admin port.

``/dashboard/live`` are the snapshots as server-sent events, ``/dashboard/try/v1/...`` the hub's own API for the try-it
box, ``/dashboard/replicas/STAGE/REPLICA/ACTION`` what an operator does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from hub.api.admin.receipts import receipt_routes
from hub.api.cross_origin import check_content_type
from hub.api.dashboard.actions import ActionBody, ActionName, NotSureError, ReplicaActions
from hub.api.dashboard.entry import PATH, DashboardDoor
from hub.api.dashboard.live import LiveSnapshots, as_events
from hub.api.dashboard.pages import HEADERS, load_pages
from hub.api.errors import error_body, error_response
from hub.api.exchange import exchange_of
from hub.api.generation.body import decode_body, read_body
from omni_discovery.commands.operate import OperationFailedError
from omni_discovery.errors import InvalidRequestError, OmniError, RegistryError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    from hub.api.dashboard.actions import DemoKiller
    from hub.api.dashboard.live import Registry
    from hub.api.door.keys import KeyRing
    from hub.api.errors import UnauthorizedError
    from hub.async_omni import AsyncOmni
    from omni_discovery.view.recent_events import RecentEvents

logger = logging.getLogger(__name__)

#: What of the API the try-it box may ask.
_TRIED: Final = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/images/generations"),
        ("POST", "/v1/audio/speech"),
        ("GET", "/v1/audio/voices"),
        ("GET", "/v1/models"),
    }
)
_actions: Final = msgspec.json.Decoder(ActionBody)
#: What a page is told, and a proxy in between: each event goes on at once.
_EVENT_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True, slots=True)
class DashboardParts:
    """What a dashboard stands on. ``api``: the name of the hub's API, ``app``: that API."""

    omni: AsyncOmni
    registry: Registry
    namespace: str
    events: RecentEvents
    app: ASGIApp
    api: str
    url: str
    #: Ends processes of replicas, in a demo alone.
    killer: DemoKiller | None = None


class Dashboard:
    """The dashboard of one hub, for the admin port. ``close`` it before that port is stopped."""

    def __init__(
        self,
        parts: DashboardParts,
        ring: KeyRing,
        count_refusal: Callable[[UnauthorizedError], None],
        *,
        is_open: bool = False,
    ) -> None:
        self._parts = parts
        self._door = DashboardDoor(ring, count_refusal, is_open=is_open)
        self._live = LiveSnapshots(parts.omni, parts.registry, parts.namespace, parts.events, parts.url)
        self._actions = ReplicaActions(parts.registry.calls, parts.namespace, parts.killer)
        self._pages = load_pages()

    def close(self) -> None:
        """End what streams. Idempotent."""
        self._live.close()

    def app(self) -> Starlette:
        """The web application."""
        return Starlette(
            routes=[
                Route("/", _lead, methods=["GET"]),
                Route(PATH, _lead, methods=["GET"]),
                Route(f"{PATH}/login", self._log_in, methods=["POST"]),
                Route(f"{PATH}/logout", self._log_out, methods=["POST"]),
                Route(f"{PATH}/session", self._session),
                Route(f"{PATH}/live", self._stream),
                Route(f"{PATH}/replicas/{{stage_id:int}}/{{replica_id:int}}/{{action}}", self._act, methods=["POST"]),
                Mount(f"{PATH}/try", TryIt(self._parts.app, self._door)),
                Mount(f"{PATH}/receipts", Receipts(Starlette(routes=receipt_routes(self._parts.omni)), self._door)),
                Route(f"{PATH}/{{file:path}}", self._page),
            ],
            exception_handlers={OmniError: _failed, HTTPException: _not_here},
        )

    async def _page(self, request: Request) -> Response:
        page = self._pages.get(request.path_params["file"])
        if page is None:
            raise HTTPException(404)
        return page

    async def _log_in(self, request: Request) -> Response:
        key, give_cookie = await self._door.log_in(request)
        response = JSONResponse({"action_key": key}, headers=dict(HEADERS))
        give_cookie(response)
        logger.info("dashboard.login client=%s", _client(request))
        return response

    async def _log_out(self, request: Request) -> Response:
        response = JSONResponse({}, headers=dict(HEADERS))
        self._door.log_out(request, response)
        return response

    async def _session(self, request: Request) -> Response:
        """Tell a page what it may do; who may not look learns only that."""
        visitor = self._door.visitor(request)
        shown: dict[str, Any] = {"reads": visitor.reads, "acts": visitor.acts}
        if visitor.reads:
            deploy = self._parts.omni.releases.newest.graph.deploy
            outputs = {stage.final_output for stage in deploy.stages} - {"none"}
            shown |= {"api": self._parts.api, "model": deploy.served_name, "outputs": sorted(outputs)}
            shown |= {"can_kill": visitor.acts and self._actions.can_kill}
        return JSONResponse(shown, headers=dict(HEADERS))

    async def _stream(self, request: Request) -> Response:
        self._door.check_reader(request)
        is_known = self._door.is_known(request)
        self._live.check_room(is_known=is_known)
        snapshots = self._live.watch(lambda: self._door.visitor(request).reads, is_known=is_known)
        return StreamingResponse(as_events(snapshots), media_type="text/event-stream", headers=_EVENT_HEADERS)

    async def _act(self, request: Request) -> Response:
        self._door.check_actor(request)
        check_content_type(request)
        body = decode_body(_actions, await read_body(request))
        place: Mapping[str, Any] = request.path_params
        try:
            name = ActionName(place["action"])
        except ValueError:
            raise InvalidRequestError(f"no action {place['action']!r}; there are: {', '.join(ActionName)}") from None
        replica = f"{place['stage_id']}/{place['replica_id']}"
        logger.info("dashboard.action action=%s replica=%s client=%s", name, replica, _client(request))
        done = await self._actions.carry_out(place["stage_id"], place["replica_id"], name, body)
        return JSONResponse({"done": done}, headers=dict(HEADERS))


class TryIt:
    """The hub's own API, without a key of it, for those who may act. HTTP only, and only what answers one request."""

    def __init__(self, app: ASGIApp, door: DashboardDoor) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            raise HTTPException(404)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if (scope["method"], path) not in _TRIED:
            raise HTTPException(404)
        self._door.check_actor(Request(scope))
        exchange_of(scope).key = "admin"
        # What opens this port is no business of the API.
        kept = [(name, value) for name, value in scope["headers"] if name not in (b"authorization", b"cookie")]
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": "", "headers": kept}
        await self._app(inner, receive, send)


class Receipts:
    """``GET /admin/requests`` and its kin, for those who have logged in."""

    def __init__(self, app: ASGIApp, door: DashboardDoor) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            raise HTTPException(404)
        self._door.check_known(Request(scope))
        path = "/admin" + scope["path"].removeprefix(scope.get("root_path", ""))
        await self._app({**scope, "path": path, "raw_path": path.encode(), "root_path": ""}, receive, send)


class AdminSite:
    """What is at the admin port: the dashboard, and ``calls``, which is everything else."""

    def __init__(self, calls: ASGIApp, dashboard: ASGIApp) -> None:
        self._calls = calls
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path = scope.get("path", "")
        is_dashboard = scope["type"] == "http" and (path in ("/", PATH) or path.startswith(f"{PATH}/"))
        await (self._dashboard if is_dashboard else self._calls)(scope, receive, send)


async def _lead(_: Request) -> Response:
    return RedirectResponse(f"{PATH}/", headers=dict(HEADERS))


def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, OmniError)  # noqa: S101 - Starlette calls it for nothing else
    if isinstance(error, NotSureError):
        return JSONResponse(error_body(str(error), "invalid_request_error", "not_sure"), status_code=error.status)
    if isinstance(error, OperationFailedError | RegistryError):
        code = "not_done" if isinstance(error, OperationFailedError) else "registry_unavailable"
        return JSONResponse(error_body(str(error), "service_unavailable_error", code), status_code=503)
    return error_response(error)


def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - Starlette calls it for nothing else
    text = f"{request.method} {request.url.path}: {error.detail}"
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    return JSONResponse(error_body(text, "invalid_request_error", code), status_code=error.status_code)


def _client(request: Request) -> str:
    return request.client.host if request.client else ""
