"""Reading a namespace family by family, for users who may not read the API keys in it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from omni_discovery.errors import CompactedError, RegistryDeniedError
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.kv import Listing, Summary, WatchBatch
from omni_discovery.list_watch import first_to_end
from omni_discovery.records.keys import namespace_prefix
from omni_discovery.records.roles import BEATS, OPEN_FAMILIES, PIPELINE


class NamespaceReader(EtcdKV):
    """An EtcdKV that reads the namespace in parts where its user may not read all of it.

    What such a user does not see are the API keys. A watch of all parts only says that something has changed: it ends
    with CompactedError, after which the caller lists again.
    """

    def __init__(self, namespace: str, *arguments: Any, **options: Any) -> None:
        """``namespace``, and what EtcdKV takes."""
        super().__init__(*arguments, **options)
        self._whole = namespace_prefix(namespace)
        #: Whether etcd has refused to let this user read all of the namespace.
        self._in_parts = False

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        """See KVStore."""
        if prefix == self._whole and not self._in_parts:
            try:
                return await super().list(prefix, keys_only=keys_only)
            except RegistryDeniedError:
                self._in_parts = True
        if prefix != self._whole:
            return await super().list(prefix, keys_only=keys_only)
        first = await super().list_key(f"{prefix}{PIPELINE}")
        items = list(first.items)
        for family in OPEN_FAMILIES:
            if family != PIPELINE:
                items += (await super().list(f"{prefix}{family}", keys_only=keys_only)).items
        # The parts are read one after the other: what has changed since the first is brought by the watch.
        return Listing(first.revision, first.cluster_id, tuple(sorted(items, key=lambda item: item.key)))

    async def summary(self, prefix: str) -> Summary:
        """See KVStore."""
        if prefix != self._whole or not self._in_parts:
            return await super().summary(prefix)
        pipeline = (await super().list_key(f"{prefix}{PIPELINE}")).items
        count = super().summary
        parts = [await count(f"{prefix}{family}") for family in OPEN_FAMILIES if family != PIPELINE]
        parts += [Summary(1, item.mod_revision) for item in pipeline]
        return Summary(sum(part.count for part in parts), max(part.max_mod_revision for part in parts))

    async def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """See KVStore."""
        if prefix != self._whole or not self._in_parts:
            async with aclosing(super().watch(prefix, start_revision)) as batches:
                async for batch in batches:
                    yield batch
            return
        # Beats change each second and are read where they are wanted.
        parts = [f"{prefix}{family}" for family in OPEN_FAMILIES if family != BEATS]
        yield WatchBatch(start_revision - 1, ())
        await first_to_end(*(self._wait_changed(part, start_revision) for part in parts))
        raise CompactedError("something in the namespace has changed")

    async def _wait_changed(self, part: str, start_revision: int) -> None:
        watch = super().watch(part, start_revision) if part.endswith("/") else super().watch_key(part, start_revision)
        async with aclosing(watch) as batches:
            async for batch in batches:
                if batch.events:
                    return
