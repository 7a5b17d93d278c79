"""When the headers of an answer leave: with its first piece, or when the wait that was set is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hub.api.held_headers import HeldHeaders, headers_latest_s
from tests.support.hub_fakes import until

START = {"type": "http.response.start", "status": 200, "headers": []}
LAST = {"type": "http.response.body", "body": b""}


def piece(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


class Client:
    """Asks one application, and notes what has left for it."""

    def __init__(self, application: Callable[..., Any], wait_s: float | None = None, **scope: str) -> None:
        self.left: list[dict[str, Any]] = []
        self.scope: dict[str, Any] = {"type": "http", "method": "POST", **scope}
        self._app = HeldHeaders(application, wait_s)

    async def ask(self) -> list[str]:
        await self._app(self.scope, self._receive, self._send)
        return self.kinds

    @property
    def kinds(self) -> list[str]:
        return [message["type"].removeprefix("http.response.") for message in self.left]

    async def _receive(self) -> Any:
        raise AssertionError("nothing is read")

    async def _send(self, message: Any) -> None:
        self.left.append(message)


async def test_headers_leave_with_the_first_piece() -> None:
    """Also where an application sends an empty piece behind its headers, as some do."""
    client: Client

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(START)
        await send(piece(b""))
        assert client.left == []
        await send(piece(b"one"))
        assert client.left == [START, piece(b"one")]
        await send(LAST)

    client = Client(app)
    assert await client.ask() == ["start", "body", "body"]


async def test_an_answer_without_a_body_leaves_whole() -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(START)
        await send(LAST)

    assert await Client(app).ask() == ["start", "body"]


@pytest.mark.parametrize("scope", [{"method": "GET"}, {"type": "websocket"}])
async def test_what_is_no_post_waits_for_nothing(scope: dict[str, str]) -> None:
    client: Client

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(START)
        assert client.kinds == ["start"]

    client = Client(app, None, **scope)
    await client.ask()


async def test_headers_leave_alone_when_their_wait_is_over() -> None:
    """1. the headers wait; 2. the wait is over: they leave, once; 3. the piece comes"""
    client: Client

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        assert headers_latest_s(scope) is not None
        await send(START)
        assert client.left == []
        await until(lambda: bool(client.left), 10.0)
        await send(piece(b"one"))
        await send(LAST)

    client = Client(app, 0.05)
    assert await client.ask() == ["start", "body", "body"]


async def test_headers_that_come_behind_the_wait_leave_at_once() -> None:
    """The wait counts from the request: an answer that took longer to begin waits no second time."""
    client: Client

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await asyncio.sleep(0.06)
        await send(START)
        assert client.kinds == ["start"]

    client = Client(app, 0.05)
    await client.ask()


async def test_nothing_leaves_behind_an_application_that_failed() -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(START)
        raise RuntimeError

    client = Client(app, 0.05)
    with pytest.raises(RuntimeError):
        await client.ask()
    await asyncio.sleep(0.1)
    assert client.left == []
