"""The door of a running hub: keys, TLS, ports of their own, and what /proc shows of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from omni_discovery.commands.access.key import KeyCommand
from stage_runtime.demo.processes import descendants
from tests.support.certificates import Certificates, make_certificates
from tests.support.hub import Hub
from tests.support.loopback import HAS_IPV6
from tests.support.other_user import as_ordinary_user, require_root
from tests.support.processes import wait_for
from tests.support.registry import EtcdServer

IN_ARGV, IN_FILE, IN_VARIABLE = "argv-key-7b1d", "file-key-93aa", "variable-key-c4e2"
METRICS, SECRETS = "metrics-token-5f", (IN_ARGV, IN_FILE, IN_VARIABLE)
ECHO = "stages: [{stage_id: 0, engine: echo, engine_args: {fail_on: kaputt}, final_output: text}]"
ASK = {"messages": [{"role": "user", "content": "hello"}]}
CRASH = {"messages": [{"role": "user", "content": "kaputt"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def secret(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.touch(0o600)
    file.write_text(text)
    return str(file)


@dataclass
class Served:
    """A hub behind TLS with all kinds of keys, and a client that trusts its certificate."""

    hub: Hub
    http: httpx.Client
    pems: Certificates

    @property
    def url(self) -> str:
        return self.hub.url

    def logged(self, pattern: str) -> str:
        found = re.search(pattern, self.hub.text)
        assert found is not None, self.hub.text
        return found[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("door")
    pems = make_certificates(folder)
    document = folder / "deploy.yaml"
    document.write_text(ECHO)
    flags = ["--deploy-config", str(document), "--api-key", IN_ARGV, "--access-log", "--admin-api"]
    flags += ["--api-key-file", secret(folder, "keys", f"alice:{IN_FILE}\n")]
    flags += ["--ssl-certfile", pems.server_cert, "--ssl-keyfile", pems.server_key]
    flags += ["--metrics-token-file", secret(folder, "metrics", METRICS)]
    hub = Hub(folder, flags, variables={"VLLM_API_KEY": IN_VARIABLE})
    with httpx.Client(verify=ssl.create_default_context(cafile=pems.ca), timeout=30) as http:
        try:
            hub.url = wait_for("the hub to listen", hub._listening, 60.0)
            wait_for("every stage to be ready", lambda: http.get(f"{hub.url}/ready").status_code == 200, 60.0)
            yield Served(hub, http, pems)
        finally:
            hub.stop()


@pytest.mark.attack("A28")
def test_every_key_opens_the_api_by_its_name_and_no_request_without_one_comes_in(served: Served) -> None:
    for key in SECRETS:
        answer = served.http.post(f"{served.url}/v1/chat/completions", json=ASK, headers=bearer(key))
        assert answer.status_code == 200
    for headers in ({}, bearer("wrong"), bearer(METRICS), {"Authorization": f"Basic {IN_FILE}"}):
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/docs"), ("GET", "/x")):
            answer = served.http.request(method, served.url + path, json=ASK, headers=headers)
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert served.http.post(f"{served.url}/v1/chat/completions", json=CRASH, headers=bearer(IN_FILE)).status_code == 500
    wait_for("the failed request's line", lambda: re.search(r"request\.failed .* key=alice stage=0", served.hub.text))
    assert served.http.get(f"{served.url}/health").status_code == 200
    figures = served.http.get(f"{served.url}/metrics", headers=bearer(METRICS)).text
    names = set(re.findall(r'omni_hub_requests_by_key_total\{key="([^"]+)"\}', figures))
    assert {"api-key-1", "alice", "VLLM_API_KEY"} <= names
    assert 'omni_hub_requests_total{outcome="UnauthorizedError"}' in figures
    assert "key=alice" in served.hub.text
    assert not [key for key in (*SECRETS, METRICS) if key in served.hub.text + figures]


def test_the_openai_client_gets_in_with_its_key_and_an_error_of_its_own_without(served: Served) -> None:
    context = ssl.create_default_context(cafile=served.pems.ca)
    with httpx.Client(verify=context) as http:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=IN_FILE, http_client=http)
        answer = client.chat.completions.create(model="", messages=[{"role": "user", "content": "hello"}])
        assert answer.choices[0].message.content
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


async def test_a_websocket_gets_a_401_in_place_of_its_handshake(served: Served) -> None:
    context = ssl.create_default_context(cafile=served.pems.ca)
    url, realtime = (f"{served.url.replace('https', 'wss')}/v1/{path}" for path in ("stream", "realtime"))
    for address in (url, realtime):
        for headers in ({}, bearer("wrong")):
            with pytest.raises(InvalidStatus) as caught:
                await connect(address, ssl=context, additional_headers=headers)
            assert caught.value.response.status_code == 401
            assert b"invalid_api_key" in (caught.value.response.body or b"")
    async with asyncio.timeout(30.0), connect(realtime, ssl=context, additional_headers=bearer(IN_FILE)) as client:
        assert json.loads(await client.recv())["type"] == "session.created"
    async with asyncio.timeout(30.0), connect(url, ssl=context, additional_headers=bearer(IN_FILE)) as client:
        await client.send(json.dumps({"type": "segment", "prompt": "hello", "last": True}))
        frames = [json.loads(frame) async for frame in client]
    assert frames[-1]["type"] == "done"


def test_everybody_learns_whether_it_is_ready_and_those_with_a_key_why(served: Served) -> None:
    assert served.http.get(f"{served.url}/ready").json() == {"ready": True}
    assert served.http.get(f"{served.url}/ready", headers=bearer("wrong")).json() == {"ready": True}
    assert "stages" in served.http.get(f"{served.url}/ready", headers=bearer(IN_FILE)).json()


def test_metrics_with_a_token_open_to_that_and_to_no_key_of_the_api(served: Served) -> None:
    for headers in ({}, bearer(IN_FILE)):
        assert served.http.get(f"{served.url}/metrics", headers=headers).status_code == 401
    assert "omni_hub_requests" in served.http.get(f"{served.url}/metrics", headers=bearer(METRICS)).text


@pytest.mark.attack("A10")
def test_operators_have_a_port_and_a_token_of_their_own(served: Served) -> None:
    """Not at the API's port, not with the API's key, and not for a page whose name leads to this address."""
    url = served.logged(r"hub\.admin url=(\S+)") + "is_sleeping"
    file = Path(served.logged(r"hub\.admin_token file=([^:]+):"))
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().strip()
    for key in ("", IN_FILE, METRICS):
        assert served.http.post(url, json={}, headers=bearer(key) if key else {}).status_code == 401
    answer = served.http.post(url, json={}, headers=bearer(token))
    assert (answer.status_code, [entry["ok"] for entry in answer.json()]) == (200, [True])
    assert served.http.post(f"{served.url}/admin/is_sleeping", json={}, headers=bearer(IN_FILE)).status_code == 404
    assert served.http.post(f"{served.url}/admin/is_sleeping", json={}, headers=bearer(token)).status_code == 401
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        assert served.http.post(url, json={}, headers={**bearer(token), **headers}).status_code == 403


@pytest.mark.attack("A29")
def test_no_process_shows_a_key_and_no_child_has_one_in_its_environment(served: Served) -> None:
    """The hub's own environment is what it was started with, and readable by its user alone."""
    pids = descendants(served.hub.process.pid)
    assert len(pids) > 2
    token = Path(served.logged(r"hub\.admin_token file=([^:]+):")).read_text().strip()
    for pid in pids:
        shown = Path(f"/proc/{pid}/cmdline").read_bytes()
        if pid != served.hub.process.pid:
            shown += Path(f"/proc/{pid}/environ").read_bytes()
        for key in (*SECRETS, METRICS, token):
            assert key.encode() not in shown, (pid, shown)
    assert b"--access-log" in Path(f"/proc/{served.hub.process.pid}/cmdline").read_bytes()
    assert served.hub.text.count("--api-key-file FILE keeps them out of both") == 1


