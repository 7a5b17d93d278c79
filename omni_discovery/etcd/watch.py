"""EtcdWatch: one watch on a stream of its own, from ``created`` to the error that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from omni_discovery.errors import CompactedError, RegistryError, RegistryUnavailableError
from omni_discovery.etcd._rpc import rpc
from omni_discovery.etcd.auth import Metadata
from omni_discovery.etcd.channel import HAS_LEADER, EndpointChannel, closed_under, was_cancelled
from omni_discovery.etcd.errors import refusal
from omni_discovery.kv import DeleteEvent, KeyValue, PutEvent, WatchBatch, WatchEvent
from omni_discovery.records.sizes import cut_value, decode_key

_DELETE: Final = 1
#: The keys and values of a batch, and what an event counts beside them. Others have their turn between two: whoever
#: writes many may be slow to read.
_BATCH_BYTES: Final = 256 << 10
_EVENT_BYTES: Final = 128
_HAS_FRAGMENTS: Final = "fragment" in rpc.WatchCreateRequest.DESCRIPTOR.fields_by_name


def to_key_value(kv: Any) -> KeyValue:
    """Convert etcd's key-value message; a value that is too long for its key comes cut."""
    key = decode_key(kv.key)
    return KeyValue(
        key=key,
        value=cut_value(key, kv.value),
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        lease_id=kv.lease,
    )


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all keys that start with ``prefix``; a zero byte means the end of all keys."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def _to_event(event: Any) -> WatchEvent:
    if event.type == _DELETE:
        return DeleteEvent(decode_key(event.kv.key), event.kv.mod_revision)
    return PutEvent(to_key_value(event.kv))


def _revision(event: WatchEvent) -> int:
    return event.item.mod_revision if isinstance(event, PutEvent) else event.mod_revision


def split_by_revision(events: Sequence[WatchEvent], most_bytes: int) -> Iterator[list[WatchEvent]]:
    """Cut events in revision order into parts of so many bytes, or little more; no revision is cut."""
    part: list[WatchEvent] = []
    size_bytes = 0
    for event in events:
        if size_bytes >= most_bytes and _revision(event) != _revision(part[-1]):
            yield part
            part, size_bytes = [], 0
        part.append(event)
        size_bytes += _EVENT_BYTES + (len(event.item.key) + len(event.item.value) if isinstance(event, PutEvent) else 0)
    if part:
        yield part


def _create_request(name: str, start_revision: int, *, is_prefix: bool) -> Any:
    key = name.encode()
    create = rpc.WatchCreateRequest(key=key or b"\0", start_revision=start_revision, progress_notify=True)
    # Without an end, the range of a watch is the one key.
    if is_prefix:
        create.range_end = prefix_end(key)
    if _HAS_FRAGMENTS:
        create.fragment = True
    return rpc.WatchRequest(create_request=create)


class EtcdWatch:
    """Reads one watch stream, of a prefix or, with ``is_prefix`` false, of one key; all calls come from one task."""

    def __init__(
        self,
        channel: EndpointChannel,
        name: str,
        start_revision: int,
        cluster_id: int,
        metadata: Metadata = (),
        *,
        is_prefix: bool = True,
    ) -> None:
        self._channel = channel
        self._metadata = metadata
        self._name = name
        self._is_prefix = is_prefix
        self._start_revision = start_revision
        #: Id of the cluster that ``start_revision`` is a revision of; 0 if not known.
        self._cluster_id = cluster_id
        self._parts: list[WatchEvent] = []

    async def batches(self, created_timeout_s: float) -> AsyncGenerator[WatchBatch, None]:
        """Yield an empty batch once the watch is open, then all changes. Ends only by a RegistryError."""
        call = self._channel.watch.Watch(metadata=(*HAS_LEADER, *self._metadata))
        try:
            try:
                async with asyncio.timeout(created_timeout_s):
                    request = _create_request(self._name, self._start_revision, is_prefix=self._is_prefix)
                    await call.write(request)
                    first = await call.read()
                self._check_created(first)
            except TimeoutError:
                text = f"{self._channel.endpoint} did not open a watch within {created_timeout_s} s"
                raise RegistryUnavailableError(text) from None
            yield WatchBatch(self._start_revision - 1, ())
            while True:
                for batch in self._to_batches(await call.read()):
                    yield batch
                    await asyncio.sleep(0)
        except grpc.RpcError as error:
            raise self._channel.explain(error) from error
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            raise closed_under("watch") from None
        finally:
            call.cancel()

    def _check_created(self, response: Any) -> None:
        self._check_open(response)
        if not response.created:
            raise RegistryUnavailableError(f"{self._channel.endpoint} began a watch without saying so")
        header = response.header
        if self._cluster_id and header.cluster_id != self._cluster_id:
            raise CompactedError(f"another etcd answers: cluster {header.cluster_id:x}, was {self._cluster_id:x}")
        if header.revision + 1 < self._start_revision:
            raise CompactedError(f"the store went back to revision {header.revision}, was {self._start_revision - 1}")

    def _check_open(self, response: Any) -> None:
        if response is grpc.aio.EOF:
            raise RegistryUnavailableError(f"{self._channel.endpoint} ended the watch")
        if not response.canceled:
            return
        raise self._why_cancelled(response)

    def _why_cancelled(self, response: Any) -> RegistryError:
        reason = response.cancel_reason or "no reason given"
        if response.compact_revision:
            text = f"revision {self._start_revision} is gone: compacted at {response.compact_revision}"
            return CompactedError(text, int(response.compact_revision))
        if "permission denied" in reason or "auth" in reason:
            return refusal(f"watch of {self._name!r}: {reason}", self._channel.endpoint)
        return RegistryUnavailableError(f"watch of {self._name!r} was ended: {reason}")

    def _to_batches(self, response: Any) -> Iterator[WatchBatch]:
        """The batches that this response completes; none if more fragments of it follow."""
        self._check_open(response)
        self._parts += [_to_event(event) for event in response.events]
        if _HAS_FRAGMENTS and response.fragment:
            return
        events, self._parts = self._parts, []
        if not events:
            yield WatchBatch(response.header.revision, ())
        # Not the header's revision: while the server catches up, that is ahead of the delivered events.
        for part in split_by_revision(events, _BATCH_BYTES):
            yield WatchBatch(_revision(part[-1]), tuple(part))
