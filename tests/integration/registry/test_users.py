"""An etcd that asks for users: each namespace has its own and can't see the other, and logins are renewed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.errors import RegistryDeniedError, RegistryLoginError
from omni_discovery.etcd.check import check_registry
from omni_discovery.etcd.config import RegistryConfig, RegistrySecurity
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records.keys import hub_key, namespace_prefix, replica_key
from tests.support.binaries import require_debian_etcd, wheel_etcd
from tests.support.population import Population
from tests.support.quiet import soon_s
from tests.support.registry import EtcdServer
from tests.support.secured import PASSWORDS, ROOT, add_users, grant, login

TOKEN_TTL_S = 2


@pytest.fixture(scope="module", params=[wheel_etcd, require_debian_etcd], ids=["etcd_35", "etcd_34"])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("secured"), binary=request.param())
    server.start()
    add_users(server)
    yield server
    server.kill()


@pytest.fixture
def short_lived(tmp_path: Path) -> Iterator[EtcdServer]:
    """One whose logins end after two idle seconds."""
    server = EtcdServer(tmp_path, flags=[f"--auth-token-ttl={TOKEN_TTL_S}"])
    server.start()
    add_users(server)
    yield server
    server.kill()


@pytest.fixture
async def alpha(secured: EtcdServer) -> AsyncIterator[EtcdKV]:
    kv = EtcdKV(secured.endpoint, security=login("alpha"))
    yield kv
    await kv.close()


async def test_a_user_does_everything_inside_its_own_namespace(alpha: EtcdKV) -> None:
    key = hub_key("alpha", "h1")
    grant_ = await alpha.grant(5.0)
    claim = await alpha.create(key, b"1", grant_.lease_id)
    assert claim.won
    async with contextlib.aclosing(alpha.watch(namespace_prefix("alpha"), claim.revision)) as batches:
        await anext(batches)
        assert len((await anext(batches)).events) == 1
    assert await alpha.keep_alive(grant_.lease_id) == grant_.ttl_s
    assert [item.key for item in (await alpha.list(namespace_prefix("alpha"))).items] == [key]
    await alpha.revoke(grant_.lease_id)
    assert await alpha.get(key) is None


@pytest.mark.attack("C23")
async def test_a_user_neither_reads_nor_writes_nor_watches_another_namespace(alpha: EtcdKV) -> None:
    """And each refusal leaves the connection and its other watches as they were."""
    own, key, prefix = namespace_prefix("alpha"), replica_key("beta", 0, 0), namespace_prefix("beta")
    start = (await alpha.list(own)).revision + 1
    async with contextlib.aclosing(alpha.watch(own, start)) as healthy:
        await anext(healthy)
        for refused in (
            alpha.get(key),
            alpha.list(prefix),
            alpha.list("/"),
            alpha.put(key, b""),
            alpha.create(key, b""),
        ):
            with pytest.raises(RegistryDeniedError):
                await refused
        with pytest.raises(RegistryDeniedError):
            await alpha.delete(key)
        for watched in (prefix, "/omni/v1/", key):
            async with contextlib.aclosing(alpha.watch(watched, start)) as batches:
                with pytest.raises(RegistryDeniedError):
                    await anext(batches)
        await alpha.put(hub_key("alpha", "h2"), b"")
        async with asyncio.timeout(5.0):
            assert len((await anext(healthy)).events) == 1


def test_the_whole_registry_works_for_two_namespaces_that_do_not_see_each_other(secured: EtcdServer) -> None:
    with _population(secured, "alpha") as one, _population(secured, "beta") as other:
        one.load_travels(5.0)
        other.load_travels(5.0)
        assert len(one.lives()) == len(other.lives()) == 3
        for population in (one, other):
            assert all(len(hub.view().replicas) == 3 for hub in population.hubs)
        other.replicas[0].close()
        time.sleep(0.5)
        one.settle()


def test_a_user_of_another_namespace_is_told_which_grant_it_lacks(secured: EtcdServer) -> None:
    config = RegistryConfig(secured.endpoint, "alpha", login("beta"))
    with pytest.raises(RegistryDeniedError, match="grant-namespace alpha --user omni-beta"):
        check_registry(config, 5.0)


@pytest.mark.parametrize(
    ("security", "said"),
    [
        (RegistrySecurity(user="omni-alpha", password="wrong-secret"), "does not know this user with this password"),
        (RegistrySecurity(user="nobody", password="wrong-secret"), "does not know this user with this password"),
        (RegistrySecurity(), "asks who we are: give --etcd-user"),
    ],
)
def test_a_wrong_login_is_named_and_its_password_is_not(
    secured: EtcdServer, security: RegistrySecurity, said: str
) -> None:
    began_s = time.monotonic()
    with pytest.raises(RegistryLoginError, match=said) as caught:
        check_registry(RegistryConfig(secured.endpoint, "alpha", security), 10.0)
    assert time.monotonic() - began_s < soon_s(3.0)
    assert secured.endpoint in str(caught.value)
    assert "wrong-secret" not in str(caught.value) + repr(caught.value)


def test_granting_again_changes_nothing(secured: EtcdServer) -> None:
    root = RegistrySecurity(user="root", password=ROOT)
    assert not grant(secured, root, "alpha", "another-password")
    check_registry(RegistryConfig(secured.endpoint, "alpha", login("alpha")), 5.0)


def test_only_an_administrator_grants(secured: EtcdServer) -> None:
    with pytest.raises(RegistryDeniedError):
        grant(secured, login("alpha"), "beta", "another-password")


def test_logins_that_ended_are_renewed_and_nobody_notices(
    short_lived: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    """1. nothing is written for longer than a token lives, with streams standing; then a load must travel
    2. etcd is restarted, so that all streams are opened anew with whatever token there is
    """
    caplog.set_level(logging.DEBUG)
    with _population(short_lived, "alpha", ttl_s=30.0) as population:
        before = population.lives()
        time.sleep(TOKEN_TTL_S + 1.5)
        population.load_travels(5.0)
        time.sleep(TOKEN_TTL_S + 1.5)
        short_lived.kill()
        short_lived.start()
        population.settle()
        population.load_travels(5.0)
        assert population.lives() == before
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert not [secret for secret in PASSWORDS.values() if secret in said]


def test_users_that_etcd_does_not_ask_for_are_no_error(endpoint: str, namespace: str) -> None:
    with OmniCoordClientForHub(endpoint, namespace=namespace, user="u", password="p") as hub:
        assert hub.wait_synced(5.0).revision


def test_users_may_be_asked_for_from_one_moment_to_the_next(tmp_path: Path) -> None:
    """Nobody is restarted when the operator turns authentication on."""
    server = EtcdServer(tmp_path)
    server.start()
    try:
        with _population(server, "alpha") as population:
            add_users(server)
            population.load_travels(10.0)
            population.settle()
    finally:
        server.kill()


def _population(server: EtcdServer, namespace: str, ttl_s: float = 3.0) -> Population:
    security = login(namespace)
    return Population(server.endpoint, namespace, ttl_s, user=security.user, password=security.password)
