"""Operating a running pipeline with etcdctl and with ``omni``: what clients notice of it, which is nothing."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.records.schema import ReplicaInfo
from tests.support.hub import Hub
from tests.support.processes import Child, wait_for
from tests.support.registry import compact, etcdctl

pytestmark = pytest.mark.e2e

SLOW_ECHO = """
model: slow-echo
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 8, delay_s: 0.02},
     runtime: {num_replicas: 3}, final_output: text}
"""


class Operated:
    """A hub with three slow replicas, what its registry holds, and an operator's hands."""

    def __init__(self, folder: Path) -> None:
        self.hub = Hub.of_yaml(folder, SLOW_ECHO).wait_ready()
        self.client = OmniCoordClientForHub(self.hub.endpoint, namespace=self.hub.namespace)
        self.pool = concurrent.futures.ThreadPoolExecutor(16)

    def replicas(self) -> dict[int, ReplicaInfo]:
        """Those that are up, cordoned or not."""
        return {key[1]: info for key, info in self.client.view().replicas.items() if info.status == "up"}

    def put(self, replica_id: int, value: dict[str, Any] | str) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        etcdctl(self.hub.endpoint, "put", f"/omni/v1/{self.hub.namespace}/control/0/{replica_id}", text)

    def forget(self) -> None:
        etcdctl(self.hub.endpoint, "del", "--prefix", f"/omni/v1/{self.hub.namespace}/control/")
        wait_for("nothing to hold", lambda: all(i.control_revision == 0 for i in self.replicas().values()))

    def omni(self, *arguments: str, namespace: str = "") -> tuple[int, str]:
        """Exit code and output of one ``omni`` command."""
        child = self.start(*arguments, namespace=namespace)
        return child.process.wait(60), child.text

    def start(self, *arguments: str, namespace: str = "") -> Child:
        where = ["--etcd-endpoints", self.hub.endpoint, "--namespace", namespace or self.hub.namespace]
        return Child([*arguments, *where], self.hub.folder, f"omni-{arguments[0]}")

    def ask(self, count: int, words: int) -> list[concurrent.futures.Future[tuple[int, dict[str, Any]]]]:
        """So many requests at once, of 20 ms for each word."""
        return [self.pool.submit(self.hub.ask, " ".join(["word"] * words)) for _ in range(count)]

    def queues(self) -> dict[int, int]:
        return {number: info.queue_length for number, info in self.replicas().items()}

    def close(self) -> None:
        self.pool.shutdown()
        self.client.close()
        left = self.hub.stop()
        assert not left, self.hub.text[-3000:]


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    running = Operated(tmp_path_factory.mktemp("operating"))
    try:
        wait_for("three replicas", lambda: len(running.replicas()) == 3)
        yield running
    finally:
        running.close()


def statuses(futures: list[concurrent.futures.Future[tuple[int, dict[str, Any]]]]) -> list[int]:
    return [future.result(30)[0] for future in futures]


def test_a_cordon_by_etcdctl_stops_picks_and_what_runs_there_ends_well(operated: Operated) -> None:
    """1. three long requests, one on each replica; 0/0 is cordoned by hand
    2. eight more requests: none goes to 0/0, all are answered
    3. the request on 0/0 comes to its end; undone with omni, it is picked again
    """
    long = operated.ask(3, 100)
    wait_for("one on each", lambda: operated.queues() == {0: 1, 1: 1, 2: 1}, 5.0)
    operated.put(0, {"cordon": True})
    wait_for("the answer", lambda: operated.replicas()[0].cordoned, 5.0)
    time.sleep(0.1)
    more = operated.ask(8, 30)
    wait_for("the others to have them", lambda: sum(operated.queues().values()) >= 10, 5.0)
    assert operated.queues()[0] <= 1
    assert statuses(long + more) == [200] * 11
    wait_for("nothing on 0/0", lambda: operated.queues()[0] == 0, 5.0)
    code, text = operated.omni("cordon", "0/0", "--undo")
    assert code == 0, text
    assert "takes work again" in text
    again = operated.ask(6, 30)
    wait_for("0/0 to be picked", lambda: operated.queues()[0] > 0, 5.0)
    assert statuses(again) == [200] * 6


def test_a_weight_of_nothing_is_a_cordon_and_ready_says_so_when_nobody_is_left(operated: Operated) -> None:
    for number in (0, 1, 2):
        assert operated.omni("weight", f"0/{number}", "0")[0] == 0
    wait_for("not ready", lambda: operated.hub.get("/ready")[0] == 503, 5.0)
    assert operated.omni("weight", "0/1", "--undo")[0] == 0
    wait_for("ready", lambda: operated.hub.get("/ready")[0] == 200, 5.0)
    assert statuses(operated.ask(1, 1)) == [200]
    operated.forget()


def test_the_share_of_a_replica_follows_its_weight(operated: Operated) -> None:
    """0/0 weighs 3, the others 1: of ten requests at once it gets six."""
    assert operated.omni("weight", "0/0", "3")[0] == 0
    time.sleep(0.1)
    running = operated.ask(10, 60)
    wait_for("all to be placed", lambda: sum(operated.queues().values()) == 10, 5.0)
    queues = operated.queues()
    assert queues[0] == 6, queues
    assert statuses(running) == [200] * 10
    operated.forget()


