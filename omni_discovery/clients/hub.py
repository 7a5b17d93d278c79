"""OmniCoordClientForHub: a hub's view of the registry, and its own registration."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from omni_discovery.clients.base import RegistryClient, accepts_old_name, client_config
from omni_discovery.etcd.config import RegistryTls
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.kv import Claim
from omni_discovery.records import keys
from omni_discovery.records.beat import BeatRecord, read_beats
from omni_discovery.records.schema import HubRecord, ReplicaInfo, ReplicaList
from omni_discovery.registration.leased_key import Listener
from omni_discovery.registration.registrars import HubRegistrar
from omni_discovery.view.api_keys import ApiKeyWatch, OnApiKeys
from omni_discovery.view.families import NamespaceReader
from omni_discovery.view.hub_watcher import HubWatcher, ViewOptions
from omni_discovery.view.table import Delta, View


class OmniCoordClientForHub(RegistryClient):
    """Watches all replicas of a namespace; with ``hub`` it also keeps that hub's record registered.

    ``on_view(view, delta)`` is called with the first list, at each change, and when the view turns stale or fresh. The
    view is compared with etcd each ``options.anti_entropy_s``. With ``options.saved_view`` it is saved to that file;
    until etcd answers, the view is the saved one, stale since it was proved fresh last. ``options.count`` is called
    with ``relist``, ``bad_value``, ``repair`` and ``unproved`` as they happen. ``on_api_keys`` is called with the
    hashes of the namespace's API keys, by name, as soon as etcd has told them and whenever they change; None: not read.
    """

    @accepts_old_name
    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        namespace: str = "default",
        ttl_s: float = 10.0,
        tls: RegistryTls | None = None,
        user: str | None = None,
        password: str | None = None,
        hub: HubRecord | None = None,
        on_view: Callable[[View, Delta], None] | None = None,
        options: ViewOptions | None = None,
        on_api_keys: OnApiKeys | None = None,
    ) -> None:
        super().__init__(client_config(endpoints, namespace, ttl_s, tls, user, password), "omni-registry-hub")
        self._hub = hub
        self._on_view = on_view
        self._on_api_keys = on_api_keys
        self._options = options or ViewOptions()
        #: The latest view; replaced as a whole, so a reader needs no lock.
        self._view = View()
        self._synced = threading.Event()
        self._hub_watcher: HubWatcher | None = None
        self._open()

    def view(self) -> View:
        """The view of the namespace now."""
        return self._view

    def get_replica_list(self) -> ReplicaList:
        """All replicas that are up and take new work, by stage and id. Empty, at 0.0, before the first list."""
        view = self._view
        up = [info for _, info in sorted(view.replicas.items()) if info.takes_new_work]
        return ReplicaList(up, view.changed_at, view.stale_since_s)

    def get_replicas_for_stage(self, stage_id: int) -> ReplicaList:
        """As get_replica_list, for one stage; the timestamp is that of the list of all stages."""
        every = self.get_replica_list()
        chosen: list[ReplicaInfo] = [info for info in every.replicas if info.stage_id == stage_id]
        return ReplicaList(chosen, every.timestamp, every.stale_since_s)

    @property
    def is_synced(self) -> bool:
        """Whether etcd has answered with a list."""
        return self._synced.is_set()

    @property
    def revoked(self) -> bool:
        """Whether an operator has revoked this hub: replicas accept nothing from it and send it nothing."""
        return self._hub is not None and self._hub.hub_id in self._view.revoked

    def wait_synced(self, timeout_s: float) -> View:
        """Wait for the first list; return the view. Raise TimeoutError."""
        if not self._synced.wait(timeout_s):
            raise TimeoutError(f"no list of replicas within {timeout_s:g} s from {self._config.endpoints}")
        return self._view

    def read_beats(self) -> dict[str, BeatRecord]:
        """The beats of the view's hubs by id, as etcd has them now. Raise RegistryError."""
        namespace = self._config.namespace
        written = self._run(self._kv.list(keys.beats_prefix(namespace)))
        return read_beats(written.items, namespace, self._view.hubs)

    def request_beat(self) -> None:
        """Write this hub's next beat soon, for what it reports has changed. From any thread, also once closed."""
        with suppress(RuntimeError):
            self._thread.call(self._request_beat)

    def _request_beat(self) -> None:
        if self._hub_watcher is not None:
            self._hub_watcher.request_beat()

    def create_pipeline(self, value: bytes) -> Claim:
        """Write the deploy document if there is none; ``current`` of the claim is in force. Raise RegistryError."""
        return self._run(self._kv.create(keys.pipeline_key(self._config.namespace), value))

    def drop_pipeline(self, revision: int) -> None:
        """Delete the deploy document if it still is the one written at ``revision``. Raise RegistryError."""
        self._run(self._kv.delete(keys.pipeline_key(self._config.namespace), revision))

    def get_pipeline(self) -> bytes | None:
        """The deploy document as etcd has it now. Raise RegistryError."""
        current = self._run(self._kv.get(keys.pipeline_key(self._config.namespace)))
        return None if current is None else current.value

    def _connect(self) -> EtcdKV:
        if self._hub is not None:
            return super()._connect()
        config = self._config
        # Who only looks on may be somebody who may not see all of the namespace.
        return NamespaceReader(
            config.namespace,
            config.endpoints,
            security=config.security,
            try_timeout_s=config.try_timeout_s,
            call_timeout_s=config.call_timeout_s,
        )

    def _start_on_loop(self, kv: EtcdKV) -> None:
        config, hub_id = self._config, ""
        if self._hub is not None:
            hub_id = self._hub.hub_id
            listener = Listener(on_lease_change=self._on_lease_change)
            self._registrar = HubRegistrar(kv, config.namespace, self._hub, ttl_s=config.ttl_s, listener=listener)
        watcher = HubWatcher(kv, config, self._on_view_change, self._options, hub_id, self._registrar)
        self._watchers, self._hub_watcher = (watcher,), watcher
        if self._on_api_keys is not None:
            self._watchers += (ApiKeyWatch(kv, config.namespace, self._on_api_keys),)
        for each in self._watchers:
            each.start()
        if self._registrar is not None:
            self._registrar.start()

    def _on_view_change(self, view: View, delta: Delta) -> None:
        self._view = view
        # A saved view is stale: etcd has not answered yet.
        if view.revision and view.stale_since_s is None:
            self._synced.set()
        if self._on_view is not None:
            self._on_view(view, delta)
