"""What a segment of shared memory looks like from outside: its header and its names. Decides nothing, holds nothing.

A segment is a header and one payload. While it holds a payload it is called by a hash of namespace, edge and key, so
that who knows those finds it and two deployments never meet; otherwise by its owner and a number.

Which process made a file in shared memory, and whether it still lives.

A process id alone can be given anew, so its start time goes with it; and it means nothing in another container, so the
process id namespace goes with both.

Away with what dead processes left in shared memory.

Anybody of the same user may sweep: each connector does as it starts, and at most once in ``SWEEP_EVERY_S`` after that.
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
    """One process. ``started`` is in clock ticks since the machine's start."""

    pid: int
    started: int
    pid_namespace: int

    @property
    def name(self) -> str:
        """A form for file names."""
        return f"{self.pid_namespace}-{self.pid}-{self.started}"

    @classmethod
    def parse(cls, name: str) -> Owner | None:
        """The owner that ``name`` was made from; None if it is no such name."""
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
        """Whether the process is surely gone. False for processes of other containers: we can't know."""
        return self.pid_namespace == _pid_namespace() and Owner.of(self.pid) != self


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


#: This process, by the id it had then: a fork makes it another.
_known: dict[int, Owner] = {}


def me() -> Owner:
    """The calling process."""
    pid = os.getpid()
    if pid not in _known:
        _known.clear()
        _known[pid] = Owner.of(pid) or Owner(pid, 0, _pid_namespace())
    return _known[pid]


#: Bytes before the payload; tensors lie on multiples of 64 behind it.
HEADER_BYTES: Final = 128
#: Where the state stands: one byte.
STATE_AT: Final = 8
#: Where a reader notes that it was there: one byte, written by readers, read by the owner.
FETCHED_AT: Final = 9
NOT_FETCHED, FETCHED, CONSUMED = 0, 1, 2
GENERATION_BYTES: Final = 16
TOKEN_BYTES: Final = 32
NAME_PREFIX: Final = "omni-"

#: Magic, state, note of readers, whether the first reader's note counts, size, owner, number, generation, digest.
HEADER: Final = struct.Struct("<8sBB?5xQQQQQ16s16s")
MAGIC: Final = b"OMNISHM3"


class State(IntEnum):
    """What a segment holds. It is free until the last byte of a payload is written, and nobody can read before.

    Gone is what its owner has given up: who still has it in hand must leave no name of it behind.
    """

    FREE = 0
    READY = 2
    GONE = 3


_STATES: Final = frozenset(State)


@dataclass(frozen=True, slots=True)
class Header:
    """A segment's first bytes. ``generation`` is new for each payload; ``key_digest`` says whose payload it is.

    ``number`` is the segment's own among its owner's.
    """

    state: State
    size_bytes: int
    owner: Owner
    number: int
    generation: bytes
    key_digest: bytes

    @classmethod
    def parse(cls, content: bytes) -> Header | None:
        """The header that starts ``content``; None if it is none of ours."""
        if len(content) < HEADER.size:
            return None
        magic, state, _, _, size, pid, started, pid_namespace, number, generation, digest = HEADER.unpack_from(content)
        if magic != MAGIC or state not in _STATES:
            return None
        return cls(State(state), size, Owner(pid, started, pid_namespace), number, generation, digest)


def key_digest(namespace: str, from_stage: str, to_stage: str, key: str) -> bytes:
    """What tells payloads apart: the same for the same four texts only, wherever one ends and the next begins."""
    before = _with_lengths(namespace, from_stage, to_stage)
    return hashlib.blake2b(before + key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@lru_cache(maxsize=256)
def _with_lengths(*texts: str) -> bytes:
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"".join(len(text).to_bytes(8, "little") + text for text in encoded)


# Names are plain text here, not paths: making those takes longer than what is done with them.


def payload_path(directory: str, digest: bytes) -> str:
    """The name of a segment while it holds the payload with that digest."""
    return f"{directory}/{NAME_PREFIX}{digest.hex()}"


def segment_name(owner: Owner, number: int) -> str:
    """What tells a segment from all others of this machine, whatever its name is."""
    return f"{owner.name}.{number}"


def home_path(directory: str, owner: Owner, number: int) -> str:
    """The name of a process's segment while it holds nothing that others may read."""
    return f"{directory}/{NAME_PREFIX}segment.{segment_name(owner, number)}"


def claim_path(payload: str, owner: Owner, number: int) -> str:
    """The name under which ``owner`` takes a payload away from all other readers."""
    return f"{payload}.{owner.name}.{number}"


def owner_in_name(name: str) -> Owner | None:
    """The process in a file's name, where that is of the latter two kinds; None for others."""
    parts = name.split(".")
    return Owner.parse(parts[1]) if len(parts) > 1 else None


SWEEP_EVERY_S: Final = 60.0


def sweep(directory: Path) -> int:
    """Unlink what processes of this machine left that are dead by now; say how many files that were."""
    swept = 0
    for path in directory.glob(f"{NAME_PREFIX}*"):
        owner = _owner_of(path)
        if owner is not None and owner.is_dead():
            # Another user's, or swept by another process in this moment.
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
        # Readers keep files open that they look at no more; those must hold no memory.
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
