"""The cap on what one client may have under way at the same time: ``--max-requests-per-client``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from hub.api.errors import error_response
from hub.api.exchange import client_name, exchange_of, host_of
from omni_discovery.errors import InvalidRequestError, OverloadedError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_RETRY_AFTER_S: Final = 1.0


class ClientQuota:
    """ASGI middleware that answers with 429 what a client sends while it has ``most`` requests under way.

    A client is who has one API key; without keys it is an IP address, or a network of 64 bits in IPv6. POSTs and
    WebSockets count. A POST that asks for several answers counts for as many, each with its companions
    (``Exchange.charge``).
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "websocket" and scope.get("method") != "POST":
            await self._app(scope, receive, send)
            return
        client, exchange = client_of(scope), exchange_of(scope)
        if self._under_way[client] >= self._most:
            text = f"this client has {self._most} requests under way, which is the most that one may have here"
            await error_response(OverloadedError(text, _RETRY_AFTER_S))(scope, receive, send)
            return
        self._under_way[client] += 1
        counted = 1

        def charge(answers: int) -> None:
            nonlocal counted
            self._check_room(client, counted, answers)
            self._under_way[client] += answers
            counted += answers

        exchange.charge, exchange.most_answers = charge, self._most
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way[client] -= counted
            if not self._under_way[client]:
                del self._under_way[client]

    def _check_room(self, client: str, counted: int, answers: int) -> None:
        """Raise InvalidRequestError for more answers than a client may ever have, OverloadedError for too many now."""
        if counted + answers > self._most:
            raise InvalidRequestError(
                f"this request asks for {counted + answers} answers, and a client may have {self._most} under way "
                "here: send fewer prompts at a time, or fewer companions, or a smaller 'n'"
            )
        under_way = self._under_way[client]
        if under_way + answers > self._most:
            text = f"this request asks for {counted + answers} answers, and this client has {under_way - counted} other"
            raise OverloadedError(f"{text} under way; {self._most} are the most here", _RETRY_AFTER_S)


def client_of(scope: Scope) -> str:
    """The client of a connection; empty for one without a key and an address."""
    return client_name(exchange_of(scope).key, host_of(scope))
