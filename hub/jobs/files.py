"""JobFiles: the files of jobs, encrypted, in a store that all hubs of a namespace reach.

A job has a file ``request``, and each claim of it ``<claim>.video`` or ``<claim>.error``. What lies in the store is
encrypted here, and what comes from it is checked here: stores see neither keys nor contents. All methods block: call
them in a thread.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Protocol

from hub.jobs.cipher import SALT_BYTES, JobKeys, content_bytes, seal, unseal
from hub.jobs.errors import JobFileError
from hub.jobs.job import Client
from omni_discovery.records.jobs import JobRecord, is_job_id

REQUEST: Final = "request"
#: The longest file of each kind.
_MOST_BYTES: Final = {REQUEST: 16 << 20, "video": 80 << 20, "error": 256 << 10}


def video_of(claim: int) -> str:
    """The part of the name of the file with the answer of a claim."""
    return f"{claim}.video"


def error_of_claim(claim: int) -> str:
    """The part of the name of the file with the text of the error of a claim."""
    return f"{claim}.error"


class SealedFile(Protocol):
    """An encrypted file that is read. Its methods raise JobFileError, or JobStoreUnavailableError."""

    @property
    def size_bytes(self) -> int:
        """Its length."""

    def read(self, size_bytes: int, /) -> bytes:
        """The next bytes; fewer only at its end."""

    def close(self) -> None:
        """Read no more of it."""


class JobStore(Protocol):
    """Where encrypted files of one namespace lie. The jobs that it is given have ids of jobs."""

    def write_sealed(self, job: JobRecord, part: str, sealed: Sequence[bytes]) -> None:
        """Write a file at once or not at all. Raise JobFileError, JobStoreUnavailableError."""

    def open_sealed(self, job: JobRecord, part: str, most_bytes: int) -> SealedFile:
        """Open a file that is no longer than that. Raise JobFileError, JobStoreUnavailableError."""

    def remove_file(self, job: JobRecord, part: str) -> None:
        """Remove one file, if it is there. What can't be removed now goes with ``remove_orphans``."""

    def remove_files(self, job: JobRecord) -> None:
        """Remove all files of a job, if there are any. What can't be removed now goes with ``remove_orphans``."""

    def remove_orphans(self, known: Collection[JobRecord]) -> int:
        """Remove what lies there of jobs that are not known, and was not written lately; return how many files."""

    def close(self) -> None:
        """End what the store needs in this hub. Idempotent."""


class JobFiles:
    """The files of one namespace's jobs in a store."""

    def __init__(self, store: JobStore, namespace: str, keys: JobKeys) -> None:
        self._store = store
        self._namespace = namespace
        self._keys = keys
        self.remove_file = store.remove_file
        self.remove_files = store.remove_files
        self.remove_orphans = store.remove_orphans
        self.close = store.close

    @property
    def secret(self) -> str:
        """The name of the key with which the files of new jobs are encrypted."""
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

    def write_file(self, job: JobRecord, part: str, content: bytes) -> None:
        """Write a file at once or not at all. Raise JobFileError, JobStoreUnavailableError."""
        place = self._place(job, part)
        sealed = list(seal(self._keys.of(job.secret), place, os.urandom(SALT_BYTES), content))
        if sum(map(len, sealed)) > _most_of(part):
            raise JobFileError(f"{len(content)} bytes are more than a job may have in one file")
        self._store.write_sealed(job, part, sealed)

    def open_file(self, job: JobRecord, part: str) -> tuple[int, Iterator[bytes]]:
        """The length of the content of a file, and the content in pieces.

        Raise JobFileError, JobStoreUnavailableError, here or with a piece.
        """
        key, place = self._keys.of(job.secret), self._place(job, part)
        file = self._store.open_sealed(job, part, _most_of(part))
        try:
            length = content_bytes(file.size_bytes)
        except BaseException:
            file.close()
            raise

        def pieces() -> Iterator[bytes]:
            try:
                yield from unseal(key, place, file.size_bytes, file.read)
            finally:
                file.close()

        return length, pieces()

    def read_file(self, job: JobRecord, part: str) -> bytes:
        """The whole content of a file. Raise JobFileError, JobStoreUnavailableError."""
        return b"".join(self.open_file(job, part)[1])

    def _place(self, job: JobRecord, part: str) -> str:
        """What a file is bound to: it decrypts nowhere else. Raise JobFileError for an id that is none."""
        if not is_job_id(job.job_id):
            raise JobFileError("that is the id of no job")
        return f"{self._namespace}/{job.job_id}.{part}"


def _most_of(part: str) -> int:
    return _MOST_BYTES[part.rpartition(".")[2]]
