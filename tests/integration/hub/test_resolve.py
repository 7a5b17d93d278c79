"""A hub that is to serve vLLM-Omni's pipeline and has no Python to resolve it with."""

from __future__ import annotations

import platform
from pathlib import Path

from hub.serve.vllm_omni.resolve import FLAG
from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.support.processes import Child, wait_for
from tests.support.registry import etcdctl

_END_S = 60


def test_the_hosts_that_wait_for_the_pipeline_are_named(tmp_path: Path) -> None:
    """1. nobody waits: the error says what kind of host can resolve
    2. a host without a hub waits for the pipeline: the error names it
    """
    with EmbeddedEtcd() as etcd:
        registry = ["--etcd-endpoints", etcd.endpoint, "--namespace", "test"]
        words = ["serve", "some/model", "--omni", "--hub-only", "--port", "0", *registry]
        first = Child(words, tmp_path, "first")
        assert first.process.wait(_END_S) == 2, first.text
        assert f"Name one of this host ({FLAG} " in first.text
        assert "as every host of these stages has: the pipeline" in first.text
        waiting = Child(["serve", "--headless", "--stage-id", "1", *registry], tmp_path, "waiting")
        try:
            wait_for("the wait in etcd", lambda: "waits/" in etcdctl(etcd.endpoint, "get", "--prefix", "/omni/v1/test"))
            second = Child(words, tmp_path, "second")
            assert second.process.wait(_END_S) == 2, second.text
            assert f"every host of these stages has (those that wait for it: {platform.node()}): the" in second.text
        finally:
            assert not waiting.stop()


def test_an_etcd_that_does_not_answer_is_told(tmp_path: Path) -> None:
    child = Child(["serve", "m", "--omni", "--hub-only", "--etcd-endpoints", "127.0.0.1:1"], tmp_path)
    assert child.process.wait(_END_S) == 1, child.text
    assert "no etcd answered" in child.text
