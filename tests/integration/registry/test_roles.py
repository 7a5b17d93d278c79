"""Hub, replica, operator and observer as users of one etcd: each does its own part, and no other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from omni_discovery.clients import OmniCoordClientForStage
from omni_discovery.commands.chaos.draw import Act
from omni_discovery.commands.chaos.run import Chaos, Times
from omni_discovery.errors import RegistryDeniedError
from omni_discovery.etcd.admin import grant_roles
from omni_discovery.etcd.config import RegistrySecurity
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.kv import Held
from omni_discovery.records import jobs, keys
from omni_discovery.records.roles import API_KEYS, OPEN_FAMILIES, WRITES
from omni_discovery.records.schema import ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.view.families import NamespaceReader
from tests.support.binaries import require_debian_etcd, wheel_etcd
from tests.support.processes import Child, wait_for
from tests.support.registry import EtcdServer, quiet_port
from tests.support.secured import ROOT

NS = "alpha"
#: One key of each family.
KEYS = {
    "replicas/": keys.replica_key(NS, 0, 7),
    "hubs/": keys.hub_key(NS, "h"),
    "beats/": keys.beat_key(NS, "h"),
    "control/": keys.replica_control_key(NS, 0, 7),
    "waits/": keys.wait_key(NS, "w"),
    "pipeline": keys.pipeline_key(NS),
    "keys/": keys.api_key_key(NS, "laptop"),
}
DOCUMENT = '{"stages": [{"stage_id": 0, "engine": "echo", "final_output": "text"}]}'


@pytest.fixture(scope="module", params=[wheel_etcd, require_debian_etcd], ids=["etcd_35", "etcd_34"])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("roles"), binary=request.param())
    server.start()
    for role in WRITES:
        password = f"{role}-secret"
        asyncio.run(grant_roles([server.endpoint], RegistrySecurity(), NS, [role], f"omni-{NS}/{role}", password))
    # A role made by hand, that lets a replica register and not read its control key.
    server.etcdctl("role", "add", "blind")
    server.etcdctl("role", "grant-permission", "blind", "readwrite", keys.replicas_prefix(NS), "--prefix")
    server.etcdctl("user", "add", "blind:blind-secret")
    server.etcdctl("user", "grant-role", "blind", "blind")
    server.etcdctl("user", "add", f"root:{ROOT}")
    server.etcdctl("user", "grant-role", "root", "root")
    server.etcdctl("auth", "enable")
    yield server
    server.kill()


def login(role: str) -> RegistrySecurity:
    return RegistrySecurity(user=f"omni-{NS}/{role}", password=f"{role}-secret")


@contextlib.asynccontextmanager
async def connected(server: EtcdServer, role: str) -> AsyncIterator[EtcdKV]:
    kv = EtcdKV(server.endpoint, security=login(role))
    try:
        yield kv
    finally:
        await kv.close()


@pytest.mark.attack("A3")
@pytest.mark.parametrize("role", WRITES)
async def test_a_role_writes_its_own_families_and_etcd_refuses_it_all_others(secured: EtcdServer, role: str) -> None:
    async with connected(secured, role) as kv:
        for family, key in KEYS.items():
            if family in WRITES[role]:
                grant = await kv.grant(30.0)
                await kv.put(key, b"1", grant.lease_id)
                assert (await kv.get(key)) is not None
                await kv.revoke(grant.lease_id)
                assert (await kv.create(key, b"2")).won
                assert await kv.delete(key)
                continue
            for refused in (kv.put(key, b""), kv.create(key, b""), kv.compare_and_put(key, b"", 1), kv.delete(key)):
                with pytest.raises(RegistryDeniedError):
                    await refused
        for other in (keys.pipeline_key("beta"), keys.replica_key("beta", 0, 0), "/omni/v1/alphabet/pipeline"):
            with pytest.raises(RegistryDeniedError):
                await kv.get(other)


@pytest.mark.attack("J5")
@pytest.mark.parametrize("role", WRITES)
async def test_only_hubs_reach_the_jobs_of_their_namespace(secured: EtcdServer, role: str) -> None:
    """Also by the condition of a write, which reads the key that it names."""
    key, record = jobs.job_key(NS, f"video_{1:032x}"), KEYS["hubs/"]
    async with connected(secured, role) as kv:
        if role == "hub":
            lease_id = (await kv.grant(30.0)).lease_id
            await kv.put(record, b"{}", lease_id)
            made = await kv.create(key, b"{}")
            assert made.won
            held = Held(record, lease_id)
            assert (await kv.compare_and_put(key, b"{}", made.revision, held=held)).won
            assert await kv.delete(key)
            await kv.revoke(lease_id)
        else:
            for refused in (kv.get(key), kv.put(key, b"{}"), kv.list(jobs.jobs_prefix(NS)), kv.delete(key)):
                with pytest.raises(RegistryDeniedError):
                    await refused
        for refused in (kv.get(jobs.job_key("beta", "video_1")), kv.list(keys.JOBS_ROOT)):
            with pytest.raises(RegistryDeniedError):
                await refused


@pytest.mark.parametrize("role", WRITES)
async def test_chaos_is_for_operators(secured: EtcdServer, role: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Who may not steer replicas is refused before anything is done to one, even to one of its own host."""
    async with connected(secured, "replica") as kv:
        lease_id = (await kv.grant(30.0)).lease_id
        for number in (0, 1):
            record = ReplicaRecord(
                stage_id=0, replica_id=number, input_addr="in", output_addr="out", status=ReplicaStatus.UP
            )
            await kv.put(keys.replica_key(NS, 0, number), encode_record(record), lease_id)
    try:
        async with connected(secured, role) as kv:
            chaos = Chaos(kv, NS, [Act.CORDON], Times(for_s=0.0, pause_s=0.0, hold_s=0.0, recovery_s=1.0))
            if role == "operator":
                # Let in: the key was written, nobody acknowledged it, and the code says so.
                assert await chaos.run(seed=1) == 1
                assert "did not answer" in capsys.readouterr().err
            else:
                with pytest.raises(RegistryDeniedError):
                    await chaos.run(seed=1)
    finally:
        async with connected(secured, "replica") as kv:
            await kv.revoke(lease_id)