@pytest.mark.attack("A26")
def test_nobody_behind_loopback_says_that_it_is_somebody_else(served: Served) -> None:
    token = Path(served.logged(r"hub\.admin_token file=([^:]+):")).read_text().strip()
    url = served.logged(r"hub\.admin url=(\S+)") + "spoofed"
    served.http.post(url, json={}, headers={**bearer(token), "X-Forwarded-For": "10.9.8.7"})
    assert served.logged(r"admin\.call method='spoofed' client=(\S+)") == "127.0.0.1"


def test_plain_http_is_no_way_around_tls_and_the_record_names_https(served: Served) -> None:
    assert served.url.startswith("https://")
    wait_for("the log to say so", lambda: f"hub.ready url={served.url}" in served.hub.text)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(served.url.replace("https", "http") + "/health", timeout=30)


def omni_key(endpoint: str, *words: str) -> int:
    parser = argparse.ArgumentParser()
    command = KeyCommand()
    command.add_arguments(parser)
    return command.run(parser.parse_args([*words, "--etcd-endpoints", endpoint, "--namespace", "test"]))


def status_of(hub: Hub, key: str) -> int:
    request = urllib.request.Request(f"{hub.url}/v1/models", headers=bearer(key))
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_keys_of_etcd_open_and_close_the_door_without_a_restart(
    tmp_path: Path, server: EtcdServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """1. no key is there: closed; 2. one is made: open to it; 3. etcd is away: what is known goes on to hold
    4. etcd is back, and the key is taken back: closed. Metrics have a port of their own all the while.
    """
    document = tmp_path / "deploy.yaml"
    document.write_text(ECHO)
    flags = ["--hub-only", "--deploy-config", str(document), "--etcd-endpoints", server.endpoint]
    flags += ["--api-keys-from-etcd", "--metrics-port", "0", "--admin-port", "0"]
    flags += ["--forwarded-allow-ips", "127.0.0.0/8"]
    hub = Hub(tmp_path, flags, variables={"OMNI_ADMIN_TOKEN": "operators"})
    try:
        hub.url = wait_for("the hub to listen", hub._listening, 60.0)
        wait_for("the keys to be known", lambda: status_of(hub, "omni-guess") == 401)
        assert omni_key(server.endpoint, "create", "alice") == 0
        key = capsys.readouterr().out.strip()
        wait_for("the key to open", lambda: status_of(hub, key) == 200)
        server.kill()
        assert [status_of(hub, each) for each in (key, "omni-guess")] == [200, 401]
        server.start()
        assert omni_key(server.endpoint, "revoke", "alice") == 0
        wait_for("the key to be refused", lambda: status_of(hub, key) == 401)
        assert hub.get("/metrics")[0] == 404
        metrics = re.search(r"hub\.metrics url=(\S+)", hub.text)
        assert metrics is not None
        assert 'omni_hub_requests_by_key_total{key="alice"}' in httpx.get(metrics[1], timeout=30).text
        admin = re.search(r"hub\.admin url=(\S+)", hub.text)
        assert admin is not None
        headers = {**bearer("operators"), "X-Forwarded-For": "10.9.8.7"}
        assert httpx.post(f"{admin[1]}behind_a_proxy", json={}, headers=headers, timeout=30).status_code == 200
        assert "admin.call method='behind_a_proxy' client=10.9.8.7" in hub.text
    finally:
        hub.stop()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ssl-certfile", "no-such.crt"], "--ssl-certfile no-such.crt can't be read"),
        (["--api-key-file", "no-such"], "--api-key-file no-such can't be read"),
        (["--api-key", "unseen", "--api-args", "--api-key unseen"], "--api-args are for vLLM's server"),
    ],
)
def test_what_is_wrong_ends_it_before_anything_starts_and_shows_no_key(
    tmp_path: Path, flags: list[str], said: str
) -> None:
    hub = Hub.of_yaml(tmp_path, ECHO, *flags)
    assert hub.process.wait(60) == 2
    assert said in hub.text
    assert "etcd" not in hub.text
    assert "unseen" not in hub.text


