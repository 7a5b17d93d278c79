"""The cap on what one client may have under way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from hub.api.client_quota import ClientQuota, client_of
from hub.api.exchange import Exchange, exchange_of
from omni_discovery.errors import InvalidRequestError, OverloadedError


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
    ],
)
def test_a_client_is_an_address_or_a_network_of_ipv6(host: str, client: str) -> None:
    assert client_of({"type": "http", "client": (host, 1)}) == client
    assert client_of({"type": "http", "client": None}) == ""


@pytest.mark.attack("A9")
async def test_one_that_has_its_share_under_way_gets_429_and_others_are_served() -> None:
    """1. a has a request and a WebSocket under way, its third is refused, but it may look; 2. b is served
    3. one of a's ends, with an error: there is room for another
    """
    goes_on, served = asyncio.Event(), list[str]()

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        served.append(scope["client"][0])
        if scope["path"] == "/long":
            await goes_on.wait()
            raise RuntimeError("a bug")

    statuses: list[int] = []

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    async def call(host: str, path: str = "/", kind: str = "http", **more: Any) -> None:
        scope = {"type": kind, "client": (host, 5), "path": path, "headers": [], "method": "POST", **more}
        await ClientQuota.__call__(quota, scope, send, send)  # type: ignore[arg-type]

    quota = ClientQuota(app, 2)
    tasks = [asyncio.create_task(call("a", "/long")), asyncio.create_task(call("a", "/long", "websocket"))]
    await asyncio.sleep(0)
    await call("a")
    assert (served, statuses[0]) == (["a", "a"], 429)
    await call("a", method="GET")
    await call("b")
    assert served == ["a", "a", "a", "b"]
    goes_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    await call("a")
    assert served[4:] == ["a"]


def scope_of(host: str) -> Scope:
    return {
        "type": "http",
        "client": (host, 5),
        "path": "/",
        "headers": [],
        "method": "POST",
        "omni.exchange": Exchange(),
    }


async def nothing(*_args: Any) -> None:
    pass


@pytest.mark.attack("I1")
async def test_a_request_for_several_answers_counts_for_as_many() -> None:
    """1. a has a request for three answers under way, of four; its request for two more is refused, one for one is not
    2. b has its own four; nobody gets five; 3. all that was counted is given back
    """
    holds, served = asyncio.Event(), list[int]()

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        exchange_of(scope).charge(answers[0] - 1)
        served.append(answers[0])
        if answers[0] == 3:
            await holds.wait()

    quota, answers = ClientQuota(app, 4), [3]
    first = asyncio.create_task(quota(scope_of("a"), nothing, nothing))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    answers[0] = 2
    with pytest.raises(OverloadedError, match="asks for 2 answers, and this client has 3 other under way; 4 are"):
        await quota(scope_of("a"), nothing, nothing)  # type: ignore[arg-type]
    answers[0] = 1
    await quota(scope_of("a"), nothing, nothing)  # type: ignore[arg-type]
    answers[0] = 4
    await quota(scope_of("b"), nothing, nothing)  # type: ignore[arg-type]
    answers[0] = 5
    with pytest.raises(InvalidRequestError, match="asks for 5 answers, and a client may have 4 under way"):
        await quota(scope_of("b"), nothing, nothing)  # type: ignore[arg-type]
    holds.set()
    await first
    assert served == [3, 1, 4]
    assert not quota._under_way
