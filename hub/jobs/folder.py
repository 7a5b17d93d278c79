"""JobFolder: the files of jobs in a folder that all hubs of a namespace reach, encrypted, readable by their owner only.

A job has a file ``<id>.request``, and each claim of it ``<id>.<claim>.video`` or ``<id>.<claim>.error``. All methods
block: call them in a thread.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from hub.jobs.cipher import SALT_BYTES, JobKeys, content_bytes, seal, unseal
from hub.jobs.errors import JobFileError
from hub.jobs.job import Client
from omni_discovery.errors import ConfigError
from omni_discovery.processes import check_unshared, write_private
from omni_discovery.records.jobs import is_job_id

logger = logging.getLogger(__name__)

REQUEST: Final = "request"
#: The longest file of each kind.
_MOST_BYTES: Final = {REQUEST: 16 << 20, "video": 80 << 20, "error": 256 << 10}
_NAME: Final = re.compile(r"\.?(video_[0-9a-f]{32})\.[a-z0-9_.]{1,80}")
#: A file whose job is not known is left alone for so long: its record may be about to be written.
_ORPHAN_S: Final = 3600.0


def video_of(claim: int) -> str:
    """The part of the name of the file with the answer of a claim."""
    return f"{claim}.video"


def error_of_claim(claim: int) -> str:
    """The part of the name of the file with the text of the error of a claim."""
    return f"{claim}.error"


class JobFolder:
    """The files of one namespace's jobs. Raise ConfigError if another user could put files there."""

    def __init__(self, path: Path, namespace: str, keys: JobKeys) -> None:
        self._namespace = namespace
        self._keys = keys
        self._path = path.absolute() / namespace
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_unshared(self._path)
        except OSError as error:
            raise ConfigError(f"--job-store {path}: {error.strerror}; give a folder of this user's") from error
        except ConfigError as error:
            raise ConfigError(f"--job-store: {error}") from error

    @property
    def secret(self) -> str:
        """The name of the key with which new files are encrypted."""
        return self._keys.first.name

    def knows(self, secret: str) -> bool:
        """Whether this hub has the key with this name."""
        return self._keys.has(secret)

    def mark_of(self, secret: str, client: Client) -> str | None:
        """What the record of a job with this secret says of its client; None for a secret that this hub has not.

        It is made of the client's key and the operator's, so that who reads etcd can't try keys out on it.
        """
        if not client.digest:
            return ""
        if not self._keys.has(secret):
            return None
        return hmac.digest(self._keys.of(secret).secret, b"omni-job-client\0" + client.digest, "sha256").hex()[:32]

    def write_file(self, job_id: str, part: str, secret: str, content: bytes) -> None:
        """Write a file at once or not at all. Raise JobFileError."""
        sealed = b"".join(seal(self._keys.of(secret), self._place(job_id, part), os.urandom(SALT_BYTES), content))
        if len(sealed) > _most_of(part):
            raise JobFileError(f"{len(content)} bytes are more than a job may have in one file")
        try:
            write_private(self._file(job_id, part), sealed)
        except OSError as error:
            raise JobFileError(f"a file of the job store can't be written: {error.strerror}") from error

    def open_file(self, job_id: str, part: str, secret: str) -> tuple[int, Iterator[bytes]]:
        """The length of the content of a file, and the content in pieces. Raise JobFileError, here or with a piece."""
        key, path = self._keys.of(secret), self._file(job_id, part)
        try:
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise JobFileError(f"a file of this job can't be read: {error.strerror}") from error
        file = os.fdopen(number, "rb")
        try:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _most_of(part):
                raise JobFileError("a file of this job is none that a hub has written")
            length = content_bytes(status.st_size)
        except BaseException:
            file.close()
            raise

        def pieces() -> Iterator[bytes]:
            with file:
                try:
                    yield from unseal(key, self._place(job_id, part), status.st_size, file.read)
                except OSError as error:
                    raise JobFileError(f"a file of this job can't be read: {error.strerror}") from error

        return length, pieces()

    def read_file(self, job_id: str, part: str, secret: str) -> bytes:
        """The whole content of a file. Raise JobFileError."""
        return b"".join(self.open_file(job_id, part, secret)[1])

    def remove_file(self, job_id: str, part: str) -> None:
        """Remove one file, if it is there."""
        with suppress(OSError):
            self._file(job_id, part).unlink(missing_ok=True)

    def remove_files(self, job_id: str) -> None:
        """Remove all files of a job, if there are any."""
        self._remove({job_id}, older_than_s=None)

    def remove_orphans(self, known: Collection[str]) -> int:
        """Remove what lies there of jobs that are not known, and was not written lately; return how many files."""
        return self._remove(None, older_than_s=time.time() - _ORPHAN_S, spared=known)

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

    def _place(self, job_id: str, part: str) -> str:
        """What a file is bound to: it decrypts nowhere else."""
        return f"{self._namespace}/{job_id}.{part}"

    def _file(self, job_id: str, part: str) -> Path:
        if not is_job_id(job_id):
            raise JobFileError("that is the id of no job")
        return self._path / f"{job_id}.{part}"


def _most_of(part: str) -> int:
    return _MOST_BYTES[part.rpartition(".")[2]]
