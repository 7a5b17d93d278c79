"""The names of one HTTP request: ours, the client's, the replicas', and the line that it leaves in the access log."""

from __future__ import annotations

import logging
import re
from hashlib import sha256
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket

from hub.api.exchange import Exchange, Exchanges, current_exchange, exchange_of
from hub.request.outputs import OmniOutput
from omni_discovery.errors import ConfigError, EngineFailedError

LINE = re.compile(
    r"http\.request method=(?P<method>\S+) path=(?P<path>\S+) status=(?P<status>\S+) duration_s=\d+\.\d{3} "
    r"bytes=(?P<bytes>\d+) pieces=(?P<pieces>\d+) complete=(?P<complete>\S+) request=(?P<request>\S+) "
    r"trace=- x_request_id=(?P<label>\S+) key=- replicas=(?P<replicas>\S+)"
)


def output(replica: str, *replicas: str) -> OmniOutput:
    return OmniOutput("r", 0, "text", replica=replica, replicas=replicas)


async def whole(request: Request) -> Response:
    exchange = exchange_of(request.scope)
    assert exchange is current_exchange()
    exchange.note_output(output("1/10"))
    exchange.note_output(output("1/2", "0/1", "1/2"))
    return PlainTextResponse(f"{request.headers['x-request-id']} {exchange.request_id}")


async def streamed(_: Request) -> Response:
    exchange = current_exchange()
    exchange.note_output(output("0/1"))

    async def pieces() -> Any:
        yield b"one"
        exchange.note_output(output("1/0"))
        yield b"three"

    return StreamingResponse(pieces())


