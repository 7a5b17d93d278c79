"""Clients that go while their answer is made, or are turned away, as the hub sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.attackers import attackers
from tests.support.hub import Hub

#: One place, which a long answer keeps for minutes.
ECHO = "{model: m, stages: [{stage_id: 0, engine: echo, engine_args: {capacity: 1, delay_s: 1}, final_output: text}]}"
LONG = json.dumps({"messages": [{"role": "user", "content": "word " * 600}]}).encode()
SHORT = json.dumps({"messages": [{"role": "user", "content": "word"}]}).encode()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    hub = Hub.of_yaml(tmp_path_factory.mktemp("hub"), ECHO)
    try:
        yield hub.wait_ready()
    finally:
        hub.stop()


def request(hub: Hub, body: bytes) -> bytes:
    host = hub.url.removeprefix("http://")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.attack("E7")
@pytest.mark.parametrize("second", [b"GET", SHORT, LONG * 100], ids=["a part", "a request", "a long body"])
def test_a_client_that_has_sent_more_and_goes_gives_its_place(hub: Hub, second: bytes) -> None:
    with attackers(hub.url, 1) as (client,):
        client.send(request(hub, LONG) + (second if second == b"GET" else request(hub, second)))
    assert hub.ask("word")[0] == 200


def test_a_client_that_has_sent_more_and_stays_gets_both_answers(hub: Hub) -> None:
    with attackers(hub.url, 1) as (client,):
        client.send(request(hub, SHORT) + request(hub, SHORT).replace(b"Host", b"Connection: close\r\nHost", 1))
        assert client.answer().count(b"200 OK") == 2


@pytest.mark.attack("E7")
def test_a_stranger_whose_websocket_is_refused_writes_no_error_into_the_log(hub: Hub) -> None:
    with attackers(hub.url, 1) as (stranger,):
        head = f"GET /v1/stream HTTP/1.1\r\nHost: {stranger.host}\r\nOrigin: http://evil.example\r\n"
        head += "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        stranger.send(f"{head}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode())
        answer = stranger.answer()
    assert answer.startswith(b"HTTP/1.1 403")
    assert b"--allowed-origins" in answer
    assert hub.get("/health")[0] == 200
    assert "ERROR" not in hub.text
    assert "without completing handshake" not in hub.text
