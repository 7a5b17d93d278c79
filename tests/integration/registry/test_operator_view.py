"""What an operator's commands show while something is wrong: a real hub, its replicas, and the commands as they are."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.commands.history_log import history_file, read_log
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records.keys import replica_key
from omni_discovery.records.schema import ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.stories import read_waits
from omni_discovery.view.hub_reports import SeenTrouble, read_reports
from tests.support.hub import Hub
from tests.support.processes import Child, wait_for
from tests.support.registry import etcdctl

FAILS = """
stages:
  - stage_id: 0
    engine: echo
    engine_args: {fail_on: FAIL, broken_file: BROKEN}
    runtime: {num_replicas: 2}
    final_output: text
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of one command."""
    namespace = () if "--namespace" in arguments else ("--namespace", "test")
    child = Child([*arguments, *namespace], folder, "command")
    return child.process.wait(60), child.text


def problems(folder: Path, *flags: str) -> list[str]:
    """What doctor calls wrong; it exits with 1 if that is anything."""
    code, text = run(folder, "doctor", "--json", *flags)
    findings = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    found = [f"{each['topic']}: {each['text']}" for each in findings if each["grade"] == "problem"]
    assert code == (1 if found else 0), text
    return found


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub.of_yaml(tmp_path, FAILS.replace("BROKEN", str(tmp_path / "broken")))
    try:
        yield hub.wait_ready()
    finally:
        left = hub.stop()
    assert left == []


def seen(client: OmniCoordClientForHub, *kinds: str) -> list[SeenTrouble]:
    """What hubs report of registered replicas, of these kinds."""
    reports = read_reports(client.view(), client.read_beats())
    every = [each for troubles in reports.troubles.values() for each in troubles]
    return [each for each in (*every, *reports.lost) if each.trouble.kind in kinds]


def test_failures_an_ejection_a_stopped_replica_and_a_drain_are_seen_from_outside(hub: Hub, tmp_path: Path) -> None:
    """1. all is well, and doctor says so
    2. a replica is broken: 'omni replicas' shows that the hub has ejected it, and why; requests fail: doctor turns
    3. a replica is stopped: it is shown as without a session with the hub, and doctor turns on it
    4. it goes on, and an operator drains it: history tells the drain from a stop, with the hub and one registry
    """
    with OmniCoordClientForHub(hub.endpoint, namespace="test") as client:
        (hub_id,) = client.wait_synced(30.0).hubs
        wait_for("a report", lambda: client.read_beats()[hub_id].health is not msgspec.UNSET)
        assert problems(tmp_path) == []
        broken = next(iter(client.view().replicas.values()))
        (tmp_path / "broken").write_text(str(broken.pid))

        def ask_until_ejected() -> list[SeenTrouble]:
            assert hub.ask("hello")[0] == 200
            return seen(client, "ejected", "probed")

        (ejected,) = wait_for("an ejection", ask_until_ejected)
        assert ejected.hubs == (hub_id,)
        assert "the last: engine" in ejected.trouble.reason
        name = ejected.trouble.name
        assert name == f"{broken.stage_id}/{broken.replica_id}"
        _, table = run(tmp_path, "replicas")
        assert any(f"{name} up, {word}" in " ".join(table.split()) for word in ("ejected", "on probation")), table
        (tmp_path / "broken").unlink()
        for _ in range(8):
            assert hub.ask("FAIL")[0] == 500

        victim = next(iter(client.view().replicas.values()))
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            wait_for("a lost session", lambda: seen(client, "no-session", "lost"))
            found = problems(tmp_path)
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        assert any(re.match(rf"requests: hub {hub_id}: 8 of \d+ requests failed in 5 min", text) for text in found), (
            found
        )
        stopped = f"replica: replica {victim.stage_id}/{victim.replica_id}"
        told = (f"{stopped} is up by its record, but without a session", f"{stopped} was lost")
        assert any(text.startswith(told) for text in found), found

        back = wait_for(
            "its return", lambda: [each for each in client.view().replicas.values() if each.pid == victim.pid]
        )
        wait_for("its session", lambda: not seen(client, "no-session", "lost"))
        code, text = run(tmp_path, "drain", f"0/{back[0].replica_id}")
        assert code == 0, text
    _, text = run(tmp_path, "history", "--json")
    lives = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    drained = [life for life in lives if life["pid"] == victim.pid and "stage_id" in life][-1]
    assert drained["end"] == "drained by an operator"
    assert [life["end"] for life in lives if life.get("hub_id") == hub_id] == [""]
    assert {each.registry for each in read_log(history_file(tmp_path / "omni", "test"))} == {drained["registry"]}


def test_a_loss_is_told_as_far_as_it_is_known_and_a_cordon_with_the_way_back(hub: Hub, tmp_path: Path) -> None:
    """1. the record of a replica that nobody could reach vanishes: whether it was stopped is not known, and said so
    2. both replicas are cordoned: doctor names the command that lets one take work again; 3. it does
    """

    async def register_and_vanish() -> None:
        kv = EtcdKV(hub.endpoint)
        try:
            record = ReplicaRecord(
                stage_id=0,
                replica_id=9,
                input_addr="tcp://127.0.0.1:1",
                output_addr="tcp://127.0.0.1:2",
                status=ReplicaStatus.UP,
            )
            grant = await kv.grant(60.0)
            await kv.put(replica_key("test", 0, 9), encode_record(record), grant.lease_id)
            await asyncio.sleep(1.0)
            await kv.revoke(grant.lease_id)
        finally:
            await kv.close()

    asyncio.run(register_and_vanish())
    with OmniCoordClientForHub(hub.endpoint, namespace="test") as client:
        client.wait_synced(30.0)
        (lost,) = wait_for("the loss", lambda: seen(client, "lost"))
    assert "it had no session here: whether it was stopped is not known" in lost.trouble.reason
    assert [run(tmp_path, "cordon", name)[0] for name in ("0/0", "0/1")] == [0, 0]
    _, text = run(tmp_path, "doctor", "--json")
    findings = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    (stage,) = [each for each in findings if each["topic"] == "stage"]
    assert stage["advice"] == "let it take work again: omni cordon 0/0 --undo; or start another replica"
    assert any("0/9 was lost at" in each["text"] and "is not known" in each["text"] for each in findings)
    assert run(tmp_path, "cordon", "0/0", "--undo")[0] == 0
    assert not any(text.startswith("stage:") for text in problems(tmp_path))


def test_a_supervisor_that_waits_for_a_pipeline_is_seen(tmp_path: Path, endpoint: str) -> None:
    """1. a supervisor starts before any hub; 2. doctor says that it waits, also one that sees none of its files
    3. who lists the namespace is told; 4. it ends, and with it that
    """
    registry = ("--etcd-endpoints", endpoint, "--namespace", "waits")
    supervisor = Child(["serve", "--headless", "--stage-id", "3", *registry], tmp_path, "headless")
    other_machine = tmp_path / "other machine"
    other_machine.mkdir()

    def waiting(folder: Path) -> list[str]:
        _, text = run(folder, "doctor", "--json", *registry)
        return [line for line in text.splitlines() if "waits for" in line and '"problem"' in line]

    try:
        wait_for(
            "a wait of a second",
            lambda: any(time.time() - w.since_s > 1.0 for w in read_waits(tmp_path / "omni", "waits")),
        )
        (line,) = wait_for("the other machine to see it", lambda: waiting(other_machine))
        assert f"the supervisor of stage 3, process {supervisor.process.pid} on {platform.node()}, waits for" in line
        assert "no hub has written it yet" in line
        (line,) = waiting(tmp_path)
        assert f"the supervisor of stage 3, process {supervisor.process.pid} of this machine, waits for" in line
        assert "no hub has written it yet" in line
        _, text = run(tmp_path, "replicas", *registry)
        assert (
            f"nothing is in namespace 'waits' yet but the supervisor of stage 3, process {supervisor.process.pid}"
            in (text)
        )
        assert "BlockingIOError" not in supervisor.text
    finally:
        supervisor.stop()
    assert waiting(tmp_path) == []
    wait_for("the key to go", lambda: not etcdctl(endpoint, "get", "--prefix", "/omni/v1/waits/"))
