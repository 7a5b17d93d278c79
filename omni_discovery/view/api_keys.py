"""ApiKeyWatch: which API keys a namespace has, as etcd says now, or said last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from omni_discovery.clock import Clock, SystemClock
from omni_discovery.errors import CompactedError, RegistryError, RegistryRefusedError
from omni_discovery.kv import KeyValue, KVStore, Listing, PutEvent, WatchBatch
from omni_discovery.list_watch import list_and_watch
from omni_discovery.records import keys
from omni_discovery.records.api_key import read_api_keys

logger = logging.getLogger(__name__)

#: The SHA-256 of each key, by its name.
OnApiKeys = Callable[[Mapping[str, bytes]], None]

_MOST_TOLD: Final = 200


class ApiKeyWatch:
    """Calls ``on_keys`` on its loop with all keys, at first and whenever they change. While etcd is away they stay."""

    def __init__(self, kv: KVStore, namespace: str, on_keys: OnApiKeys, *, clock: Clock | None = None) -> None:
        self._kv = kv
        self._namespace = namespace
        self._prefix = keys.api_keys_prefix(namespace)
        self._on_keys = on_keys
        self._clock = clock or SystemClock()
        self._items: dict[str, KeyValue] = {}
        #: Keys whose values can't be read, each of which is logged once.
        self._bad: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch; returns at once."""
        watching = list_and_watch(self._kv, self._prefix, self, is_prefix=True, clock=self._clock)
        self._task = asyncio.create_task(watching, name="api-key-watch")

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def replace(self, listing: Listing, asked_at_s: float) -> None:
        """See WatchSink."""
        self._items = {item.key: item for item in listing.items}
        self._tell()

    async def apply(self, batch: WatchBatch) -> None:
        """See WatchSink."""
        for event in batch.events:
            if isinstance(event, PutEvent):
                self._items[event.item.key] = event.item
            else:
                self._items.pop(event.key, None)
        if batch.events:
            self._tell()

    def on_watch_failed(self, error: Exception, log_level: int) -> None:
        """See WatchSink."""
        match error:
            case CompactedError():
                logger.info("api_keys.relist reason=%s", error)
            case RegistryRefusedError():
                level = logging.ERROR if log_level >= logging.WARNING else log_level
                logger.log(
                    level, "api_keys.refused reason=%s: this hub's etcd user has to read %s", error, self._prefix
                )
            case RegistryError():
                logger.log(log_level, "api_keys.retrying reason=%s: the keys that were known go on to hold", error)
            case _:
                logger.error("api_keys.failed", exc_info=error)

    def _tell(self) -> None:
        found, bad = read_api_keys(self._namespace, self._items.values())
        for error in bad:
            if error.key not in self._bad:
                text = "api_keys.bad_value key=%s reason=%s: it opens nothing"
                logger.warning(text, error.key[:_MOST_TOLD], error.reason[:_MOST_TOLD])
        self._bad = {error.key for error in bad}
        self._on_keys({name: bytes.fromhex(record.sha256) for name, record in found.items()})