@pytest.mark.attack("A3")
@pytest.mark.parametrize("role", ["replica", "observer"])
async def test_who_may_not_see_the_api_keys_sees_all_else(secured: EtcdServer, role: str) -> None:
    """Whole, in parts: with the changes of both, and without a word of the API keys."""
    root = EtcdKV(secured.endpoint, security=RegistrySecurity(user="root", password=ROOT))
    reader = NamespaceReader(NS, secured.endpoint, security=login(role))
    plain = EtcdKV(secured.endpoint, security=login(role))
    whole = keys.namespace_prefix(NS)
    try:
        for key in KEYS.values():
            await root.put(key, b"1")
        for refused in (plain.list(whole), plain.get(KEYS["keys/"]), plain.list(f"{whole}{API_KEYS}")):
            with pytest.raises(RegistryDeniedError):
                await refused
        async with contextlib.aclosing(plain.watch(f"{whole}{API_KEYS}", 1)) as batches:
            with pytest.raises(RegistryDeniedError):
                await anext(batches)
        # omni top asks what a replica's lease has left.
        lease_id = (await root.grant(30.0)).lease_id
        await root.put(KEYS["replicas/"], b"1", lease_id)
        left = await reader.lease_time(lease_id)
        assert left is not None
        assert left.ttl_s == 30.0
        await root.put(KEYS["replicas/"], b"1")
        listing = await reader.list(whole)
        assert [item.key for item in listing.items] == sorted(set(KEYS.values()) - {KEYS["keys/"]})
        assert (await reader.summary(whole)).count == len(OPEN_FAMILIES)
        async with contextlib.aclosing(reader.watch(whole, listing.revision + 1)) as batches, asyncio.timeout(30):
            assert (await anext(batches)).events == ()
            await root.put(KEYS["keys/"], b"2")
            await root.put(KEYS["pipeline"], b"2")
            with pytest.raises(Exception, match="something in the namespace has changed"):
                await anext(batches)
        for key in KEYS.values():
            await root.delete(key)
    finally:
        for kv in (root, reader, plain):
            await kv.close()


