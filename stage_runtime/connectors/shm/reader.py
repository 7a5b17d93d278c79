"""The reader's side of shared memory: views of a hand-off in place, without a copy.

A view is private and writable: its user's writes are seen by no other process. It holds the shared lock of the block,
so the owner can't reuse the block before the view is gone; if the reader is killed, the kernel releases the lock.

Opening and mapping a file, and the faults of its pages, take longer than all the rest, so a block that was read once
stays mapped for its next hand-off. That holds no memory, because an owner that drops a block truncates its file.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import numpy as np

from stage_runtime.config import SerializationError
from stage_runtime.connectors.store.layout import (
    CONSUMED,
    FETCHED,
    FETCHED_AT,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    STATE_AT,
    TAKEN,
    Header,
    State,
    claim_path,
    home_path,
    key_digest,
    me,
    new_number,
    open_own_file,
    payload_path,
    segment_name,
)

#: The kernel's table of this process's pages, 8 bytes each. The highest three bits: present, swapped, of a file. A page
#: of a private mapping that was written to is present and not of a file.
PAGEMAP = "/proc/self/pagemap"
_UNTOUCHED: Final = 0b000
_OF_THE_FILE: Final = 0b101


class Mapped:
    """A block in a reader's process: its open file, mapped privately. One view at a time uses it."""

    # Kept as attributes, because modules may be cleared before the last object at the end of the process.
    _flock, _unlock = staticmethod(fcntl.flock), fcntl.LOCK_UN
    _pid_now, _close = staticmethod(os.getpid), staticmethod(os.close)

    def __init__(self, name: str, descriptor: int, size_bytes: int) -> None:
        self.descriptor = self._pages = -1
        self.name = name
        self.map = mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY)
        self._address: int = np.frombuffer(self.map, np.uint8).__array_interface__["data"][0]
        self._pid = self._pid_now()
        with contextlib.suppress(OSError):
            # Shows this process only, not one forked later.
            self._pages = os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        self.descriptor = descriptor

    def is_ours(self) -> bool:
        """False in a process that was forked later, where the lock still belongs to the parent."""
        return self._pid == self._pid_now()

    def is_whole(self) -> bool:
        """Whether the file has its full length."""
        return os.lseek(self.descriptor, 0, os.SEEK_END) == len(self.map)

    def unlock(self) -> None:
        """Release the shared lock, so that the owner can reuse the block."""
        self._flock(self.descriptor, self._unlock)

    def forget(self, size_bytes: int) -> bool:
        """Discard the writes to a view of ``size_bytes``.

        False if the owner has dropped the block; then its memory is released, too, unless there is another reader.
        """
        if self._was_written(HEADER_BYTES + size_bytes):
            self.map.madvise(mmap.MADV_DONTNEED)
        if os.fstat(self.descriptor).st_nlink:
            return True
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self.descriptor, 0)
        return False

    def _was_written(self, size_bytes: int) -> bool:
        """Whether any of the first pages is not the file's any more; True if the kernel doesn't tell."""
        if self._pages < 0:
            return True
        first, count = self._address // mmap.PAGESIZE, -(-size_bytes // mmap.PAGESIZE)
        found = np.frombuffer(os.pread(self._pages, 8 * count, 8 * first), np.uint64) >> np.uint64(61)
        return len(found) < count or bool(((found != _UNTOUCHED) & (found != _OF_THE_FILE)).any())

    def close(self) -> None:
        """Unlock and close the file. The mapping goes with its last view. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0 and self.is_ours():
            self._flock(descriptor, self._unlock)
        if descriptor >= 0:
            self._close(descriptor)
        pages, self._pages = self._pages, -1
        if pages >= 0:
            self._close(pages)

    __del__ = close


#: How often a path is looked up again after another block was renamed to it in between.
_TRIES: Final = 5
#: How many unused blocks stay mapped; each takes three descriptors.
KEPT_MAPPED: Final = 32


class ShmView(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a hand-off in place. Tensors made of it keep it alive; the block is unlocked with the last one."""

    mapped: Mapped | None = None
    reader: ShmReader
    locked: bool
    _is_ending = staticmethod(sys.is_finalizing)

    def payload(self) -> memoryview:
        """All its bytes, not copied."""
        return self.data

    def let_go(self) -> None:
        """Unlock the block now. Tensors that still lie in it may change from here on. Idempotent."""
        if self.mapped is not None and self.locked:
            self.locked = False
            self.mapped.unlock()

    def __del__(self) -> None:
        if self.mapped is not None and self.mapped.is_ours() and not self._is_ending():
            self.let_go()
            self.reader.take_back(self.mapped, self.size)


