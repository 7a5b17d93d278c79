"""The format of a block of shared memory, header and paths, its owner process, and the sweep of dead owners' files.

A block is a header and one hand-off. While it holds a hand-off its path is a hash of namespace, edge and key, so that a
reader finds it by these and two deployments never collide; otherwise its path is its home, its owner and a number.

An owner is a process id with its start time, because ids are reused, and with its process id namespace, because ids
mean nothing in another container.

Each connector sweeps files of dead processes of the same user: as it starts, and at most once in ``SWEEP_EVERY_S``.
It does so in the engine's thread, a short while at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from stage_runtime.config import SerializationError

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"([0-9]+)-([0-9]+)-([0-9]+)")


@dataclass(frozen=True, slots=True)
class Owner:
    """One process. ``started`` is its start time in clock ticks since boot."""

    pid: int
    started: int
    pid_namespace: int

    @property
    def name(self) -> str:
        """The owner as a part of file names."""
        return f"{self.pid_namespace}-{self.pid}-{self.started}"

    @classmethod
    def parse(cls, name: str) -> Owner | None:
        """The owner of a ``name``; None for any other text."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        pid_namespace, pid, started = (int(part) for part in found.groups())
        return cls(pid, started, pid_namespace)

    @classmethod
    def of(cls, pid: int) -> Owner | None:
        """The living process with that id; None if there is none."""
        try:
            # The name in parentheses may hold spaces; the fields after it do not.
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        if fields[0] == "Z":
            return None
        return cls(pid, int(fields[19]), _pid_namespace())

    def is_dead(self) -> bool:
        """Whether the process has surely ended. False for a process of another container, which can't be checked."""
        return self.pid_namespace == _pid_namespace() and Owner.of(self.pid) != self


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


#: The calling process by its id: a fork has another id.
_known: dict[int, Owner] = {}


def me() -> Owner:
    """The calling process."""
    pid = os.getpid()
    if pid not in _known:
        _known.clear()
        _known[pid] = Owner.of(pid) or Owner(pid, 0, _pid_namespace())
    return _known[pid]


#: Bytes before the hand-off; its tensors are aligned to 64 bytes.
HEADER_BYTES: Final = 128
#: Offset of the state, one byte.
STATE_AT: Final = 8
#: Offset of the readers' note, one byte, written by readers and read by the owner.
FETCHED_AT: Final = 9
NOT_FETCHED, FETCHED, CONSUMED = 0, 1, 2
GENERATION_BYTES: Final = 16
TOKEN_BYTES: Final = 32
NAME_PREFIX: Final = "omni-"

#: Magic, state, note of readers, whether the first reader's note counts, size, owner, number, generation, digest.
HEADER: Final = struct.Struct("<8sBB?5xQQQQQ16s16s")
MAGIC: Final = b"OMNISHM3"


class State(IntEnum):
    """The state of a block. It is free until the last byte of a hand-off is written, and can't be read before.

    Gone: its owner has dropped it, and a reader that still has it must unlink every path that it gave it.
    """

    FREE = 0
    READY = 2
    GONE = 3


