"""The whole product while its etcd is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.hub import ECHO_PAIR, Hub
from tests.support.processes import wait_for
from tests.support.registry import EtcdServer

TTL_S = 2.0


def test_etcd_dead_for_three_ttls_under_load_fails_no_request_and_ends_no_process(tmp_path: Path) -> None:
    """1. requests run all the time; etcd is killed for three TTLs and comes back on its data
    2. every request was answered rightly, the same processes run, and all four replicas are registered at once
    """
    (tmp_path / "etcd").mkdir()
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    flags = ["--etcd-endpoints", server.endpoint, "--omni-heartbeat-timeout", str(TTL_S)]
    hub = Hub.of_yaml(tmp_path, ECHO_PAIR, *flags)
    try:
        hub.wait_ready()
        wait_for("all four", lambda: len(up(hub, flags)) == 4, 20.0)
        before, tree = up(hub, flags), hub.tree()
        with asking(hub) as answers:
            time.sleep(0.5)
            server.kill()
            time.sleep(3 * TTL_S)
            server.start()
            wait_for("all four again", lambda: up(hub, flags) == before, 5.0)
        assert len(answers) > 20
        assert {status for status, _ in answers} == {200}
        assert all(text == "one two three" for _, text in answers)
        assert hub.tree() == tree
    finally:
        left = hub.stop()
        server.kill()
    assert not left


def up(hub: Hub, flags: list[str]) -> list[tuple[int, int, int, int]]:
    """Stage, id, epoch and process of the replicas that are up, as `omni replicas` sees them."""
    records = hub.replicas(*flags[:2])
    return sorted((r["stage_id"], r["replica_id"], r["epoch"], r["pid"]) for r in records if r["status"] == "up")


@contextmanager
def asking(hub: Hub) -> Iterator[list[tuple[int, str]]]:
    """Two clients that ask one question after the other; what they were answered."""
    answers: list[tuple[int, str]] = []
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            status, body = hub.ask("one two three", modalities=["text"])
            answers.append((status, body["choices"][0]["message"]["content"] if status == 200 else str(body)))
            enough.wait(0.05)

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        yield answers
    finally:
        enough.set()
        for client in clients:
            client.join(60.0)
