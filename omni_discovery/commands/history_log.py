"""The history of replicas and hubs: from etcd's revisions, and from a log that hubs keep because etcd compacts those.

A replica process is identified by its key and epoch and called a life here: a key may see many. The log is a file of
JSON lines, bounded in size; each line says of which registry it is, since one user may have many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from omni_discovery.errors import ConfigError, RecordError
from omni_discovery.kv import PutEvent, WatchEvent
from omni_discovery.processes import make_private
from omni_discovery.records import keys
from omni_discovery.records.keys import check_namespace
from omni_discovery.records.schema import (
    DRAINED_BY_OPERATOR,
    HubRecord,
    ReplicaInfo,
    ReplicaStatus,
    decode_hub,
    decode_replica,
    own_reason,
)
from omni_discovery.stories import registry_name
from omni_discovery.text import one_line
from omni_discovery.view.table import Delta, View

logger = logging.getLogger(__name__)

#: Values of ``Transition.what`` besides the names of statuses.
REGISTERED: Final = "registered"
GONE: Final = "gone"
#: A hub ended as it was told to.
STOPPED: Final = "stopped"


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one replica process; each line of a hub's log is one, as JSON."""

    stage_id: int
    replica_id: int
    epoch: int
    #: ``registered``, the name of a status, or ``gone``.
    what: str
    #: Wall-clock seconds; None if unknown.
    at_s: float | None
    host: str = ""
    pid: int = 0
    reason: str = ""
    #: Which registry; empty in lines of older releases.
    registry: str = ""


class HubTransition(msgspec.Struct, frozen=True, kw_only=True):
    """A hub that registered or is gone; a line of the log like a Transition, which older releases pass over."""

    hub_id: str
    #: ``registered``, ``stopped`` or ``gone``.
    what: str
    #: Wall-clock seconds; None if unknown.
    at_s: float | None
    host: str = ""
    pid: int = 0
    started_at: float = 0.0
    version: str = ""
    registry: str = ""


AnyTransition = Transition | HubTransition


@dataclass(frozen=True, slots=True)
class Life:
    """One replica process from its registration to its end. Times are wall-clock seconds, None where unknown."""

    stage_id: int
    replica_id: int
    epoch: int
    host: str = ""
    pid: int = 0
    registered_at_s: float | None = None
    up_at_s: float | None = None
    #: The last moment at which it is known to have been registered.
    seen_at_s: float | None = None
    gone_at_s: float | None = None
    is_gone: bool = False
    last_status: str = ""
    reason: str = ""
    registry: str = ""

    @property
    def end(self) -> str:
        """How it ended, with the whole reason; empty while it goes on."""
        reason = one_line(self.reason)
        return f"failed: {reason}" if self.short_end == "failed" and reason else self.short_end

    @property
    def short_end(self) -> str:
        """How it ended, in a few words; empty while it goes on."""
        if not self.is_gone:
            return ""
        match self.last_status:
            case ReplicaStatus.DOWN if self.reason == DRAINED_BY_OPERATOR:
                return DRAINED_BY_OPERATOR
            case ReplicaStatus.DOWN:
                # A replica that fails writes the reason into its record before it withdraws.
                return "failed" if own_reason(self.reason) else "stopped"
            case ReplicaStatus.ERROR:
                return "failed"
            case ReplicaStatus.DRAINING:
                return "lost while draining"
            case ReplicaStatus.STARTING:
                return "lost while starting"
            case _:
                return "lost"


@dataclass(frozen=True, slots=True)
class HubLife:
    """One hub process. Times are wall-clock seconds, None where unknown."""

    hub_id: str
    host: str = ""
    pid: int = 0
    started_at_s: float = 0.0
    version: str = ""
    gone_at_s: float | None = None
    is_gone: bool = False
    was_stopped: bool = False
    registry: str = ""

    @property
    def end(self) -> str:
        """How it ended; empty while it goes on. Etcd does not tell a hub that was stopped from one that died."""
        if not self.is_gone:
            return ""
        return "stopped" if self.was_stopped else "stopped or lost"


