"""Membership: turns views of the registry into clients and pool entries.

What two records of one address or one key say of each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hub.replicas.refused import RefusedReplicas
from omni_discovery.errors import ConfigError
from omni_discovery.log_once import LogOnce
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.mass_loss import Disappearance
from omni_discovery.view.table import live_hubs

if TYPE_CHECKING:
    from hub.pool.versions import Pools
    from hub.replicas.stage_client import StageClient
    from omni_discovery.view.table import Delta, ReplicaId, View

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ViewChanged:
    """A view of the registry, and what changed in it since the one before."""

    view: View
    delta: Delta


def role(info: ReplicaInfo) -> tuple[object, ...]:
    """What a record must keep for the others not to be looked at again."""
    return info.stage_id, info.input_addr, info.epoch, info.takes_new_work, info.fingerprint, info.content


def _replica(info: ReplicaInfo) -> ReplicaId:
    return info.stage_id, info.replica_id


def is_same_process(ours: ReplicaInfo, info: ReplicaInfo) -> bool:
    """Whether a client that was made for the one record serves the other."""
    mine = (ours.input_addr, ours.output_addr, ours.curve_public_key, ours.stage_id)
    return mine == (info.input_addr, info.output_addr, info.curve_public_key, info.stage_id)


class Membership:
    """Owns the client of every replica process, by its input address.

    A key that is gone stops picks at once, but in a mass disappearance; its client stays until nothing is in flight
    there. ``connect`` gives None where ``attach`` will bring the client later. ``on_lost`` is told when a replica's
    work in flight has no answer to wait for. ``ttl_s`` is the leases'.
    """

    def __init__(
        self,
        pools: Pools,
        connect: Callable[[ReplicaInfo], StageClient | None],
        on_lost: Callable[[int, str, str], None],
        ttl_s: float = 10.0,
        on_closed: Callable[[StageClient], None] = lambda _client: None,
        now: Callable[[], float] = time.monotonic,
        knows: Callable[[ReplicaInfo], bool] = lambda _info: True,
    ) -> None:
        #: Whom the hub does not pick for what it runs; ``knows`` says which deploy documents are served.
        self.refused = RefusedReplicas(pools, knows)
        self.clients: dict[str, StageClient] = {}
        #: How many hubs share the replicas, this one included.
        self.live_hubs = 1
        self._pools = pools
        self._connect = connect
        self._on_lost = on_lost
        #: The records of the last view, and of them those that are served, by input address.
        self._records: Mapping[ReplicaId, ReplicaInfo] = {}
        self._listed: dict[str, ReplicaInfo] = {}
        #: (history, cluster id, revision) of the last view.
        self._version = (0, 0, 0)
        self._on_closed = on_closed
        self._now = now
        self._disappearance: Disappearance[int, str] = Disappearance(ttl_s)
        #: Replicas that vanished lately, by stage and input address: they may have to be served on.
        self._vanished: dict[tuple[int, str], ReplicaInfo] = {}
        #: Those of them that are served on.
        self._held: set[tuple[int, str]] = set()
        #: By stage that the pipeline doesn't have, and by address that can't be used.
        self._log_once = LogOnce()

    def apply(self, view: View, delta: Delta) -> bool:
        """Make clients and pools what ``view`` shows; return whether it may have changed which replicas can be picked.

        A view older than the last is ignored; the same one again changes nothing. ``delta`` is used if it leads from
        the last view to this one; else whole views are compared.
        """
        history, cluster_id, revision = self._version
        is_later = (view.history, view.cluster_id) == (history, cluster_id)
        if is_later and view.revision < revision:
            return False
        self._version = (view.history, view.cluster_id, view.revision)
        self.live_hubs = live_hubs(view)
        self._pools.set_live_hubs(self.live_hubs)
        records, self._records = self._records, view.replicas
        if is_later and delta.since_revision == revision and self._keeps_roles(records, delta):
            self._update_in_place(delta.updated)
            return False
        self._replace_all(view, regressed=view.history != history)
        return True

    def judge(self) -> None:
        """Look anew at what the replicas run, of which those are refused that should run something else."""
        held = {info.input_addr: info for key, info in self._vanished.items() if key in self._held}
        self.refused.judge({**held, **self._listed})

    def _keeps_roles(self, before: Mapping[ReplicaId, ReplicaInfo], delta: Delta) -> bool:
        """Whether no replica came, went, moved or began to stop: most views bring one new load among a thousand."""
        if self._vanished or delta.added or delta.removed:
            return False
        for info in delta.updated:
            if role(before[_replica(info)]) != role(info):
                return False
            # Of two records with one address only the newer counts.
            newest = self._listed.get(info.input_addr)
            is_newest = newest is not None and _replica(newest) == _replica(info)
            if info.stage_id in self._pools and not is_newest:
                return False
        return True

    def _update_in_place(self, updated: Iterable[ReplicaInfo]) -> None:
        for info in updated:
            if info.stage_id in self._pools:
                self._listed[info.input_addr] = info
                self._upsert(info)

    def _replace_all(self, view: View, *, regressed: bool) -> None:
        """Go through all replicas of a view, by input address: one may have moved, or two may claim one address."""
        before, self._listed = self._listed, self._newest(view)
        here = {(info.stage_id, info.input_addr) for info in self._listed.values()}
        gone = [info for info in before.values() if (info.stage_id, info.input_addr) not in here]
        self._vanished.update(((info.stage_id, info.input_addr), info) for info in gone)
        members: dict[int, dict[str, bool]] = {stage_id: {} for stage_id in self._pools.stage_ids}
        for info in self._listed.values():
            members[info.stage_id][info.input_addr] = info.takes_new_work
        self._disappearance.follow(
            members,
            fresh=view.stale_since_s is None,
            regressed=regressed,
            now_s=self._now(),
            answers=self._pools.answers,
        )
        # Before the others are let go of: these may be all that a stage has left.
        self._hold(here)
        for info in gone:
            if (info.stage_id, info.input_addr) not in self._held:
                self._remove(info)
        self.judge()
        for addr, info in self._listed.items():
            old = before.get(addr)
            if old is not None and old.stage_id == info.stage_id and old.fingerprint != info.fingerprint:
                self._pools.of(old).core.remove(addr, self._now())
            if old is not info and old != info:
                self._upsert(info)

    @property
    def applied_revision(self) -> int:
        """The revision of the last view that was followed."""
        return self._version[2]

    @property
    def next_review_s(self) -> float | None:
        """When ``review`` is due though nothing happens, monotonic."""
        return self._disappearance.next_review_s

    def review(self) -> None:
        """Time has passed or a session has changed: let go of whom the registry rightly lists no more."""
        if self._vanished:
            self._hold({(info.stage_id, info.input_addr) for info in self._listed.values()})

    def _hold(self, listed: set[tuple[int, str]]) -> None:
        """Serve on, of all that vanished, those whom the registry is not believed to have lost."""
        spared = self._disappearance.review(self._pools.answers, self._now())
        held = {(stage_id, addr) for stage_id, addrs in spared.items() for addr in addrs}
        before, self._held = self._held, held
        for key in held - before:
            self._keep(self._vanished[key])
        for key in before - held - listed:
            self._remove(self._vanished[key])
        for key in self._vanished.keys() - self._disappearance.tracked():
            del self._vanished[key]

    def _keep(self, info: ReplicaInfo) -> None:
        pool, addr = self._pools.of(info), info.input_addr
        logger.warning(
            "replica.kept stage=%d replica=%d epoch=%d: it vanished from the registry with many others",
            info.stage_id,
            info.replica_id,
            info.epoch,
        )
        if pool.core.members.get(addr) is None:
            # The first of a mass disappearance is let go of before anybody can know that it is one.
            pool.core.upsert(info, self._now())
            if addr in self.clients:
                self.clients[addr].renew(info, afresh=True)
        if addr not in self.clients:
            self._attach(info)
        pool.core.hold(addr, self._now())

    def members(self, stage_ids: Collection[int]) -> list[ReplicaInfo]:
        """The replicas of some stages: those that the registry lists, and those that are served on all the same."""
        held = {key: info for key, info in self._vanished.items() if key in self._held}
        listed = {(info.stage_id, info.input_addr): info for info in self._listed.values()}
        return [info for info in (held | listed).values() if info.stage_id in stage_ids]

    def close_if_unused(self, stage_id: int, addr: str) -> None:
        """Let go of a client whose replica is not listed any more and has nothing in flight."""
        client = self.clients.get(addr)
        # A replica of another stage may have got the port of one that died.
        if client is None or client.info.stage_id != stage_id or self._pools.record(stage_id, addr) is not None:
            return
        # What was sent last would be lost with the socket, and an abort that is lost keeps an engine busy.
        if not client.has_open_aborts:
            del self.clients[addr]
            client.close()
            # The last acknowledgements may be on their way to a listener that knows this client no more.
            self._on_closed(client)

    def attach(self, info: ReplicaInfo, client: StageClient) -> None:
        """Take in a client that took its time to be made for a record; close it if nobody needs it any more."""
        listed = self._pools.record(info.stage_id, info.input_addr)
        if listed is not None and info.input_addr not in self.clients:
            if is_same_process(info, listed):
                self._serve(listed, client)
                # What it said before it was known here went unheard.
                client.renew(listed, afresh=True)
                return
            self._attach(listed)
        client.close()

    def record_of(self, stage_id: int, replica_id: int) -> ReplicaInfo | None:
        """What the last view shows of a replica; None if it shows none."""
        return self._records.get((stage_id, replica_id))

    def close(self) -> None:
        """Close every client. Idempotent."""
        for client in self.clients.values():
            client.close()
        self.clients.clear()

    def _newest(self, view: View) -> dict[str, ReplicaInfo]:
        """What a view lists for our stages. Of two records with one address the older one's process is dead."""
        newest: dict[str, ReplicaInfo] = {}
        for info in view.replicas.values():
            other = newest.get(info.input_addr)
            if self._is_ours(info) and (other is None or other.epoch <= info.epoch):
                newest[info.input_addr] = info
        return newest

    def _is_ours(self, info: ReplicaInfo) -> bool:
        if info.stage_id in self._pools:
            return True
        if self._log_once.should(info.stage_id):
            logger.warning("replica.ignored stage=%d: the pipeline has no such stage", info.stage_id)
        return False

    def _remove(self, info: ReplicaInfo) -> None:
        logger.info("replica.removed stage=%d replica=%d epoch=%d", info.stage_id, info.replica_id, info.epoch)
        self._pools.of(info).core.remove(info.input_addr, self._now())
        self.close_if_unused(info.stage_id, info.input_addr)

    def _upsert(self, info: ReplicaInfo) -> None:
        pool, addr = self._pools.of(info), info.input_addr
        client = self.clients.get(addr)
        if client is not None and not is_same_process(client.info, info):
            self._replace(client)
            client = None
        # The client of one that was let go of may have stayed for its aborts: the pool knows nothing of its session.
        afresh = pool.core.members.get(addr) is None
        pool.core.upsert(info, self._now())
        self.refused.entered(pool, addr)
        if client is not None:
            client.renew(info, afresh=afresh)
        else:
            self._attach(info)
        if info.status is ReplicaStatus.ERROR:
            self._on_lost(info.stage_id, addr, f"it reports an error: {info.reason or 'no reason given'}")

    def _replace(self, client: StageClient) -> None:
        stage_id, addr = client.info.stage_id, client.addr
        del self.clients[addr]
        client.close()
        self._on_closed(client)
        self._pools.of(client.info).core.session_down(addr, self._now())
        self._on_lost(stage_id, addr, "another process has taken its address")

    def _attach(self, info: ReplicaInfo) -> None:
        try:
            client = self._connect(info)
        except ConfigError as error:
            self._pools.of(info).core.unusable(info.input_addr, str(error))
            if self._log_once.should(info.input_addr):
                logger.warning("replica.unusable stage=%d replica=%d: %s", info.stage_id, info.replica_id, error)
            return
        if client is not None:
            self._serve(info, client)

    def _serve(self, info: ReplicaInfo, client: StageClient) -> None:
        self.clients[info.input_addr] = client
        logger.info(
            "replica.attached stage=%d replica=%d epoch=%d addr=%s",
            info.stage_id,
            info.replica_id,
            info.epoch,
            info.input_addr,
        )
