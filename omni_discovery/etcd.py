"""EtcdKV: KVStore over a real etcd, on etcd3's messages and grpc.aio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

import grpc
import tenacity

from omni_discovery._etcd_messages import rpc
from omni_discovery.endpoints import parse_endpoints
from omni_discovery.errors import LeaseNotFoundError, RegistryError, RegistryUnavailableError
from omni_discovery.etcd_channel import Line, Lines, closed_under, map_error, was_cancelled
from omni_discovery.etcd_keepalive import KeepAlives
from omni_discovery.etcd_watch import EtcdWatch, prefix_end, to_key_value
from omni_discovery.kv import Claim, Grant, KeyValue, Listing, WatchBatch

__all__ = ["EtcdKV", "parse_endpoints"]

_PAGE_KEYS: Final = 500

#: Picks one method of one endpoint's stubs.
_Method = Callable[[Line], Any]


class EtcdKV:
    """A connection to etcd. Make it on the event loop that uses it; nothing is sent before the first call.

    One attempt of a call ends after ``try_timeout_s``, and none begins later than ``call_timeout_s`` after the first.
    Reads, and writes that recognise their own effect, are tried again; any other write only if it cannot have run.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        connect_timeout_s: float = 1.0,
        try_timeout_s: float = 2.0,
        call_timeout_s: float = 6.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines = Lines(parse_endpoints(endpoints), connect_timeout_s)
        self._try_timeout_s = try_timeout_s
        self._call_timeout_s = call_timeout_s
        self._keep_alives = KeepAlives(self._lines, try_timeout_s)
        #: The etcd history that the last answer of a list came from; 0 before the first.
        self._cluster_id = 0
        self._closed = False

    async def grant(self, ttl_s: float) -> Grant:
        """See KVStore. The TTL is asked for in whole seconds, rounded up."""
        request = rpc.LeaseGrantRequest(TTL=max(1, -int(-ttl_s // 1)))
        # A grant whose answer is lost leaves a lease that holds nothing and expires.
        response = await self._call(lambda line: line.lease.LeaseGrant, request, repeatable=True)
        return Grant(response.ID, float(response.TTL))

    async def keep_alive(self, lease_id: int) -> float:
        """See KVStore. One attempt: the lease decides when the next is due."""
        self._check_usable()
        return await self._keep_alives.renew(lease_id)

    async def revoke(self, lease_id: int) -> None:
        """See KVStore."""
        request = rpc.LeaseRevokeRequest(ID=lease_id)
        try:
            await self._call(lambda line: line.lease.LeaseRevoke, request, repeatable=True)
        except LeaseNotFoundError:
            return

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """See KVStore."""
        request = rpc.PutRequest(key=key.encode(), value=value, lease=lease_id)
        response = await self._call(lambda line: line.kv.Put, request, repeatable=False)
        return int(response.header.revision)

    async def create(self, key: str, value: bytes, lease_id: int = 0) -> Claim:
        """See KVStore."""
        absent = rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=key.encode(), create_revision=0)
        return await self._put_if(absent, key, value, lease_id)

    async def compare_and_put(self, key: str, value: bytes, mod_revision: int, lease_id: int = 0) -> Claim:
        """See KVStore."""
        unchanged = rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=key.encode(), mod_revision=mod_revision
        )
        return await self._put_if(unchanged, key, value, lease_id)

    async def delete(self, key: str) -> bool:
        """See KVStore."""
        request = rpc.DeleteRangeRequest(key=key.encode())
        response = await self._call(lambda line: line.kv.DeleteRange, request, repeatable=False)
        return bool(response.deleted)

    async def get(self, key: str) -> KeyValue | None:
        """See KVStore."""
        response = await self._call(lambda line: line.kv.Range, rpc.RangeRequest(key=key.encode()), repeatable=True)
        return to_key_value(response.kvs[0]) if response.kvs else None

    async def list(self, prefix: str) -> Listing:
        """See KVStore. Read in pages; raises CompactedError if the revision is compacted meanwhile."""
        start, end = prefix.encode() or b"\0", prefix_end(prefix.encode())
        request = rpc.RangeRequest(key=start, range_end=end, limit=_PAGE_KEYS)
        items: list[KeyValue] = []
        while True:
            page = await self._call(lambda line: line.kv.Range, request, repeatable=True)
            items += [to_key_value(kv) for kv in page.kvs]
            request.revision = request.revision or page.header.revision
            if not page.more or not page.kvs:
                break
            request.key = page.kvs[-1].key + b"\0"
        self._cluster_id = page.header.cluster_id
        return Listing(request.revision, page.header.cluster_id, tuple(items))

    async def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """See KVStore."""
        self._check_usable()
        line = self._lines.current
        watch = EtcdWatch(line, prefix, start_revision, self._cluster_id)
        try:
            async with aclosing(watch.batches(self._try_timeout_s)) as batches:
                async for batch in batches:
                    yield batch
        except RegistryUnavailableError:
            self._lines.leave(line)
            raise

    async def close(self) -> None:
        """See KVStore. Calls and watches that are under way end with RegistryUnavailableError."""
        if not self._closed:
            self._closed = True
            self._keep_alives.close()
            await self._lines.close()

    async def _put_if(self, condition: Any, key: str, value: bytes, lease_id: int) -> Claim:
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=key.encode(), value=value, lease=lease_id))
        read = rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode()))
        request = rpc.TxnRequest(compare=[condition], success=[put, read], failure=[read])
        unsure = False

        def note(error: RegistryError) -> None:
            nonlocal unsure
            unsure = unsure or (isinstance(error, RegistryUnavailableError) and error.may_have_run)

        response = await self._call(lambda line: line.kv.Txn, request, repeatable=True, on_failure=note)
        kvs = response.responses[-1].response_range.kvs
        current = to_key_value(kvs[0]) if kvs else None
        won = bool(response.succeeded)
        if unsure and current is not None and not won:
            # An earlier attempt whose answer was lost may be the very write that stands in our way.
            won = current.value == value and current.lease_id == lease_id
        return Claim(won, int(response.header.revision), current)

    async def _call(
        self,
        method: _Method,
        request: Any,
        *,
        repeatable: bool,
        on_failure: Callable[[RegistryError], None] = lambda error: None,
    ) -> Any:
        self._check_usable()

        def may_repeat(error: BaseException) -> bool:
            unavailable = isinstance(error, RegistryUnavailableError) and not self._closed
            return unavailable and (repeatable or not getattr(error, "may_have_run", True))

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(may_repeat),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
            stop=tenacity.stop_after_delay(self._call_timeout_s),
            reraise=True,
        )

        async def attempt() -> Any:
            try:
                return await self._try_once(method, request)
            except RegistryError as error:
                on_failure(error)
                raise

        return await retrying(attempt)

    async def _try_once(self, method: _Method, request: Any) -> Any:
        line = self._lines.current
        try:
            call: Awaitable[Any] = method(line)(request, timeout=self._try_timeout_s)
            return await call
        except grpc.RpcError as error:
            mapped = map_error(error)
            if isinstance(mapped, RegistryUnavailableError):
                self._lines.leave(line)
            raise mapped from error
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            raise closed_under("call") from None

    def _check_usable(self) -> None:
        if self._closed:
            raise RegistryUnavailableError("this connection is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("an EtcdKV belongs to the event loop it was made on; make another one for this loop")
