"""Which routes are open, and what a door answers to those without a key: any path that is not named is closed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hub.api.door.guard import Door, Locks, OnlyMetrics, OwnHostOnly, is_trusted, still_opens
from hub.api.door.keys import KeyRing, read_key
from hub.api.errors import UnauthorizedError

API = KeyRing([read_key("alice", "a-key", "x")])
METRICS = KeyRing([read_key("metrics", "m-key", "x")])


@pytest.mark.parametrize(
    ("method", "path", "ring"),
    [
        ("GET", "/health", None),
        ("HEAD", "/ready", None),
        ("GET", "/ping", None),
        ("GET", "/metrics", None),
        ("OPTIONS", "/v1/chat/completions", None),
        ("POST", "/health", API),
        ("POST", "/ping", API),
        ("POST", "/v1/chat/completions", API),
        ("GET", "/", API),
        ("GET", "", API),
        ("GET", "/health/", API),
        ("GET", "//health", API),
        ("GET", "/health/../v1/models", API),
        ("GET", "/HEALTH", API),
        ("GET", "/metrics/", API),
        ("POST", "/metrics", API),
        ("GET", "/root/metrics", API),
        *(
            ("POST", path, API)
            for path in ("/invocations", "/tokenize", "/detokenize", "/pooling", "/inference/v1/generate")
        ),
        *(("GET", path, API) for path in ("/docs", "/openapi.json", "/redoc", "/version", "/load", "/server_info")),
        ("GET", "/something-to-come", API),
    ],
)
def test_where_keys_are_asked_for_all_but_probes_and_metrics_is_closed(
    method: str, path: str, ring: KeyRing | None
) -> None:
    assert Locks(API).of(method, path) is ring


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metrics/x", "/metricsX", "/root/metrics"])
def test_a_token_closes_the_metrics_below_any_root_and_nothing_else(path: str) -> None:
    assert Locks(None, METRICS).of("GET", path) is METRICS
    assert Locks(API, METRICS).of("GET", path) is METRICS
    assert Locks(None, METRICS).of("POST", "/v1/chat/completions") is None


class Guarded:
    """A door with keys, or none, in front of an application that answers everything."""

    def __init__(self, locks: Locks) -> None:
        self.keys: list[str] = []
        self.refusals: list[UnauthorizedError] = []
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])
        self.app = Door(app, locks, self.keys.append, self.refusals.append)

    async def _answer(self, request: Request) -> Response:
        return JSONResponse({"trusted": is_trusted(request.scope)})

    async def ask(self, path: str, key: str = "", method: str = "GET") -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://hub") as http:
            return await http.request(method, path, headers={"Authorization": f"Bearer {key}"} if key else {})


async def test_without_the_right_key_the_answer_is_openais_401() -> None:
    guarded = Guarded(Locks(API))
    for key, text in (("", "a key is needed"), ("wrong", "this key opens nothing here"), ("m-key", "opens nothing")):
        answer = await guarded.ask("/v1/models", key)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert text in error["message"]
        assert "wrong" not in error["message"]
    assert (len(guarded.refusals), guarded.keys) == (3, [])
    assert (await guarded.ask("/v1/models", "a-key")).status_code == 200
    assert guarded.keys == ["alice"]


async def test_details_are_for_those_with_a_key_where_one_is_asked_for() -> None:
    assert (await Guarded(Locks(API)).ask("/ready")).json() == {"trusted": False}
    assert (await Guarded(Locks(API)).ask("/ready", "wrong")).json() == {"trusted": False}
    assert (await Guarded(Locks(API)).ask("/ready", "a-key")).json() == {"trusted": True}
    assert (await Guarded(Locks()).ask("/ready")).json() == {"trusted": True}


async def test_metrics_have_a_key_of_their_own_or_a_port_of_their_own() -> None:
    guarded = Guarded(Locks(API, METRICS))
    assert [(await guarded.ask("/metrics", key)).status_code for key in ("", "a-key", "m-key")] == [401, 401, 200]
    assert (await guarded.ask("/v1/models", "m-key")).status_code == 401
    moved = Guarded(Locks(API, METRICS, metrics_moved=True))
    assert [(await moved.ask(path, "m-key")).status_code for path in ("/metrics", "/metrics/")] == [404, 404]
    moved.app = OnlyMetrics(moved.app._app)  # type: ignore[assignment]
    assert [(await moved.ask(path)).status_code for path in ("/metrics", "/v1/models")] == [200, 404]


async def test_until_the_keys_of_etcd_are_known_a_client_is_asked_to_wait() -> None:
    guarded = Guarded(Locks(KeyRing([read_key("alice", "a-key", "x")], from_etcd=True)))
    answer = await guarded.ask("/v1/models", "made-in-etcd")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "keys_unknown"
    assert (await guarded.ask("/v1/models", "a-key")).status_code == 200


async def test_a_websocket_without_a_key_is_refused_before_it_is_accepted() -> None:
    """With a 401 where the server can send one, and else by closing."""
    guarded, sent = Guarded(Locks(API)), list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/stream", "headers": [], "extensions": {"websocket.http.response": {}}}
    await guarded.app(scope, receive, send)
    assert [(message["type"], message.get("status")) for message in sent] == [
        ("websocket.http.response.start", 401),
        ("websocket.http.response.body", None),
    ]
    sent.clear()
    await guarded.app({"type": "websocket", "path": "/v1/stream", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.attack("A10")
async def test_a_page_that_dns_leads_here_is_refused_before_its_key_is_looked_at() -> None:
    guarded = Guarded(Locks(API))
    guarded.app = OwnHostOnly(guarded.app, ["hub"])  # type: ignore[assignment]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded.app), base_url="http://evil.example") as http:
        answer = await http.get("/", headers={"Authorization": "Bearer a-key"})
    assert (answer.status_code, answer.json()["error"]["code"], guarded.keys) == (403, "wrong_host", [])
    assert (await guarded.ask("/", "a-key")).status_code == 200


@pytest.mark.attack("O7")
async def test_what_a_page_of_another_origin_loads_is_refused_and_a_link_to_the_page_is_not() -> None:
    """Pictures of its own by the address of an open dashboard's stream took all places of that."""
    guarded = Guarded(Locks())
    guarded.app = OwnHostOnly(guarded.app, ["hub"], ["/page"])  # type: ignore[assignment]
    transport = httpx.ASGITransport(guarded.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://hub") as http:
        for site, path, status in (
            ("cross-site", "/live", 403),
            ("same-site", "/live", 403),
            ("cross-site", "/page", 200),
            ("same-origin", "/live", 200),
        ):
            assert (await http.get(path, headers={"Sec-Fetch-Site": site})).status_code == status
        assert (await http.get("/live")).status_code == 200


async def test_who_is_inside_learns_that_the_key_was_taken_back() -> None:
    ring = KeyRing(from_etcd=True)
    ring.replace({"alice": read_key("alice", "a-key", "x").digest})
    inside: list[Any] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        inside.append(scope)

    headers = [(b"authorization", b"Bearer a-key")]
    door = Door(app, Locks(ring), lambda _: None, lambda _: None)
    await door({"type": "http", "method": "POST", "path": "/x", "headers": headers}, app, app)
    assert still_opens(inside[0])
    ring.replace({})
    assert not still_opens(inside[0])
    # Where no key is asked for, none is taken back.
    assert still_opens({})
