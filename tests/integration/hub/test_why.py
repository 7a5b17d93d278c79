"""``omni why`` beside a real hub, etcd and replicas: one of them is killed while it works, and the command says so."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.commands.why.command import WhyCommand
from omni_discovery.errors import OmniError
from omni_discovery.receipts.asking import HubUnaskableError, NoReceiptError
from tests.support.host_etcd import REGISTRY_PORT, etcd_on
from tests.support.hub import Hub
from tests.support.netns import Host, Network, require_netns
from tests.support.processes import OMNI, Child, wait_for

DEPLOY = """
model: echo-two
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 1, delay_s: 0.1}, runtime: {num_replicas: 2}}
  - {stage_id: 1, engine: echo, engine_args: {capacity: 8}, runtime: {num_replicas: 2}, final_output: text}
"""
#: Two seconds of work for stage 0, of words that no receipt may hold.
PROMPT = " ".join(["swordfish"] * 20)
#: Asks a hub at a URL, with an x-request-id.
ASK = """
import sys, urllib.request
body = b'{"messages": [{"role": "user", "content": "one"}]}'
headers = {"Content-Type": "application/json", "x-request-id": sys.argv[2]}
urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body, headers), timeout=30).read()
"""
TOKEN = "a-token-of-thirty-two-characters"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("why")
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    running = Hub.of_yaml(folder, DEPLOY, "--admin-port", "0", "--admin-token-file", str(folder / "token"))
    try:
        yield running.wait_ready()
    finally:
        running.stop()


class Why:
    """The command as the user of a hub runs it."""

    def __init__(self, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
        self._hub = hub
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str]:
        """The exit code, and what it printed."""
        command, parser = WhyCommand(), argparse.ArgumentParser()
        command.add_arguments(parser)
        self._capsys.readouterr()
        code = command.run(parser.parse_args([*words, "--namespace", self._hub.namespace]))
        return code, self._capsys.readouterr().out

    def read(self, *words: str) -> list[dict[str, Any]]:
        """What it prints with --json; nothing where the hub has no receipt."""
        try:
            return [json.loads(line) for line in self(*words, "--json")[1].splitlines()]
        except NoReceiptError:
            return []


@pytest.fixture
def why(hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Why:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(hub.folder))
    monkeypatch.setenv("COLUMNS", "80")
    return Why(hub, capsys)


def ask(hub: Hub, label: str, prompt: str = PROMPT) -> dict[str, Any]:
    """A chat with an x-request-id; its answer."""
    body = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
    headers = {"Content-Type": "application/json", "x-request-id": label}
    request = urllib.request.Request(f"{hub.url}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found | {"header": answer.headers["x-omni-request-id"]}


def admin_url(hub: Hub) -> str:
    marker = "hub.admin url="
    line = next(line for line in hub.text.splitlines() if marker in line)
    return line.split(marker)[1].split()[0].removesuffix("/admin/")


def test_a_request_whose_replica_is_killed_tells_who_had_it_and_who_went_on(hub: Hub, why: Why) -> None:
    """1. a request runs at a replica of stage 0, and that is killed; 2. the other one does it; 3. why says both"""
    answers: list[dict[str, Any]] = []
    # Asked for before: by the time that a command has started and answered, the work may be done.
    pids = {f"{each['stage_id']}/{each['replica_id']}": each["pid"] for each in hub.replicas()}
    client = threading.Thread(target=lambda: answers.append(ask(hub, "killed", f"{PROMPT} {PROMPT} {PROMPT}")))
    client.start()
    running = wait_for("the request to run", lambda: [each for each in why.read("killed") if "accepted_s" in str(each)])
    had_it = running[0]["attempts"][0]["replica"]
    os.kill(pids[had_it], signal.SIGKILL)
    client.join(120)
    [told] = why.read("killed")
    first, second, *_ = told["attempts"]
    assert told["outcome"] == "ok"
    assert (first["replica"], first["outcome"]) == (had_it, "lost")
    assert (second["stage"], second["is_retry"], second["outcome"]) == (0, True, "done")
    assert second["replica"] != had_it
    left_out = {each["replica"]: each.get("out", "") for each in second["picking"]["candidates"]}
    assert left_out[had_it]
    assert told["transfers"][0]["size_bytes"] > 0
    text = why("killed")[1]
    assert f"stage {had_it} " in text
    assert "lost: " in text
    assert max(map(len, text.splitlines())) <= 80
    assert "swordfish" not in text + json.dumps(told)
    # By any name, and its picks come out the same again.
    assert [why.read(name)[0]["request_id"] for name in (answers[0]["id"], answers[0]["header"])] == [
        told["request_id"]
    ] * 2
    assert why("killed", "--replay")[0] == 0


def test_what_waits_says_what_for(hub: Hub, why: Why) -> None:
    """Three requests for two slots, of which one may be starting again: one waits at least."""
    clients = [threading.Thread(target=ask, args=(hub, f"many-{number}")) for number in range(4)]
    for client in clients:
        client.start()
    try:
        work = wait_for("one to wait", lambda: why.read("--waiting"))[0]
        assert work["stage"] == 0
        assert work["what"].startswith("a ")
        assert "wait" in why("--waiting")[1]
    finally:
        for client in clients:
            client.join(120)
    assert any(each["attempts"][0].get("waits") for number in range(4) for each in why.read(f"many-{number}"))


def test_a_replica_that_was_cordoned_says_so(hub: Hub, why: Why) -> None:
    wait_for("all replicas", lambda: [each for each in hub.replicas() if each["status"] == "up"][3:])
    child = Child(["cordon", "1/0", "--namespace", hub.namespace], hub.folder, "cordon")
    assert child.process.wait(60) == 0, child.text
    wait_for("the hub to see it", lambda: "cordoned" in why("1/0")[1])
    ask(hub, "after", "short")
    text = why("1/0")[1]
    assert "cordoned: omni cordon 1/0 --undo" in text
    assert "left it out: cordoned" in text
    [told] = why.read("after")
    last = [each for each in told["attempts"] if each["stage"] == 1][-1]
    assert {each["replica"]: each.get("out", "") for each in last["picking"]["candidates"]}["1/0"] == "cordoned"


def test_all_hubs_of_the_registry_are_asked_and_each_answers_once(tmp_path: Path) -> None:
    """1. two hubs on two hosts, each with a port for operators, share a replica; each serves a request of its own
    2. from a third host, both requests are found, with the token, once it may go to addresses that etcd alone has; from
       the first, its own hub is asked only once
    3. one hub is ended by SIGKILL: it is named as one that does not answer, and the other one's answer is shown
    """
    require_netns()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    with Network("registry", "one", "two") as network, ExitStack() as stack:
        registry = network.hosts["registry"]
        stack.enter_context(etcd_on(registry, tmp_path))
        etcd = ["--etcd-endpoints", f"{registry.address}:{REGISTRY_PORT}"]
        token = ["--admin-token-file", str(tmp_path / "token")]
        hubs = {name: _start_hub(tmp_path / name, network.hosts[name], etcd + token) for name in ("one", "two")}
        for each in hubs.values():
            stack.callback(each.stop)
        words = ["serve", "--headless", "--stage-id", "0", "--namespace", "test", *etcd]
        replica = Child(words, tmp_path, "replica", prefix=network.hosts["one"].command())
        stack.callback(replica.stop)

        def why(host: str, folder: Path, *words: str, more: tuple[str, ...] = ("--admin-token-anywhere",)) -> str:
            command = [*OMNI, "why", *words, "--namespace", "test", *etcd, *token, "--all-hubs", *more]
            runtime = {"XDG_RUNTIME_DIR": str(folder)}
            command = network.hosts[host].command(*command)
            done = subprocess.run(command, env=os.environ | runtime, capture_output=True, timeout=60, check=False)
            return done.stdout.decode() + done.stderr.decode()

        for name, each in hubs.items():
            each.url = wait_for("the hub to listen", each._listening, 60)
            asking = network.hosts[name].command(sys.executable, "-c", ASK, each.url, f"of-{name}")
            wait_for("an answer", lambda asking=asking: not subprocess.call(asking, stderr=subprocess.DEVNULL), 60)
        unsent = why("registry", tmp_path, "--last-failures", more=())
        assert "would get the token" in unsent
        seen = {name: why("registry", tmp_path, f"of-{name}") for name in hubs}
        assert [f"label of-{name}" in text for name, text in seen.items()] == [True, True], seen
        reports = why("one", tmp_path / "one", "0/0", "--json").splitlines()
        asked_hubs = [json.loads(line)["hub"] for line in reports if line.startswith("{")]
        assert len(asked_hubs) == len(set(asked_hubs)) == 2, reports
        os.kill(hubs["two"].process.pid, signal.SIGKILL)
        text = why("registry", tmp_path, "--last-failures")
        assert "no request has failed" in text
        assert f"{network.hosts['two'].address}:" in text
        assert "does not answer" in text


def _start_hub(folder: Path, host: Host, flags: list[str]) -> Hub:
    folder.mkdir()
    document = folder / "deploy.yaml"
    document.write_text("{model: echo, stages: [{stage_id: 0, engine: echo, final_output: text}]}")
    port = ["--admin-host", host.address, "--admin-port", "0", "--host", host.address]
    return Hub(folder, ["--deploy-config", str(document), "--hub-only", *port, *flags], prefix=host.command())


@pytest.mark.attack("A10")
def test_at_the_port_it_takes_the_token_and_at_the_socket_nothing_is_called(hub: Hub, why: Why) -> None:
    """The socket has no control calls: who may read there may not act."""
    url = admin_url(hub)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/admin/requests", timeout=30)
    assert refused.value.code == 401
    refused.value.close()
    with pytest.raises(HubUnaskableError, match="wants its token"):
        why("--last-failures", "--hub", url)
    code, text = why("--last-failures", "--hub", url, "--admin-token-file", str(hub.folder / "token"))
    assert (code, text) == (0, "no request has failed that these hubs keep a receipt of\n")
    [socket] = Path(hub.folder / "omni").glob("*.receipts-*.sock")
    assert socket.parent.stat().st_mode & 0o777 == 0o700


def test_what_is_not_there_says_what_to_do(why: Why) -> None:
    with pytest.raises(OmniError, match="ask the other hubs"):
        why("nobody")
    with pytest.raises(OmniError, match="omni replicas shows"):
        why("0/9")
    with pytest.raises(OmniError, match="omni why REQUEST"):
        why()
    with pytest.raises(OmniError, match="--replay is of one request"):
        why("--waiting", "--replay")
