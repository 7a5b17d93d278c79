"""Records that somebody made so large that etcd can't list them in one answer."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records import keys
from tests.support.processes import OMNI

RECORDS, RECORD_BYTES = 60, 1_200_000


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