async def talk(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("hallo")
    await websocket.close()


APP = Starlette(
    routes=[Route("/whole", whole, methods=["POST"]), Route("/streamed", streamed), WebSocketRoute("/talk", talk)]
)


def client(*, logs: bool = False) -> TestClient:
    return TestClient(Exchanges(APP, logs=logs))


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    found = [LINE.fullmatch(record.getMessage()) for record in caplog.records if record.name == "hub.api.exchange"]
    return [match.groupdict() for match in found if match is not None]


def test_an_answer_names_our_id_the_clients_and_the_replicas_by_stage() -> None:
    """What runs behind, such as vLLM's server, which makes its ids of the header, sees our id in the client's place."""
    answer = client().post("/whole", headers={"X-Request-Id": "my own/7"})
    seen, ours = answer.text.split()
    assert seen == ours == answer.headers["x-omni-request-id"]
    assert answer.headers["x-request-id"] == "my own/7"
    assert answer.headers["x-omni-replicas"] == "0/1, 1/2, 1/10"
    other = client().post("/whole", headers={"X-Request-Id": "my own/7"})
    assert other.headers["x-omni-request-id"] != ours


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-Request-Id": ""},
        {"X-Request-Id": "x" * 129},
        {"X-Request-Id": "gr\u00fc\u00df"},
        {"X-Request-Id": "a\tb"},
        {"X-Request-Id": "a\x7fb"},
    ],
    ids=["none", "empty", "too long", "not ASCII", "a tab", "not printable"],
)
def test_what_is_no_label_is_ignored_and_our_id_stands_in_its_place(headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    answer = client().post("/whole", headers=raw)  # type: ignore[arg-type]
    assert answer.headers["x-request-id"] == answer.headers["x-omni-request-id"]
    assert len(answer.headers["x-request-id"]) == 32


def test_of_two_labels_none_is_taken_and_the_longest_is() -> None:
    raw = [(b"x-request-id", b"one"), (b"x-request-id", b"two")]
    answer = client().post("/whole", headers=raw)  # type: ignore[arg-type]
    assert answer.headers["x-request-id"] == answer.headers["x-omni-request-id"]
    assert client().post("/whole", headers={"x-request-id": "x" * 128}).headers["x-request-id"] == "x" * 128


def test_the_headers_of_a_stream_name_what_is_known_when_they_leave_and_its_line_names_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    answer = client(logs=True).get("/streamed?key=secret", headers={"x-request-id": "mine"})
    assert (answer.text, answer.headers["x-omni-replicas"]) == ("onethree", "0/1")
    (line,) = lines(caplog)
    assert (line["method"], line["path"], line["status"], line["complete"]) == ("GET", "/streamed", "200", "yes")
    assert (line["bytes"], line["pieces"], line["replicas"]) == ("8", "2", "0/1,1/0")
    assert (line["request"], line["label"]) == (answer.headers["x-omni-request-id"], "mine")
    assert "secret" not in "".join(record.getMessage() for record in caplog.records if "exchange" in record.name)


def test_every_request_leaves_a_line_and_none_does_without_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    """A path that breaks a line or a word, a route that is not there, and a WebSocket, whose frames are its pieces."""
    caplog.set_level(logging.INFO)
    client().get("/nowhere")
    assert lines(caplog) == []
    one = client(logs=True)
    one.get("/no%20where%0A1")
    with one.websocket_connect("/talk", headers={"x-request-id": "mine"}) as socket:
        assert socket.receive_text() == "hallo"
        named = dict(socket.extra_headers or [])
    assert named[b"x-request-id"] == b"mine"
    missing, talked = lines(caplog)
    assert (missing["path"], missing["status"], missing["label"]) == ("/no_where_1", "404", "-")
    assert (talked["path"], talked["status"], talked["pieces"], talked["bytes"]) == ("/talk", "101", "1", "5")
    assert named[b"x-omni-request-id"].decode() == talked["request"]


def test_an_answer_that_breaks_off_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("the client has left")

    caplog.set_level(logging.INFO)
    with pytest.raises(RuntimeError):
        TestClient(Exchanges(broken, logs=True)).get("/")
    (line,) = lines(caplog)
    assert (line["status"], line["bytes"], line["complete"]) == ("200", "4", "no")


def test_thousands_of_replicas_make_no_header_of_kilobytes() -> None:
    exchange = Exchange()
    for number in range(1000):
        exchange.note_output(output(f"0/{number}"))
    assert exchange.replicas.endswith("0/30, 0/31, and 968 more")


def test_the_line_of_a_failed_request_names_the_replicas_that_were_tried() -> None:
    exchange, error = Exchange(), EngineFailedError("it raised")
    error.replicas = ("1/0", "0/1")
    exchange.note_output(output("0/1"))
    exchange.note_error(error)
    assert exchange.headers()["x-omni-replicas"] == "0/1, 1/0"
    nobody = Exchange()
    nobody.note_error(ConfigError("no request"))
    nobody.note_error(EngineFailedError("never sent"))
    assert nobody.replicas == ""


@pytest.mark.attack("W1")
def test_a_client_is_called_the_same_each_time_and_nothing_tells_who_it_is() -> None:
    """By its key, where it has one; else by its address, or its network."""
    asked = [("", "10.0.0.1"), ("", "10.0.0.2"), ("", "fd00:1::1"), ("", "fd00:1::2"), ("ops", "10.0.0.1")]
    called: list[str] = []
    for key, host in asked * 2:
        exchange = Exchange(host=host)
        exchange.key = key
        called.append(exchange.client)
    first, second = called[:5], called[5:]
    assert first == second
    assert first[2] == first[3]
    assert len(set(first)) == 4
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in first)
    assert Exchange().client == ""


@pytest.mark.attack("Z89")
def test_the_client_of_a_key_is_called_the_same_by_all_hubs() -> None:
    """By the key, whatever its name: that may be another's in another file."""
    called: list[str] = []
    for name, key in (("ops", b"one"), ("other", b"one"), ("ops", b"two")):
        exchange = Exchange(host="10.0.0.1")
        exchange.key, exchange.key_digest = name, sha256(key).digest()
        called.append(exchange.client)
    assert called[0] == called[1] == "key-faf37a52da70ee3e"
    assert called[2] != called[0]
