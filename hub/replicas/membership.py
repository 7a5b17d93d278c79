"""Membership: turns views of the registry into connections to replicas and entries of pools."""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from hub.config import OutOfSocketsError
from hub.replicas.address_claims import AddressClaims
from hub.replicas.attach_limits import AT_ONCE, AttachLimits, most_unanswered
from hub.replicas.lost import LostReplicas
from hub.replicas.mismatched import MismatchedReplicas
from omni_discovery.errors import ConfigError
from omni_discovery.log_once import LinePace, LogOnce
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.mass_loss import MassLossGuard
from omni_discovery.view.table import Delta, View, live_hubs

if TYPE_CHECKING:
    from hub.pool.entry import Entry
    from hub.pool.versions import Pools
    from hub.replicas.stage_client import StageClient
    from omni_discovery.view.replica_map import ReplicaId

logger = logging.getLogger(__name__)


#: How often the log says that replicas wait to be connected to.
_WAITS_EVERY_S: Final = 60.0
#: So many replicas that leave in one view have a line of their own, and so many connections are closed in one turn of
#: the loop: a line takes as long as many requests where another thread is busy.
_MOST_LINES: Final = 32
#: Lines of records that were logged once and are not again.
_MOST_REMEMBERED: Final = 20_000


@dataclass(frozen=True, slots=True)
class ViewChanged:
    """A view of the registry, and what changed in it since the one before."""

    view: View
    delta: Delta

    def is_before(self, other: ViewChanged) -> bool:
        """Whether the view shows less of one history of the registry."""
        mine, others = self.view, other.view
        is_same = (mine.history, mine.cluster_id) == (others.history, others.cluster_id)
        return is_same and mine.revision < others.revision

    def followed_by(self, later: ViewChanged) -> ViewChanged:
        """The later view, with both changes where they are known to follow each other."""
        first, second = self.delta, later.delta
        if second.since_revision is None or second.since_revision != self.view.revision:
            return later
        removed, added = _by_id(first.removed), _by_id(first.added)
        updated = _by_id(first.updated)
        for info in second.removed:
            key = _replica(info)
            # One that has come in between was not there before, and is not now.
            if added.pop(key, None) is None:
                removed[key] = updated.pop(key, info)
        for info in second.updated:
            (added if _replica(info) in added else updated)[_replica(info)] = info
        added.update(_by_id(second.added))
        delta = replace(
            second,
            added=tuple(added.values()),
            updated=tuple(updated.values()),
            removed=tuple(removed.values()),
            since_revision=first.since_revision,
        )
        return ViewChanged(later.view, delta)


