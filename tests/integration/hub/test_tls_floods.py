"""What strangers send to TLS, and not through it, keeps a hub from nobody; and a slow reader is noticed behind TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import uvloop
from websockets.sync.client import connect

from hub.api.connections import ConnectionLimits
from tests.integration.hub.test_bounded_websockets import server_of, until
from tests.support.attackers import Attacker
from tests.support.certificates import Certificates, make_certificates
from tests.support.hub import Hub
from tests.support.processes import wait_for
from tests.support.tls_client import TlsClient

ECHO = "{model: echo, stages: [{stage_id: 0, engine: echo, final_output: text}]}"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("pems"))


@pytest.fixture(scope="module")
def http(pems: Certificates) -> Iterator[httpx.Client]:
    with httpx.Client(verify=ssl.create_default_context(cafile=pems.ca), timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, pems: Certificates, http: httpx.Client) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    document = folder / "deploy.yaml"
    document.write_text(ECHO)
    tls = ["--ssl-certfile", pems.server_cert, "--ssl-keyfile", pems.server_key]
    hub = Hub(folder, ["--deploy-config", str(document), *tls])
    try:
        hub.url = wait_for("the hub to listen", hub._listening, 60.0)
        wait_for("every stage to be ready", lambda: http.get(f"{hub.url}/ready").status_code == 200, 60.0)
        yield hub
    finally:
        hub.stop()


def say(hub: Hub, http: httpx.Client, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    answer = http.post(f"{hub.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    return str(answer.json()["choices"][0]["message"]["content"])


def cuts(hub: Hub, http: httpx.Client) -> float:
    line = 'omni_hub_http_cut_total{reason="tls_records"} '
    found = http.get(f"{hub.url}/metrics").text.splitlines()
    return next((float(each.split()[1]) for each in found if each.startswith(line)), 0.0)


@pytest.mark.attack("G2")
def test_strangers_who_only_change_keys_are_cut_and_others_are_served(hub: Hub, http: httpx.Client) -> None:
    """1. six clients send thousands of KeyUpdates and no HTTP, or half a request before them
    2. each is cut when it has sent some hundreds; 3. others are served
    """
    before = cuts(hub, http)
    with ExitStack() as stack:
        clients = [TlsClient(hub.url) for _ in range(6)]
        for number, each in enumerate(clients):
            stack.callback(each.close)
            head = each.records(b"GET /health HTTP/1.1\r\n") if number % 2 else b""
            each.send(head + each.key_updates(400))
        assert say(hub, http, "one two") == "one two"
        assert cuts(hub, http) == before
        for each in clients:
            each.send(each.key_updates(3000))
        assert say(hub, http, "three") == "three"
        for each in clients:
            each.answer()
    assert cuts(hub, http) == before + 6


def test_honest_clients_pass_whatever_their_records(hub: Hub, http: httpx.Client, pems: Certificates) -> None:
    """A large body; a request whose header comes byte by byte, with a KeyUpdate or two; small WebSocket messages."""
    before = cuts(hub, http)
    assert say(hub, http, "word " * 400_000).startswith("word word")
    client = TlsClient(hub.url)
    try:
        head = f"GET /health HTTP/1.1\r\nHost: {client.host}\r\nConnection: close\r\n\r\n".encode()
        pieces = [bytes((each,)) for each in head]
        client.send(client.records(*pieces[:20]) + client.key_updates(2) + client.records(*pieces[20:]))
        assert client.answer()
    finally:
        client.close()
    context = ssl.create_default_context(cafile=pems.ca)
    with connect(hub.url.replace("http", "ws", 1) + "/v1/stream", ssl=context) as stream:
        stream.send(json.dumps({"type": "segment", "prompt": "a b"}))
        for _ in range(90):
            stream.ping().wait(30)
        stream.send('{"type": "end"}')
        while json.loads(stream.recv(30))["type"] != "done":
            pass
    assert cuts(hub, http) == before


async def answer_much(scope: Any, receive: Any, send: Any) -> None:
    """48 KiB."""
    await answer_bytes(send, 48 << 10)


async def answer_more(scope: Any, receive: Any, send: Any) -> None:
    """4 MiB."""
    await answer_bytes(send, 4 << 20)


async def answer_bytes(send: Any, size_bytes: int) -> None:
    headers = [(b"content-length", str(size_bytes).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * size_bytes})


def test_a_client_that_leaves_little_unread_behind_tls_is_cut_too(pems: Certificates) -> None:
    """TLS's own buffers are empty: all that is left lies encrypted in front of the socket."""

    async def story() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pems.server_cert, pems.server_key)
        limits = ConnectionLimits(send_timeout_s=3)
        async with server_of(answer_much, limits, 4096, context) as (url, server):
            client = await asyncio.to_thread(TlsClient, url, 4096)
            try:
                client.send(client.records(f"GET / HTTP/1.1\r\nHost: {client.host}\r\n\r\n".encode()))
                await until(lambda: server._omni.hub_metrics.http_cuts.labels("send_timeout")._value.get() == 1)
            finally:
                client.close()

    uvloop.run(story())


@pytest.mark.attack("I3")
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["http", "https"])
def test_a_client_that_reads_little_but_steadily_is_not_cut(pems: Certificates, is_encrypted: bool) -> None:
    """1. a client reads 2 KiB every 0.1 s, for twice --send-timeout
    2. all that time nothing moves in the hub's own buffer: a megabyte in front of it lies in the kernel
    3. it is not cut, and gets the whole answer, though the hub closes the connection behind that
    """
    uvloop.run(read_slowly(pems, is_encrypted=is_encrypted))


async def read_slowly(pems: Certificates, *, is_encrypted: bool) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pems.server_cert, pems.server_key)
    limits = ConnectionLimits(send_timeout_s=3)
    async with server_of(answer_more, limits, 1 << 20, context if is_encrypted else None) as (url, server):
        client = await asyncio.to_thread(TlsClient if is_encrypted else Attacker, url, 4096)
        try:
            head = f"GET / HTTP/1.1\r\nHost: {client.host}\r\nConnection: close\r\n\r\n".encode()
            client.send(client.records(head) if isinstance(client, TlsClient) else head)
            unsent, came = set(), 0
            for _ in range(60):
                came += len(await asyncio.to_thread(client.socket.recv, 2048))
                await asyncio.sleep(0.1)
                unsent |= {each.unsent_bytes for each in server._bounded.connections.all()}
            assert min(unsent) > 1 << 20
            while came < 4 << 20:
                piece = await asyncio.to_thread(client.socket.recv, 1 << 20)
                assert piece, f"cut after {came} bytes"
                came += len(piece)
            assert server._omni.hub_metrics.http_cuts.labels("send_timeout")._value.get() == 0
        finally:
            client.close()
