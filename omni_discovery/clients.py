"""The two faces of the registry for programs: OmniCoordClientForStage and OmniCoordClientForHub.

Both are plain, thread-safe objects. Each owns one thread with its own loop and its own connection to etcd, so that a
busy engine or a busy hub can't starve the lease. Functions given to them are called on that thread and must be quick.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_discovery import keys
from omni_discovery._client_base import RegistryClient
from omni_discovery.config import RegistryConfig
from omni_discovery.control import InForce
from omni_discovery.control_watch import ControlWatch
from omni_discovery.endpoints import parse_endpoints
from omni_discovery.errors import ConfigError
from omni_discovery.etcd import EtcdKV
from omni_discovery.hub_watcher import HubWatcher, ViewOptions
from omni_discovery.known_hubs import KnownHubs
from omni_discovery.kv import Claim, KeyValue
from omni_discovery.messages import HubRecord, ReplicaInfo, ReplicaList, ReplicaRecord, ReplicaStatus
from omni_discovery.registrar import Listener
from omni_discovery.registrations import HubRegistrar, ReplicaRegistrar, changed_record, checked, replica_id_of
from omni_discovery.registry_security import RegistrySecurity, RegistryTls
from omni_discovery.table import Delta, ReplicaTable, View
from omni_discovery.watcher import Watcher

#: A drain's key is taken back within this, or left.
_TAKE_BACK_S: Final = 1.0


def _config(
    endpoints: str | Sequence[str],
    namespace: str,
    ttl_s: float,
    tls: RegistryTls | None,
    user: str | None,
    password: str | None,
) -> RegistryConfig:
    try:
        parse_endpoints(endpoints)
    except ConfigError as error:
        # The seeds' clients raise RuntimeError for an address that can't be used, and name it.
        raise RuntimeError(str(error)) from error
    security = RegistrySecurity(tls=tls, user=user or "", password=password or "")
    return RegistryConfig(endpoints, namespace=namespace, ttl_s=ttl_s, security=security)


class OmniCoordClientForStage(RegistryClient):
    """Registers one replica and keeps it registered until ``close``.

    ``fields`` are further fields of ReplicaRecord: host, pid, model, capacity, curve_public_key and so on.
    ``may_renew`` is asked before each renewal: false lets the lease run out. With ``on_hubs`` the hubs are watched too;
    it gets all hubs by id at each change. ``on_registered(replica_id, epoch)`` comes each time the key is ours anew,
    ``on_lost(reason)`` each time it no longer is. What the operator writes under the replica's control key is followed
    and answered in the record; ``on_drain()`` comes once, when this life of it is to finish what it has and close.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        input_addr: str,
        output_addr: str,
        stage_id: int,
        *,
        namespace: str = "default",
        ttl_s: float = 10.0,
        tls: RegistryTls | None = None,
        user: str | None = None,
        password: str | None = None,
        status: ReplicaStatus = ReplicaStatus.UP,
        replica_id: int | None = None,
        fields: Mapping[str, Any] | None = None,
        may_renew: Callable[[], bool] | None = None,
        on_hubs: Callable[[Mapping[str, HubRecord]], None] | None = None,
        on_registered: Callable[[int, int], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
        on_drain: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(_config(endpoints, namespace, ttl_s, tls, user, password), f"omni-registry-stage-{stage_id}")
        self._may_renew = may_renew
        self._on_hubs = on_hubs
        self._on_registered = on_registered
        self._on_lost = on_lost
        self._on_drain = on_drain
        self._is_draining = False
        self._wanted_id = replica_id
        self._changed = threading.Condition()
        #: What was published last and stands; None while nothing does. Guarded by ``_changed``.
        self._registration: tuple[int, int] | None = None
        #: What should be published. Guarded by ``_changed``.
        self._record = self._first_record(input_addr, output_addr, stage_id, status, fields or {})
        self._own_weight = self._record.weight
        self._open()

    def _first_record(
        self, input_addr: str, output_addr: str, stage_id: int, status: ReplicaStatus, fields: Mapping[str, Any]
    ) -> ReplicaRecord:
        try:
            record = ReplicaRecord(
                stage_id=stage_id,
                replica_id=self._wanted_id or 0,
                input_addr=input_addr,
                output_addr=output_addr,
                status=status,
            )
            return changed_record(checked(record), fields)
        except ConfigError:
            self._thread.close()
            raise

    def update_info(self, status: ReplicaStatus | None = None, queue_length: int | None = None) -> None:
        """Publish a new status at once, a new queue length at most each load interval. Never waits."""
        if status is None and queue_length is None:
            raise ValueError("update_info needs status or queue_length")
        changes = {"status": status, "queue_length": queue_length}
        self.describe(**{name: value for name, value in changes.items() if value is not None})

    def describe(self, **fields: Any) -> None:
        """Publish other fields of the record: phase, progress, reason, capacity and so on. Never waits."""
        self._check_open()
        with self._changed:
            self._record = changed_record(self._record, fields)
            record = self._record
            # Inside the lock, so that two threads' records reach the loop in the order in which they were made.
            self._thread.call(lambda: self._replica.update(self._shown(record)))

    def wait_registered(self, timeout_s: float) -> tuple[int, int]:
        """Return (replica_id, epoch) as soon as the record stands in the registry. Raise TimeoutError."""
        with self._changed:
            self._changed.wait_for(lambda: self._registration is not None, timeout_s)
            if self._registration is None:
                raise TimeoutError(f"not registered within {timeout_s:g} s at {self._config.endpoints}")
            return self._registration

    def _begin(self, kv: EtcdKV) -> None:
        config = self._config
        self._control = ControlWatch(kv, config.namespace, self._record.stage_id, self._take_control)
        self._registrar = self._replica = ReplicaRegistrar(
            kv,
            config.namespace,
            self._shown(self._record),
            wanted_id=self._wanted_id,
            ttl_s=config.ttl_s,
            load_interval_s=config.load_interval_s,
            may_renew=self._may_renew or (lambda: True),
            listener=Listener(self._tell_registered, self._note_published, self._note_lost),
        )
        self._replica.start()
        if self._on_hubs is not None:
            prefix = keys.hubs_prefix(config.namespace)
            known = KnownHubs(config.ttl_s, self._on_hubs)
            self._watcher = Watcher(kv, ReplicaTable(config.namespace), prefix, known.on_view)
            self._watcher.start()

    async def _close_on_loop(self) -> None:
        await self._control.close(_TAKE_BACK_S)
        await super()._close_on_loop()

    def _shown(self, record: ReplicaRecord) -> ReplicaRecord:
        """The record as it may be published: not up before it is known what the operator wants of this id."""
        if self._control.known or record.status is not ReplicaStatus.UP:
            return record
        return msgspec.structs.replace(record, status=ReplicaStatus.STARTING)

    def _take_control(self, in_force: InForce) -> None:
        if self._is_closed:
            return
        error = in_force.error
        if in_force.draining and self._on_drain is None and not error:
            error = f"revision {in_force.revision}: this replica can't be drained by its key"
        weight = self._own_weight if in_force.weight is None else in_force.weight
        self.describe(
            cordoned=in_force.cordoned, weight=weight, control_revision=in_force.revision, control_error=error
        )
        if in_force.draining and not self._is_draining and self._on_drain is not None:
            self._is_draining = True
            self._on_drain()

    def _tell_registered(self, key: KeyValue) -> None:
        self._control.follow(replica_id_of(key), key.create_revision)
        if not self._control.known:
            self._replica.update(self._shown(self._record))
        if self._on_registered is not None:
            self._on_registered(replica_id_of(key), key.create_revision)

    def _note_published(self, key: KeyValue) -> None:
        with self._changed:
            shown = msgspec.json.decode(key.value, type=ReplicaRecord)
            if (shown.status, self._record.status) == (ReplicaStatus.STARTING, ReplicaStatus.UP):
                return
            self._registration = (replica_id_of(key), key.create_revision)
            self._changed.notify_all()

    def _note_lost(self, reason: str) -> None:
        with self._changed:
            self._registration = None
        if self._on_lost is not None:
            self._on_lost(reason)


class OmniCoordClientForHub(RegistryClient):
    """Follows all replicas of a namespace; with ``hub`` it also keeps that hub's own record registered.

    ``on_view(view, delta)`` comes with the first list, each change, and when the view turns stale or fresh. The view is
    compared with etcd each ``options.anti_entropy_s``. With ``options.saved_view`` it is kept in that file and, until
    etcd answers, begins with what the file holds, stale since it was proved last. ``options.count`` is told ``relist``,
    ``bad_value``, ``repair`` and ``unproved`` as they happen.
    """

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
    ) -> None:
        super().__init__(_config(endpoints, namespace, ttl_s, tls, user, password), "omni-registry-hub")
        self._hub = hub
        self._on_view = on_view
        self._options = options or ViewOptions()
        #: Swapped whole, so a reader needs no lock.
        self._view = View()
        self._synced = threading.Event()
        self._open()

    def view(self) -> View:
        """Everything known of the namespace, as of now."""
        return self._view

    def get_replica_list(self) -> ReplicaList:
        """All replicas that are up and take new work, by stage and id. Empty, at 0.0, before the first list."""
        view = self._view
        up = [info for _, info in sorted(view.replicas.items()) if info.takes_new_work]
        return ReplicaList(up, view.changed_at, view.stale_since_s)

    def get_replicas_for_stage(self, stage_id: int) -> ReplicaList:
        """As get_replica_list, but of one stage only; the timestamp is that of the whole list."""
        every = self.get_replica_list()
        chosen: list[ReplicaInfo] = [info for info in every.replicas if info.stage_id == stage_id]
        return ReplicaList(chosen, every.timestamp, every.stale_since_s)

    @property
    def is_synced(self) -> bool:
        """Whether etcd has answered with a list."""
        return self._synced.is_set()

    def wait_synced(self, timeout_s: float) -> View:
        """Return the view once the first list is in. Raise TimeoutError."""
        if not self._synced.wait(timeout_s):
            raise TimeoutError(f"no list of replicas within {timeout_s:g} s from {self._config.endpoints}")
        return self._view

    def create_pipeline(self, value: bytes) -> Claim:
        """Put the deploy document if there is none; ``current`` of the answer is what stands. Raise RegistryError."""
        return self._run(self._kv.create(keys.pipeline_key(self._config.namespace), value))

    def drop_pipeline(self, revision: int) -> None:
        """Delete the deploy document if it still is the one written at ``revision``. Raise RegistryError."""
        self._run(self._kv.delete(keys.pipeline_key(self._config.namespace), revision))

    def get_pipeline(self) -> bytes | None:
        """The deploy document as etcd has it now. Raise RegistryError."""
        current = self._run(self._kv.get(keys.pipeline_key(self._config.namespace)))
        return None if current is None else current.value

    def _begin(self, kv: EtcdKV) -> None:
        config, hub_id = self._config, ""
        if self._hub is not None:
            hub_id = self._hub.hub_id
            self._registrar = HubRegistrar(kv, config.namespace, self._hub, ttl_s=config.ttl_s)
        self._watcher = HubWatcher(kv, config, self._take_view, self._options, hub_id, self._registrar)
        self._watcher.start()
        if self._registrar is not None:
            self._registrar.start()

    def _take_view(self, view: View, delta: Delta) -> None:
        self._view = view
        # A saved view is no answer of etcd's.
        if view.revision and view.stale_since_s is None:
            self._synced.set()
        if self._on_view is not None:
            self._on_view(view, delta)
