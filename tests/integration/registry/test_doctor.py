"""``omni doctor`` against real etcds: one that asks for users, one where something is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from pathlib import Path

import pytest

from omni_discovery.clients import OmniCoordClientForStage
from omni_discovery.clients.wait_board import leave_last_words
from omni_discovery.commands.doctor import diagnose
from omni_discovery.commands.findings.checks import Finding, Grade
from omni_discovery.commands.findings.processes import recent_findings
from omni_discovery.etcd.config import RegistrySecurity
from omni_discovery.records.schema import ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.stories import Stories, read_stories
from tests.support.registry import EtcdServer, etcdctl, eventually
from tests.support.secured import add_users, login


def texts(findings: list[Finding], grade: Grade) -> list[str]:
    return [f"{each.topic}: {each.text}" for each in findings if each.grade is grade]


def diagnosed(endpoints: str, namespace: str, security: RegistrySecurity | None = None) -> list[Finding]:
    return asyncio.run(diagnose(endpoints, security or RegistrySecurity(), namespace)).findings


def test_who_is_refused_is_told_so_and_who_is_let_in_is_not(server: EtcdServer) -> None:
    """1. nobody logged in; 2. the user of another namespace; 3. the right user, who can't see the others."""
    add_users(server)
    for security in (RegistrySecurity(), login("beta")):
        (refused,) = texts(diagnosed(server.endpoint, "alpha", security), Grade.PROBLEM)
        assert refused.startswith(f"etcd: {server.endpoint} refuses us")
    findings = diagnosed(server.endpoint, "alpha", login("alpha"))
    # The tests' own etcd is an old one.
    (release,) = texts(findings, Grade.PROBLEM)
    assert "with published weaknesses" in release
    assert any("other namespaces can't be seen" in text for text in texts(findings, Grade.NOTE))


def test_a_record_without_a_lease_and_of_nobody_is_named_beside_an_endpoint_that_is_down(
    endpoint: str, namespace: str
) -> None:
    """Of two endpoints one is down: the other is asked, and what it holds is looked at all the same."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        record = ReplicaRecord(
            stage_id=0,
            replica_id=0,
            input_addr=f"tcp://{nobody}",
            output_addr=f"tcp://{nobody}",
            status=ReplicaStatus.UP,
            host="gpu-7",
        )
        etcdctl(endpoint, "put", f"/omni/v1/{namespace}/replicas/0/0", encode_record(record).decode())
        problems = texts(diagnosed(f"{nobody},{endpoint}", namespace), Grade.PROBLEM)
    assert [text.split(":")[0] for text in problems] == ["etcd", "namespace", "lease", "pipeline", "address"]
    assert f"{nobody} does not answer" in problems[0]
    assert "no hub is registered" in problems[1]
    assert f"tcp://{nobody} (Connection refused)" in problems[4]


@pytest.mark.parametrize(
    ("greeting", "told"),
    [(None, "the process is stopped or hangs"), (b"SSH-2.0", "something else listens there"), (b"\xff\0", "")],
)
async def test_a_socket_that_connects_and_does_not_greet_is_named(
    endpoint: str, namespace: str, greeting: bytes | None, told: str
) -> None:
    """The kernel takes connections for a process that is stopped; a socket of ZMQ that is well speaks first."""
    closed: list[bool] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting or b"")
        await reader.read()
        writer.close()
        closed.append(True)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        address = f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        record = ReplicaRecord(
            stage_id=0, replica_id=0, input_addr=address, output_addr=address, status=ReplicaStatus.UP
        )
        await asyncio.to_thread(
            etcdctl, endpoint, "put", f"/omni/v1/{namespace}/replicas/0/0", encode_record(record).decode()
        )
        findings = (await diagnose(endpoint, RegistrySecurity(), namespace)).findings
        # Both addresses are the same one, which is looked at once.
        await eventually("the connection to be closed", lambda: len(closed) == 1)
    assert [told in each.text for each in findings if each.topic == "address" and each.grade is Grade.PROBLEM] == (
        [True] if told else []
    )


async def test_a_replica_that_lost_its_lease_leaves_the_story_of_it_for_doctor(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. a replica registers; 2. somebody revokes its lease; 3. it comes back, and the loss can be read of"""
    home = tmp_path / "omni"
    client = OmniCoordClientForStage(endpoint, "tcp://h:1", "tcp://h:2", 0, namespace=namespace, ttl_s=3.0)
    client.keep_stories(Stories(home, namespace))
    try:
        await asyncio.to_thread(client.wait_registered, 10.0)
        key = f"/omni/v1/{namespace}/replicas/0/0"
        lease_id = json.loads(etcdctl(endpoint, "get", key, "-w", "json"))["kvs"][0]["lease"]
        etcdctl(endpoint, "lease", "revoke", f"{lease_id:x}")
        stories = await eventually("the story", lambda: read_stories(home, namespace))
        await asyncio.to_thread(client.wait_registered, 10.0)
    finally:
        await asyncio.to_thread(client.close)
    registry = (await diagnose(endpoint, RegistrySecurity(), namespace)).registry
    (finding,) = recent_findings(stories, registry, "written:1", time.time())
    assert recent_findings(stories, "0123abcd", "written:1", time.time()) == []
    head, granted, *_, lost = finding.text.splitlines()
    assert head.startswith(f"lease {key} of process {os.getpid()}")
    assert f"held: granted for 3 s as {lease_id:x}" in granted
    assert lost.endswith("lost: the server has no such lease")


@pytest.mark.attack("F6")
def test_a_pipeline_with_too_many_stages_is_named_by_its_numbers(endpoint: str, namespace: str) -> None:
    stages = [{"stage_id": number, "engine": "echo", "final_output": "text"} for number in range(1000)]
    etcdctl(endpoint, "put", f"/omni/v1/{namespace}/pipeline", json.dumps({"stages": stages}))
    problems = texts(diagnosed(endpoint, namespace), Grade.PROBLEM)
    assert any("it has 1000 stages; a pipeline has at most 256" in text for text in problems)


def test_the_last_words_of_a_supervisor_are_kept_once_for_each_host_and_stage(endpoint: str, namespace: str) -> None:
    """It may be started again and again: the newest reason counts. An etcd that is away delays no end."""
    for reason in ("no such model", "no such device"):
        leave_last_words(endpoint, namespace, 3, reason)
    (said,) = [text for text in texts(diagnosed(endpoint, namespace), Grade.PROBLEM) if text.startswith("ended: ")]
    assert "the supervisor of stage 3" in said
    assert said.endswith("no such device")
    (line,) = etcdctl(endpoint, "get", "--prefix", f"/omni/v1/{namespace}/waits/", "-w", "json").splitlines()
    (item,) = json.loads(line)["kvs"]
    assert item["lease"], "it goes by itself"
    leave_last_words("127.0.0.1:1", namespace, 3, "nobody reads this")
