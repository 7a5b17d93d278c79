"""Tenants that share an etcd with users: what one can do to another by etcd's own weaknesses, and who is told of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import pytest

from omni_discovery.commands.doctor import diagnose
from omni_discovery.commands.findings.checks import Grade
from omni_discovery.etcd._rpc import rpc
from omni_discovery.etcd.auth import Metadata, Tokens
from omni_discovery.etcd.channel import EndpointChannel
from omni_discovery.etcd.config import RegistrySecurity
from omni_discovery.etcd.http import get_text
from omni_discovery.etcd.releases.advisories import FULL_STORE, NESTED, OPEN_WATCH, UNCHECKED_CALLS, Advisory
from omni_discovery.etcd.releases.versions import Version, VersionLog, parse_version
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records.keys import namespace_prefix, pipeline_key
from tests.support.binaries import require_debian_etcd, require_newest_etcd, wheel_etcd
from tests.support.registry import EtcdServer, eventually
from tests.support.secured import ROOT, add_users, login

ADMINISTRATOR: Final = RegistrySecurity(user="root", password=ROOT)
#: What alpha is after: beta's.
SECRET: Final = pipeline_key("beta").encode()
LONG_VALUE: Final = bytes(500_000)
CALL_S: Final = 10.0


class Tenant:
    """One user's connection, with etcd's own calls."""

    def __init__(self, channel: EndpointChannel, metadata: Metadata) -> None:
        self.channel = channel
        self.metadata = metadata

    async def call(self, method: Any, request: Any) -> Any:
        return await method(request, timeout=CALL_S, metadata=self.metadata)

    async def may(self, method: Any, request: Any) -> bool:
        try:
            await self.call(method, request)
        except grpc.RpcError as error:
            if "permission denied" not in (error.details() or ""):
                raise
            return False
        return True


@asynccontextmanager
async def tenant(server: EtcdServer, security: RegistrySecurity) -> AsyncIterator[Tenant]:
    channel = EndpointChannel(server.endpoint, CALL_S)
    try:
        yield Tenant(channel, await Tokens(security.user, security.password, CALL_S).metadata(channel))
    finally:
        await channel.close()


@pytest.fixture(scope="module", params=[wheel_etcd, require_debian_etcd, require_newest_etcd])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    folder = tmp_path_factory.mktemp("shared")
    server = EtcdServer(folder, binary=request.param(), flags=["--quota-backend-bytes=16777216"])
    server.start()
    add_users(server)
    yield server
    server.kill()


def release_of(server: EtcdServer) -> Version:
    version = parse_version(json.loads(get_text(server.endpoint, "/version"))["etcdserver"])
    assert version is not None
    return version


async def nest_a_transaction(alpha: Tenant, beta_revision: int) -> bool:
    inner = rpc.TxnRequest(success=[rpc.RequestOp(request_put=rpc.PutRequest(key=SECRET, value=b"alpha's"))])
    outer = rpc.TxnRequest(success=[rpc.RequestOp(request_txn=inner)])
    return await alpha.may(alpha.channel.kv.Txn, outer)


async def call_what_is_an_administrators(alpha: Tenant, beta_revision: int) -> bool:
    may_compact = await alpha.may(alpha.channel.kv.Compact, rpc.CompactionRequest(revision=beta_revision))
    # A corruption alarm stops nothing on a healthy member that is not asked to check itself.
    raising = rpc.AlarmRequest(action=rpc.AlarmRequest.ACTIVATE, alarm=1)
    may_raise = await alpha.may(alpha.channel.maintenance.Alarm, raising)
    assert may_raise == may_compact
    return may_raise


async def watch_without_an_end(alpha: Tenant, beta_revision: int) -> bool:
    own = namespace_prefix("alpha").encode()
    stream = alpha.channel.watch.Watch(metadata=alpha.metadata)
    asked = rpc.WatchCreateRequest(key=own, range_end=b"\0", start_revision=beta_revision)
    await stream.write(rpc.WatchRequest(create_request=asked))
    seen = False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3.0):
            while not seen:
                answer = await stream.read()
                if answer.canceled:
                    break
                seen = any(event.kv.key == SECRET for event in answer.events)
    stream.cancel()
    return seen


async def fill_the_store(alpha: Tenant, beta_revision: int) -> bool:
    own = namespace_prefix("alpha").encode()

    async def put_until_refused() -> None:
        for number in range(200):
            await alpha.call(alpha.channel.kv.Put, rpc.PutRequest(key=own + str(number).encode(), value=LONG_VALUE))

    with pytest.raises(grpc.RpcError, match="space exceeded"):
        await put_until_refused()
    return await alpha.may(alpha.channel.auth.AuthDisable, rpc.AuthDisableRequest())


Attack = Callable[[Tenant, int], Any]
#: In this order: the last one leaves an etcd without users, or without space.
ATTACKS: Final[tuple[tuple[Advisory, Attack], ...]] = (
    (OPEN_WATCH, watch_without_an_end),
    (NESTED, nest_a_transaction),
    (UNCHECKED_CALLS, call_what_is_an_administrators),
    (FULL_STORE, fill_the_store),
)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[logging.LogRecord]]:
    """What is logged of weaknesses, as by a process that has met no etcd yet."""
    monkeypatch.setattr(EtcdKV, "version_log", VersionLog())
    caplog.set_level(logging.INFO)
    return lambda: [each for each in caplog.records if each.getMessage().startswith("etcd.advisories")]


@pytest.mark.attack("A4")
async def test_a_release_that_does_not_keep_tenants_apart_is_named_at_start_and_by_doctor(
    shared: EtcdServer, said: Callable[[], list[logging.LogRecord]]
) -> None:
    """Whoever logs in as a tenant is told, although newer servers tell their release to administrators only."""
    kv = EtcdKV(shared.endpoint, security=login("alpha"))
    try:
        await kv.get(pipeline_key("alpha"))
        await eventually("the release", lambda: kv.server_versions[shared.endpoint], 30.0)
    finally:
        await kv.close()
    expected = [advisory.name for advisory, _ in ATTACKS if advisory.is_open_in(release_of(shared))]
    lines = said()
    findings = (await diagnose(shared.endpoint, login("alpha"), "alpha")).findings
    (release,) = (each for each in findings if each.topic == "release")
    if not expected:
        assert (lines, release.grade) == ([], Grade.OK)
        return
    (line,) = lines
    assert line.levelno == logging.WARNING
    assert release.grade is Grade.PROBLEM
    assert "3.6.14 or newer" in release.advice
    assert [name for name in expected if name not in line.getMessage() or name not in release.text] == []


async def test_without_users_nobody_is_warned(server: EtcdServer, said: Callable[[], list[logging.LogRecord]]) -> None:
    """Everybody who reaches such an etcd may do everything anyway."""
    kv = EtcdKV(server.endpoint)
    try:
        await kv.get("/")
        await eventually("the release", lambda: kv.server_versions[server.endpoint], 30.0)
    finally:
        await kv.close()
    assert said() == []
    findings = (await diagnose(server.endpoint, RegistrySecurity(), "alpha")).findings
    assert not [each for each in findings if each.topic == "release" and each.grade is Grade.PROBLEM]


@pytest.mark.attack("A4")
async def test_a_tenant_breaks_out_by_those_weaknesses_alone_that_are_named_for_its_release(
    shared: EtcdServer,
) -> None:
    """1. an administrator writes beta's document; 2. alpha tries each attack on it

    Each that is fixed in this release is refused; each that is not shows that its warning is true.
    """
    async with tenant(shared, ADMINISTRATOR) as root, tenant(shared, login("alpha")) as alpha:
        written = await root.call(root.channel.kv.Put, rpc.PutRequest(key=SECRET, value=b"beta's"))
        release, succeeded = release_of(shared), {}
        for advisory, attack in ATTACKS:
            succeeded[advisory.name] = await attack(alpha, written.header.revision)
            disarm = rpc.AlarmRequest(action=rpc.AlarmRequest.DEACTIVATE, alarm=1)
            if advisory is UNCHECKED_CALLS:
                await root.call(root.channel.maintenance.Alarm, disarm)
    assert succeeded == {advisory.name: advisory.is_open_in(release) for advisory, _ in ATTACKS}
