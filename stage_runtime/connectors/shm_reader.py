"""A reader's side of shared memory: views of a payload where it lies, without copying it.

A view is private and writable: what its user writes, nobody else sees. It holds the segment's shared lock, so the
owner can't use the segment again before the view is gone; the kernel takes the lock back if the reader is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
from pathlib import Path
from typing import Final

from stage_runtime.connectors.layout import (
    CONSUMED,
    FETCHED,
    FETCHED_AT,
    HEADER_BYTES,
    Header,
    State,
    claim_path,
    home_path,
)
from stage_runtime.connectors.shm_owner import me
from stage_runtime.errors import SerializationError

#: A name may be given to another segment between two looks; so often it is looked up anew.
_TRIES: Final = 5

_claims = itertools.count()


class View(mmap.mmap):
    """A mapped payload. Tensors made of it keep it alive; with the last of them the segment is let go."""

    #: The file's descriptor; the mapping has one of its own, and both share one lock.
    descriptor: int = -1
    #: Held here, for modules are empty when the last views go as the process ends.
    _close = staticmethod(os.close)

    def payload(self) -> memoryview:
        """The payload without the header."""
        return memoryview(self)[HEADER_BYTES:]

    def let_go(self) -> None:
        """Let the owner use the segment again, now. What still views it may see anything from here on. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            self._close(descriptor)

    def __del__(self) -> None:
        # Closed is unlocked: the mapping's own descriptor goes with it.
        if self.descriptor >= 0:
            self._close(self.descriptor)


def attach(path: str, key_digest: bytes, generation: bytes | None, *, consume: bool) -> View | None:
    """The payload of that name; None if it is not there, or not of that ``generation``.

    With ``consume`` only one reader gets it. Raise SerializationError if the file is none of ours.
    """
    for _ in range(_TRIES):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            header = _check(path, descriptor)
            if header.state is State.READY and header.key_digest == key_digest:
                return _enter(path, descriptor, header, generation, consume=consume)
        except (BlockingIOError, _MovedError):
            # Its owner writes the next payload into it: what the name means now is another segment, or nothing.
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        else:
            os.close(descriptor)
    return None


class _MovedError(Exception):
    """The name means another segment by now."""


def _check(path: str, descriptor: int) -> Header:
    status = os.fstat(descriptor)
    header = Header.parse(os.pread(descriptor, HEADER_BYTES, 0))
    if status.st_uid != os.geteuid() or header is None or header.size_bytes > status.st_size - HEADER_BYTES:
        # A segment that is let go in this moment has an empty header, and its name is gone already.
        if not any(os.pread(descriptor, HEADER_BYTES, 0)) and status.st_size >= HEADER_BYTES:
            raise _MovedError
        raise SerializationError(f"{path} is no hand-off")
    return header


def _enter(path: str, descriptor: int, header: Header, generation: bytes | None, *, consume: bool) -> View | None:
    if generation is not None and header.generation != generation:
        os.close(descriptor)
        return None
    if consume:
        _claim(path, descriptor, header)
    view = View(descriptor, HEADER_BYTES + header.size_bytes, access=mmap.ACCESS_COPY)
    view.descriptor = descriptor
    os.pwrite(descriptor, bytes([CONSUMED if consume else FETCHED]), FETCHED_AT)
    return view


def _claim(path: str, descriptor: int, header: Header) -> None:
    claimed = Path(claim_path(path, me(), next(_claims)))
    try:
        Path(path).rename(claimed)
    except FileNotFoundError:
        raise _MovedError from None
    found, mine = claimed.stat(), os.fstat(descriptor)
    if (found.st_ino, found.st_dev) != (mine.st_ino, mine.st_dev):
        # Another payload of that name came in between: put it back, unless there is yet another one.
        with contextlib.suppress(FileExistsError):
            os.link(claimed, path)
        claimed.unlink()
        raise _MovedError
    if header.owner.is_dead():
        claimed.unlink()
    else:
        claimed.rename(home_path(str(claimed.parent), header.owner, header.number))