async def test_a_replica_that_may_not_read_its_control_key_registers_and_says_so(secured: EtcdServer) -> None:
    """The claim reads that key by its transaction, which etcd refuses as a whole: the claim is made without it."""
    with OmniCoordClientForStage(
        secured.endpoint, "tcp://h:1", "tcp://h:2", 0, namespace=NS, user="blind", password="blind-secret"
    ) as client:
        replica_id, epoch = await asyncio.to_thread(client.wait_registered, 20.0)
        async with connected(secured, "observer") as kv:
            found = await kv.get(keys.replica_key(NS, 0, replica_id))
    assert found is not None
    record = json.loads(found.value)
    assert (record["status"], record["epoch"], found.create_revision) == ("up", epoch, epoch)
    assert "can't be read" in record["control_error"]


class Users:
    """Commands of the product, each as one user of etcd."""

    def __init__(self, server: EtcdServer, folder: Path) -> None:
        self._flags = ["--etcd-endpoints", server.endpoint, "--namespace", NS]
        self._folder = folder
        self.running: list[Child] = []

    def start(self, role: str, *arguments: str) -> Child:
        password = self._folder / f"{role}.password"
        password.write_text(f"{role}-secret")
        login = ["--etcd-user", f"omni-{NS}/{role}", "--etcd-password-file", str(password)]
        name = f"{role}-{len(self.running)}"
        child = Child([*arguments, *self._flags, *login], self._folder, name)
        self.running.append(child)
        return child

    def run(self, role: str, *arguments: str, codes: Sequence[int] = (0,)) -> str:
        child = self.start(role, *arguments)
        assert child.process.wait(60) in codes, child.text
        return child.text


@pytest.fixture
def users(secured: EtcdServer, tmp_path: Path) -> Iterator[Users]:
    made = Users(secured, tmp_path)
    yield made
    for child in reversed(made.running):
        child.stop()


@pytest.mark.attack("A3")
def test_a_deployment_runs_with_a_user_for_each_role(users: Users, tmp_path: Path) -> None:
    """1. a hub and a headless host serve, each as its role; a request is answered
    2. the observer sees it all and changes nothing; the operator cordons and drains, which is acknowledged
    3. what the operator left in etcd is nothing
    """
    file, port = tmp_path / "pipeline.yaml", quiet_port()
    file.write_text(DOCUMENT)
    ttl = ("--omni-heartbeat-timeout", "5")
    users.start("hub", "serve", "--hub-only", "--deploy-config", str(file), "--port", str(port), *ttl)
    stage = users.start("replica", "serve", "--headless", "--stage-id", "0", *ttl)
    wait_for("the replica", lambda: stage.must_run() or "replica.ready" in stage.text)
    wait_for("an answer", lambda: answered(port) == "hello")
    seen = json.loads(users.run("observer", "replicas", "--json").splitlines()[0])
    assert (seen["stage_id"], seen["status"]) == (0, "up")
    assert users.run("observer", "hubs", "--json")
    assert "looks on" in users.run("observer", "doctor", "--json", codes=(0, 1))
    assert "may write replicas/, waits/ (replica)" in users.run("replica", "doctor", "--json", codes=(0, 1))
    assert "echo" in users.run("observer", "pipeline", "show")
    refused = users.run("observer", "cordon", "0/0", codes=(1,))
    assert "role does not allow" in refused
    assert "operator" in refused
    assert "(operator)" in users.run("operator", "doctor", "--json", codes=(0, 1))
    users.run("operator", "cordon", "0/0")
    users.run("operator", "cordon", "0/0", "--undo")
    assert "drained" in users.run("operator", "drain", "0/0")
    wait_for("the supervisor's end", lambda: stage.process.poll() is not None)
    assert stage.process.returncode == 0


def answered(port: int) -> str:
    body = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "hello"}]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])
    except OSError:
        return ""
