"""A cluster of three in Docker, shared by the tests of this folder, each in a namespace of its own."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.support.binaries import require_docker
from tests.support.cluster import EtcdCluster, etcd_image
from tests.support.population import Population


@pytest.fixture(scope="session")
def rounds() -> int:
    """How often a loop of faults goes round: a few times in ``make test``, many in ``make chaos``."""
    return int(os.environ.get("OMNI_CHAOS_ROUNDS", "3"))


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    require_docker()
    with etcd_image(tmp_path_factory.mktemp("image")) as image, EtcdCluster(image) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    """The cluster, whole again after each test."""
    yield shared_cluster
    shared_cluster.mend()


@pytest.fixture
def population(cluster: EtcdCluster) -> Iterator[Population]:
    with Population(cluster.endpoints, f"fault-{uuid.uuid4().hex}") as population:
        population.membership_changes()
        yield population
