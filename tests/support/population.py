"""Some replicas and hubs of one namespace on one registry, and what must be true of them whatever happens to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.records import keys
from omni_discovery.view.table import Delta, View
from tests.support.processes import wait_for
from tests.support.registry import etcdctl

#: (stage_id, replica_id, epoch)
Life = tuple[int, int, int]


class Population:
    """Two replicas of stage 0, one of stage 1, and two hubs. All are registered and seen once it is entered."""

    def __init__(self, endpoints: str, namespace: str, ttl_s: float = 3.0, **options: Any) -> None:
        self.endpoints, self.namespace, self.ttl_s, self._options = endpoints, namespace, ttl_s, options
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._changes: list[str] = []
        self._load = 0
        self._staged: list[tuple[int, OmniCoordClientForStage]] = []
        self.hubs: list[OmniCoordClientForHub] = []

    def __enter__(self) -> Self:
        try:
            for stage_id in (0, 0, 1):
                self.add_replica(stage_id)
            for _ in range(2):
                self.add_hub()
            self.settle()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def replicas(self) -> list[OmniCoordClientForStage]:
        return [replica for _, replica in self._staged]

    def add_replica(self, stage_id: int) -> OmniCoordClientForStage:
        replica = OmniCoordClientForStage(
            self.endpoints,
            "tcp://h:1",
            "tcp://h:2",
            stage_id,
            namespace=self.namespace,
            ttl_s=self.ttl_s,
            **self._options,
        )
        self._staged.append((stage_id, self._stack.enter_context(replica)))
        replica.wait_registered(10.0)
        return replica

    def add_hub(self, endpoints: str = "") -> OmniCoordClientForHub:
        hub = OmniCoordClientForHub(
            endpoints or self.endpoints, namespace=self.namespace, on_view=self._note, **self._options
        )
        self.hubs.append(self._stack.enter_context(hub))
        hub.wait_synced(10.0)
        return hub

    def lives(self) -> list[Life]:
        """Who the replicas themselves believe to be."""
        return sorted((stage, *replica.wait_registered(15.0)) for stage, replica in self._staged)

    def settle(self, timeout_s: float = 15.0) -> None:
        """Wait until each hub's view is fresh and shows exactly the replicas that live, as they live now."""
        for hub in self.hubs:
            wait_for("a fresh view of all replicas", lambda hub=hub: self._is_right(hub), timeout_s)  # type: ignore[misc]

    def load_travels(self, timeout_s: float) -> None:
        """A new load of each replica reaches each hub within ``timeout_s``."""
        self._load += 1
        for replica in self.replicas:
            replica.update_info(queue_length=self._load)
        for hub in self.hubs:
            wait_for("the new load", lambda hub=hub: self._has_load(hub), timeout_s)  # type: ignore[misc]

    def membership_changes(self) -> list[str]:
        """What hubs were told since the last call: replicas added and removed."""
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def assert_keys_are_the_living(self, endpoint: str) -> None:
        """The registry's keys are those of the replicas, and every one is leased."""
        prefix = keys.replicas_prefix(self.namespace)
        found = json.loads(etcdctl(endpoint, "get", "--prefix", prefix, "-wjson")).get("kvs", [])
        assert all(item.get("lease", 0) for item in found)
        assert len(found) == len(self.replicas)
        assert sorted(item["create_revision"] for item in found) == sorted(epoch for _, _, epoch in self.lives())

    def _is_right(self, hub: OmniCoordClientForHub) -> bool:
        view = hub.view()
        shown = sorted((info.stage_id, info.replica_id, info.epoch) for info in up_in(view))
        return view.stale_since_s is None and shown == self.lives()

    def _has_load(self, hub: OmniCoordClientForHub) -> bool:
        return [info.queue_length for info in up_in(hub.view())] == [self._load] * len(self.replicas)

    def _note(self, view: View, delta: Delta) -> None:
        with self._lock:
            self._changes += [f"added {info.stage_id}/{info.replica_id}" for info in delta.added]
            self._changes += [f"removed {info.stage_id}/{info.replica_id}" for info in delta.removed]


def up_in(view: View) -> Iterable[Any]:
    """The replicas that a view shows as up."""
    return [info for _, info in sorted(view.replicas.items()) if info.status == "up"]
