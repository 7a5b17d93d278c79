"""The last view on disk, so that a hub can start while etcd is away from it.

The file holds a list of the namespace without beats and waits. It is readable by its owner only, replaced atomically,
and checked by a digest when it is read. A file that is damaged, or of another registry, is ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from omni_discovery.clock import Clock
from omni_discovery.etcd.config import parse_endpoints
from omni_discovery.kv import KeyValue, Listing
from omni_discovery.log_once import LogOnce
from omni_discovery.processes import write_private

logger = logging.getLogger(__name__)

_MAGIC: Final = "omni-view 1"
_MAX_BYTES: Final = 64 << 20
#: A change is written within this time, and at most this often.
_SAVE_EVERY_S: Final = 2.0
#: Without a change, the file is written this often, for its ``fresh_at_s``.
_REFRESH_S: Final = 60.0


class _Item(msgspec.Struct, frozen=True, array_like=True):
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int


class _File(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    endpoints: tuple[str, ...]
    cluster_id: int
    revision: int
    #: Wall-clock seconds up to which the view was proved fresh.
    fresh_at_s: float
    items: tuple[_Item, ...]


class SavedView:
    """One file, for one namespace at one set of endpoints."""

    def __init__(self, path: Path, namespace: str, endpoints: str | Sequence[str]) -> None:
        self.path = path
        self._namespace = namespace
        self._endpoints = tuple(sorted(parse_endpoints(endpoints)))

    def load(self) -> tuple[Listing, float] | None:
        """The saved list, and the wall-clock time up to which it was proved fresh; None without a usable file."""
        try:
            saved = self._read()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("view.ignored file=%s reason=%s", self.path, error)
            return None
        items = tuple(KeyValue(*msgspec.structs.astuple(item)) for item in saved.items)
        return Listing(saved.revision, saved.cluster_id, items), saved.fresh_at_s

    def save(self, listing: Listing, fresh_at_s: float) -> None:
        """Replace the file. Raise OSError, or ValueError for a view that is too large."""
        # Asked first: encoding holds up all threads, for as long as there is to encode.
        if (least_bytes := sum(len(item.key) + len(item.value) for item in listing.items)) > _MAX_BYTES:
            raise ValueError(f"its keys and values have {least_bytes} bytes, more than {_MAX_BYTES}")
        items = tuple(
            _Item(item.key, item.value, item.create_revision, item.mod_revision, item.lease_id)
            for item in listing.items
        )
        body = msgspec.json.encode(
            _File(
                namespace=self._namespace,
                endpoints=self._endpoints,
                cluster_id=listing.cluster_id,
                revision=listing.revision,
                fresh_at_s=fresh_at_s,
                items=items,
            )
        )
        if len(body) > _MAX_BYTES:
            raise ValueError(f"it has {len(body)} bytes, more than {_MAX_BYTES}")
        write_private(self.path, f"{_MAGIC} {hashlib.sha256(body).hexdigest()}\n".encode() + body)

    def _read(self) -> _File:
        if self.path.stat().st_size > _MAX_BYTES + 1024:
            raise ValueError("it is too large to be one of ours")
        head, _, body = self.path.read_bytes().partition(b"\n")
        if head != f"{_MAGIC} {hashlib.sha256(body).hexdigest()}".encode():
            raise ValueError("it is damaged, or of another version")
        saved = msgspec.json.decode(body, type=_File)
        if (saved.namespace, saved.endpoints) != (self._namespace, self._endpoints):
            raise ValueError(f"it is of namespace {saved.namespace} at {', '.join(saved.endpoints)}")
        return saved


class ViewSaver:
    """Keeps one file up to date, by a task on the event loop that calls ``start``.

    ``current`` returns the list and the wall-clock time of its last proof; None while the view is stale.
    """

    def __init__(self, file: SavedView, current: Callable[[], tuple[Listing, float] | None], clock: Clock) -> None:
        self._file = file
        self._current = current
        self._clock = clock
        self._saved_items: tuple[KeyValue, ...] | None = None
        self._saved_at_s = float("-inf")
        self._log_once = LogOnce()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._task = asyncio.create_task(self._run(), name="view-saver")

    async def close(self) -> None:
        """Save once more if there is something new, and stop. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._save_if_due(changed_only=True)

    async def _run(self) -> None:
        # The first view is saved sooner: a hub may be killed at any moment.
        await self._clock.sleep(_SAVE_EVERY_S / 4)
        while True:
            await self._save_if_due(changed_only=False)
            await self._clock.sleep(_SAVE_EVERY_S)

    async def _save_if_due(self, *, changed_only: bool) -> None:
        current = self._current()
        if current is None:
            return
        listing, fresh_at_s = current
        overdue = self._clock.monotonic_s() - self._saved_at_s >= _REFRESH_S
        if listing.items == self._saved_items and (changed_only or not overdue):
            return
        try:
            await asyncio.to_thread(self._file.save, listing, fresh_at_s)
        except (OSError, ValueError) as error:
            if self._log_once.should():
                logger.warning("view.not_saved file=%s reason=%s", self._file.path, error)
            return
        self._log_once.forget()
        self._saved_items, self._saved_at_s = listing.items, self._clock.monotonic_s()
