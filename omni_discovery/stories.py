"""Stories and Waits: what failed lately, and what a process waits for now, in files that ``omni doctor`` reads.

Each process writes one small file in a folder of its user and namespace; the file is replaced whole and bounded. That
of its stories stays when the process ends. Nothing else reads them, so their format may change with any release.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from omni_discovery.errors import ConfigError
from omni_discovery.log_once import LogOnce
from omni_discovery.processes import is_private, make_private, write_private

logger = logging.getLogger(__name__)

#: Stories that a process keeps, lines of one, and characters of a line.
_MOST_STORIES: Final = 20
_MOST_LINES: Final = 100
_MOST_CHARACTERS: Final = 500
#: Files of processes that a folder keeps, and the size of one that is read.
_MOST_FILES: Final = 50
_MOST_BYTES: Final = 2 << 20
#: Many requests may fail at once: the file is written this long after the first, with the first of them.
_WRITE_AFTER_S: Final = 1.0


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one lease or request, until it was lost or failed at wall-clock ``at_s``."""

    #: ``lease``, ``request`` or ``supervisor``.
    kind: str
    #: The key that the lease holds, the request's id, or the supervisor's stage.
    name: str
    pid: int
    at_s: float
    #: Oldest first.
    lines: tuple[str, ...]
    #: The registry of the lease or request: its id as ``registry_name`` has it, empty if not known, and its endpoints.
    registry: str = ""
    endpoints: str = ""


def registry_name(cluster_id: int) -> str:
    """What files on this machine call a registry: the id of its etcd cluster, as etcdctl prints it; "" for id 0."""
    return f"{cluster_id:x}" if cluster_id else ""


def same_registry(story: Story, registry: str, endpoints: str) -> bool:
    """Whether a story is of the registry with this name or at one of these endpoints, which may be written otherwise.

    An etcd that was wiped has another name at the same endpoint: how leases were lost there is its story, too.
    """
    return bool(registry and story.registry == registry) or share_endpoint(story.endpoints, endpoints)


def share_endpoint(one: str, other: str) -> bool:
    """Whether two comma lists have an endpoint in common."""
    return bool(_endpoints_in(one) & _endpoints_in(other))


def _endpoints_in(text: str) -> set[str]:
    parts = (part.strip().removesuffix("/") for part in text.split(",") if part.strip())
    return {part.removeprefix("https://").removeprefix("http://") for part in parts}


class Stories:
    """Writes the stories of this process in the background. All methods may be called from any thread.

    ``folder`` is the user's runtime folder, ``namespace`` a checked one; ``endpoints`` are those of its etcd.
    """

    def __init__(
        self, folder: Path, namespace: str, endpoints: str = "", wall_s: Callable[[], float] = time.time
    ) -> None:
        self._folder = _folder(folder, namespace)
        self._endpoints = endpoints
        self._wall_s = wall_s
        #: The id of the etcd cluster, 0 while it is not known. Set by whoever is connected to it.
        self.cluster_id: Callable[[], int] = lambda: 0
        self._lock = threading.Lock()
        #: Guarded by the lock, as are the two below.
        self._stories: deque[Story] = deque(maxlen=_MOST_STORIES)
        #: How many of them are not written yet.
        self._unwritten = 0
        self._timer: threading.Timer | None = None
        #: Held while the file is written; guards ``_log_once``.
        self._file_lock = threading.Lock()
        self._log_once = LogOnce()

    def write(self, kind: str, name: str, read_lines: Callable[[], Iterable[str]]) -> None:
        """Keep what happened to one lease or request that just failed. Returns at once; the file follows in a second.

        ``read_lines`` is called at once, but not for a story that is dropped: of those within one second, the first
        few are kept. Never raises: a diagnosis must not add to the failure that it is about.
        """
        try:
            self._keep(kind, name, read_lines)
        except Exception:
            logger.exception("stories.not_kept kind=%s", kind)

    def _keep(self, kind: str, name: str, read_lines: Callable[[], Iterable[str]]) -> None:
        with self._lock:
            if self._unwritten >= _MOST_STORIES:
                return
            kept = tuple(_printable(line[:_MOST_CHARACTERS]) for line in deque(read_lines(), maxlen=_MOST_LINES))
            story = Story(
                kind=kind,
                name=_printable(name),
                pid=os.getpid(),
                at_s=self._wall_s(),
                lines=kept,
                registry=registry_name(self.cluster_id()),
                endpoints=self._endpoints,
            )
            self._stories.append(story)
            self._unwritten += 1
            if self._timer is None:
                timer = threading.Timer(_WRITE_AFTER_S, self.flush)
                timer.daemon = True
                # Where no thread can be started, the next story or ``flush`` at the end tries again.
                timer.start()
                self._timer = timer

    def flush(self) -> None:
        """Write what is not written yet. Blocks for the file; a file that can't be written is logged once."""
        with self._file_lock:
            with self._lock:
                timer, self._timer = self._timer, None
                is_written = not self._unwritten
                stories, self._unwritten = tuple(self._stories), 0
            if timer is not None:
                timer.cancel()
            if is_written:
                return
            try:
                self._replace_file(msgspec.json.encode(stories))
            except (OSError, ConfigError) as error:
                if self._log_once.should():
                    logger.warning("stories.not_written folder=%s reason=%s", self._folder, error)

    def _replace_file(self, content: bytes) -> None:
        make_private(self._folder.parent)
        write_private(self._folder / f"{os.getpid()}.json", content)
        files = sorted(self._folder.glob("*.json"), key=_written_at_s)
        for old in files[:-_MOST_FILES]:
            old.unlink(missing_ok=True)


