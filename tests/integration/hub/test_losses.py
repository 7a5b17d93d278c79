"""Replicas whose records vanish together and return, as LostReplicas sees them through a real etcd."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack

import pytest

from hub.replicas.lost import LostReplicas
from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.table import Delta, ReplicaId, View
from tests.support.processes import wait_for
from tests.support.registry import EtcdServer, etcdctl

COUNT = 4


class Watcher:
    """Follows the views of a hub's client as Membership does."""

    def __init__(self) -> None:
        self.lost = LostReplicas()
        self.records: Mapping[ReplicaId, ReplicaInfo] = {}
        self.most_lost = 0

    def follow(self, view: View, delta: Delta) -> None:
        """A view has come; called on the client's own thread."""
        before, self.records = self.records, view.replicas
        self.lost.follow_view(before, view.replicas, time.monotonic())
        self.most_lost = max(self.most_lost, len(self.names()))

    def names(self) -> list[str]:
        """The replicas that are reported as lost."""
        return [trouble.name for trouble in self.lost.troubles(time.monotonic(), time.time())]

    def epochs(self) -> dict[ReplicaId, int]:
        """The epoch of every replica that is listed as up."""
        return {key: info.epoch for key, info in self.records.items() if info.status is ReplicaStatus.UP}


@pytest.mark.parametrize("how", ["hangs", "deleted"])
def test_replicas_that_an_etcd_forgot_and_that_are_back_are_not_lost(
    server: EtcdServer, stack: ExitStack, how: str
) -> None:
    """1. etcd hangs for longer than the TTL, or all records are deleted; 2. the same processes register again"""
    watcher = Watcher()
    for number in range(COUNT):
        client = OmniCoordClientForStage(server.endpoint, f"tcp://h:{number}", f"tcp://h:1{number}", 0, ttl_s=3.0)
        stack.enter_context(client)
        client.wait_registered(30.0)
        client.update_info(status=ReplicaStatus.UP)
    stack.enter_context(OmniCoordClientForHub(server.endpoint, on_view=watcher.follow))
    wait_for("all to be up", lambda: len(watcher.epochs()) == COUNT, timeout_s=30.0)
    before = watcher.epochs()
    if how == "hangs":
        server.signal(signal.SIGSTOP)
        time.sleep(6.0)
        server.signal(signal.SIGCONT)
    else:
        etcdctl(server.endpoint, "del", "--prefix", "/omni/v1/default/replicas/")

    def all_are_back() -> bool:
        return len(now := watcher.epochs()) == COUNT and not set(now.values()) & set(before.values())

    wait_for("new lives of all", all_are_back, timeout_s=30.0)
    assert watcher.names() == []
    # After a hang the hub may see the new lives first, and then nobody was ever gone.
    assert watcher.most_lost == COUNT or how == "hangs"
