"""Door: the ASGI layer that asks for keys. One for every API: what is not named as open here is closed.

Probes are open, and ``/metrics`` unless it has a token. ``/ready`` tells everybody its status, and who has a key why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starlette.responses import JSONResponse

from hub.api.door.hosts import comes_from_elsewhere, means_this_host
from hub.api.door.keys import KeyRing, bearer_of
from hub.api.errors import UnauthorizedError, error_body, error_response
from hub.api.exchange import exchange_of

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

#: What anybody may read where keys are asked for.
PROBES: Final = frozenset({"/health", "/ping", "/ready"})
_METRICS: Final = "/metrics"
#: The keys in the ASGI scope of whether details are shown, and of what tells whether the client's key is still one.
_TRUSTED: Final = "omni.trusted"
_STILL: Final = "omni.still_opens"


@dataclass(frozen=True, slots=True)
class Locks:
    """Which keys open what at one port; None: everybody may come in."""

    api: KeyRing | None = None
    metrics: KeyRing | None = None
    #: Whether ``/metrics`` is at a port of its own.
    metrics_moved: bool = False

    def of(self, method: str, path: str) -> KeyRing | None:
        """The keys that open a route."""
        if self.metrics is not None and is_metrics(path):
            return self.metrics
        is_open = method in {"GET", "HEAD"} and (path in PROBES or path == _METRICS)
        # A browser asks so before a request from another site, and can't send a key with it. No route acts on it.
        return None if is_open or method == "OPTIONS" else self.api


def is_metrics(path: str) -> bool:
    """Whether a path may lead to metrics, below a root path, too."""
    # vLLM's mount takes whatever begins so.
    return any(part.startswith("metrics") for part in path.split("/"))


def is_trusted(scope: Scope) -> bool:
    """Whether the client may see details: it has a key, or none is asked for."""
    return bool(scope.get(_TRUSTED, True))


def still_opens(scope: Scope) -> bool:
    """Whether the key that a connection came in with opens its door even now: keys may be taken back meanwhile."""
    check: Callable[[], bool] | None = scope.get(_STILL)
    return check is None or check()


class Door:
    """Lets requests through to an application, or answers 401. ``count_key`` is called with each key's name.

    ``count_refusal`` is called with the error of each request that is not let through.
    """

    def __init__(
        self,
        app: ASGIApp,
        locks: Locks,
        count_key: Callable[[str], None],
        count_refusal: Callable[[UnauthorizedError], None],
    ) -> None:
        self._app = app
        self._locks = locks
        self._count_key = count_key
        self._count_refusal = count_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        # Nothing of ours reads a cookie, but libraries do for every request, in a time that grows with the square of
        # the backslashes.
        scope["headers"] = [each for each in scope["headers"] if each[0] != b"cookie" or b"\\" not in each[1]]
        if self._locks.metrics_moved and is_metrics(scope["path"]):
            await _not_here(scope)(scope, receive, send)
            return
        answer = self._refusal(scope)
        if answer is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request without the right key; None lets it through."""
        key = bearer_of(scope["headers"])
        api = self._locks.api
        found = None if api is None else api.find(key)
        scope[_TRUSTED] = api is None or found is not None
        ring = self._locks.of(scope.get("method", "GET"), scope["path"])
        if ring is not None and ring is not api:
            found = ring.find(key)
        if found is not None:
            exchange = exchange_of(scope)
            exchange.key, exchange.key_digest = found.name, found.digest
            self._count_key(found.name)
        if ring is not None and found is not None:
            scope[_STILL] = lambda: ring.find(key) is not None
        if ring is None or found is not None:
            return None
        if ring.awaits_etcd:
            return _unknown_yet()
        error = UnauthorizedError(is_missing=not key)
        self._count_refusal(error)
        response = error_response(error)
        response.headers["WWW-Authenticate"] = "Bearer"
        return response


def _unknown_yet() -> Response:
    text = "the API keys have not come from etcd yet: try again in 1 s"
    body = error_body(text, "service_unavailable_error", "keys_unknown")
    return JSONResponse(body, status_code=503, headers={"Retry-After": "1"})


def _not_here(scope: Scope) -> Response:
    text = f"{scope['path']} is at a port of its own: --metrics-port of this hub"
    return JSONResponse(error_body(text, "invalid_request_error", "not_found"), status_code=404)


class OwnHostOnly:
    """Lets requests through that name this host as their Host, and as their Origin if they have one; else 403.

    What pages of other origins have a browser load is refused, too: it brings no Origin. Links to ``pages`` may be
    anywhere.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], pages: Collection[str] = ()) -> None:
        self._app = app
        self._names = names
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and not means_this_host(scope["headers"], self._names):
            text = "Host, or Origin, names another host than this one: use its address"
            await JSONResponse(error_body(text, "permission_error", "wrong_host"), status_code=403)(
                scope, receive, send
            )
            return
        if scope["type"] == "http" and scope["path"] not in self._pages and comes_from_elsewhere(scope["headers"]):
            text = "a page of another origin asks for this: open it by its own address"
            await JSONResponse(error_body(text, "permission_error", "wrong_site"), status_code=403)(
                scope, receive, send
            )
            return
        await self._app(scope, receive, send)


class OnlyMetrics:
    """What a port of its own for metrics shows of an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["path"] != _METRICS:
            body = error_body(f"only {_METRICS} is here", "invalid_request_error", "not_found")
            await JSONResponse(body, status_code=404)(scope, receive, send)
            return
        await self._app(scope, receive, send)
