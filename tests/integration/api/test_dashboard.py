"""The dashboard of a running hub over HTTP: who may look, who may act, and what actions do to real replicas."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from hub.api.dashboard.live import MOST_WATCHERS
from stage_runtime.demo.processes import alive
from tests.support.dashboard import DashboardHub
from tests.support.hub import ECHO_PAIR, Hub
from tests.support.processes import wait_for

ASK = {"messages": [{"role": "user", "content": "one two three"}]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardHub]:
    hub = DashboardHub(tmp_path_factory.mktemp("dashboard"), document=ECHO_PAIR)
    try:
        yield hub.wait_ready()
    finally:
        assert hub.stop() == []


@pytest.fixture
def stranger(served: DashboardHub) -> Iterator[httpx.Client]:
    with served.client("") as http:
        yield http


@pytest.fixture
def operator(served: DashboardHub) -> Iterator[httpx.Client]:
    with served.client() as http:
        yield http


def log_in(http: httpx.Client, token: str) -> dict[str, str]:
    """Log in as a browser does; return the headers with which its page acts."""
    answer = http.post("login", json={"token": token})
    assert answer.status_code == 200
    origin = str(http.base_url.copy_with(path="/")).rstrip("/")
    return {"Origin": origin, "X-Omni-Action-Key": answer.json()["action_key"]}


def snapshots(http: httpx.Client) -> Iterator[dict[str, Any]]:
    with http.stream("GET", "live") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


def snapshot(http: httpx.Client) -> dict[str, Any]:
    return next(snapshots(http))


def replica(http: httpx.Client, name: str) -> dict[str, Any]:
    found = (each for stage in snapshot(http)["stages"] for each in stage["replicas"] if each["name"] == name)
    return next(found, {})


@pytest.mark.attack("C29")
def test_who_has_no_token_gets_the_empty_page_and_nothing_of_the_hub(stranger: httpx.Client) -> None:
    for path in ("", "app.js", "style.css", "session"):
        answer = stranger.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "echo" not in answer.text
    assert stranger.get("session").json() == {"reads": False, "acts": False}
    closed = [("GET", "live"), ("GET", "receipts/requests"), ("GET", "receipts/replicas/0/0")]
    for method, path in (*closed, ("POST", "try/v1/chat/completions"), ("POST", "replicas/0/0/cordon")):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "omni_dashboard_0=x"}):
            answer = stranger.request(method, path, json=ASK, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
    assert stranger.post("login", json={"token": "wrong"}).status_code == 401
    assert stranger.post("login", data={"token": "wrong"}).status_code == 415
    assert stranger.get("../hub/cli.py").status_code == 401
    assert stranger.get("%2e%2e/routes.py").status_code == 404


@pytest.mark.attack("Z40")
@pytest.mark.parametrize("path", ["session", "../admin/is_sleeping"])
def test_a_cookie_that_is_slow_to_read_is_not_read(stranger: httpx.Client, path: str) -> None:
    """Sixty thousand of them hold a library that unquotes them for ten seconds."""
    began_s = time.monotonic()
    stranger.get(path, headers={"Cookie": 'a="' + "\\" * 60_000})
    assert time.monotonic() - began_s < 5


@pytest.mark.attack("Z55")
def test_a_path_without_end_is_no_defect(served: DashboardHub, stranger: httpx.Client) -> None:
    """Python reads no number of five thousand digits, and said so in the log for each."""
    answer = stranger.post(f"replicas/{'9' * 5000}/0/cordon", json={})
    assert (answer.status_code, "at most 4096 characters" in answer.text) == (414, True)
    assert stranger.post(f"replicas/{'9' * 4000}/0/cordon", json={}).status_code == 401


@pytest.mark.attack("C28")
def test_a_cookie_looks_and_only_its_own_page_acts(served: DashboardHub, stranger: httpx.Client) -> None:
    """The cookie is all that another site, or a server at another port of this host, can send or get."""
    acting = log_in(stranger, served.token)
    (cookie,) = stranger.cookies.jar
    assert (cookie.path, cookie.has_nonstandard_attr("HttpOnly")) == ("/dashboard", True)
    assert cookie.get_nonstandard_attr("SameSite") == "strict"
    assert served.token not in str(cookie.value)
    assert stranger.get("session").json()["acts"] is False
    assert snapshot(stranger)["namespace"] == "test"
    body = {"epoch": replica(stranger, "0/0")["epoch"]}
    origin, key = acting["Origin"], acting["X-Omni-Action-Key"]
    for headers in ({}, {"Origin": origin}, {"X-Omni-Action-Key": key}, {**acting, "X-Omni-Action-Key": "guessed"}):
        answer = stranger.post("replicas/0/0/cordon", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied"), headers
    for origin in ("https://evil.example", "http://127.0.0.1:1", "null"):
        answer = stranger.post("replicas/0/0/cordon", json=body, headers={**acting, "Origin": origin})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied"), origin
    rebound = stranger.post("replicas/0/0/cordon", json=body, headers={**acting, "Host": "evil.example"})
    assert rebound.status_code == 403
    assert stranger.post("replicas/0/0/cordon", data=body, headers=acting).status_code == 415
    assert replica(stranger, "0/0")["state"] == "up"
    # The cookie is no key of the other calls at this port.
    assert (
        stranger.post(served.url.replace("/dashboard/", "/admin/is_sleeping"), json={}, headers=acting).status_code
        == 401
    )
    assert stranger.post("logout", json={}, headers=acting).status_code == 200
    stranger.cookies.set(cookie.name, str(cookie.value), path="/dashboard")
    assert stranger.get("live").status_code == 401, "the session has ended"


def test_snapshots_come_each_second_while_somebody_looks(operator: httpx.Client) -> None:
    coming = islice(snapshots(operator), 30)
    first = next(shown for shown in coming if [stage["able"] for stage in shown["stages"]] == [2, 2])
    second, third = next(coming), next(coming)
    assert first["at"] < second["at"] < third["at"]
    assert {each["name"] for stage in first["stages"] for each in stage["replicas"]} == {"0/0", "0/1", "1/0", "1/1"}
    assert first["traffic"]["ended"]["per_s"] is None or first["traffic"]["window_s"] > 0
    assert third["traffic"]["ended"]["per_s"] is not None

    def checked() -> bool:
        checks = snapshot(operator)["checks"]
        return checks["at"] is not None and not checks["problem"] and checks["fine"] > 3

    with operator.stream("GET", "live"):
        wait_for("the checks of etcd's keys", checked)


def test_the_try_it_box_asks_the_hubs_own_api_and_nothing_else_of_it(operator: httpx.Client) -> None:
    answer = operator.post("try/v1/chat/completions", json=ASK)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "one two three"
    with operator.stream("POST", "try/v1/chat/completions", json={**ASK, "stream": True}) as streamed:
        assert streamed.headers["x-omni-replicas"].startswith("0/")
        assert "data: [DONE]" in streamed.read().decode()
    assert operator.get("try/v1/models").json()["data"][0]["id"] == "echo-pair"
    for path in ("try/metrics", "try/v1/videos", "try/docs", "try/v1/chat/completions/../../metrics", "try/"):
        assert operator.get(path).status_code == 404, path
    assert operator.post("try/v1/chat/completions", json={"messages": 3}).status_code == 400


def test_the_receipts_of_requests_are_there_for_who_has_logged_in(served: DashboardHub, stranger: httpx.Client) -> None:
    acting = log_in(stranger, served.token)
    asked = stranger.post("try/v1/chat/completions", json=ASK, headers=acting)
    name = asked.headers["x-omni-request-id"]
    listed = stranger.get("receipts/requests?limit=200")
    assert listed.headers["cache-control"] == "no-store"
    assert [each["outcome"] for each in listed.json()["requests"] if name in each["request_id"]] == ["ok"]
    (receipt, *_) = stranger.get(f"receipts/requests/{name}").json()["receipts"]
    assert receipt["key"] == "admin"
    assert {attempt["stage"] for attempt in receipt["attempts"]} == {0, 1}
    assert stranger.get("receipts/requests/nobody").status_code == 404
    assert stranger.get("receipts/is_sleeping").status_code == 404
    assert stranger.post("receipts/is_sleeping", json={}, headers=acting).status_code == 404


def test_an_operator_cordons_weighs_and_drains_as_the_commands_do(served: DashboardHub, operator: httpx.Client) -> None:
    epoch = replica(operator, "0/1")["epoch"]

    def act(name: str, action: str, **body: Any) -> httpx.Response:
        return operator.post(f"replicas/{name}/{action}", json={"epoch": epoch, **body})

    assert "is cordoned" in act("0/1", "cordon").json()["done"]
    wait_for("the cordon", lambda: replica(operator, "0/1")["state"] == "cordoned")
    record = next(each for each in served.hub.replicas() if (each["stage_id"], each["replica_id"]) == (0, 1))
    assert record["cordoned"] is True
    last = operator.post("replicas/0/0/cordon", json={"epoch": replica(operator, "0/0")["epoch"]})
    assert (last.status_code, last.json()["error"]["code"]) == (409, "not_sure")
    assert act("0/1", "weight", weight=0.5).json()["done"] == "replica 0/1 weighs 0.5"
    assert act("0/1", "weight").json()["done"] == "replica 0/1 has its own weight again"
    assert act("0/1", "uncordon").json()["done"] == "replica 0/1 takes work again"
    wait_for("work again", lambda: replica(operator, "0/1")["takes_work"])
    other = act("0/1", "cordon", epoch=epoch - 1)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
    assert act("0/77", "cordon").status_code == 404
    assert act("0/1", "explode").status_code == 400
    assert act("0/1", "weight", weight=-1).status_code == 400
    assert act("0/1", "kill").status_code == 403, "only a demo kills"
    pid = replica(operator, "0/1")["pid"]
    assert "drains" in act("0/1", "drain").json()["done"]
    wait_for("its end", lambda: not alive([pid]))
    wait_for("the event", lambda: any("has ended" in event["text"] for event in snapshot(operator)["events"]))
    assert "dashboard.action action=drain replica=0/1 client=127.0.0.1" in served.hub.text


def test_who_asks_may_only_look_where_the_hub_was_told_so_and_it_ends_in_order(tmp_path: Path) -> None:
    """A stream that is open does not hold up the hub's end."""
    hub = DashboardHub(tmp_path, "--dashboard-open", document=ECHO_PAIR).wait_ready()
    try:
        with hub.client("") as anybody:
            said = anybody.get("session").json()
            assert (said["reads"], said["acts"], said["can_kill"]) == (True, False, False)
            shown = replica(anybody, "0/0")
            for path, body in (("replicas/0/0/cordon", {"epoch": shown["epoch"]}), ("try/v1/chat/completions", ASK)):
                assert anybody.post(path, json=body).status_code == 403
            assert anybody.get("receipts/requests").status_code == 403, "names of keys, and labels of clients"
            with anybody.stream("GET", "live") as answer:
                lines = answer.iter_lines()
                next(lines)
                hub.hub.process.terminate()
                assert list(lines) is not None, "the stream ends by itself"
                began_s = time.monotonic()
                assert hub.hub.process.wait(60) == 0
                assert time.monotonic() - began_s < 30
    finally:
        assert hub.stop() == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dashboard-open"], "--dashboard-open is about --admin-port"),
        (["--admin-port", "0", "--dashboard-open", "--admin-host", "0.0.0.0"], "--dashboard-open is for loopback only"),
        (["--admin-port", "0", "--demo-fd", "77"], "only omni demo gives it"),
    ],
)
def test_flags_that_would_open_it_to_others_end_the_start(tmp_path: Path, flags: list[str], said: str) -> None:
    hub = Hub.of_yaml(tmp_path, ECHO_PAIR, *flags)
    try:
        wait_for("the refusal", lambda: hub.process.poll() is not None, 60)
        assert said in hub.text
    finally:
        hub.stop()


def test_many_pages_share_one_hub_and_the_next_is_told(operator: httpx.Client, served: DashboardHub) -> None:
    with httpx.Client(base_url=served.url, headers=operator.headers, timeout=30) as http:
        open_ones = [http.stream("GET", "live") for _ in range(MOST_WATCHERS)]
        answers = [each.__enter__() for each in open_ones]
        try:
            assert {answer.status_code for answer in answers} == {200}
            refused = wait_for("a refusal", lambda: (r := operator.get("live")).status_code == 429 and r)
            assert "close one" in refused.json()["error"]["message"]
        finally:
            for each in open_ones:
                each.__exit__(None, None, None)
    wait_for("a place", lambda: _can_look(operator))


def _can_look(http: httpx.Client) -> bool:
    with http.stream("GET", "live") as answer:
        return answer.status_code == 200
