"""ReplicaTable: the local copy of a namespace, and the difference that each list or batch makes to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from types import MappingProxyType
from typing import Final, TypeVar

from omni_discovery.clock import utc_time
from omni_discovery.errors import RecordError
from omni_discovery.kv import KeyValue, Listing, PutEvent, Summary, WatchBatch
from omni_discovery.records import keys
from omni_discovery.records.control import ControlError, HubControlSpec, parse_hub
from omni_discovery.records.schema import HubRecord, ReplicaInfo, decode_hub, decode_replica
from omni_discovery.view.record_bounds import MOST_HUBS, MOST_REPLICAS, RecordBounds
from omni_discovery.view.replica_map import ReplicaId, ReplicaMap, replica_id

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _empty() -> Mapping[_Key, _Value]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class View:
    """The table at one moment; never changes afterwards."""

    replicas: Mapping[ReplicaId, ReplicaInfo] = field(default_factory=_empty)
    hubs: Mapping[str, HubRecord] = field(default_factory=_empty)
    #: Hubs that an operator has revoked, registered or not.
    revoked: frozenset[str] = frozenset()
    #: The deploy document in the registry; None if there is none.
    pipeline: bytes | None = None
    #: Errors by key, for values that can't be read. The replica or hub of such a key is not in the view.
    bad: Mapping[str, RecordError] = field(default_factory=_empty)
    #: How many records of replicas, and of hubs, are not read, since there are too many (record_bounds.py).
    refused_count: int = 0
    refused_hubs: int = 0
    #: All changes up to this revision are in the view; 0 before the first list.
    revision: int = 0
    cluster_id: int = 0
    #: How often the registry was wiped, restored from a backup or replaced by another.
    history: int = 0
    #: Wall-clock time of the last change, 0.0 before the first list.
    changed_at: float = 0.0
    #: Wall-clock time since when the view is stale; None while it is fresh.
    stale_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes by one list or batch. Apply ``removed`` before ``added``: a new life of a replica is in both."""

    added: tuple[ReplicaInfo, ...] = ()
    updated: tuple[ReplicaInfo, ...] = ()
    removed: tuple[ReplicaInfo, ...] = ()
    hubs_changed: bool = False
    revoked_changed: bool = False
    pipeline_changed: bool = False
    #: Errors of values that can't be read and were not in the last view.
    bad: tuple[RecordError, ...] = ()
    #: The revision of the view that the watcher delivered before this one; None if there was none, or not known. Keys
    #: that are in no view, as beats are, raise the table's revision between the two. A reader whose last view is of
    #: another revision has missed changes, and must compare all of both views.
    since_revision: int | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        """Whether anything changed."""
        replicas = self.added or self.updated or self.removed
        return bool(replicas or self.hubs_changed or self.revoked_changed or self.pipeline_changed or self.bad)


def shows_other_keys(before: View, after: View) -> bool:
    """Whether other keys can't be read, or are not, than in the view before; no delta may say so."""
    refused = before.refused_count, before.refused_hubs
    return after.bad is not before.bad or refused != (after.refused_count, after.refused_hubs)


def live_hubs(view: View) -> int:
    """How many hubs share the replicas: all that are registered and not revoked, at least 1, the calling hub."""
    return max(1, len(view.hubs.keys() - view.revoked))


class _Unread(Enum):
    """Why a value was not looked at."""

    #: There are more records of its kind than are read.
    TOO_MANY = "too many"


_Meaning = ReplicaInfo | HubRecord | HubControlSpec | bytes | RecordError | _Unread | None


#: By key and revision, what values mean that were read beforehand.
Ahead = Mapping[tuple[str, int], _Meaning]
_NOTHING_READ: Final[Ahead] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Row:
    item: KeyValue
    meaning: _Meaning


