"""The format of a block of shared memory, header and paths, its owner process, and the sweep of dead owners' files.

A block is a header and one hand-off. While it holds a hand-off its path is a hash of namespace, edge and key, so that a
reader finds it by these and two deployments never collide; otherwise its path is its home, its owner and a number.

An owner is a process id with its start time, because ids are reused, and with its process id namespace, because ids
mean nothing in another container.

Each connector sweeps files of dead processes of the same user: as it starts, and at most once in ``SWEEP_EVERY_S``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Final

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
    before = _with_lengths(namespace, from_stage, to_stage)
    return hashlib.blake2b(before + key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@lru_cache(maxsize=256)
def _with_lengths(*texts: str) -> bytes:
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"".join(len(text).to_bytes(8, "little") + text for text in encoded)


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


def owner_in_name(name: str) -> Owner | None:
    """The process in the name of a home or claim path; None for any other."""
    parts = name.split(".")
    return Owner.parse(parts[1]) if len(parts) > 1 else None


SWEEP_EVERY_S: Final = 60.0


def sweep(directory: Path) -> int:
    """Unlink the files of processes of this machine that have ended; the number of files."""
    swept = 0
    for path in directory.glob(f"{NAME_PREFIX}*"):
        owner = _owner_of(path)
        if owner is not None and owner.is_dead():
            # Of another user, or being swept by another process.
            with contextlib.suppress(OSError):
                _remove(path)
                swept += 1
    if swept:
        logger.info("shm.swept files=%d", swept)
    return swept


def _remove(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        path.unlink()
        # Readers keep unused files open; those must hold no memory.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _owner_of(path: Path) -> Owner | None:
    named = owner_in_name(path.name)
    if named is not None:
        return named
    try:
        with path.open("rb") as file:
            header = Header.parse(file.read(HEADER_BYTES))
    except OSError:
        return None
    return None if header is None else header.owner