def test_a_port_for_operators_that_is_taken_is_named_by_its_flag(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        hub = Hub.of_yaml(tmp_path, ECHO, "--admin-port", str(taken.getsockname()[1]))
        assert hub.process.wait(60) == 2
    assert "choose another --admin-port" in hub.text


def url_in(hub: Hub, name: str) -> str:
    found = re.search(rf"hub\.{name} url=(\S+)", hub.text)
    assert found is not None, hub.text
    return found[1]


@pytest.mark.attack("F3")
@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1")
def test_no_other_user_can_answer_those_who_say_localhost(tmp_path: Path) -> None:
    """1. a hub has three ports on 127.0.0.1; another user can listen on none of them on ::1
    2. who says localhost is answered by the hub, with either address tried first
    """
    require_root()
    flags = ["--admin-port", "0", "--metrics-port", "0"]
    hub = Hub.of_yaml(tmp_path, ECHO, *flags)
    try:
        hub.wait_ready()
        ports = [httpx.URL(url).port or 0 for url in (hub.url, url_in(hub, "admin"), url_in(hub, "metrics"))]

        def refusals() -> list[str]:
            said = []
            for port in ports:
                try:
                    socket.create_server(("::1", port), family=socket.AF_INET6).close()
                    said.append(f"{port} could be taken")
                except OSError as error:
                    said.append(os.strerror(error.errno or 0))
            return said

        assert as_ordinary_user(refusals) == ["Address already in use"] * 3
        for host in ("127.0.0.1", "[::1]", "localhost"):
            api, admin, metrics = (f"http://{host}:{port}" for port in ports)
            assert httpx.post(f"{api}/v1/chat/completions", json=ASK, timeout=30).status_code == 200
            assert httpx.post(f"{admin}/admin/nothing", json={}, timeout=30).status_code == 401
            assert "omni_build_info" in httpx.get(f"{metrics}/metrics", timeout=30).text
    finally:
        hub.stop()


@pytest.mark.attack("F3")
@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1")
@pytest.mark.parametrize("flag", ["--port", "--admin-port", "--metrics-port"])
def test_a_port_where_somebody_else_would_answer_is_not_used(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as stranger:
        port = str(stranger.getsockname()[1])
        hub = Hub.of_yaml(tmp_path, ECHO, flag, port)
        assert hub.process.wait(60) == 2
    assert f"can't listen on ::1 port {port}" in hub.text
    assert f"clients that say localhost: choose another {flag}" in hub.text
