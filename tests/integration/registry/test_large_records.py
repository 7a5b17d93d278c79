"""Records that somebody made so large that etcd can't list them in one answer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records import keys
from tests.support.hub import Hub
from tests.support.processes import OMNI, most_mib

RECORDS, RECORD_BYTES = 60, 1_200_000
NESTED_RECORDS = 40
GIANT_KEYS = 20


@pytest.mark.attack("E2")
async def test_large_records_of_another_make_lists_slower_not_impossible(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. a replica, and 72 MB of records that are none; 2. a hub that starts now sees the replica; so do operators"""
    with OmniCoordClientForStage(endpoint, "tcp://h:1", "tcp://h:2", 0, namespace=namespace) as replica:
        replica.wait_registered(30.0)
        kv = EtcdKV(endpoint, try_timeout_s=30.0, call_timeout_s=60.0)
        prefix = keys.replicas_prefix(namespace)
        for number in range(RECORDS):
            await kv.put(f"{prefix}900/{number}", b"x" * RECORD_BYTES)
        assert len((await kv.list(prefix)).items) == RECORDS + 1
        await kv.close()
        with OmniCoordClientForHub(endpoint, namespace=namespace) as hub:
            hub.wait_synced(60.0)
            assert [info.input_addr for info in hub.get_replica_list().replicas] == ["tcp://h:1"]
        command = [*OMNI, "replicas", "--namespace", namespace, "--etcd-endpoints", endpoint]
        shown = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
        )
        assert (shown.returncode, "0/0" in shown.stdout) == (0, True), shown


@pytest.mark.attack("Z11")
async def test_keys_of_a_megabyte_hold_nobody_up(endpoint: str, namespace: str) -> None:
    """1. keys of 1.4 MB that end in an escape sequence; 2. a hub lists them, and names each with its begin"""
    kv = EtcdKV(endpoint, try_timeout_s=30.0, call_timeout_s=60.0)
    prefix = keys.replicas_prefix(namespace)
    for number in range(GIANT_KEYS):
        await kv.put(f"{prefix}{number:0>1400000}\x1b", b"x")
    with OmniCoordClientForHub(endpoint, namespace=namespace) as hub:
        hub.wait_synced(60.0)
        bad = hub.view().bad
        assert len(bad) == GIANT_KEYS
        assert all(len(key) < 600 and len(str(error)) < 700 for key, error in bad.items())
    for item in (await kv.list(prefix)).items:
        assert not await kv.delete(item.key)
    await kv.close()


@pytest.mark.attack("K4")
def test_records_that_are_costly_to_decode_hide_only_themselves(endpoint: str, namespace: str, tmp_path: Path) -> None:
    """1. forty records, each of 1.4 MB of empty lists; 2. a hub starts among them and serves, in little memory
    3. its log, omni replicas and omni doctor name keys to delete; the stage's replica is shown; it keeps its lease
    """
    prefix, lists = keys.replicas_prefix(namespace), b"[" + b",".join([b"[]"] * 480_000) + b"]"

    async def write() -> None:
        kv = EtcdKV(endpoint, try_timeout_s=30.0, call_timeout_s=60.0)
        for number in range(NESTED_RECORDS):
            about = b'{"stage_id":1,"replica_id":%d,"input_addr":"tcp://127.0.0.1:1","output_addr":"tcp://127.0.0.1:2"'
            record = about % number + b',"status":"error","connectors":{"a":' + lists + b"}}"
            await kv.put(f"{prefix}1/{number}", record)
        await kv.close()

    document = tmp_path / "deploy.yaml"
    document.write_text("stages: [{stage_id: 0, engine: echo, final_output: text}]")
    etcd = ["--namespace", namespace, "--etcd-endpoints", endpoint]
    asyncio.run(write())
    hub = Hub(tmp_path, ["--deploy-config", str(document), "--etcd-endpoints", endpoint], namespace)
    try:
        hub.wait_ready()
        assert hub.ask("hello")[0] == 200
        assert most_mib(hub.process.pid) < 400
        (line,) = [line for line in hub.text.splitlines() if f"watcher.bad_value key={prefix}1/0 " in line]
        assert "has more than 98304 bytes, as no record has: find who writes it" in line
        shown = _omni(["replicas", *etcd], tmp_path)
        assert (shown.returncode, "0/0" in shown.stdout) == (0, True), shown
        named = " ".join(shown.stdout.split())
        assert f"not shown, since they can't be read: {prefix}1/0, " in named
        assert f"and {NESTED_RECORDS - 3} more; omni doctor says what to do" in named
        examined = _omni(["doctor", "--json", *etcd], tmp_path)
        assert examined.returncode == 1, examined
        findings = [json.loads(line) for line in examined.stdout.splitlines()]
        bad = [each for each in findings if each["topic"] == "record"]
        assert len(bad) == 9
        assert "has more than 98304 bytes" in bad[0]["text"]
        assert bad[0]["advice"].endswith(f"etcdctl del {prefix}1/0")
        assert f"{NESTED_RECORDS - 8} more keys can't be read" in bad[8]["text"]
        assert hub.ask("hello")[0] == 200
    finally:
        hub.stop()


def _omni(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"COLUMNS": "400"}
    return subprocess.run(
        [*OMNI, *words], capture_output=True, text=True, timeout=120, check=False, cwd=folder, env=variables
    )
