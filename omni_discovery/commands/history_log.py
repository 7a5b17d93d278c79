"""Who was up when: the lives of replicas, put together from what etcd still knows and what hubs wrote down.

A hub's own memory of its replicas: a bounded file of JSON lines that outlives etcd's compactions.
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
from omni_discovery.records import keys
from omni_discovery.records.keys import check_namespace
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus, decode_replica
from omni_discovery.runtime_dir import is_private
from omni_discovery.text import one_line
from omni_discovery.view.table import Delta, View

logger = logging.getLogger(__name__)

#: What a transition says besides the names of statuses.
REGISTERED: Final = "registered"
GONE: Final = "gone"


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One change in the life of one replica; a line of a hub's log is one as JSON."""

    stage_id: int
    replica_id: int
    epoch: int
    #: ``registered``, the name of a status, or ``gone``.
    what: str
    #: Wall-clock seconds; None if nobody knows.
    at_s: float | None
    host: str = ""
    pid: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a replica. Times are wall-clock seconds, None where nobody knows."""

    stage_id: int
    replica_id: int
    epoch: int
    host: str = ""
    pid: int = 0
    registered_at_s: float | None = None
    up_at_s: float | None = None
    #: The last moment at which it is known to have been there.
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
                # Who fails says so, and then withdraws.
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
    """What a record tells that the last transition of its key, ``known``, has not told yet."""
    same_life = known is not None and _key(known) == _key(info) and known.what != GONE
    told = [] if same_life else [_transition(info, REGISTERED, info.registered_at)]
    if not same_life or known is None or known.what != info.status.value or known.reason != info.reason:
        told.append(_transition(info, info.status.value, info.last_heartbeat))
    return told


def of_removal(info: ReplicaInfo, at_s: float | None) -> Transition:
    """The replica is not registered any more."""
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
    """Turns the registry's events, in their order, into transitions."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._infos: dict[str, ReplicaInfo] = {}
        self._known: dict[str, Transition] = {}

    def read(self, event: WatchEvent) -> Iterator[Transition]:
        """What one event tells; nothing if it is about no replica or can't be read."""
        where = event.item if isinstance(event, PutEvent) else event
        parsed = keys.parse_key(self._namespace, where.key)
        if not isinstance(parsed, keys.ReplicaKey):
            return
        if not isinstance(event, PutEvent):
            info = self._infos.pop(where.key, None)
            # Of a life that began before the oldest revision left, nothing but its end would be known.
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
    """Put transitions of any source and order together; ``present`` is who is registered now.

    The oldest life comes first. A life that nobody saw end, and that is not present, is over all the same.
    """
    found: dict[_Key, Life] = {}
    named: dict[tuple[int, int, int], _Key] = {}
    # Those that don't say whose they are come last, and join whom the others told of.
    for each in sorted(transitions, key=_is_nameless):
        key = named.get(_key(each)[:3], _key(each)) if _is_nameless(each) else _key(each)
        named[key[:3]] = key
        found[key] = _grown(found.get(key) or Life(*key), each)
    here = {_key(info): info for info in present}
    for key, info in here.items():
        life = found.get(key) or Life(*key)
        for each in of_record(info, None):
            life = _grown(life, each)
        found[key] = replace(life, is_gone=False, gone_at_s=None, last_status=info.status.value)
    ended = (life if key in here else replace(life, is_gone=True) for key, life in found.items())
    return sorted(ended, key=lambda life: (life.registered_at_s or life.seen_at_s or 0.0, life.epoch))


#: Of one life: stage, replica, epoch, host, pid. A fresh etcd counts its epochs from the start again.
_Key = tuple[int, int, int, str, int]


def _key(of: Transition | ReplicaInfo) -> _Key:
    return of.stage_id, of.replica_id, of.epoch, of.host, of.pid


def _is_nameless(transition: Transition) -> bool:
    return not (transition.host or transition.pid)


def _grown(life: Life, each: Transition) -> Life:
    changes: dict[str, Any] = {"host": each.host or life.host, "pid": each.pid or life.pid}
    seen_s = [moment for moment in (life.seen_at_s, each.at_s) if moment is not None]
    if each.what == GONE:
        changes |= {"is_gone": True, "gone_at_s": _least(life.gone_at_s, each.at_s)}
        return replace(life, **changes)
    if each.what == REGISTERED:
        changes["registered_at_s"] = _least(life.registered_at_s, each.at_s)
    elif life.seen_at_s is None or each.at_s is None or each.at_s >= life.seen_at_s:
        changes |= {"last_status": each.what, "reason": each.reason}
    if each.what == ReplicaStatus.UP:
        changes["up_at_s"] = _least(life.up_at_s, each.at_s)
    changes["seen_at_s"] = max(seen_s, default=None)
    return replace(life, **changes)


def _least(one: float | None, other: float | None) -> float | None:
    return min((moment for moment in (one, other) if moment is not None), default=None)


#: Two files of at most this size are kept: some ten thousand transitions.
_MOST_BYTES: Final = 1 << 20


def history_file(folder: Path, namespace: str) -> Path:
    """Where the hubs of this user and machine write down what becomes of a namespace's replicas."""
    return folder / f"{check_namespace(namespace)}.history.jsonl"


class HistoryLog:
    """Appends what each view changes. Belongs to one thread; several hubs may write to one file.

    A log that can't be written is said once and given up: the hub serves on.
    """

    def __init__(self, file: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._file = file
        self._most_bytes = most_bytes
        self._known: dict[tuple[int, int], Transition] = {}
        self._broken = False

    def note(self, view: View, delta: Delta) -> None:
        """Write down what a view of the registry changed."""
        told: list[Transition] = []
        for info in delta.removed:
            told.append(of_removal(info, view.changed_at))
            self._known.pop((info.stage_id, info.replica_id), None)
        for info in (*delta.added, *delta.updated):
            for each in of_record(info, self._known.get((info.stage_id, info.replica_id))):
                self._known[info.stage_id, info.replica_id] = each
                told.append(each)
        if told and not self._broken:
            self._append(b"".join(msgspec.json.encode(each) + b"\n" for each in told))

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
            self._broken = True
            logger.warning("history.not_written file=%s reason=%s", self._file, error)


def remembering(on_view: Callable[[View, Delta], None], folder: Path, namespace: str) -> Callable[[View, Delta], None]:
    """``on_view``, and a log of what each view changes."""
    log = HistoryLog(history_file(folder, namespace))

    def take(view: View, delta: Delta) -> None:
        on_view(view, delta)
        log.note(view, delta)

    return take


def read_log(file: Path) -> Iterator[Transition]:
    """All transitions that are kept, the oldest first. Lines that can't be read are left out."""
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
