"""Clients of a hub's TLS port hold a place from the moment they are accepted, whether or not they ever speak TLS."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from tests.support.attackers import GONE, Attacker, attackers, descriptors
from tests.support.certificates import Certificates, make_certificates
from tests.support.hub import Hub
from tests.support.processes import wait_for

PLACES = 20
#: Each word takes its time, so that an answer can be made to last.
ECHO = "{model: m, stages: [{stage_id: 0, engine: echo, engine_args: {capacity: 64, delay_s: 1}, final_output: text}]}"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("pems"))


@pytest.fixture
def client(pems: Certificates) -> Iterator[httpx.Client]:
    with httpx.Client(verify=ssl.create_default_context(cafile=pems.ca), timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, pems: Certificates) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    tls = ("--ssl-certfile", pems.server_cert, "--ssl-keyfile", pems.server_key)
    hub = Hub.of_yaml(folder, ECHO, *tls, "--max-connections", str(PLACES), "--header-timeout", "60")
    try:
        hub.url = wait_for("the hub to listen", hub._listening, 60.0)
        with httpx.Client(verify=ssl.create_default_context(cafile=pems.ca)) as client:
            wait_for("the stage", lambda: client.get(f"{hub.url}/ready").status_code == 200, 60.0)
        yield hub
    finally:
        hub.stop()


def cuts(hub: Hub, client: httpx.Client, reason: str) -> float:
    line = f'omni_hub_http_cut_total{{reason="{reason}"}} '
    lines = client.get(f"{hub.url}/metrics").text.splitlines()
    return next((float(each.split()[1]) for each in lines if each.startswith(line)), 0.0)


def chat(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}]}


def must_go_on(served: Attacker) -> None:
    """One more word of the answer comes."""
    seen = b""
    while b"data: " not in seen:
        piece = served.socket.recv(1 << 16)
        assert piece, f"cut after {seen!r}"
        seen += piece


@pytest.mark.attack("D6")
def test_silent_tls_connections_give_their_places_the_oldest_first(hub: Hub, client: httpx.Client) -> None:
    """1. five times as many strangers as there are places: one half says nothing, the other half a hello
    2. those that came first are closed at once, and honest clients are served meanwhile
    """
    quiet = descriptors(hub.process.pid)
    with attackers(hub.url, 5 * PLACES) as strangers:
        for each in strangers[::2]:
            # A hello that promises more than comes. Some are closed already.
            with suppress(*GONE):
                each.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        answer = client.post(f"{hub.url}/v1/chat/completions", json=chat("one"))
        assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "one")
        assert all(each.answer() == b"" for each in strangers[: 3 * PLACES])
        wait_for("few descriptors", lambda: descriptors(hub.process.pid) <= quiet + PLACES + 5)
        assert cuts(hub, client, "displaced") >= 4 * PLACES
    wait_for("the descriptors back", lambda: descriptors(hub.process.pid) <= quiet + 5)


@pytest.mark.attack("D6")
def test_who_finds_all_places_served_is_told_so_behind_the_handshake(
    hub: Hub, client: httpx.Client, pems: Certificates
) -> None:
    """1. all places are taken by requests that are being answered; silent strangers knock, too
    2. an honest client gets a 503 and not a reset, and those that are served are not cut
    """
    context = ssl.create_default_context(cafile=pems.ca)
    body = json.dumps(chat("word " * 300) | {"stream": True}).encode()
    client.close()
    with attackers(hub.url, PLACES) as served:
        for each in served:
            each.socket = context.wrap_socket(each.socket, server_hostname="127.0.0.1")
            each.request(body)
        for each in served:
            must_go_on(each)
        with attackers(hub.url, 3):
            answer = httpx.get(f"{hub.url}/health", verify=context, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_connections")
        for each in served:
            must_go_on(each)


@pytest.mark.attack("D6")
def test_handshakes_that_never_end_are_counted_and_do_not_lengthen_the_stop(
    tmp_path_factory: pytest.TempPathFactory, pems: Certificates
) -> None:
    tls = ("--ssl-certfile", pems.server_cert, "--ssl-keyfile", pems.server_key)
    hub = Hub.of_yaml(tmp_path_factory.mktemp("short"), ECHO, *tls, "--header-timeout", "3")
    try:
        hub.url = wait_for("the hub to listen", hub._listening, 60.0)
        with attackers(hub.url, 3) as silent, httpx.Client(verify=ssl.create_default_context(cafile=pems.ca)) as client:
            assert all(each.answer() == b"" for each in silent)
            assert cuts(hub, client, "header_timeout") >= 3
        with attackers(hub.url, 3) as late:
            assert not late[0].is_closed()
            hub.stop()
            assert all(each.answer() == b"" for each in late)
        assert "Traceback" not in hub.text
        assert "never retrieved" not in hub.text
    finally:
        hub.stop()
