"""JobObjects: the files of jobs as objects of a Mooncake store, which lie in the memory of store processes.

The first object of a file is written last, so that a file which is found is whole. All methods block, for seconds where
the store does not answer: call them in a thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from hub.jobs.errors import JobFileError, JobStoreUnavailableError
from hub.jobs.mooncake.names import (
    SLICE_BYTES,
    Head,
    decode_head,
    encode_head,
    file_prefix,
    head_names,
    job_prefix,
    orphans_pattern,
    pattern_of,
    slice_name,
    slices_of,
)
from omni_discovery.records.jobs import JobRecord

if TYPE_CHECKING:
    from hub.jobs.mooncake.client import MooncakeClient

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 8


class JobObjects:
    """A ``JobStore``. The client is closed with it."""

    def __init__(self, client: MooncakeClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        #: What was looked for last. The same again finds nothing: no job that it covers writes any more.
        self._swept = ""

    def write_sealed(self, job: JobRecord, part: str, sealed: Sequence[bytes]) -> None:
        """See JobStore."""
        prefix, token = file_prefix(self._namespace, job, part), os.urandom(_TOKEN_BYTES).hex()
        content = b"".join(sealed)
        try:
            for number in range(1, slices_of(len(content))):
                begin = number * SLICE_BYTES
                if not self._client.put(slice_name(prefix, token, number), content[begin : begin + SLICE_BYTES]):
                    raise JobStoreUnavailableError("the job store has not taken a file of this job")
            head = encode_head(Head(len(content), token, content[:SLICE_BYTES]))
            if not any(self._client.put(name, head) for name in head_names(prefix)):
                raise JobStoreUnavailableError("the job store has not taken a file of this job")
        except JobStoreUnavailableError:
            self._remove(pattern_of(f"{prefix}{token}-"))
            raise

    def open_sealed(self, job: JobRecord, part: str, most_bytes: int) -> _OpenObjects:
        """See JobStore."""
        prefix = file_prefix(self._namespace, job, part)
        for name in head_names(prefix):
            content = self._client.get(name)
            if content is not None:
                return _OpenObjects(self._client, prefix, decode_head(content, most_bytes))
        raise JobFileError("the job store does not have a file of this job any more: what kept it was restarted")

    def remove_file(self, job: JobRecord, part: str) -> None:
        """See JobStore."""
        self._remove(pattern_of(file_prefix(self._namespace, job, part)))

    def remove_files(self, job: JobRecord) -> None:
        """See JobStore."""
        self._remove(pattern_of(job_prefix(self._namespace, job)))

    def remove_orphans(self, known: Collection[JobRecord]) -> int:
        """See JobStore. They go by the hours in which their jobs were made, once no job of such an hour is known."""
        pattern = orphans_pattern(self._namespace, known, time.time())
        if pattern == self._swept:
            return 0
        removed = self._remove(pattern)
        if removed is not None:
            self._swept = pattern
        return removed or 0

    def close(self) -> None:
        """See JobStore."""
        self._client.close()

    def _remove(self, pattern: str) -> int | None:
        """How many objects were removed; None if the store can't be reached."""
        try:
            return self._client.remove_matching(pattern)
        except JobStoreUnavailableError as error:
            logger.warning("jobs.not_swept reason=%s", error)
            return None


class _OpenObjects:
    """See SealedFile; at most one slice is in memory."""

    def __init__(self, client: MooncakeClient, prefix: str, head: Head) -> None:
        self._client, self._prefix, self._token = client, prefix, head.token
        self.size_bytes = head.size_bytes
        self._slice = head.first
        self._begin = 0
        self._number = 0

    def read(self, size_bytes: int, /) -> bytes:
        """See SealedFile."""
        taken = self._slice[self._begin : self._begin + size_bytes]
        self._begin += len(taken)
        while len(taken) < size_bytes and self._number + 1 < slices_of(self.size_bytes):
            self._fetch()
            more = self._slice[: size_bytes - len(taken)]
            self._begin = len(more)
            taken += more
        return taken

    def close(self) -> None:
        """See SealedFile."""
        self._slice = b""

    def _fetch(self) -> None:
        self._number += 1
        found = self._client.get(slice_name(self._prefix, self._token, self._number))
        if found is None:
            raise JobFileError("the job store does not have all of a file of this job any more")
        if len(found) != min(SLICE_BYTES, self.size_bytes - self._number * SLICE_BYTES):
            raise JobFileError("a file of this job is none that a hub has written")
        self._slice = found
