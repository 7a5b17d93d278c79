"""Requests that web pages of strangers have browsers send: the checks of Host and Origin, and CORS.

A page of any site may have a browser send requests to this hub: simple ones with the page's Origin, and, where the
site's name is made to lead to this hub's address (DNS rebinding), any with the site's name as Host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from hub.api.door.hosts import is_own_page
from hub.api.errors import error_body
from omni_discovery.errors import InvalidRequestError
from omni_discovery.sockets.hosts import is_loopback, is_own_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

ANY: Final = "*"
#: The type of a form with files.
FORM: Final = "multipart/form-data"
#: Methods that change nothing.
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
#: Headers of answers that pages of allowed origins may read.
_EXPOSED: Final = (
    "retry-after",
    "server-timing",
    "x-omni-replicas",
    "x-omni-request-id",
    "x-omni-resume",
    "x-request-id",
)


@dataclass(frozen=True, slots=True)
class WebPolicy:
    """Which hosts and origins are answered.

    ``hosts``: names that requests may be addressed to, besides loopback names and addresses; None: any.
    ``origins``: those whose pages may send requests, as browsers name them; ANY: all.
    """

    hosts: tuple[str, ...] | None = None
    origins: tuple[str, ...] = ()

    def refusal(self, method: str, host: str | None, origin: str | None) -> str:
        """Why a request is refused; empty if it is not. ``method`` is empty for a WebSocket."""
        if host is not None and self.hosts is not None and not is_own_host(host, self.hosts):
            return (
                f"this hub is not addressed as {host!r}: use its address or localhost, or allow the name"
                " with --allowed-hosts"
            )
        if origin is None or method in _SAFE or self._allows(origin, host):
            return ""
        return f"pages of {origin!r} may not send requests here: --allowed-origins allows them"

    def _allows(self, origin: str, host: str | None) -> bool:
        if ANY in self.origins or origin.lower() in self.origins:
            return True
        return host is not None and is_own_page(origin, host)


def web_policy(bound_to: str, hosts: Sequence[str], origins: Sequence[str]) -> WebPolicy:
    """The policy of a server that is bound to a host, by the flags ``--allowed-hosts`` and ``--allowed-origins``.

    Without names, one that is bound to loopback answers to loopback names and addresses, and any other to all names.
    """
    names = tuple(name.lower() for name in hosts)
    is_any = ANY in names or (not names and not is_loopback(bound_to))
    return WebPolicy(None if is_any else names, tuple(origin.lower().rstrip("/") for origin in origins))


class CrossOriginGuard:
    """ASGI middleware that answers a request which the policy refuses, before its body is read."""

    def __init__(self, app: ASGIApp, policy: WebPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, str] = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Two lengths: a proxy in front may go by the one and take the rest for another request.
            text = "a request has a Content-Length or a Transfer-Encoding, not both"
            await _refuse(400, "invalid_request_error", "invalid_request", text)(scope, receive, send)
            return
        refusal = self._policy.refusal(scope.get("method", ""), headers.get(b"host"), headers.get(b"origin"))
        if refusal:
            await _refuse(403, "permission_error", "permission_denied", refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def guarded(app: ASGIApp, policy: WebPolicy) -> ASGIApp:
    """The application behind the guard; pages of allowed origins may read its answers."""
    app = CrossOriginGuard(app, policy)
    if not policy.origins:
        return app
    # Outermost: a preflight request carries neither a key nor a body.
    return CORSMiddleware(
        app, allow_origins=policy.origins, allow_methods=[ANY], allow_headers=[ANY], expose_headers=_EXPOSED
    )


def _refuse(status: int, kind: str, code: str, text: str) -> JSONResponse:
    return JSONResponse(error_body(text, kind, code), status_code=status, headers={"Connection": "close"})


class ContentTypeError(InvalidRequestError):
    """The body is of a type that the route does not take."""

    def __init__(self, given: str, wanted: str) -> None:
        is_curls = given == "application/x-www-form-urlencoded"
        what = "has no Content-Type" if not given else f"is sent as {given!r}"
        if wanted == FORM:
            advice = "send a form, as curl -F image=@cat.png does"
        elif is_curls:
            advice = f"curl -d sends that unless told: add -H 'Content-Type: {wanted}'"
        else:
            advice = "send that header"
        super().__init__(f"the body {what}; this route takes 'Content-Type: {wanted}': {advice}", 415)


def check_content_type(request: Request, wanted: str = "application/json") -> None:
    """Raise ContentTypeError for a body of another type. Call it before the body is read.

    A page of any site may have a browser send a form or plain text without a preflight request, but not JSON: a route
    that takes forms has only the checks of Origin and Host before it.
    """
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != wanted:
        raise ContentTypeError(given, wanted)