def test_wrong_uses_are_told_and_change_nothing(operated: Operated) -> None:
    code, text = operated.omni("cordon", "0/9")
    assert code == 2
    assert "no replica 0/9 is registered" in text
    assert "there are: 0/0, 0/1, 0/2" in text
    wrong = (
        ["weight", "0/0", "heavy"],
        ["weight", "0/0"],
        ["drain", "first"],
        ["history", "x"],
        ["history", "--limit", "0"],
    )
    for arguments in wrong:
        assert operated.omni(*arguments)[0] == 2, arguments
    assert operated.omni("drain", "0/0", "--timeout", "-1")[0] == 2
    assert operated.omni("cordon", "0/9", "--undo")[0] == 0
    assert all(info.control_revision == 0 for info in operated.replicas().values())


def test_a_replica_that_stands_still_does_not_answer_and_that_is_said(operated: Operated) -> None:
    pid = operated.replicas()[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        code, text = operated.omni("cordon", "0/1")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert code == 1
    assert "did not answer" in text
    assert "taken back" in text
    key = f"/omni/v1/{operated.hub.namespace}/control/0/1"
    assert etcdctl(operated.hub.endpoint, "get", "--print-value-only", key) == ""
    assert not operated.replicas()[1].cordoned


def test_to_cordon_the_last_that_serves_is_warned_of(operated: Operated) -> None:
    for number, is_last in ((0, False), (1, False), (2, True)):
        code, text = operated.omni("cordon", f"0/{number}")
        assert code == 0
        assert ("warning: no other replica of stage 0 takes work" in text) is is_last
    for number in (0, 1, 2):
        assert operated.omni("cordon", f"0/{number}", "--undo")[0] == 0
    operated.forget()


def test_nonsense_is_shown_by_replicas_and_named_by_doctor(operated: Operated) -> None:
    """1. all is well: doctor says so; 2. a bad value: the table shows it, doctor names its key."""
    # A hub's report is up to a second old.
    wait_for("all to be well", lambda: operated.omni("doctor")[0] == 0)
    code, text = operated.omni("doctor")
    assert code == 0, text
    assert "nothing is wrong" in text
    operated.put(2, '{"cordn": true}')
    wait_for("the answer", lambda: operated.replicas()[2].control_error, 5.0)
    code, text = operated.omni("replicas")
    assert code == 0
    assert '"cordn" is not known' in text
    assert all(len(line) <= 80 for line in text.splitlines()), text
    code, text = operated.omni("doctor")
    assert code == 1
    assert "control/0/2" in text
    assert all(len(line) <= 80 for line in text.splitlines()), text
    operated.forget()


def test_doctor_names_a_wrong_namespace_and_an_etcd_that_is_not_there(operated: Operated) -> None:
    code, text = operated.omni("doctor", "--json", namespace="tset")
    findings = [json.loads(line) for line in text.splitlines()]
    assert code == 1
    assert any("'tset' has no replica, but other namespaces have: test (3)" in each["text"] for each in findings)
    child = Child(["doctor", "--etcd-endpoints", f"{operated.hub.endpoint},127.0.0.1:9"], operated.hub.folder, "doctor")
    assert child.process.wait(30) == 1
    assert "127.0.0.1:9 does not answer" in " ".join(child.text.split())


def test_a_drain_ends_what_runs_without_an_error_and_history_remembers_it(operated: Operated) -> None:
    """1. requests of four seconds run everywhere; omni drain 0/2 waits for those on 0/2
    2. --timeout passes first: said, exit 1; the drain goes on; asked again, it ends with 0
    3. every request is answered; the replica stays down
    4. history knows its end, from etcd, and from the hub's own log after a compaction
    """
    drained = operated.replicas()[2]
    long = operated.ask(6, 200)
    wait_for("work on 0/2", lambda: operated.queues().get(2, 0) > 0, 5.0)
    code, text = operated.omni("drain", "0/2", "--timeout", "0.3")
    assert code == 1
    assert "still drains" in text
    code, text = operated.omni("drain", "0/2")
    assert code == 0, text
    assert "has drained" in text
    assert statuses(long) == [200] * 6
    assert statuses(operated.ask(4, 2)) == [200] * 4
    time.sleep(1.0)
    assert set(operated.replicas()) == {0, 1}
    for is_compacted in (False, True):
        if is_compacted:
            compact(operated.hub.endpoint)
        code, text = operated.omni("history", "0/2", "--json")
        assert code == 0, text
        (life,) = [json.loads(line) for line in text.splitlines()]
        assert (life["epoch"], life["pid"], life["end"]) == (drained.epoch, drained.pid, "drained by an operator")
        assert life["up_at_s"] < life["gone_at_s"]
    code, text = operated.omni("history")
    assert code == 0
    assert "3 lives" in text
    assert all(len(line) <= 80 for line in text.splitlines()), text