def _descriptors() -> int:
    """How many files this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def role(info: ReplicaInfo) -> tuple[object, ...]:
    """The fields of a record whose change may affect other replicas: then all of the view is gone through."""
    return (
        info.stage_id,
        info.input_addr,
        info.epoch,
        info.takes_new_work,
        info.fingerprint,
        info.content,
        info.leased,
    )


def _replica(info: ReplicaInfo) -> ReplicaId:
    return info.stage_id, info.replica_id


def _by_id(infos: Iterable[ReplicaInfo]) -> dict[ReplicaId, ReplicaInfo]:
    return {_replica(info): info for info in infos}


def _peer(info: ReplicaInfo) -> tuple[str, str, str]:
    """Whom a client made for a record talks to, whatever else the record says."""
    return info.input_addr, info.output_addr, info.curve_public_key


def is_same_process(ours: ReplicaInfo, info: ReplicaInfo) -> bool:
    """Whether two records are of one process, so that a client made for ``ours`` can be kept for ``info``."""
    return (_peer(ours), ours.stage_id) == (_peer(info), info.stage_id)


def is_same_life(older: ReplicaInfo, newer: ReplicaInfo) -> bool:
    """Whether two records at one address are of one process, which has registered again."""
    return is_same_process(older, newer) and (older.host, older.pid) == (newer.host, newer.pid)


class MembershipOwner(Protocol):
    """The part of the orchestrator that Membership calls."""

    def connect_replica_of(self, info: ReplicaInfo) -> StageClient | None:
        """Make the client of a listed replica; None if ``Membership.attach`` will bring it. Raise ConfigError."""

    def client_closed(self, client: StageClient) -> None:
        """A client was closed: its last acknowledgements will not arrive."""

    def replica_lost(self, stage_id: int, addr: str, reason: str) -> None:
        """The requests in flight on a replica will not be answered."""

    def serves_document(self, info: ReplicaInfo) -> bool:
        """Whether the replica runs a deploy document that this hub serves."""


class Membership:
    """Keeps the client of every replica process, by its input address.

    A replica whose key is gone is not picked any more, except in a mass loss; its client stays until nothing is in
    flight there. ``ttl_s`` is that of the leases, ``now`` returns monotonic seconds.
    """

    def __init__(
        self,
        pools: Pools,
        owner: MembershipOwner,
        ttl_s: float = 10.0,
        now: Callable[[], float] = time.monotonic,
        lost: LostReplicas | None = None,
    ) -> None:
        #: Replicas that left without goodbye, for the hub's report.
        self._lost = lost or LostReplicas()
        #: Replicas that are not picked because of what they run.
        self.mismatched = MismatchedReplicas(pools, owner.serves_document, self._life_has_answered, now)
        self.clients: dict[str, StageClient] = {}
        #: How many hubs share the replicas, this one included.
        self.live_hubs = 1
        self._pools = pools
        self._owner = owner
        #: The records of the last view.
        self._records: Mapping[ReplicaId, ReplicaInfo] = {}
        #: The same records by input address.
        self._at_address: dict[str, dict[ReplicaId, ReplicaInfo]] = {}
        #: Of these, the newest record of each input address, for the stages of the pipeline.
        self._listed: dict[str, ReplicaInfo] = {}
        #: (history, cluster id, revision) of the last view.
        self._version = (0, 0, 0)
        self._now = now
        self._mass_loss: MassLossGuard[int, str] = MassLossGuard(ttl_s)
        #: Replicas that vanished lately, by stage and input address: a mass loss may keep them in service.
        self._vanished: dict[tuple[int, str], ReplicaInfo] = {}
        #: Of these, the replicas that are kept in service.
        self._held: set[tuple[int, str]] = set()
        #: By stage that the pipeline doesn't have, and by address that can't be used.
        self._log_once = LogOnce(now, _MOST_REMEMBERED)
        self._lines = LinePace(now, _MOST_LINES)
        self._limits = AttachLimits(
            self._has_answered, most_unanswered(_descriptors()), self._is_leased, self._is_connected
        )
        self._claims = AddressClaims(self._answers, self._is_named)
        #: Replicas that have left, by stage and input address, whose clients are to be closed if nobody uses them.
        self._to_close: dict[tuple[int, str], None] = {}
        #: When the rest of them is closed.
        self._close_s = 0.0
        #: When this turn of the loop began, and how many replicas were connected to in it.
        self._turn_s, self._attached_now = 0.0, 0
        self._view = View()

    def _begin_turn(self) -> None:
        self._turn_s, self._attached_now = self._now(), 0

    def apply(self, view: View, delta: Delta) -> bool:
        """Make clients and pools what ``view`` shows; return whether it may have changed which replicas can be picked.

        A view older than the last is ignored; the same one again changes nothing. ``delta`` is used if its
        ``since_revision`` is the revision of the last view; else whole views are compared.
        """
        history, cluster_id, revision = self._version
        is_later = (view.history, view.cluster_id) == (history, cluster_id)
        if is_later and view.revision < revision:
            return False
        self._version = (view.history, view.cluster_id, view.revision)
        self._view = view
        self.live_hubs = live_hubs(view)
        self._pools.set_live_hubs(self.live_hubs)
        records, self._records = self._records, view.replicas
        self._begin_turn()
        is_known = is_later and delta.since_revision == revision
        if is_known and self._keeps_roles(records, delta):
            self._update_in_place(delta.updated)
            return False
        if is_known:
            addrs = self._note_changes(records, delta)
            self._lost.follow_changes(delta.removed, delta.added, view.replicas, self._records_at, self._now())
            self._replace_at(addrs)
        else:
            self._lost.follow_view(records, view.replicas, self._now())
            self._note_all(view)
            self._replace_all(regressed=view.history != history)
        self._tell_left_out()
        return True

    def check_mismatches(self) -> None:
        """Other documents are served than before: compare again what the replicas run with what they should."""
        self.mismatched.judge_all()
        for rest, entered in self._pools.misplaced():
            addr = entered.input_addr
            rest.core.remove(addr, self._now())
            info = self._wanted(addr)
            if addr in self._listed:
                self._upsert(self._listed[addr])
            elif info is not None:
                self._keep(info)

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
            self._at_address[info.input_addr][_replica(info)] = info
            if info.stage_id in self._pools:
                self._listed[info.input_addr] = info
                self._upsert(info)

    def _records_at(self, addr: str) -> Collection[ReplicaInfo]:
        """All records that name an input address."""
        return self._at_address.get(addr, {}).values()

    def _note_all(self, view: View) -> None:
        """Sort all records by their address."""
        self._at_address = {}
        for key, info in view.replicas.items():
            self._at_address.setdefault(info.input_addr, {})[key] = info
        sharing = ((addr, infos) for addr, infos in self._at_address.items() if self._is_shared(infos.values()))
        self._claims.share_only({addr: len(infos) for addr, infos in sharing})

    def _note_changes(self, before: Mapping[ReplicaId, ReplicaInfo], delta: Delta) -> dict[str, None]:
        """Sort the changed records by their address; return the addresses whose owner they may change, in order."""
        addrs: dict[str, None] = {}
        # A record may also have moved from one address to another.
        for key in map(_replica, (*delta.removed, *delta.updated)):
            addr = before[key].input_addr
            self._at_address[addr].pop(key, None)
            addrs[addr] = None
        for info in (*delta.updated, *delta.added):
            self._at_address.setdefault(info.input_addr, {})[_replica(info)] = info
            addrs[info.input_addr] = None
        for addr in addrs:
            infos = self._at_address[addr]
            if not infos:
                del self._at_address[addr]
            if self._is_shared(infos.values()):
                self._claims.share(addr, len(infos))
            else:
                self._claims.unshare(addr)
        return addrs

    def _is_shared(self, infos: Collection[ReplicaInfo]) -> bool:
        return len(infos) > 1 and sum(info.stage_id in self._pools for info in infos) > 1

    def _replace_all(self, *, regressed: bool) -> None:
        """Go through all replicas of the view, by input address: one may have moved, or two may claim one address."""
        before, self._listed = self._listed, self._owners(self._at_address)
        members: dict[int, dict[str, bool]] = {stage_id: {} for stage_id in self._pools.stage_ids}
        for info in self._listed.values():
            members[info.stage_id][info.input_addr] = info.takes_new_work
        self._mass_loss.apply_members(
            members,
            fresh=self._view.stale_since_s is None,
            regressed=regressed,
            now_s=self._now(),
            answers=self._pools.answers,
        )
        self._follow_owners(before, self._listed)

    def _replace_at(self, addrs: Mapping[str, None]) -> None:
        """Go through the replicas at the addresses that have changed, and at some whose owner may change by itself."""
        here = {**addrs, **dict.fromkeys(self._claims.to_look_at(self._now()))}
        before = {addr: self._listed[addr] for addr in here if addr in self._listed}
        after = self._owners(here)
        for addr in before.keys() - after.keys():
            del self._listed[addr]
        self._listed.update(after)
        put: dict[int, dict[str, bool]] = {}
        gone: dict[int, list[str]] = {}
        for info in after.values():
            put.setdefault(info.stage_id, {})[info.input_addr] = info.takes_new_work
        for addr, info in before.items():
            if not self._is_listed((info.stage_id, addr)):
                gone.setdefault(info.stage_id, []).append(addr)
        self._mass_loss.apply_changes(
            put,
            gone,
            fresh=self._view.stale_since_s is None,
            regressed=False,
            now_s=self._now(),
            answers=self._pools.answers,
        )
        self._follow_owners(before, after)

    def _follow_owners(self, before: Mapping[str, ReplicaInfo], after: Mapping[str, ReplicaInfo]) -> None:
        """These addresses had the one owners, and have the others now."""
        gone = [info for info in before.values() if not self._is_listed((info.stage_id, info.input_addr))]
        self._vanished.update(((info.stage_id, info.input_addr), info) for info in gone)
        # Before the others are let go of: these may be all that a stage has left.
        self._hold()
        self._remove_all([info for info in gone if (info.stage_id, info.input_addr) not in self._held])
        self.mismatched.follow({addr: self._wanted(addr) for addr in {**before, **after}})
        for addr, info in after.items():
            old = before.get(addr)
            if old is not None and old.stage_id == info.stage_id and old.fingerprint != info.fingerprint:
                pool = self._pools.of(old)
                if pool is not self._pools.of(info):
                    pool.core.remove(addr, self._now())
            if old is not info and old != info:
                self._upsert(info)
        # Last, since one that has left may have come back by now.
        self._close_some()

    def _is_listed(self, key: tuple[int, str]) -> bool:
        """Whether the registry lists a replica of this stage at this input address, and it is the one that counts."""
        info = self._listed.get(key[1])
        return info is not None and info.stage_id == key[0]

    @property
    def applied_revision(self) -> int:
        """The revision of the last view that was applied."""
        return self._version[2]

    @property
    def next_review_s(self) -> float | None:
        """When time alone makes ``review_members`` due, monotonic seconds; None if it does not."""
        moments_s = [self._mass_loss.next_review_s, self._limits.next_review_s]
        moments_s += [self._claims.next_look_s, self.mismatched.next_review_s]
        moments_s += [self._close_s] if self._to_close else []
        return min((each for each in moments_s if each is not None), default=None)

    def owner_may_change(self, addr: str) -> None:
        """Who answers at an input address, or its epoch, is another: if several records name it, a review is due."""
        self._claims.look_again(addr, self._now())

    def review_members(self) -> None:
        """Time has passed or a session has changed: remove those whose mass loss is over, attach those that wait."""
        self._begin_turn()
        look_s = self._claims.next_look_s
        if look_s is not None and look_s <= self._now():
            self._replace_at({})
        if self._vanished:
            self._hold()
        if self._to_close and self._close_s <= self._now():
            self._close_some()
        waiting_s = self._limits.next_review_s
        if waiting_s is not None and waiting_s <= self._now():
            self._attach_waiting()
        self.mismatched.review()
        self._tell_left_out()

    def _attach_waiting(self) -> None:
        waiting, overdue = self._limits.review(self._now())
        for addr in overdue:
            client = self.clients.pop(addr, None)
            self._limits.gone(addr)
            if client is not None:
                client.close()
                self._owner.client_closed(client)
                self._limits.postpone(addr)
        for addr in waiting:
            info = self._wanted(addr)
            if info is None or addr in self.clients:
                self._limits.gone(addr)
            elif not self._attach(info):
                return
        if len(waiting) >= AT_ONCE:
            self._limits.continue_at(self._after_rest_s())

    def _wanted(self, addr: str) -> ReplicaInfo | None:
        """The record of the replica at an address that is listed or kept in service."""
        info = self._listed.get(addr)
        if info is None and self._held:
            keys = ((stage_id, addr) for stage_id in self._pools.stage_ids)
            info = next((self._vanished[key] for key in keys if key in self._held), None)
        return info

    def _answers(self, info: ReplicaInfo) -> bool:
        """Whether this life of a replica has a session now."""
        entry = self._entry_of(info)
        return entry is not None and entry.answers

    def _is_named(self, info: ReplicaInfo) -> bool:
        """Whether the process of a record says, on a connection that stands, that this is its present life."""
        client = self.clients.get(info.input_addr)
        # The clients of a program's own factory may not know.
        is_named = getattr(client, "named_epoch", 0) == info.epoch
        return client is not None and is_named and _peer(client.info) == _peer(info)

    def _is_leased(self, addr: str) -> bool:
        """Whether the record of an address ends with a lease; also if there is none any more."""
        info = self._wanted(addr)
        return info is None or info.leased

    def _is_connected(self, addr: str) -> bool:
        """Whether the connections to an address stand, whoever it is; also where its client can't tell."""
        return bool(getattr(self.clients.get(addr), "is_connected", True))

    def _life_has_answered(self, info: ReplicaInfo) -> bool:
        """Whether this life of a replica has ever had a session."""
        entry = self._entry_of(info)
        return entry is not None and entry.first_up_s is not None

    def _entry_of(self, info: ReplicaInfo) -> Entry | None:
        """The pool's entry of this life of a replica; None if another life has its address, or nobody."""
        entry = self._pools.of(info).core.members.entries.get(info.input_addr)
        is_same = entry is not None and (entry.info.replica_id, entry.info.epoch) == (info.replica_id, info.epoch)
        return entry if is_same else None

    def _has_answered(self, addr: str) -> bool:
        """Whether the client of an address has ever had a session, or is gone."""
        client = self.clients.get(addr)
        entry = None if client is None else self._pools.of(client.info).core.members.entries.get(addr)
        return entry is None or entry.first_up_s is not None

    def _hold(self) -> None:
        """Keep replicas in service that vanished in a mass loss, and remove those whose time is over."""
        if not self._vanished:
            return
        kept_without_record = self._mass_loss.kept_without_record(self._pools.answers, self._now())
        held = {(stage_id, addr) for stage_id, addrs in kept_without_record.items() for addr in addrs}
        before, self._held = self._held, held
        for key in held - before:
            self._keep(self._vanished[key])
        self._remove_all([self._vanished[key] for key in before - held if not self._is_listed(key)])
        self.mismatched.follow({addr: self._wanted(addr) for _, addr in held ^ before})
        for key in self._vanished.keys() - self._mass_loss.tracked():
            del self._vanished[key]

    def _keep(self, info: ReplicaInfo) -> None:
        pool, addr = self._pools.of(info), info.input_addr
        if addr in self._listed:
            # A replica, perhaps of another stage, that is there has its port, and the client.
            return
        text = "replica.kept replica=%s epoch=%d: it vanished from the registry with many others"
        logger.warning(text, info.name, info.epoch)
        if pool.core.members.get(addr) is None:
            # The first replica of a mass loss is removed before it can be known that it is one.
            pool.core.upsert(info, self._now())
            if addr in self.clients:
                self.clients[addr].renew(info, afresh=True)
        if addr not in self.clients:
            self._attach(info)
        pool.core.hold(addr, self._now())

    def members(self, stage_ids: Collection[int]) -> list[ReplicaInfo]:
        """The replicas of some stages: those that the registry lists, and those kept in service without a record."""
        held = {key: info for key, info in self._vanished.items() if key in self._held}
        listed = {(info.stage_id, info.input_addr): info for info in self._listed.values()}
        return [info for info in (held | listed).values() if info.stage_id in stage_ids]

    def close_if_unused(self, stage_id: int, addr: str) -> None:
        """Close the client of a replica that is not listed any more and has nothing in flight."""
        client = self.clients.get(addr)
        # A replica of another stage may use the port of one that died.
        if client is None or client.info.stage_id != stage_id or self._pools.record(stage_id, addr) is not None:
            return
        # Messages in the socket's queue are lost with it, and a lost abort keeps an engine busy.
        if not client.has_open_aborts:
            del self.clients[addr]
            client.close()
            # Its last acknowledgements may arrive at a listener that has no such client any more.
            self._owner.client_closed(client)

    def attach(self, info: ReplicaInfo, client: StageClient) -> None:
        """Add a client that a factory made for the record ``info``; close it if its replica is gone by now."""
        self._begin_turn()
        listed = self._pools.record(info.stage_id, info.input_addr)
        if listed is not None and info.input_addr not in self.clients:
            if is_same_process(info, listed):
                self._serve(listed, client)
                # Events of this client from before this moment were not handled.
                client.renew(listed, afresh=True)
                return
            self._attach(listed)
        client.close()

    def record_of(self, stage_id: int, replica_id: int) -> ReplicaInfo | None:
        """The record of a replica in the last view; None if there is none."""
        return self._records.get((stage_id, replica_id))

    def close(self) -> None:
        """Close every client. Idempotent."""
        for client in self.clients.values():
            client.close()
        self.clients.clear()

    def _owners(self, addrs: Iterable[str]) -> dict[str, ReplicaInfo]:
        """The records at these addresses for stages of the pipeline, by address: of several at one, its owner."""
        owners: dict[str, ReplicaInfo] = {}
        for addr in addrs:
            claimants = [info for info in self._records_at(addr) if self._is_ours(info)]
            if len(claimants) == 1:
                owners[addr] = claimants[0]
            if len(claimants) < 2:
                continue
            owner = owners[addr] = self._claims.owner(claimants, self._now())
            why = "answers there" if self._answers(owner) else "is tried first"
            for info in claimants:
                # The former record of a process that has registered again ends with its lease.
                is_former = info.epoch < owner.epoch and is_same_life(info, owner)
                if info is owner or is_former:
                    continue
                if self._should_warn((addr, info.stage_id, info.replica_id, info.epoch)):
                    text = "replica.unusable replica=%s: its address %s is that of replica %s, which %s"
                    logger.warning(text, info.name, addr, owner.name, why)
        return owners

    def _is_ours(self, info: ReplicaInfo) -> bool:
        if info.stage_id in self._pools:
            return True
        if self._should_warn(info.stage_id):
            logger.warning("replica.ignored replica=%s: the pipeline has no such stage", info.name)
        return False

    def _remove_all(self, infos: Sequence[ReplicaInfo]) -> None:
        """Have some replicas picked no more; ``_close_some`` closes their clients."""
        for number, info in enumerate(infos):
            if number < _MOST_LINES:
                logger.info("replica.removed replica=%s epoch=%d", info.name, info.epoch)
            self._pools.of(info).core.remove(info.input_addr, self._now())
            if info.input_addr in self.clients:
                self._to_close[info.stage_id, info.input_addr] = None
            elif info.input_addr not in self._listed:
                self._limits.gone(info.input_addr)
        if len(infos) > _MOST_LINES:
            logger.info("replica.removed_more count=%d: omni history names them", len(infos) - _MOST_LINES)

    def _after_rest_s(self) -> float:
        """When to go on with what one turn of the loop does not allow: requests have as long in between."""
        now_s = self._now()
        return now_s + (now_s - self._turn_s)

    def _close_some(self) -> None:
        """Close some clients of replicas that have left, and the others later."""
        for stage_id, addr in list(islice(self._to_close, AT_ONCE)):
            del self._to_close[stage_id, addr]
            self.close_if_unused(stage_id, addr)
        self._close_s = self._after_rest_s()

    def _upsert(self, info: ReplicaInfo) -> None:
        pool, addr = self._pools.of(info), info.input_addr
        client = self.clients.get(addr)
        if client is not None and not is_same_process(client.info, info):
            self._replace(client)
            client = None
        # The client of a removed replica may have stayed for its aborts: the pool has no session of it.
        afresh = pool.core.members.get(addr) is None
        pool.core.upsert(info, self._now())
        self.mismatched.replica_entered(pool, addr)
        if client is not None:
            client.renew(info, afresh=afresh)
        else:
            self._attach(info)
        if info.status is ReplicaStatus.ERROR:
            self._owner.replica_lost(info.stage_id, addr, f"it reports an error: {info.reason or 'no reason given'}")

    def _replace(self, client: StageClient) -> None:
        stage_id, addr = client.info.stage_id, client.addr
        del self.clients[addr]
        client.close()
        self._owner.client_closed(client)
        self._pools.of(client.info).core.session_down(addr, self._now())
        self._owner.replica_lost(stage_id, addr, "another process has taken its address")

    def _attach(self, info: ReplicaInfo) -> bool:
        """Connect to a replica; return False if it has to wait, and those behind it with it."""
        addr, now_s = info.input_addr, self._now()
        if self._attached_now >= AT_ONCE:
            self._limits.continue_at(self._after_rest_s(), addr)
            return False
        reason = self._limits.must_wait(addr, now_s)
        if reason:
            self._note_unusable(info, reason, "limit", _WAITS_EVERY_S)
            return False
        self._attached_now += 1
        try:
            client = self._owner.connect_replica_of(info)
        except ConfigError as error:
            self._limits.gone(addr)
            self._note_unusable(info, str(error), addr)
            return True
        except OutOfSocketsError as error:
            self._limits.ran_out(addr, now_s)
            steps = "it is tried again; fewer clients, or a higher limit of open files (ulimit -n), help"
            self._note_unusable(info, f"{error}: {steps}", "sockets", _WAITS_EVERY_S)
            return False
        if client is None:
            self._limits.gone(addr)
        else:
            self._serve(info, client)
        return True

    def _note_unusable(self, info: ReplicaInfo, why: str, key: str, every_s: float = math.inf) -> None:
        self._pools.of(info).core.unusable(info.input_addr, why)
        if self._should_warn(key, every_s):
            logger.warning("replica.unusable replica=%s: %s", info.name, why)

    def _should_warn(self, key: Hashable, every_s: float = math.inf) -> bool:
        """Whether a line about a record is news, and there is room for it: anybody may write thousands of records."""
        return self._log_once.should(key, every_s) and self._lines.may_log()

    def _tell_left_out(self) -> None:
        if count := self._lines.take_left_out():
            logger.warning("replica.unusable_more count=%d: omni doctor names them", count)

    def _serve(self, info: ReplicaInfo, client: StageClient) -> None:
        self.clients[info.input_addr] = client
        # Those that nobody is behind have one turn after the other, and the first is told.
        if self._limits.attached(info.input_addr, self._now()):
            logger.info("replica.attached replica=%s epoch=%d addr=%s", info.name, info.epoch, info.input_addr)
