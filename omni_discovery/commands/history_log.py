"""The history of replicas: from etcd's revisions, and from a log that hubs keep because etcd compacts those.

A replica process is identified by its key and epoch and called a life here: a key may see many. The log is a file of
JSON lines, bounded in size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from omni_discovery.errors import RecordError
from omni_discovery.kv import PutEvent, WatchEvent
from omni_discovery.processes import is_private
from omni_discovery.records import keys
from omni_discovery.records.keys import check_namespace
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus, decode_replica
from omni_discovery.text import one_line
from omni_discovery.view.table import Delta, View

logger = logging.getLogger(__name__)

#: Values of ``Transition.what`` besides the names of statuses.
REGISTERED: Final = "registered"
GONE: Final = "gone"


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

    @property
    def end(self) -> str:
        """How it ended, in a few words; empty while it goes on."""
        if not self.is_gone:
            return ""
        reason = one_line(self.reason)
        match self.last_status:
            case ReplicaStatus.DOWN:
                # A replica that fails writes the reason into its record before it withdraws.
                return f"failed: {reason}" if reason else "withdrew"
            case ReplicaStatus.ERROR:
                return f"failed: {reason}" if reason else "failed"
            case ReplicaStatus.DRAINING:
                return "lost while draining"
            case ReplicaStatus.STARTING:
                return "lost while starting"
            case _:
                return "lost"


def of_record(info: ReplicaInfo, known: Transition | None) -> list[Transition]:
    """Return the transitions between ``known``, the last one of the record's key, and the record."""
    same_life = known is not None and _key(known) == _key(info) and known.what != GONE
    new = [] if same_life else [_transition(info, REGISTERED, info.registered_at)]
    if not same_life or known is None or known.what != info.status.value or known.reason != info.reason:
        new.append(_transition(info, info.status.value, info.last_heartbeat))
    return new


def of_removal(info: ReplicaInfo, at_s: float | None) -> Transition:
    """Return the transition of a replica whose key was removed at ``at_s``."""
    return _transition(info, GONE, at_s)


def _transition(info: ReplicaInfo, what: str, at_s: float | None) -> Transition:
    return Transition(
        stage_id=info.stage_id,
        replica_id=info.replica_id,
        epoch=info.epoch,
        what=what,
        at_s=at_s or None,
        host=info.host,
        pid=info.pid,
        reason=info.reason,
    )


class EventReader:
    """Turns the registry's watch events, in their order, into transitions."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._infos: dict[str, ReplicaInfo] = {}
        self._known: dict[str, Transition] = {}

    def read_event(self, event: WatchEvent) -> Iterator[Transition]:
        """Yield the transitions of one event; none if its key is not a replica's or its record can't be read."""
        where = event.item if isinstance(event, PutEvent) else event
        parsed = keys.parse_key(self._namespace, where.key)
        if not isinstance(parsed, keys.ReplicaKey):
            return
        if not isinstance(event, PutEvent):
            info = self._infos.pop(where.key, None)
            # Without a record, the process began before the oldest revision left: only its end would be known.
            if info is not None:
                yield of_removal(info, None)
            self._known.pop(where.key, None)
            return
        try:
            record = decode_replica(where.key, parsed.stage_id, parsed.replica_id, event.item.value)
        except RecordError:
            return
        info = self._infos[where.key] = record.to_info(event.item.create_revision)
        for transition in of_record(info, self._known.get(where.key)):
            self._known[where.key] = transition
            yield transition


def lives(transitions: Iterable[Transition], present: Iterable[ReplicaInfo] = ()) -> list[Life]:
    """Merge transitions of any source and order into lives, oldest first; ``present`` are the replicas registered now.

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
        for transition in of_record(info, None):
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
    changes: dict[str, Any] = {"host": new.host or life.host, "pid": new.pid or life.pid}
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
        self._is_broken = False

    def append_changes(self, view: View, delta: Delta) -> None:
        """Append the transitions that led to a view of the registry; ``delta`` is what it changed."""
        new: list[Transition] = []
        for info in delta.removed:
            new.append(of_removal(info, view.changed_at))
            self._known.pop((info.stage_id, info.replica_id), None)
        for info in (*delta.added, *delta.updated):
            for transition in of_record(info, self._known.get((info.stage_id, info.replica_id))):
                self._known[info.stage_id, info.replica_id] = transition
                new.append(transition)
        if new and not self._is_broken:
            self._append(b"".join(msgspec.json.encode(transition) + b"\n" for transition in new))

    def _append(self, lines: bytes) -> None:
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_private(self._file.parent):
                raise PermissionError(f"others can write to {self._file.parent}")
            with self._file.open("ab") as log:
                log.write(lines)
                is_full = log.tell() >= self._most_bytes
            if is_full:
                self._file.replace(_former(self._file))
        except OSError as error:
            self._is_broken = True
            logger.warning("history.not_written file=%s reason=%s", self._file, error)


def with_history(on_view: Callable[[View, Delta], None], folder: Path, namespace: str) -> Callable[[View, Delta], None]:
    """Return a callback that calls ``on_view`` and then appends to the log of the namespace."""
    log = HistoryLog(history_file(folder, namespace))

    def on_view_logged(view: View, delta: Delta) -> None:
        on_view(view, delta)
        log.append_changes(view, delta)

    return on_view_logged


def read_log(file: Path) -> Iterator[Transition]:
    """Yield the transitions of a log, oldest first. Lines that can't be read are skipped."""
    for part in (_former(file), file):
        try:
            lines = part.read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=Transition)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue


def _former(file: Path) -> Path:
    return file.with_suffix(".old.jsonl")