class ReplicaTable:
    """The keys of one namespace. Applying a list or batch again changes nothing."""

    def __init__(self, namespace: str) -> None:
        self._namespace = keys.check_namespace(namespace)
        self._beats = keys.beats_prefix(namespace)
        self._waits = keys.waits_prefix(namespace)
        self._hub_controls = keys.hub_controls_prefix(namespace)
        self._replicas_prefix = keys.replicas_prefix(namespace)
        self._hubs_prefix = keys.hubs_prefix(namespace)
        self._bounds = RecordBounds(MOST_REPLICAS)
        self._hub_bounds = RecordBounds(MOST_HUBS)
        self._rows: dict[str, _Row] = {}
        self._view = View()
        self._replicas = ReplicaMap()
        #: Revisions of keys deleted since ``begin_reconcile``; None while no list is awaited.
        self._deleted: dict[str, int] | None = None

    def __repr__(self) -> str:
        view = self._view
        counts = f"replicas={len(view.replicas)}, hubs={len(view.hubs)}, bad={len(view.bad)}, revision={view.revision}"
        stale = "" if view.stale_since_s is None else f", stale since {utc_time(view.stale_since_s)}"
        return f"ReplicaTable({self._namespace}, {counts}{stale})"

    def snapshot(self) -> View:
        """The view now."""
        return self._view

    def replace(self, listing: Listing, at_s: float) -> Delta:
        """Make the table equal to a list read at wall-clock ``at_s``; it is fresh then."""
        before, after = self._rows, {}
        self._bounds.fill(item for item in listing.items if item.key.startswith(self._replicas_prefix))
        self._hub_bounds.fill(item for item in listing.items if item.key.startswith(self._hubs_prefix))
        for item in listing.items:
            old = before.get(item.key)
            is_known = old is not None and old.item == item and (old.meaning is _Unread.TOO_MANY) != self._is_read(item)
            after[item.key] = old if old is not None and is_known else self._read(item)
        self._rows = after
        is_first = self._view.revision == 0
        went_back = not is_first and (
            listing.cluster_id != self._view.cluster_id or listing.revision < self._view.revision
        )
        view = replace(
            self._view,
            revision=listing.revision,
            cluster_id=listing.cluster_id,
            history=self._view.history + went_back,
            stale_since_s=None,
        )
        return self._show(view, {key: before.get(key) for key in before.keys() | after.keys()}, at_s, is_first)

    def apply(self, batch: WatchBatch, at_s: float) -> Delta:
        """Apply a batch that arrived at wall-clock ``at_s``. Events that were applied before change nothing."""
        seen_revision, revision = self._view.revision, max(self._view.revision, batch.revision)
        before: dict[str, _Row | None] = {}
        for event in batch.events:
            where = event.item if isinstance(event, PutEvent) else event
            key, revision = where.key, max(revision, where.mod_revision)
            if where.mod_revision <= seen_revision:
                continue
            before.setdefault(key, self._rows.get(key))
            if isinstance(event, PutEvent):
                self._put(event.item)
            else:
                self._remove(key)
                if self._deleted is not None:
                    self._deleted[key] = where.mod_revision
        return self._show(replace(self._view, revision=revision), before, at_s, False)

    def listing(self) -> Listing:
        """The table as a listing, without beats and waits, which mean nothing later, and what was not looked at."""
        left_out = self._beats, self._waits
        rows = self._rows.items()
        items = [row.item for key, row in rows if row.meaning is not _Unread.TOO_MANY and not key.startswith(left_out)]
        items.sort(key=lambda item: item.key)
        return Listing(self._view.revision, self._view.cluster_id, tuple(items))

    def beats(self) -> list[KeyValue]:
        """The beats of the hubs in the view, as written last."""
        rows = (self._rows.get(f"{self._beats}{hub_id}") for hub_id in self._view.hubs)
        return [row.item for row in rows if row is not None]

    def restore(self, listing: Listing, fresh_at_s: float) -> Delta:
        """Fill the table from a saved list, stale since wall-clock ``fresh_at_s``."""
        delta = self.replace(listing, fresh_at_s)
        self.mark_stale(fresh_at_s)
        return delta

    def summary(self) -> Summary:
        """The table's summary, equal to that of KVStore.summary if the table equals the registry."""
        revisions = [row.item.mod_revision for row in self._rows.values()]
        return Summary(len(revisions), max(revisions, default=0))

    def begin_reconcile(self) -> None:
        """A list is about to be requested; batches go on being applied meanwhile."""
        self._deleted = {}

    def newer(self, listing: Listing) -> list[KeyValue]:
        """The records of a list that are newer than what is known, in its order; as many as are read at most."""
        rows = self._rows
        records = (item for item in listing.items if self._bounds_of(item.key) is not None)
        found = (
            item for item in records if (row := rows.get(item.key)) is None or item.mod_revision > row.item.mod_revision
        )
        return list(islice(found, MOST_REPLICAS.records))

    def read_ahead(self, items: Iterable[KeyValue]) -> Ahead:
        """What these mean, for ``reconcile``. It may be called in a thread: it changes nothing."""
        return {(item.key, item.mod_revision): self._meaning(item) for item in items}

    def reconcile(self, listing: Listing, at_s: float, ahead: Ahead = _NOTHING_READ) -> tuple[Delta, int]:
        """Apply a list that was requested after ``begin_reconcile``, where it differs from what batches brought.

        What is in ``ahead`` is not read anew.
        Also return how many keys the batches had missed. A key that is gone from the list counts, even if the batch
        that deletes it may still be under way.
        """
        seen, deleted, self._deleted = self._view.revision, self._deleted or {}, None
        before: dict[str, _Row | None] = {}
        missed = 0
        for item in listing.items:
            row = self._rows.get(item.key)
            if item.mod_revision > (row.item.mod_revision if row is not None else deleted.get(item.key, 0)):
                before[item.key] = row
                self._put(item, ahead)
                missed += item.mod_revision <= seen
        listed = {item.key for item in listing.items}
        for key in [key for key in self._rows if key not in listed]:
            if self._rows[key].item.mod_revision <= listing.revision:
                before[key] = self._rows[key]
                self._remove(key)
                missed += 1
        view = replace(self._view, revision=max(seen, listing.revision))
        return self._show(view, before, at_s, False), missed

    def mark_stale(self, since_s: float) -> bool:
        """The view is stale since wall-clock ``since_s``; return whether it was fresh before."""
        if self._view.stale_since_s is not None:
            return False
        self._view = replace(self._view, stale_since_s=since_s)
        return True

    def _put(self, item: KeyValue, ahead: Ahead = _NOTHING_READ) -> None:
        bounds = self._bounds_of(item.key)
        if bounds is not None:
            bounds.put(item)
        self._rows[item.key] = self._read(item, ahead)

    def _remove(self, key: str) -> None:
        self._rows.pop(key, None)
        bounds = self._bounds_of(key)
        if bounds is not None:
            bounds.remove(key)

    def _bounds_of(self, key: str) -> RecordBounds | None:
        """What bounds the records of which this key's is one; None for keys whose number is not bounded."""
        if key.startswith(self._replicas_prefix):
            return self._bounds
        return self._hub_bounds if key.startswith(self._hubs_prefix) else None

    def _is_read(self, item: KeyValue) -> bool:
        bounds = self._bounds_of(item.key)
        return bounds is None or bounds.is_read(item.key)

    def _read(self, item: KeyValue, ahead: Ahead = _NOTHING_READ) -> _Row:
        if item.key.startswith(self._waits):
            # Who may write there may write any number of any length, and what they say is asked for elsewhere.
            return _Row(replace(item, value=b""), None)
        if not self._is_read(item):
            return _Row(item, _Unread.TOO_MANY)
        place = item.key, item.mod_revision
        return _Row(item, ahead[place] if place in ahead else self._meaning(item))

    def _read_moved(self, before: dict[str, _Row | None]) -> None:
        """Read what there is room for now, and forget what there is not; ``before`` gets the rows as they were."""
        for bounds in (self._bounds, self._hub_bounds):
            for key in bounds.moved:
                row = self._rows[key]
                before.setdefault(key, row)
                if self._is_read(row.item) == (row.meaning is _Unread.TOO_MANY):
                    self._rows[key] = self._read(row.item)
            bounds.moved.clear()

    def _meaning(self, item: KeyValue) -> _Meaning:
        try:
            match keys.parse_key(self._namespace, item.key):
                case keys.ReplicaKey(stage_id, replica_id):
                    record = decode_replica(item.key, stage_id, replica_id, item.value)
                    return record.to_info(item.create_revision, leased=item.lease_id != 0, lease_id=item.lease_id)
                case keys.HubKey(hub_id):
                    return decode_hub(item.key, hub_id, item.value)
                case keys.PipelineKey():
                    return item.value
                case keys.HubControlKey(hub_id):
                    return parse_hub(hub_id, item.value)
                case keys.BeatKey() | keys.ReplicaControlKey() | keys.ApiKeyKey() | keys.WaitKey():
                    return None
                case None:
                    return self._stray(item.key)
        except ControlError as error:
            return RecordError(item.key, str(error))
        except RecordError as error:
            return error

    def _stray(self, key: str) -> RecordError | None:
        """An unknown key is ignored, but under the prefixes of records it is reported as bad."""
        records = keys.replicas_prefix(self._namespace), keys.hubs_prefix(self._namespace)
        if key.startswith((*records, self._hub_controls)):
            return RecordError(key, "is not the key of a replica or hub")
        return None

    def _show(self, view: View, before: dict[str, _Row | None], at_s: float, is_first: bool) -> Delta:
        """Set the view to ``view`` with the changes of the keys in ``before``; return these changes."""
        self._read_moved(before)
        delta = _difference(before, self._rows)
        refused = self._bounds.refused_count, self._hub_bounds.refused_count
        if refused != (view.refused_count, view.refused_hubs):
            view = replace(view, refused_count=refused[0], refused_hubs=refused[1])
        if delta.added or delta.updated or delta.removed:
            self._replicas = self._replicas.changed(delta.removed, (*delta.updated, *delta.added))
            view = replace(view, replicas=self._replicas)
        if delta.hubs_changed:
            view = replace(view, hubs=MappingProxyType(self._changed_hubs(before)))
        revoked = self._all_revoked() if any(key.startswith(self._hub_controls) for key in before) else view.revoked
        if revoked != view.revoked:
            delta, view = replace(delta, revoked_changed=True), replace(view, revoked=revoked)
        if delta.pipeline_changed:
            row = self._rows.get(keys.pipeline_key(self._namespace))
            view = replace(view, pipeline=row.item.value if row else None)
        if delta.bad or any(key in view.bad for key in before):
            bad = dict(view.bad)
            for key in before:
                row = self._rows.get(key)
                bad.pop(key, None)
                if row is not None and isinstance(row.meaning, RecordError):
                    bad[key] = row.meaning
            view = replace(view, bad=MappingProxyType(bad))
        self._view = replace(view, changed_at=at_s) if delta or is_first else view
        return delta

    def _changed_hubs(self, before: Mapping[str, _Row | None]) -> dict[str, HubRecord]:
        hubs = dict(self._view.hubs)
        for key in before:
            if key.startswith(self._hubs_prefix):
                row = self._rows.get(key)
                hubs.pop(key.removeprefix(self._hubs_prefix), None)
                if row is not None and isinstance(row.meaning, HubRecord):
                    hubs[row.meaning.hub_id] = row.meaning
        return hubs

    def _all_revoked(self) -> frozenset[str]:
        # A value that can't be read doesn't change whether its hub is revoked.
        before, found = self._view.revoked, set()
        for key, row in self._rows.items():
            if key.startswith(self._hub_controls):
                hub_id = key.removeprefix(self._hub_controls)
                spec = row.meaning
                if spec.revoked if isinstance(spec, HubControlSpec) else hub_id in before:
                    found.add(hub_id)
        return frozenset(found)