def of_record(info: ReplicaInfo, known: Transition | None, registry: str = "") -> list[Transition]:
    """Return the transitions between ``known``, the last one of the record's key, and the record."""
    same_life = known is not None and _key(known) == _key(info) and known.what != GONE
    new = [] if same_life else [_transition(info, REGISTERED, info.registered_at, registry)]
    if not same_life or known is None or known.what != info.status.value or known.reason != info.reason:
        new.append(_transition(info, info.status.value, info.last_heartbeat, registry))
    return new


def of_removal(info: ReplicaInfo, at_s: float | None, registry: str = "") -> Transition:
    """Return the transition of a replica whose key was removed at ``at_s``."""
    return _transition(info, GONE, at_s, registry)


def of_hub(hub: HubRecord, what: str, at_s: float | None, registry: str = "") -> HubTransition:
    """Return the transition of a hub."""
    return HubTransition(
        hub_id=hub.hub_id,
        what=what,
        at_s=at_s or None,
        host=hub.host,
        pid=hub.pid,
        started_at=hub.started_at,
        version=hub.version,
        registry=registry,
    )


def _transition(info: ReplicaInfo, what: str, at_s: float | None, registry: str) -> Transition:
    return Transition(
        stage_id=info.stage_id,
        replica_id=info.replica_id,
        epoch=info.epoch,
        what=what,
        at_s=at_s or None,
        host=info.host,
        pid=info.pid,
        reason=info.reason,
        registry=registry,
    )


class EventReader:
    """Turns the registry's watch events, in their order, into transitions."""

    def __init__(self, namespace: str, registry: str = "") -> None:
        self._namespace = namespace
        self._registry = registry
        self._infos: dict[str, ReplicaInfo] = {}
        self._hubs: dict[str, HubRecord] = {}
        self._known: dict[str, Transition] = {}

    def read_event(self, event: WatchEvent) -> Iterator[AnyTransition]:
        """Yield the transitions of one event; none if its key is not a replica's or hub's, or can't be read."""
        where = event.item if isinstance(event, PutEvent) else event
        parsed = keys.parse_key(self._namespace, where.key)
        # Without a record of what is deleted, the process began before the oldest revision left: only its end is known.
        if isinstance(parsed, keys.HubKey):
            if not isinstance(event, PutEvent):
                hub = self._hubs.pop(where.key, None)
                if hub is not None:
                    yield of_hub(hub, GONE, None, self._registry)
                return
            with suppress(RecordError):
                hub = self._hubs[where.key] = decode_hub(where.key, parsed.hub_id, event.item.value)
                yield of_hub(hub, REGISTERED, None, self._registry)
        if not isinstance(parsed, keys.ReplicaKey):
            return
        if not isinstance(event, PutEvent):
            info = self._infos.pop(where.key, None)
            if info is not None:
                yield of_removal(info, None, self._registry)
            self._known.pop(where.key, None)
            return
        try:
            record = decode_replica(where.key, parsed.stage_id, parsed.replica_id, event.item.value)
        except RecordError:
            return
        info = self._infos[where.key] = record.to_info(event.item.create_revision)
        for transition in of_record(info, self._known.get(where.key), self._registry):
            self._known[where.key] = transition
            yield transition


