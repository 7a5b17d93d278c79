"""A person who forgets --namespace is told of the one that runs, by every command that lists something."""

from __future__ import annotations

import pytest

from omni_discovery.commands.main import main
from tests.support.registry import etcdctl


@pytest.mark.parametrize(
    ("words", "code"),
    [(["replicas"], 0), (["replicas", "--json"], 0), (["hubs"], 0), (["history"], 0), (["pipeline", "show"], 2)],
    ids=str,
)
def test_the_namespace_that_runs_is_suggested(
    endpoint: str,
    namespace: str,
    words: list[str],
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The etcd is shared with other tests, so the others that there are may be more than one."""
    etcdctl(endpoint, "put", f"/omni/v1/{namespace}/pipeline", "{}")
    assert main([*words, "--etcd-endpoints", endpoint, "--namespace", "nothing-here"]) == code
    told = capsys.readouterr().err
    assert "nothing is in namespace 'nothing-here'; there " in told
    assert namespace in told
