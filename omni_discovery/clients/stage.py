"""OmniCoordClientForStage: registers a replica, publishes its state, and watches its control key and the hubs.

create_stage_coord_client: such a client that also polls the length of the engine's queue.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from omni_discovery.clients.base import RegistryClient, accepts_old_name, client_config
from omni_discovery.errors import ConfigError, RegistryError
from omni_discovery.etcd.config import RegistryTls
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.kv import KeyValue
from omni_discovery.log_once import LogOnce
from omni_discovery.records import keys
from omni_discovery.records.control import AppliedControl
from omni_discovery.records.schema import HubRecord, ReplicaInfo, ReplicaRecord, ReplicaStatus
from omni_discovery.registration.control_watch import ControlWatch
from omni_discovery.registration.drain_acks import DrainAcks
from omni_discovery.registration.leased_key import Listener
from omni_discovery.registration.registrars import ReplicaRegistrar, changed_record, checked, replica_id_of
from omni_discovery.view.known_hubs import KnownHubs
from omni_discovery.view.known_producers import KnownProducers
from omni_discovery.view.long_lists import fill, run_aside
from omni_discovery.view.table import ReplicaTable
from omni_discovery.view.watcher import Watcher

logger = logging.getLogger(__name__)

#: How long a close waits until the drain is removed from the control key.
_TAKE_BACK_S: Final = 1.0
#: How often the records of earlier stages are read at least.
_PRODUCERS_EVERY_S: Final = 30.0


def _ignore(_news: object) -> None:
    return None


class OmniCoordClientForStage(RegistryClient):
    """Registers one replica and keeps it registered until ``close``.

    ``fields`` are further fields of ReplicaRecord: host, pid, model, capacity, curve_public_key and so on. The control
    key of the replica is watched, and what was applied of it is answered in the record.

    ``may_renew()`` is called before each renewal: false lets the lease run out. ``on_hubs(records)`` is called with all
    hubs that may connect, by id, at each change; ``on_revoked(hub_ids)`` with all hubs that must be disconnected.
    ``on_registered(replica_id, epoch)``: the key was claimed, also after a loss. ``on_lost(reason)``: the key was lost.
    ``on_drain()`` is called once, when an operator drains this life: finish what is in flight and close.
    ``on_acknowledged()``: the record says ``draining`` and every hub has applied that.
    ``producers`` gets the records of the stages that it names.
    """

    @accepts_old_name
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
        on_revoked: Callable[[frozenset[str]], None] | None = None,
        on_registered: Callable[[int, int], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
        on_drain: Callable[[], None] | None = None,
        on_acknowledged: Callable[[], None] | None = None,
        producers: KnownProducers | None = None,
    ) -> None:
        super().__init__(
            client_config(endpoints, namespace, ttl_s, tls, user, password), f"omni-registry-stage-{stage_id}"
        )
        self._may_renew = may_renew
        self._on_hubs = on_hubs
        self._on_revoked = on_revoked
        self._on_registered = on_registered
        self._on_lost = on_lost
        self._on_drain = on_drain
        self._on_acknowledged = on_acknowledged
        self._producers = producers
        self._reads_producers: asyncio.Task[None] | None = None
        self._producer_missed = asyncio.Event()
        #: Replaced as a whole; its state belongs to the loop.
        self._known_hubs: KnownHubs | None = None
        self._is_draining = False
        self._wanted_id = replica_id
        self._changed = threading.Condition()
        #: (replica_id, epoch) of the published record; None while none is. Guarded by ``_changed``.
        self._registration: tuple[int, int] | None = None
        #: The record to publish. Guarded by ``_changed``.
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
        """Publish a new status at once, a new queue length at most once a load interval. Never blocks on etcd."""
        if status is None and queue_length is None:
            raise ValueError("update_info needs status or queue_length")
        changes = {"status": status, "queue_length": queue_length}
        self.describe(**{name: value for name, value in changes.items() if value is not None})

    def describe(self, **fields: Any) -> None:
        """Publish other fields of the record: phase, progress, reason, capacity and so on. Never blocks on etcd.

        Raise ConfigError for an unknown field or a value out of range.
        """
        self._check_open()
        self._change_record(fields)
        self._thread.call(self._update_record)

    def wait_registered(self, timeout_s: float) -> tuple[int, int]:
        """Wait until the record is published; return (replica_id, epoch). Raise TimeoutError."""
        with self._changed:
            self._changed.wait_for(lambda: self._registration is not None, timeout_s)
            if self._registration is None:
                raise TimeoutError(f"not registered within {timeout_s:g} s at {self._config.endpoints}")
            return self._registration

    @property
    def awaited_hubs(self) -> frozenset[str] | None:
        """Ids of the hubs that have not acknowledged a drain yet; None while that is not known."""
        return self._acks.awaited

    def _start_on_loop(self, kv: EtcdKV) -> None:
        config = self._config
        self._control = ControlWatch(kv, config.namespace, self._record.stage_id, self._on_control_change)
        self._registrar = self._replica = ReplicaRegistrar(
            kv,
            config.namespace,
            self._shown(self._record),
            wanted_id=self._wanted_id,
            ttl_s=config.ttl_s,
            load_interval_s=config.load_interval_s,
            may_renew=self._may_renew or (lambda: True),
            listener=Listener(
                self._on_key_registered, self._on_key_published, self._on_key_lost, self._on_lease_change
            ),
        )
        self._replica.start()
        self._acks = DrainAcks(kv, config.namespace, self._revoked, self._on_drain_acknowledged)
        if self._on_hubs is not None or self._on_revoked is not None:
            self._watchers = self._watch_hubs(kv)
        if self._producers is not None and self._producers.stage_ids:
            self._producers.on_miss(self._read_producers_now)
            self._reads_producers = asyncio.create_task(self._read_producers(kv, self._producers), name="producers")

    def _read_producers_now(self) -> None:
        # The loop may have ended: this client is being closed.
        with suppress(RuntimeError):
            self._thread.call(self._producer_missed.set)

    async def _read_producers(self, kv: EtcdKV, producers: KnownProducers) -> None:
        """Read the records of earlier stages now and then, and at once when an address is not known. Runs for ever.

        They are not watched: the load in every record of every producer would come to every consumer.
        """
        while True:
            self._producer_missed.clear()
            try:
                table = ReplicaTable(self._config.namespace)
                found: list[ReplicaInfo] = []
                for stage_id in producers.stage_ids:
                    await fill(table, await kv.list(keys.replicas_prefix(self._config.namespace, stage_id)), 0.0)
                    found += table.snapshot().replicas.values()
                # In a thread: what others have written may take seconds, and this loop renews the lease.
                await run_aside(producers.apply_records, found)
            except RegistryError as error:
                logger.debug("producers.unknown reason=%s", error)
                producers.read_failed()
            with suppress(TimeoutError):
                async with asyncio.timeout(_PRODUCERS_EVERY_S * (0.5 + 0.5 * random.random())):
                    await self._producer_missed.wait()

    def _watch_hubs(self, kv: EtcdKV) -> tuple[Watcher, ...]:
        namespace = self._config.namespace
        known = KnownHubs(self._config.ttl_s, self._on_hubs or _ignore, on_revoked=self._on_revoked or _ignore)
        self._known_hubs = known
        controls, hubs = keys.hub_controls_prefix(namespace), keys.hubs_prefix(namespace)
        watchers = (
            Watcher(kv, ReplicaTable(namespace), controls, known.on_control_view),
            Watcher(kv, ReplicaTable(namespace), hubs, known.on_view),
        )
        for watcher in watchers:
            watcher.start()
        return watchers

    async def _close_on_loop(self) -> None:
        if self._reads_producers is not None:
            self._reads_producers.cancel()
        await self._acks.close()
        if self._control.has_drain:
            # Before the record is withdrawn, so that whoever sees that sees the drain done, too.
            await self._control.close(_TAKE_BACK_S)
        await super()._close_on_loop()

    async def _end_watches(self) -> None:
        await self._control.close(_TAKE_BACK_S)
        await super()._end_watches()

    def _change_record(self, fields: Mapping[str, Any]) -> None:
        with self._changed:
            self._record = changed_record(self._record, fields)

    def _update_record(self) -> None:
        # The newest record, whichever change this call was made for: an older one could lack the cordon.
        self._replica.update(self._shown(self._record))

    def _revoked(self) -> frozenset[str]:
        return frozenset() if self._known_hubs is None else self._known_hubs.revoked

    def _shown(self, record: ReplicaRecord) -> ReplicaRecord:
        """The record to publish: not ``up`` before the control key was read, which may cordon the replica."""
        if self._control.known or record.status is not ReplicaStatus.UP:
            return record
        return msgspec.structs.replace(record, status=ReplicaStatus.STARTING)

    def _on_control_change(self, applied: AppliedControl) -> None:
        error = applied.error
        if applied.draining and self._on_drain is None and not error:
            error = f"revision {applied.revision}: this replica can't be drained by its key"
        weight = self._own_weight if applied.weight is None else applied.weight
        shown = {"cordoned": applied.cordoned, "weight": weight}
        self._change_record({**shown, "control_revision": applied.revision, "control_error": error})
        self._update_record()
        if applied.draining and not (self._is_draining or self._is_closed) and self._on_drain is not None:
            self._is_draining = True
            self._on_drain()

    def _on_key_registered(self, key: KeyValue) -> None:
        self._control.watch_control(replica_id_of(key), key.create_revision, self._replica.control_listing)
        # The first write after the claim shows what the control key says, or it does not say ``up``.
        self._update_record()
        if self._on_registered is not None:
            self._on_registered(replica_id_of(key), key.create_revision)

    def _on_key_published(self, key: KeyValue) -> None:
        shown = msgspec.json.decode(key.value, type=ReplicaRecord)
        if shown.status is ReplicaStatus.DRAINING:
            self._acks.await_revision(key.mod_revision)
        else:
            self._acks.stop_waiting()
        with self._changed:
            if (shown.status, self._record.status) == (ReplicaStatus.STARTING, ReplicaStatus.UP):
                return
            self._registration = (replica_id_of(key), key.create_revision)
            self._changed.notify_all()

    def _on_key_lost(self, reason: str) -> None:
        self._acks.stop_waiting()
        with self._changed:
            self._registration = None
        if self._on_lost is not None:
            self._on_lost(reason)

    def _on_drain_acknowledged(self) -> None:
        if self._on_acknowledged is not None:
            self._on_acknowledged()


@accepts_old_name
def create_stage_coord_client(
    endpoints: str | Sequence[str],
    input_addr: str,
    output_addr: str,
    stage_id: int,
    queue_length_getter: Callable[[], int] | None = None,
    **options: Any,
) -> OmniCoordClientForStage:
    """Register a replica whose queue length is read from ``queue_length_getter`` each load interval.

    A negative length counts as 0; while the getter raises, the last length is kept. It is called on the client's thread
    and must be quick. ``options`` are those of OmniCoordClientForStage.
    """
    if queue_length_getter is None:
        return OmniCoordClientForStage(endpoints, input_addr, output_addr, stage_id, **options)
    return _PollingClient(endpoints, input_addr, output_addr, stage_id, queue_length_getter, **options)


class _PollingClient(OmniCoordClientForStage):
    """OmniCoordClientForStage that publishes what its getter returns."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        input_addr: str,
        output_addr: str,
        stage_id: int,
        getter: Callable[[], int],
        **options: Any,
    ) -> None:
        self._getter = getter
        self._polling: asyncio.Task[None] | None = None
        super().__init__(endpoints, input_addr, output_addr, stage_id, **options)

    def _start_on_loop(self, kv: EtcdKV) -> None:
        super()._start_on_loop(kv)
        self._polling = asyncio.create_task(self._poll_queue_length(), name="queue-length")

    async def _close_on_loop(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
        await super()._close_on_loop()

    async def _poll_queue_length(self) -> None:
        published, log_once = 0, LogOnce()
        while True:
            try:
                length = max(0, int(self._getter()))
            except Exception:
                if log_once.should():
                    logger.warning("queue_length.unknown: the getter raised; the former length stands", exc_info=True)
                length = published
            if length != published and not self._is_closed:
                published = length
                self.update_info(queue_length=length)
            await asyncio.sleep(self._config.load_interval_s)