def _difference(before: Mapping[str, _Row | None], after: Mapping[str, _Row]) -> Delta:
    """The changes of the keys of ``before``: from their rows there to those in ``after``."""
    added: list[ReplicaInfo] = []
    updated: list[ReplicaInfo] = []
    removed: list[ReplicaInfo] = []
    bad: list[RecordError] = []
    hubs_changed = pipeline_changed = False
    for key, old_row in before.items():
        new_row = after.get(key)
        if old_row is new_row:
            continue
        old, new = old_row.meaning if old_row else None, new_row.meaning if new_row else None
        if isinstance(new, RecordError):
            bad.append(new)
        if isinstance(old, ReplicaInfo) and isinstance(new, ReplicaInfo) and old.epoch == new.epoch:
            if old != new:
                updated.append(new)
            continue
        if isinstance(old, ReplicaInfo):
            removed.append(old)
        if isinstance(new, ReplicaInfo):
            added.append(new)
        hubs_changed = hubs_changed or (old != new and HubRecord in (type(old), type(new)))
        pipeline_changed = pipeline_changed or (old != new and bytes in (type(old), type(new)))
    return Delta(
        added=tuple(sorted(added, key=replica_id)),
        updated=tuple(sorted(updated, key=replica_id)),
        removed=tuple(sorted(removed, key=replica_id)),
        hubs_changed=hubs_changed,
        pipeline_changed=pipeline_changed,
        bad=tuple(sorted(bad, key=lambda error: error.key)),
    )