_STATES: Final = frozenset(State)


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of a block. ``generation`` is unique to a hand-off; ``key_digest`` is the hash of its key.

    ``number`` is unique among the blocks of its owner.
    """

    state: State
    size_bytes: int
    owner: Owner
    number: int
    generation: bytes
    key_digest: bytes

    @classmethod
    def parse(cls, content: bytes) -> Header | None:
        """The header at the beginning of ``content``; None for other content."""
        if len(content) < HEADER.size:
            return None
        magic, state, _, _, size, pid, started, pid_namespace, number, generation, digest = HEADER.unpack_from(content)
        if magic != MAGIC or state not in _STATES:
            return None
        return cls(State(state), size, Owner(pid, started, pid_namespace), number, generation, digest)


def key_digest(namespace: str, from_stage: str, to_stage: str, key: str) -> bytes:
    """The hash of a key, 16 bytes. Texts are hashed with their lengths, so no other four texts give the same."""
    hashed = _hash_of_edge(namespace, from_stage, to_stage).copy()
    hashed.update(key.encode("utf-8", "surrogatepass"))
    return hashed.digest()


@lru_cache(maxsize=256)
def _hash_of_edge(*texts: str) -> hashlib.blake2b:
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return hashlib.blake2b(b"".join(len(text).to_bytes(8, "little") + text for text in encoded), digest_size=16)


# Paths are plain text here: making a Path takes longer than what is done with it.


def payload_path(directory: str, digest: bytes) -> str:
    """The path of a block while it holds the hand-off with that digest."""
    return f"{directory}/{NAME_PREFIX}{digest.hex()}"


def segment_name(owner: Owner, number: int) -> str:
    """The id of a block, unique on this machine, whatever its path is."""
    return f"{owner.name}.{number}"


def home_path(directory: str, owner: Owner, number: int) -> str:
    """The path of a block while it holds nothing to read."""
    return f"{directory}/{NAME_PREFIX}segment.{segment_name(owner, number)}"


def claim_path(payload: str, owner: Owner, number: int) -> str:
    """The path to which the reader ``owner`` renames a hand-off to claim it from all other readers."""
    return f"{payload}.{owner.name}.{number}"


def new_number() -> int:
    """A number for a home or claim path that no other user could guess, and so take the path before."""
    return int.from_bytes(os.urandom(8), "little")


#: The errors of a path that something of another user has, or of a folder that this user may not write to.
TAKEN: Final = frozenset({errno.EEXIST, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTEMPTY, errno.EROFS})


def owner_in_name(name: str) -> Owner | None:
    """The process in the name of a home or claim path; None for any other."""
    parts = name.split(".")
    return Owner.parse(parts[1]) if len(parts) > 1 else None


SWEEP_EVERY_S: Final = 60.0
#: In how many slices a folder should be gone through.
_MOST_SLICES: Final = 60


class Sweeper:
    """Unlinks, in a folder, the files of this user's processes on this machine that have ended. Used by any thread.

    Whatever else lies there under such a name is left alone, and so is the folder if it can't be read. Other users may
    put any number of names there, so the folder is gone through in slices of time.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._folder = -1
        #: The names that were not looked at yet; None between two times through the folder.
        self._scan: Any = None
        self._slices = self._looked_at = self._swept = 0
        self._closed = False

    def sweep_for(self, for_s: float) -> bool:
        """Go on for so many seconds at most, then for the file that it is at; whether all was gone through.

        False also while another thread is at it.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            until_s = self._clock() + for_s
            if self._begin() and not self._go_on(until_s):
                self._tell_late()
                return False
            self._end()
            return True
        finally:
            self._lock.release()

    def close(self) -> None:
        """Leave the rest to others. Idempotent."""
        with self._lock:
            self._closed = True
            self._end()

    def _begin(self) -> bool:
        """Whether there is something to go through."""
        if self._scan is None and not self._closed:
            # By a descriptor, so that no other folder can be put there.
            with contextlib.suppress(OSError):
                self._folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                self._scan = os.scandir(self._folder)
        return self._scan is not None

    def _go_on(self, until_s: float) -> bool:
        with contextlib.suppress(OSError):
            for entry in self._scan:
                self._looked_at += 1
                # Of another user, no file, or being swept by another process.
                with contextlib.suppress(OSError, SerializationError):
                    self._swept += entry.name.startswith(NAME_PREFIX) and _sweep_file(entry, self._folder)
                if self._clock() >= until_s:
                    return False
        return True

    def _end(self) -> None:
        if self._scan is not None:
            self._scan.close()
        if self._folder >= 0:
            os.close(self._folder)
        if self._swept:
            logger.info("shm.swept files=%d", self._swept)
        self._scan, self._folder = None, -1
        self._slices = self._looked_at = self._swept = 0

    def _tell_late(self) -> None:
        self._slices += 1
        if self._slices == _MOST_SLICES:
            logger.warning(
                "shm.sweep_late folder=%s names=%d: too many names lie there to go through them in time, and what "
                "ended processes left stays meanwhile; ls -l says whose they are: have that user remove them",
                self._directory,
                self._looked_at,
            )


def open_own_file(path: str, folder: int | None = None) -> int:
    """Open a file of this user for reading and writing; ``path`` is looked up in the folder of that descriptor.

    Anybody may put anything under any name into /dev/shm, so this never blocks and follows no link. Raise
    SerializationError for whatever is not a file of this user, OSError if the file can't be opened.
    """
    # Looked at before it is opened: opening may block, or do something, for what is no file.
    _check_own(os.stat(path, dir_fd=folder, follow_symlinks=False), path)
    # The name may lead to something else by now.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    try:
        _check_own(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_own(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SerializationError(f"{path} is no hand-off: no regular file")
    if status.st_uid != os.geteuid():
        raise SerializationError(f"{path} is no hand-off: another user's file")


def _sweep_file(entry: os.DirEntry[str], folder: int) -> bool:
    # Of others there may be any number: no error is made for each.
    if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return False
    name = entry.name
    descriptor = open_own_file(name, folder)
    try:
        owner = owner_in_name(name)
        if owner is None:
            header = Header.parse(os.pread(descriptor, HEADER_BYTES, 0))
            owner = None if header is None else header.owner
        if owner is None or not owner.is_dead():
            return False
        os.unlink(name, dir_fd=folder)
        # Readers keep unused files open; those must hold no memory. A file with another name is another block's.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(descriptor).st_nlink:
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
    return True