def hub_lives(
    transitions: Iterable[HubTransition], present: Iterable[HubRecord] = (), registry: str = ""
) -> list[HubLife]:
    """Merge the transitions of hubs, of any source and order, into lives.

    ``present`` are the hubs that are registered now, in ``registry``.
    """
    found: dict[tuple[str, str, int, float], HubLife] = {}
    here = {_hub_key(hub) for hub in present}
    for each in (*transitions, *(of_hub(hub, REGISTERED, None, registry) for hub in present)):
        key = _hub_key(each)
        life = found.get(key) or HubLife(each.hub_id, each.host, each.pid, each.started_at, is_gone=key not in here)
        ends_s = [moment for moment in (life.gone_at_s, each.at_s) if moment is not None]
        found[key] = replace(
            life,
            version=each.version or life.version,
            # A hub whose lease was lost has registered again: the last end counts.
            gone_at_s=max(ends_s, default=None) if life.is_gone and each.what != REGISTERED else life.gone_at_s,
            was_stopped=life.was_stopped or each.what == STOPPED,
            registry=each.registry or life.registry,
        )
    return sorted(found.values(), key=lambda life: (life.started_at_s, life.hub_id))


def _hub_key(hub: HubTransition | HubRecord) -> tuple[str, str, int, float]:
    return hub.hub_id, hub.host, hub.pid, hub.started_at


def of_registry(
    transitions: Iterable[AnyTransition], registry: str, known: Iterable[AnyTransition]
) -> tuple[list[AnyTransition], int]:
    """Keep the transitions of one registry; also return how many lives of others are left out.

    Those of older releases, which don't say of which registry they are, are kept for the lives among ``known``.
    """
    ids = {_any_key(each) for each in known}
    kept: list[AnyTransition] = []
    others = set()
    for each in transitions:
        if each.registry == registry or (not each.registry and _any_key(each) in ids):
            kept.append(each)
        else:
            others.add((each.registry, _any_key(each)))
    return kept, len(others)


def _any_key(transition: AnyTransition) -> tuple[object, ...]:
    return _hub_key(transition) if isinstance(transition, HubTransition) else _key(transition)


def lives(transitions: Iterable[Transition], present: Iterable[ReplicaInfo] = (), registry: str = "") -> list[Life]:
    """Merge transitions of any source and order into lives, oldest first.

    ``present`` are the replicas that are registered now, in ``registry``.

    A life whose end is not among the transitions counts as ended unless it is present.
    """
    found: dict[_Key, Life] = {}
    named: dict[tuple[int, int, int], _Key] = {}
    # Transitions without a process come last: they belong to the process that the others name.
    for transition in sorted(transitions, key=_is_nameless):
        key = _key(transition)
        if _is_nameless(transition):
            key = named.get(key[:3], key)
        named[key[:3]] = key
        found[key] = _with_transition(found.get(key) or Life(*key), transition)
    here = {_key(info): info for info in present}
    for key, info in here.items():
        life = found.get(key) or Life(*key)
        for transition in of_record(info, None, registry):
            life = _with_transition(life, transition)
        found[key] = replace(life, is_gone=False, gone_at_s=None, last_status=info.status.value)
    ended = (life if key in here else replace(life, is_gone=True) for key, life in found.items())
    return sorted(ended, key=lambda life: (life.registered_at_s or life.seen_at_s or 0.0, life.epoch))


#: Stage, replica, epoch, host, pid of one life. A new etcd counts epochs from 1 again, so epochs alone may repeat.
_Key = tuple[int, int, int, str, int]


def _key(process: Transition | ReplicaInfo) -> _Key:
    return process.stage_id, process.replica_id, process.epoch, process.host, process.pid


def _is_nameless(transition: Transition) -> bool:
    return not (transition.host or transition.pid)


def _with_transition(life: Life, new: Transition) -> Life:
    changes: dict[str, Any] = {
        "host": new.host or life.host,
        "pid": new.pid or life.pid,
        "registry": new.registry or life.registry,
    }
    seen_s = [moment for moment in (life.seen_at_s, new.at_s) if moment is not None]
    if new.what == GONE:
        changes |= {"is_gone": True, "gone_at_s": _least(life.gone_at_s, new.at_s)}
        return replace(life, **changes)
    if new.what == REGISTERED:
        changes["registered_at_s"] = _least(life.registered_at_s, new.at_s)
    elif life.seen_at_s is None or new.at_s is None or new.at_s >= life.seen_at_s:
        changes |= {"last_status": new.what, "reason": new.reason}
    if new.what == ReplicaStatus.UP:
        changes["up_at_s"] = _least(life.up_at_s, new.at_s)
    changes["seen_at_s"] = max(seen_s, default=None)
    return replace(life, **changes)


