"""A real etcd for the tests of this folder."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.support.registry import EtcdServer


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """An etcd that all tests share, each in a namespace of its own."""
    with EmbeddedEtcd() as etcd:
        yield etcd.endpoint


@pytest.fixture
def namespace() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the test's own, which it may kill."""
    server = EtcdServer(tmp_path)
    server.start()
    yield server
    server.kill()
