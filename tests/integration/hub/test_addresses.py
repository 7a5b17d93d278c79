"""Records that name another replica's address, and a hub that sees both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records import keys
from tests.support.hub import ECHO_PAIR, Hub
from tests.support.processes import wait_for

#: Four times as many as a hub tries at the same time, and more.
JUNK = 1200

_T = TypeVar("_T")


@pytest.mark.attack("A23")
def test_a_record_with_the_addresses_of_another_replica_disturbs_nobody(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. a hub and its replicas serve; a record 0/8 appears that names the addresses of 1/0
    2. the log tells so and names 1/0; all requests of both stages are answered
    3. a hub that starts now, and sees both records at once, answers all of them, too
    """
    (tmp_path / "deploy.yaml").write_text(ECHO_PAIR.replace("num_replicas: 2", "num_replicas: 1"))
    arguments = ["--deploy-config", str(tmp_path / "deploy.yaml"), "--etcd-endpoints", endpoint]
    with ExitStack() as stack:
        hub = Hub(tmp_path, arguments, namespace)
        stack.callback(hub.stop)
        hub.wait_ready()
        with OmniCoordClientForHub(endpoint, namespace=namespace) as client:
            victim = client.wait_synced(30.0).replicas[1, 0]
        fields = {"curve_public_key": victim.curve_public_key, "capacity": 8, "fingerprint": ""}
        stack.enter_context(
            OmniCoordClientForStage(
                endpoint, victim.input_addr, victim.output_addr, 0, namespace=namespace, replica_id=8, fields=fields
            )
        )
        told = f"its address {victim.input_addr} is that of replica 1/0, which answers there"
        wait_for("the refusal", lambda: told in hub.text)
        ask_all(hub)
        (tmp_path / "later").mkdir()
        later = Hub(tmp_path / "later", [*arguments, "--hub-only"], namespace)
        stack.callback(later.stop)
        later.wait_ready()
        ask_all(later)


@pytest.mark.attack("H2")
def test_copies_of_the_records_of_replicas_take_nothing_from_them(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. a hub and its replicas serve; each record is copied to a free id, once without a lease, once with one
    2. the log tells so and names the replicas; all requests of both stages are answered
    3. a hub that starts now, and sees all of them at once, answers all, too
    4. the key of 1/0 is deleted, and a copy put in its place: the process registers again, as 1/1, and names that one;
       both hubs go by that record
    """
    with ExitStack() as stack:
        hub = hub_of(stack, tmp_path, endpoint, namespace)
        with_kv(endpoint, lambda kv: copy_records(kv, namespace))
        for name in ("0/700", "0/800", "1/700", "1/800"):
            told = f"replica={name}: its address "
            wait_for(f"the refusal of {name}", lambda told=told: told in hub.text)
        assert "which answers there" in hub.text
        ask_all(hub)
        (tmp_path / "later").mkdir()
        arguments = ["--deploy-config", str(tmp_path / "deploy.yaml"), "--etcd-endpoints", endpoint, "--hub-only"]
        later = Hub(tmp_path / "later", arguments, namespace)
        stack.callback(later.stop)
        later.wait_ready()
        ask_all(later)
        with_kv(endpoint, lambda kv: replace_by_copy(kv, keys.replica_key(namespace, 1, 0)))
        for each in (hub, later):
            wait_for("a session with 1/1", lambda each=each: "replica.session_up replica=1/1" in each.text)
            ask_all(each)


async def copy_records(kv: EtcdKV, namespace: str) -> None:
    """Copy each record to two free ids: one without a lease, one with a lease of nobody."""
    lease = await kv.grant(600.0)
    for item in (await kv.list(keys.replicas_prefix(namespace))).items:
        fields = json.loads(item.value)
        for more, lease_id in ((700, 0), (800, lease.lease_id)):
            number = fields["replica_id"] + more
            value = json.dumps({**fields, "replica_id": number}).encode()
            await kv.put(keys.replica_key(namespace, fields["stage_id"], number), value, lease_id)


async def replace_by_copy(kv: EtcdKV, key: str) -> None:
    """Put a copy in the place of a record. Where the replica is faster it has its id again: then repeat."""
    async with asyncio.timeout(30.0):
        while True:
            item = await kv.get(key)
            if item is not None and await kv.delete(key) and (await kv.create(key, item.value)).won:
                return
            await asyncio.sleep(0.5)


@pytest.mark.attack("H7")
def test_a_replica_that_starts_anew_waits_behind_no_records_of_nobody(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. a hub and its replicas serve; many records without a lease name addresses where nobody listens
    2. the only replica of stage 1 is killed and starts anew: it is connected to long before the others had turns
    """
    with ExitStack() as stack:
        hub = hub_of(stack, tmp_path, endpoint, namespace)
        own_key = keys.replica_key(namespace, 1, 0)

        async def write_junk(kv: EtcdKV) -> int:
            item = await kv.get(own_key)
            assert item is not None
            fields = json.loads(item.value)
            for first in range(0, JUNK, 50):
                await asyncio.gather(*(kv.put(*junk(namespace, fields, each)) for each in range(first, first + 50)))
            return int(fields["pid"])

        pid = with_kv(endpoint, write_junk)
        wait_for("those that wait", lambda: "others have never answered" in hub.text)
        sessions = hub.text.count("replica.session_up replica=1/")
        os.kill(pid, signal.SIGKILL)
        wait_for("a session with the next", lambda: hub.text.count("replica.session_up replica=1/") > sessions, 60.0)
        ask_all(hub)


def junk(namespace: str, fields: dict[str, object], number: int) -> tuple[str, bytes]:
    """The key and the value of a record of nobody."""
    host = f"tcp://127.1.{number // 250}.{number % 250}"
    replica_id = 1000 + number
    value = {**fields, "replica_id": replica_id, "input_addr": f"{host}:1", "output_addr": f"{host}:2"}
    return keys.replica_key(namespace, 1, replica_id), json.dumps(value).encode()


def hub_of(stack: ExitStack, folder: Path, endpoint: str, namespace: str) -> Hub:
    """A hub with one replica of each of two stages."""
    (folder / "deploy.yaml").write_text(ECHO_PAIR.replace("num_replicas: 2", "num_replicas: 1"))
    arguments = ["--deploy-config", str(folder / "deploy.yaml"), "--etcd-endpoints", endpoint]
    hub = Hub(folder, arguments, namespace)
    stack.callback(hub.stop)
    return hub.wait_ready()


def with_kv(endpoint: str, act: Callable[[EtcdKV], Coroutine[None, None, _T]]) -> _T:
    """Do something in the registry."""

    async def run() -> _T:
        kv = EtcdKV(endpoint)
        try:
            return await act(kv)
        finally:
            await kv.close()

    return asyncio.run(run())


def ask_all(hub: Hub) -> None:
    for _ in range(6):
        status, body = hub.ask("well", modalities=["text", "image"])
        assert status == 200, body
        assert len(body["choices"]) == 2, json.dumps(body)[:500]
