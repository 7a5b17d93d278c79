"""JobFolder: the files of jobs in a folder that all hubs of a namespace reach, readable by their owner only.

The file of a job is ``<id>.<part>``. All methods block: call them in a thread.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from hub.jobs.errors import JobFileError, JobStoreUnavailableError
from omni_discovery.errors import ConfigError
from omni_discovery.processes import check_unshared, write_private
from omni_discovery.records.jobs import JobRecord

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"\.?(video_[0-9a-f]{32})\.[a-z0-9_.]{1,80}")
#: A file whose job is not known is left alone for so long: its record may be about to be written.
_ORPHAN_S: Final = 3600.0
#: What is left of the disk, for others that write to it: so much of it, and no more than so many bytes.
_LEFT_FREE: Final = 0.05
_MOST_LEFT_FREE_BYTES: Final = 1 << 30
_NO_ROOM: Final = "the disk of the job store has no room: delete videos, or wait until older ones have expired"


class JobFolder:
    """A ``JobStore``. Raise ConfigError if another user could put files there."""

    def __init__(self, path: Path, namespace: str) -> None:
        self._path = path.absolute() / namespace
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_unshared(self._path)
        except OSError as error:
            raise ConfigError(f"--job-store {path}: {error.strerror}; give a folder of this user's") from error
        except ConfigError as error:
            raise ConfigError(f"--job-store: {error}") from error

    def write_sealed(self, job: JobRecord, part: str, sealed: Sequence[bytes]) -> None:
        """See JobStore. Raise JobStoreUnavailableError where too little of the disk would be left free."""
        try:
            # Why a job has failed is short, and told even then.
            if not part.endswith(".error"):
                self._check_room(sum(map(len, sealed)))
            write_private(self._file(job, part), b"".join(sealed))
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise JobStoreUnavailableError(_NO_ROOM) from error
            raise JobFileError(f"a file of the job store can't be written: {error.strerror}") from error

    def open_sealed(self, job: JobRecord, part: str, most_bytes: int) -> _OpenFile:
        """See JobStore."""
        try:
            number = os.open(self._file(job, part), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise JobFileError(f"a file of this job can't be read: {error.strerror}") from error
        file = os.fdopen(number, "rb")
        try:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
                raise JobFileError("a file of this job is none that a hub has written")
        except BaseException:
            file.close()
            raise
        return _OpenFile(file, status.st_size)

    def remove_file(self, job: JobRecord, part: str) -> None:
        """See JobStore."""
        with suppress(OSError):
            self._file(job, part).unlink(missing_ok=True)

    def remove_files(self, job: JobRecord) -> None:
        """See JobStore."""
        self._remove({job.job_id}, older_than_s=None)

    def remove_orphans(self, known: Collection[JobRecord]) -> int:
        """See JobStore."""
        return self._remove(None, older_than_s=time.time() - _ORPHAN_S, spared={job.job_id for job in known})

    def close(self) -> None:
        """See JobStore. There is nothing to end."""

    def _check_room(self, size_bytes: int) -> None:
        disk = os.statvfs(self._path)
        left = min(int(disk.f_blocks * disk.f_frsize * _LEFT_FREE), _MOST_LEFT_FREE_BYTES)
        # Some file systems do not say how much there is.
        if disk.f_blocks and disk.f_bavail * disk.f_frsize - size_bytes < left:
            raise JobStoreUnavailableError(_NO_ROOM)

    def _remove(self, only: Collection[str] | None, older_than_s: float | None, spared: Collection[str] = ()) -> int:
        removed = 0
        try:
            with os.scandir(self._path) as entries:
                for entry in entries:
                    found = _NAME.fullmatch(entry.name)
                    if found is None or found[1] in spared or (only is not None and found[1] not in only):
                        continue
                    with suppress(OSError):
                        if older_than_s is None or entry.stat(follow_symlinks=False).st_mtime < older_than_s:
                            Path(entry.path).unlink(missing_ok=True)
                            removed += 1
        except OSError as error:
            logger.warning("jobs.not_swept reason=%s", error)
        return removed

    def _file(self, job: JobRecord, part: str) -> Path:
        return self._path / f"{job.job_id}.{part}"


class _OpenFile:
    """See SealedFile."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self.size_bytes = size_bytes

    def read(self, size_bytes: int, /) -> bytes:
        """See SealedFile."""
        try:
            return self._file.read(size_bytes)
        except OSError as error:
            raise JobFileError(f"a file of this job can't be read: {error.strerror}") from error

    def close(self) -> None:
        """See SealedFile."""
        self._file.close()
