"""HubWatcher: a hub's view of a namespace, proved fresh by beats and saved to a file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omni_discovery.clock import Clock, SystemClock
from omni_discovery.etcd.config import RegistryConfig
from omni_discovery.kv import KVStore, Listing
from omni_discovery.records import keys
from omni_discovery.records.beat import Beat
from omni_discovery.records.health import HubHealth
from omni_discovery.registration.leased_key import LeasedKey
from omni_discovery.view.anti_entropy import AntiEntropyOptions
from omni_discovery.view.freshness import LONGEST_ECHO_S
from omni_discovery.view.saved_view import SavedView, ViewSaver
from omni_discovery.view.table import Delta, ReplicaTable, View
from omni_discovery.view.watcher import BAD_AGAIN_S, Watcher

logger = logging.getLogger(__name__)


def _ignore(_event: str | float) -> None:
    return None


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """How a hub keeps its view; see OmniCoordClientForHub for the meaning of each."""

    anti_entropy_s: float = 60.0
    saved_view: Path | None = None
    applied_revision: Callable[[], int] | None = None
    count: Callable[[str], None] = _ignore
    #: Gets the seconds from the write of each beat to its return on the watch.
    observe_echo: Callable[[float], None] = _ignore
    #: Returns the fingerprint of the deploy document that the hub serves.
    serves: Callable[[], str] = lambda: ""
    #: Returns what the hub reports of requests and replicas; None: nothing. Called on the watcher's loop.
    health: Callable[[], HubHealth | None] = lambda: None


class HubWatcher(Watcher):
    """Watches all keys of a namespace. With ``registrar``, which holds the hub's key, it proves freshness by beats."""

    def __init__(
        self,
        kv: KVStore,
        config: RegistryConfig,
        on_view: Callable[[View, Delta], None],
        options: ViewOptions,
        hub_id: str = "",
        registrar: LeasedKey | None = None,
        clock: Clock | None = None,
    ) -> None:
        clock = self._hub_clock = clock or SystemClock()
        key = keys.beat_key(config.namespace, hub_id)
        anti_entropy = AntiEntropyOptions(
            beat=None
            if registrar is None
            else lambda kv: Beat(kv, key, lambda: registrar.lease_id, options.serves, options.health),
            # A third of a lease, as for a renewal, but at least a second: etcd may be slow.
            echo_timeout_s=min(LONGEST_ECHO_S, max(1.0, config.ttl_s / 3)),
            anti_entropy_s=options.anti_entropy_s,
            applied_revision=options.applied_revision,
            count=options.count,
            observe_echo=options.observe_echo,
        )
        table = ReplicaTable(config.namespace)
        #: The id of the hub whose key the registrar holds; empty without one.
        self._own_id = "" if registrar is None else hub_id
        super().__init__(kv, table, keys.namespace_prefix(config.namespace), on_view, clock=clock, options=anti_entropy)
        self._hub_table = table
        self._saved = options.saved_view and SavedView(options.saved_view, config.namespace, config.endpoints)
        self._saver = ViewSaver(self._saved, self._fresh_list, clock) if self._saved else None

    def request_beat(self) -> None:
        """Write a beat as soon as the common rate of all hubs allows: the hub's report has changed."""
        self._anti_entropy.request_beat()

    def start(self) -> None:
        """Deliver the saved view, if there is one, then begin to watch; returns at once."""
        found = self._saved.load() if self._saved else None
        if found is not None:
            self._deliver_saved(*found)
        super().start()
        if self._saver is not None:
            self._saver.start()

    async def close(self) -> None:
        """Save the view if it changed, stop watching. Idempotent."""
        if self._saver is not None:
            await self._saver.close()
        await super().close()

    def _log_refused(self, view: View) -> None:
        super()._log_refused(view)
        if (
            view.refused_hubs
            and self._own_id
            and self._own_id not in view.hubs
            and self._log_once.should("own", BAD_AGAIN_S)
        ):
            text = "watcher.own_record_not_read hub=%s refused=%d: no replica lets this hub in until others have gone"
            logger.error(text, self._own_id, view.refused_hubs)

    def _deliver_saved(self, listing: Listing, fresh_at_s: float) -> None:
        delta = self._hub_table.restore(listing, fresh_at_s)
        self._deliver(self._hub_table.snapshot(), delta)

    def _fresh_list(self) -> tuple[Listing, float] | None:
        view = self._hub_table.snapshot()
        if not view.revision or view.stale_since_s is not None:
            return None
        return self._hub_table.listing(), self._hub_clock.wall_s() - self.unproved_s()
