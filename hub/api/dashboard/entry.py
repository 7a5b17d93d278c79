"""DashboardDoor: who may look at the dashboard, and who may act: by the admin port's token, or a session's cookie."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from hub.api.cross_origin import check_content_type
from hub.api.dashboard.sessions import SESSION_S, BrowserSessions
from hub.api.door.keys import bearer_of
from hub.api.errors import UnauthorizedError
from hub.api.generation.body import decode_body, read_body
from omni_discovery.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from hub.api.door.keys import KeyRing

#: The header with the secret that a page needs to act.
ACTION_HEADER: Final = "x-omni-action-key"
PATH: Final = "/dashboard"
#: What leads to the dashboard's page.
PAGES: Final = frozenset({"/", PATH, f"{PATH}/"})
_SECRET_BYTES: Final = 32


class LogIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a log-in."""

    token: Annotated[str, msgspec.Meta(max_length=4096)]


_log_ins: Final = msgspec.json.Decoder(LogIn)


class ReadOnlyError(InvalidRequestError):
    """The client may look, and no more."""

    def __init__(self) -> None:
        super().__init__("this page may look, and not act: log in with the token of the admin port", 403)


@dataclass(frozen=True, slots=True)
class Visitor:
    """What a client of the dashboard may do."""

    reads: bool
    acts: bool


class DashboardDoor:
    """Lives on the hub's loop. ``is_open``: whoever reaches the port may look. ``count_refusal`` as that of Door."""

    def __init__(self, ring: KeyRing, count_refusal: Callable[[UnauthorizedError], None], *, is_open: bool) -> None:
        self._ring = ring
        self._count_refusal = count_refusal
        self._is_open = is_open
        self._sessions = BrowserSessions()

    def visitor(self, request: Request) -> Visitor:
        """Find out who asks. A cookie alone acts never: a page also needs its own secret, and its own Origin."""
        if self._has_token(request):
            return Visitor(reads=True, acts=True)
        key = request.headers.get(ACTION_HEADER, "")
        # Whether the Origin is ours is checked in front of this.
        came_from_page = request.method in ("GET", "HEAD") or "origin" in request.headers
        acts = came_from_page and self._sessions.may_act(_secret_of(request), key, time.monotonic())
        return Visitor(reads=acts or self._is_open or self._has_session(request), acts=acts)

    def _has_token(self, request: Request) -> bool:
        return self._ring.find(bearer_of(request.headers.raw)) is not None

    def _has_session(self, request: Request) -> bool:
        return self._sessions.may_read(_secret_of(request), time.monotonic())

    def check_reader(self, request: Request) -> None:
        """Raise UnauthorizedError for a client that may not look."""
        if not self.visitor(request).reads:
            raise self._refused(request)

    def check_known(self, request: Request) -> None:
        """Raise ReadOnlyError for a client that may look only since everybody may."""
        self.check_reader(request)
        if not self.is_known(request):
            raise ReadOnlyError

    def is_known(self, request: Request) -> bool:
        """Whether the client has the token, or has logged in."""
        return self._has_token(request) or self._has_session(request)

    def check_actor(self, request: Request) -> None:
        """Raise UnauthorizedError for a client that may not even look, ReadOnlyError for one that may do only that."""
        visitor = self.visitor(request)
        if not visitor.reads:
            raise self._refused(request)
        if not visitor.acts:
            raise ReadOnlyError

    async def log_in(self, request: Request) -> tuple[str, Callable[[Response], None]]:
        """Read the token of a body. Return the page's secret, and what gives a response the cookie.

        Raise InvalidRequestError.
        """
        check_content_type(request)
        body = decode_body(_log_ins, await read_body(request))
        if self._ring.find(body.token) is None:
            error = UnauthorizedError(is_missing=not body.token)
            self._count_refusal(error)
            raise error
        cookie, key = secrets.token_urlsafe(_SECRET_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
        self._sessions.begin(cookie, key, time.monotonic())

        def give(response: Response) -> None:
            response.set_cookie(
                _cookie_of(request),
                cookie,
                max_age=int(SESSION_S),
                path=PATH,
                secure=request.url.scheme == "https",
                httponly=True,
                samesite="strict",
            )

        return key, give

    def log_out(self, request: Request, response: Response) -> None:
        """End the session of a client."""
        self._sessions.end(_secret_of(request))
        response.delete_cookie(_cookie_of(request), path=PATH)

    def _refused(self, request: Request) -> UnauthorizedError:
        error = UnauthorizedError(is_missing=not bearer_of(request.headers.raw))
        self._count_refusal(error)
        return error


def _cookie_of(request: Request) -> str:
    # Cookies know no ports: hubs beside each other have one name each.
    return f"omni_dashboard_{request.url.port or 0}"


def _secret_of(request: Request) -> str:
    # Not by the library, which takes ever longer for what is quoted.
    name, found = _cookie_of(request), ""
    for part in ";".join(request.headers.getlist("cookie")).split(";"):
        given, _, value = part.strip().partition("=")
        found = value if given == name else found
    return found