class ShmReader:
    """Finds hand-offs in ``directory``, and keeps blocks that it has read mapped. Used by any thread.

    Without ``by_key``, a key alone finds none: keys can be guessed, and whoever names one could read others' hand-offs.
    """

    def __init__(self, namespace: str, directory: str, *, by_key: bool) -> None:
        self._namespace = namespace
        self._directory = directory
        self._by_key = by_key
        #: Mapped blocks without a view, by id, the last used one last. Taking one out is owning it, so no lock is
        #: needed: the garbage collector may put one back at any moment.
        self._known: OrderedDict[str, Mapped] = OrderedDict()
        self._keep = KEPT_MAPPED

    def read(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> ShmView | None:
        """A view of a hand-off; None if it is not there, or not the generation that the metadata mean.

        Consumes it unless the metadata say ``consume: False``. Raise SerializationError if the file is no hand-off.
        """
        generation, segment = metadata.get("generation"), metadata.get("segment")
        consume = bool(metadata.get("consume", True))
        if not isinstance(generation, bytes):
            if not self._by_key:
                return None
            generation = None
        elif isinstance(segment, str) and (mapped := self._known.pop(segment, None)) is not None and mapped.is_ours():
            view = self._enter_again(mapped, generation, consume)
            if view is not None:
                return view
        return self._attach(key_digest(self._namespace, *edge), generation, consume)

    def take_back(self, mapped: Mapped, size_bytes: int) -> None:
        """Keep a block without a view mapped, or close it."""
        known = self._known
        kept = mapped.forget(size_bytes) and len(known) < self._keep
        if not kept or known.setdefault(mapped.name, mapped) is not mapped:
            mapped.close()
        elif not self._keep:
            # The reader was closed meanwhile.
            self._trim(0)

    def close(self) -> None:
        """Close the unused blocks and keep none from now on. Views stay valid. Idempotent."""
        self._keep = 0
        self._trim(0)

    def _trim(self, count: int) -> None:
        while len(self._known) > count:
            with contextlib.suppress(KeyError):
                self._known.popitem(last=False)[1].close()

    def _enter_again(self, mapped: Mapped, generation: bytes, consume: bool) -> ShmView | None:
        try:
            fcntl.flock(mapped.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if mapped.is_whole():
                magic, state, note, counted, size, _, _, _, _, found, digest = HEADER.unpack_from(mapped.map)
                # The generation is unique, so the key need not be compared.
                right = magic == MAGIC and state == State.READY and note != CONSUMED and found == generation
                if right and size <= len(mapped.map) - HEADER_BYTES:
                    if consume:
                        _claim(payload_path(self._directory, digest), mapped.descriptor)
                    if consume or counted:
                        _note(mapped.descriptor, consume)
                    return self._view(mapped, size)
        except (BlockingIOError, _MovedError):
            pass
        except BaseException:
            mapped.close()
            raise
        mapped.close()
        return None

    def _view(self, mapped: Mapped, size_bytes: int) -> ShmView:
        view = ShmView(size_bytes, np.uint8, mapped.map, HEADER_BYTES)
        view.reader, view.locked, view.mapped = self, True, mapped
        return view

    def _attach(self, digest: bytes, generation: bytes | None, consume: bool) -> ShmView | None:
        self._trim(max(self._keep - 1, 0))
        path = payload_path(self._directory, digest)
        for _ in range(_TRIES):
            try:
                descriptor = open_own_file(path)
            except FileNotFoundError:
                return None
            try:
                mapped, size = _map(path, descriptor, digest, generation, consume)
            except BaseException as error:
                os.close(descriptor)
                if isinstance(error, _AnotherError):
                    return None
                # Its owner is writing the next hand-off into it: the path belongs to another block now, or to none.
                if not isinstance(error, BlockingIOError | _MovedError):
                    raise
            else:
                return self._view(mapped, size)
        return None


def _map(path: str, descriptor: int, digest: bytes, generation: bytes | None, consume: bool) -> tuple[Mapped, int]:
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    header, file_bytes = _check(path, descriptor)
    if header.state is not State.READY or header.key_digest != digest:
        raise _MovedError
    if generation is not None and header.generation != generation:
        raise _AnotherError
    if consume:
        _claim(path, descriptor)
    _note(descriptor, consume)
    return Mapped(segment_name(header.owner, header.number), descriptor, file_bytes), header.size_bytes


def _note(descriptor: int, consumed: bool) -> None:
    """Note for the owner that the hand-off was fetched, or consumed."""
    os.pwrite(descriptor, bytes([CONSUMED if consumed else FETCHED]), FETCHED_AT)


class _AnotherError(Exception):
    """The path belongs to another generation than the wanted one."""


class _MovedError(Exception):
    """The path belongs to another block by now."""


def _check(path: str, descriptor: int) -> tuple[Header, int]:
    status = os.fstat(descriptor)
    header = Header.parse(os.pread(descriptor, HEADER_BYTES, 0))
    if header is None or header.size_bytes > status.st_size - HEADER_BYTES:
        # A block that is being dropped is truncated, and its path is gone already.
        if status.st_nlink == 0:
            raise _MovedError
        raise SerializationError(f"{path} is no hand-off")
    return header, status.st_size


def _claim(path: str, descriptor: int) -> None:
    header = Header.parse(os.pread(descriptor, HEADER_BYTES, 0))
    if header is None:
        raise _MovedError
    claimed = Path(claim_path(path, me(), new_number()))
    try:
        Path(path).rename(claimed)
    except FileNotFoundError:
        raise _MovedError from None
    found, mine = claimed.lstat(), os.fstat(descriptor)
    if (found.st_ino, found.st_dev) != (mine.st_ino, mine.st_dev):
        _put_back(claimed, path)
        raise _MovedError
    if header.owner.is_dead():
        claimed.unlink()
    else:
        home = Path(home_path(str(claimed.parent), header.owner, header.number))
        try:
            claimed.rename(home)
        except OSError as error:
            if error.errno not in TAKEN:
                raise
            # Another user has taken its home. The owner drops a consumed block that has no path.
            claimed.unlink()
        else:
            if _state(descriptor) is State.GONE:
                home.unlink(missing_ok=True)


def _put_back(claimed: Path, path: str) -> None:
    """Give a wrongly claimed block its path back, unless another block has it now, or the block was dropped."""
    try:
        descriptor = open_own_file(str(claimed))
    except SerializationError:
        # Only root can have renamed what is another user's.
        claimed.unlink()
        return
    try:
        if _state(descriptor) is State.READY:
            with contextlib.suppress(FileExistsError):
                os.link(claimed, path)
        claimed.unlink()
        # Its owner may have unlinked its paths before it had this one again.
        if _state(descriptor) is not State.READY:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(Path(path).stat(), os.fstat(descriptor)):
                    Path(path).unlink()
    finally:
        os.close(descriptor)


def _state(descriptor: int) -> State | None:
    found = os.pread(descriptor, 1, STATE_AT)
    return State(found[0]) if found and found[0] in set(State) else None