def read_stories(folder: Path, namespace: str) -> list[Story]:
    """The stories that all processes of this user left for a namespace, the oldest first. Never raises OSError.

    Files that can't be read are left out, and all of them if others can write to the folder.
    """
    found: list[Story] = []
    if is_private(folder):
        for file in _folder(folder, namespace).glob("*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                if file.stat().st_size <= _MOST_BYTES:
                    found += msgspec.json.decode(file.read_bytes(), type=tuple[Story, ...])
    return sorted(found, key=lambda story: story.at_s)


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """What a process waits for, such as a supervisor for a deploy document, since wall-clock ``since_s``."""

    pid: int
    since_s: float
    #: Who waits, and for what.
    who: str
    reason: str
    #: The etcd endpoints of the process.
    endpoints: str = ""
    #: A WaitKind of ``records.waits``, and the stage; empty and None where they are not known.
    kind: str = ""
    stage_id: int | None = None


class Board(Protocol):
    """Where waits are shown to other machines."""

    def show(self, waits: Sequence[Wait]) -> None:
        """These are the waits from now on. Returns at once; never raises."""

    def close(self) -> None:
        """Show nothing any more. Idempotent; never raises."""


class Waits:
    """Says what this process waits for. Used by one thread; a file that can't be written is logged once.

    Several waits of one process are told apart by a key. Files of processes that have ended are ignored and removed.
    ``board`` shows them to other machines; None: they are seen only here.
    """

    def __init__(
        self,
        folder: Path,
        namespace: str,
        endpoints: str,
        wall_s: Callable[[], float] = time.time,
        board: Board | None = None,
    ) -> None:
        self._folder = _waits_folder(folder, namespace)
        self._endpoints = endpoints
        self._wall_s = wall_s
        self._board = board
        self._waits: dict[str, Wait] = {}
        self._log_once = LogOnce()

    def begin(self, key: str, who: str, reason: str, kind: str = "", stage_id: int | None = None) -> None:
        """``who`` waits, because of ``reason``; a wait that goes on keeps its beginning. Never raises.

        ``kind`` is a WaitKind of ``records.waits``; ``stage_id`` the stage whose replicas are waited for.
        """
        former = self._waits.get(key)
        since_s = self._wall_s() if former is None else former.since_s
        reason = _printable(reason[:_MOST_CHARACTERS])
        wait = Wait(
            pid=os.getpid(),
            since_s=since_s,
            who=who,
            reason=reason,
            endpoints=self._endpoints,
            kind=kind,
            stage_id=stage_id,
        )
        if wait != former:
            self._waits[key] = wait
            self._write()

    def end(self, key: str) -> None:
        """The wait is over. Idempotent; never raises."""
        if self._waits.pop(key, None) is not None:
            self._write()

    def close(self) -> None:
        """All waits are over. Idempotent; never raises."""
        if self._waits:
            self._waits.clear()
            self._write()
        if self._board is not None:
            self._board.close()

    def _write(self) -> None:
        if self._board is not None:
            self._board.show(tuple(self._waits.values()))
        file = self._folder / f"{os.getpid()}.json"
        try:
            if not self._waits:
                file.unlink(missing_ok=True)
                return
            make_private(self._folder.parent)
            write_private(file, msgspec.json.encode(tuple(self._waits.values())))
        except (OSError, ConfigError) as error:
            if self._log_once.should():
                logger.warning("waits.not_written folder=%s reason=%s", self._folder, error)


def read_waits(folder: Path, namespace: str) -> list[Wait]:
    """What the processes of this user that run now wait for, the longest first. Never raises OSError."""
    found: list[Wait] = []
    if is_private(folder):
        for file in _waits_folder(folder, namespace).glob("*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                if not Path(f"/proc/{file.stem}").exists():
                    file.unlink(missing_ok=True)
                elif file.stat().st_size <= _MOST_BYTES:
                    found += msgspec.json.decode(file.read_bytes(), type=tuple[Wait, ...])
    return sorted(found, key=lambda wait: wait.since_s)


def _printable(text: str) -> str:
    """The text without what UTF-8 can't hold: a client may name its request by anything."""
    return text.encode("utf-8", "backslashreplace").decode()


def _folder(folder: Path, namespace: str) -> Path:
    return folder / f"{namespace}.stories"


def _waits_folder(folder: Path, namespace: str) -> Path:
    return folder / f"{namespace}.waits"


def _written_at_s(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
