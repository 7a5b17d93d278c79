"""The recipe for a new deploy document, as docs/operations/upgrade.md has it, with real processes under load."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Hub
from tests.support.processes import Child, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(not os.environ.get("OMNI_LONG"), reason="the long form: make long"),
]


def document(words: int) -> str:
    """Both stages say so many words: what an answer looks like tells which versions made it."""
    return f"""
    model: two-echoes
    stages:
      - {{stage_id: 0, engine: echo, engine_args: {{delay_s: 0.01}}, final_output: text,
         default_sampling_params: {{max_tokens: {words}}}}}
      - {{stage_id: 1, engine: echo, engine_args: {{delay_s: 0.01}}, final_output: text,
         default_sampling_params: {{max_tokens: {words}}}}}
    """


class Clients:
    """Ask one after the other, and note the status and how many words each stage said."""

    def __init__(self, hub: Hub, count: int) -> None:
        self._hub = hub
        self._stopping = threading.Event()
        self.answers: list[tuple[int, tuple[int, ...]]] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stopping.is_set():
            status, body = self._hub.ask("a b c d e f g")
            said = tuple(len(choice["message"]["content"].split()) for choice in body.get("choices", []))
            self.answers.append((status, said))

    def more(self, count: int) -> None:
        wanted = len(self.answers) + count
        wait_for(f"{count} more answers", lambda: len(self.answers) >= wanted, 60.0)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(30.0)


class Hosts:
    """Supervisors of one replica each, on two hosts for each stage."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._children: dict[tuple[int, str], Child] = {}
        self._lives = 0

    def start(self, stage_id: int, host: str) -> None:
        self._lives += 1
        arguments = ["serve", "--headless", "--stage-id", str(stage_id), "--etcd-endpoints", self._hub.endpoint]
        name = f"stage{stage_id}-{host}-{self._lives}"
        where = ["--namespace", self._hub.namespace]
        self._children[stage_id, host] = Child([*arguments, *where], self._hub.folder, name)
        wait_for(f"{name} to be up", lambda: self._count_up() == len(self._children), 60.0)

    def restart(self, stage_id: int, host: str) -> None:
        child = self._children.pop((stage_id, host))
        assert child.stop() == []
        assert child.process.returncode == 0, child.text
        self.start(stage_id, host)

    def _count_up(self) -> int:
        return sum(record["status"] == "up" for record in self._hub.replicas())

    def stop(self) -> None:
        for child in self._children.values():
            child.stop()


def figure(hub: Hub, name: str) -> float:
    lines = hub.get("/metrics")[1].splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def command(hub: Hub, *arguments: str) -> tuple[int, str]:
    where = ["--etcd-endpoints", hub.endpoint, "--namespace", hub.namespace]
    child = Child([*arguments, *where], hub.folder, f"omni-{arguments[0]}")
    return child.process.wait(60), child.text


def test_a_new_document_is_rolled_out_host_by_host_and_no_client_notices(tmp_path: Path) -> None:
    """1. two hosts for each stage serve; the new document is applied: the hub says that it follows
    2. one host of each stage is restarted, then the first stage's other, then the second's
    3. every answer is whole and of one version; the last ones are of the new one
    """
    hub = Hub.of_yaml(tmp_path, document(2), "--hub-only")
    hub.url = wait_for("the hub to listen", hub._listening, 60.0)
    hosts = Hosts(hub)
    clients: Any = None
    try:
        for stage_id, host in ((0, "a"), (1, "a"), (0, "b"), (1, "b")):
            hosts.start(stage_id, host)
        wait_for("readiness", lambda: hub.get("/ready")[0] == 200)
        clients = Clients(hub, 4)
        clients.more(20)
        (tmp_path / "new.yaml").write_text(document(3))
        assert command(hub, "pipeline", "apply", "new.yaml")[0] == 0
        wait_for("the hub to follow", lambda: "hub.pipeline_followed" in hub.text)
        clients.more(20)
        code, text = command(hub, "doctor")
        assert code == 1
        assert "another deploy document" in " ".join(text.split())
        hosts.restart(0, "a")
        clients.more(20)
        assert "≠" in command(hub, "replicas")[1]
        hosts.restart(1, "a")
        clients.more(20)
        hosts.restart(0, "b")
        wait_for("the old requests", lambda: figure(hub, "omni_hub_requests_on_older_pipelines") == 0)
        hosts.restart(1, "b")
        clients.more(20)
        clients.stop()
        assert "≠" not in command(hub, "replicas")[1]
        code, text = command(hub, "doctor")
        assert "another" not in text, text
    finally:
        if clients is not None:
            clients.stop()
        hosts.stop()
        hub.stop()
    assert {status for status, _ in clients.answers} == {200}
    assert {said for _, said in clients.answers} == {(2, 2), (3, 3)}
    assert clients.answers[-1] == (200, (3, 3))
