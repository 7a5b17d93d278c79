"""A hub's own memory of its replicas: a bounded file of JSON lines that outlives etcd's compactions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from omni_discovery.history import Transition, of_record, of_removal
from omni_discovery.keys import check_namespace
from omni_discovery.runtime_file import is_private
from omni_discovery.table import Delta, View

logger = logging.getLogger(__name__)

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