def _least(one: float | None, other: float | None) -> float | None:
    return min((moment for moment in (one, other) if moment is not None), default=None)


#: Two files of at most this size are kept: some ten thousand transitions.
_MOST_BYTES: Final = 1 << 20


def history_file(folder: Path, namespace: str) -> Path:
    """The log of a namespace's replicas that the hubs of this user on this machine share."""
    return folder / f"{check_namespace(namespace)}.history.jsonl"


class HistoryLog:
    """Appends the transitions between views. Used by one thread; several hubs may append to one file.

    The first error is logged and ends the writing; the hub goes on serving.
    """

    def __init__(self, file: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._file = file
        self._most_bytes = most_bytes
        self._known: dict[tuple[int, int], Transition] = {}
        self._hubs: Mapping[str, HubRecord] = {}
        self._registry = ""
        self._is_broken = False

    def append_changes(self, view: View, delta: Delta) -> None:
        """Append the transitions that led to a view of the registry; ``delta`` is what it changed."""
        registry = self._registry = registry_name(view.cluster_id)
        new: list[AnyTransition] = []
        for info in delta.removed:
            new.append(of_removal(info, view.changed_at, registry))
            self._known.pop((info.stage_id, info.replica_id), None)
        for info in (*delta.added, *delta.updated):
            for transition in of_record(info, self._known.get((info.stage_id, info.replica_id)), registry):
                self._known[info.stage_id, info.replica_id] = transition
                new.append(transition)
        hubs, self._hubs = self._hubs, view.hubs
        if delta.hubs_changed:
            left = (hub for hub_id, hub in hubs.items() if hub_id not in view.hubs)
            new += [of_hub(hub, GONE, view.changed_at, registry) for hub in left]
            new += [
                of_hub(hub, REGISTERED, None, registry) for hub_id, hub in view.hubs.items() if hubs.get(hub_id) != hub
            ]
        self._write(new)

    def append_stop(self, hub: HubRecord, at_s: float) -> None:
        """Append that this hub ends as it was told to: it does not see its own key go."""
        self._write([of_hub(hub, STOPPED, at_s, self._registry)])

    def _write(self, new: Iterable[AnyTransition]) -> None:
        lines = b"".join(msgspec.json.encode(transition) + b"\n" for transition in new)
        if lines and not self._is_broken:
            self._append(lines)

    def _append(self, lines: bytes) -> None:
        try:
            make_private(self._file.parent)
            with self._file.open("ab") as log:
                log.write(lines)
                is_full = log.tell() >= self._most_bytes
            if is_full:
                self._file.replace(_former(self._file))
        except (OSError, ConfigError) as error:
            self._is_broken = True
            logger.warning("history.not_written file=%s reason=%s", self._file, error)


def with_history(on_view: Callable[[View, Delta], None], log: HistoryLog) -> Callable[[View, Delta], None]:
    """Return a callback that calls ``on_view`` and then appends to the log."""

    def on_view_logged(view: View, delta: Delta) -> None:
        on_view(view, delta)
        log.append_changes(view, delta)

    return on_view_logged


def read_log(file: Path) -> Iterator[AnyTransition]:
    """Yield the transitions of a log, oldest first. Lines that can't be read are skipped."""
    for part in (_former(file), file):
        try:
            lines = part.read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                if b'"hub_id":' in line:
                    yield msgspec.json.decode(line, type=HubTransition)
                else:
                    yield msgspec.json.decode(line, type=Transition)


def _former(file: Path) -> Path:
    return file.with_suffix(".old.jsonl")
