"""Two faults of ``python -m tests.fault``, which ``make fault`` runs all, under a steady load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault.faults import all_faults
from tests.fault.runs import run
from tests.fault.site import Site
from tests.support.binaries import require_docker, require_haproxy
from tests.support.netns import require_netns

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    for require in (require_docker, require_haproxy, require_netns):
        require()
    with Site(tmp_path_factory.mktemp("faults"), 1) as site:
        yield site


@pytest.mark.parametrize("name", ["replica-killed", "etcd-leader-killed"])
def test_clients_see_no_error_and_nothing_is_left(site: Site, name: str) -> None:
    """A process on one of several hosts, or an etcd in its container, is killed while clients ask for streams."""
    fault, _ = all_faults()[name]
    row, _ = run(site, name, fault, "steady")
    assert row.wrong == ()
    assert row.errors == row.broken == 0
    assert row.requests >= 20


def test_the_end_of_all_leaves_no_process_and_no_key(site: Site) -> None:
    assert site.stop() == []
