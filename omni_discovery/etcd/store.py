"""EtcdKV: KVStore over a real etcd, on etcd3's messages and grpc.aio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, Final

from omni_discovery.etcd import fork  # noqa: F401

# isort: split
import grpc
import tenacity

from omni_discovery.errors import (
    AnswerTooLargeError,
    CompactedError,
    LeaseNotFoundError,
    RegistryDeniedError,
    RegistryError,
    RegistryLoginError,
    RegistryUnavailableError,
)
from omni_discovery.etcd._rpc import rpc
from omni_discovery.etcd.auth import Tokens
from omni_discovery.etcd.channel import EndpointChannel, EndpointChannels, Outage, closed_under, was_cancelled
from omni_discovery.etcd.config import RegistrySecurity, parse_endpoints
from omni_discovery.etcd.keepalive import KeepAlives
from omni_discovery.etcd.releases.versions import ServerVersions, VersionLog
from omni_discovery.etcd.watch import EtcdWatch, prefix_end, to_key_value
from omni_discovery.kv import Claim, FirstKeys, Held, KeyValue, LeaseGrant, LeaseTime, Listing, Summary, WatchBatch
from omni_discovery.records.sizes import ListRoom

__all__ = ["EtcdKV", "parse_endpoints"]

#: Keys of the first page of a list and of the longest, and about how many bytes a page has: all of it is in memory at
#: once, and a page that comes late is asked for again. A page of keys without values has so many from the first on.
_FIRST_PAGE_KEYS: Final = 32
_MOST_PAGE_KEYS: Final = 500
_PAGE_OF_KEYS_ALONE: Final = 2000
_PAGE_BYTES: Final = 2 << 20
#: How many writes of others are looked through for one of ours whose answer was lost.
_MOST_STEPS_BACK: Final = 8

#: Picks one method of one endpoint's stubs.
_Method = Callable[[EndpointChannel], Any]


def _fitted(item: KeyValue, room: ListRoom) -> KeyValue:
    value = room.fit(item.key, item.value)
    return item if value is item.value else replace(item, value=value)


class EtcdKV:
    """A connection to etcd. Make it on the event loop that uses it; nothing is sent before the first call.

    One attempt of a call ends after ``try_timeout_s``, and none begins later than ``call_timeout_s`` after the first.
    Reads, and writes that recognise their own effect, are tried again; any other write only if it cannot have run.
    """

    #: Shared by all connections of a process: they meet the same servers, and one channel about each is enough.
    version_log: ClassVar[VersionLog] = VersionLog()

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        security: RegistrySecurity | None = None,
        connect_timeout_s: float = 1.0,
        try_timeout_s: float = 2.0,
        call_timeout_s: float = 6.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        secured = (security or RegistrySecurity()).for_endpoints(endpoints)
        parsed = parse_endpoints(endpoints)
        self._channels = EndpointChannels(parsed, connect_timeout_s, secured.tls)
        self._outage = Outage(parsed)
        self._tokens = Tokens(secured.user, secured.password, try_timeout_s)
        self._try_timeout_s = try_timeout_s
        self._call_timeout_s = call_timeout_s
        self._server_versions = ServerVersions(
            self._tokens, try_timeout_s, self.version_log, secured.tls, has_users=bool(secured.user)
        )
        self._keep_alives = KeepAlives(self._channels, self._tokens, try_timeout_s)
        #: The id of the cluster that answered the last list; 0 before the first.
        self._cluster_id = 0
        #: The revision of the latest answer about keys: what is sent after it takes effect behind that.
        self._seen_revision = 0
        self._closed = False

    @property
    def server_versions(self) -> Mapping[str, str]:
        """The release of each endpoint that has answered, such as ``3.5.23``; empty where the server does not say."""
        return self._server_versions.versions

    @property
    def cluster_id(self) -> int:
        """The id of the cluster that answered the last list; 0 before the first. May be read from any thread."""
        return self._cluster_id

    async def grant(self, ttl_s: float) -> LeaseGrant:
        """See KVStore. The requested TTL is rounded up to whole seconds."""
        request = rpc.LeaseGrantRequest(TTL=max(1, -int(-ttl_s // 1)))
        # A grant whose answer is lost leaves a lease that holds nothing and expires.
        response = await self._call(lambda channel: channel.lease.LeaseGrant, request, repeatable=True)
        return LeaseGrant(response.ID, float(response.TTL))

    async def keep_alive(self, lease_id: int) -> float:
        """See KVStore. One attempt: the lease decides when the next is due."""
        self._check_usable()
        return await self._keep_alives.renew_lease(lease_id)

    async def lease_time(self, lease_id: int) -> LeaseTime | None:
        """See KVStore."""
        request = rpc.LeaseTimeToLiveRequest(ID=lease_id)
        response = await self._call(lambda channel: channel.lease.LeaseTimeToLive, request, repeatable=True)
        # etcd answers -1 for a lease that it does not have.
        return None if response.TTL < 0 else LeaseTime(float(response.TTL), float(response.grantedTTL))

    async def revoke(self, lease_id: int) -> None:
        """See KVStore."""
        request = rpc.LeaseRevokeRequest(ID=lease_id)
        try:
            await self._call(lambda channel: channel.lease.LeaseRevoke, request, repeatable=True)
        except LeaseNotFoundError:
            return

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """See KVStore."""
        request = rpc.PutRequest(key=key.encode(), value=value, lease=lease_id)
        response = await self._call(lambda channel: channel.kv.Put, request, repeatable=False)
        return int(response.header.revision)

    async def create(self, key: str, value: bytes, lease_id: int = 0, *, also_read: str | None = None) -> Claim:
        """See KVStore."""
        absent = rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=key.encode(), create_revision=0)
        return await self._put_if([absent], key, value, lease_id, also_read)

    async def compare_and_put(
        self, key: str, value: bytes, mod_revision: int, lease_id: int = 0, *, held: Held | None = None
    ) -> Claim:
        """See KVStore."""
        unchanged = rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=key.encode(), mod_revision=mod_revision
        )
        return await self._put_if([unchanged, *_conditions(held)], key, value, lease_id)

    async def delete(self, key: str, mod_revision: int = 0) -> bool:
        """See KVStore."""
        request = rpc.DeleteRangeRequest(key=key.encode())
        if mod_revision:
            at = rpc.Compare(
                result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=key.encode(), mod_revision=mod_revision
            )
            delete = rpc.RequestOp(request_delete_range=request)
            transaction = rpc.TxnRequest(compare=[at], success=[delete])
            return bool((await self._call(lambda channel: channel.kv.Txn, transaction, repeatable=False)).succeeded)
        response = await self._call(lambda channel: channel.kv.DeleteRange, request, repeatable=False)
        return bool(response.deleted)

    async def get(self, key: str) -> KeyValue | None:
        """See KVStore."""
        response = await self._call(
            lambda channel: channel.kv.Range, rpc.RangeRequest(key=key.encode()), repeatable=True
        )
        return to_key_value(response.kvs[0]) if response.kvs else None

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        """See KVStore. Read in pages; raises CompactedError if the revision is compacted meanwhile."""
        start, end = prefix.encode() or b"\0", prefix_end(prefix.encode())
        limit, most = (_PAGE_OF_KEYS_ALONE,) * 2 if keys_only else (_FIRST_PAGE_KEYS, _MOST_PAGE_KEYS)
        request = rpc.RangeRequest(key=start, range_end=end, limit=limit, keys_only=keys_only)
        items: list[KeyValue] = []
        room = ListRoom()
        while True:
            try:
                page = await self._call(lambda channel: channel.kv.Range, request, repeatable=True)
            except AnswerTooLargeError:
                if request.limit == 1:
                    raise
                # Whoever fills the prefix with large values makes lists slower, not impossible.
                request.limit = max(1, request.limit // 8)
                continue
            items += [_fitted(to_key_value(kv), room) for kv in page.kvs]
            request.revision = request.revision or page.header.revision
            if not page.more or not page.kvs:
                break
            fitting = request.limit * _PAGE_BYTES // max(1, page.ByteSize())
            request.limit = max(1, min(fitting, 2 * request.limit, most))
            request.key = page.kvs[-1].key + b"\0"
        self._cluster_id = page.header.cluster_id
        return Listing(request.revision, page.header.cluster_id, tuple(items))

    async def summary(self, prefix: str) -> Summary:
        """See KVStore."""
        raw = prefix.encode()
        request = rpc.RangeRequest(
            key=raw or b"\0",
            range_end=prefix_end(raw),
            limit=1,
            keys_only=True,
            sort_order=rpc.RangeRequest.DESCEND,
            sort_target=rpc.RangeRequest.MOD,
        )
        response = await self._call(lambda channel: channel.kv.Range, request, repeatable=True)
        return Summary(int(response.count), max((int(kv.mod_revision) for kv in response.kvs), default=0))

    async def first_keys(self, prefix: str, limit: int) -> FirstKeys:
        """See KVStore. etcd reads no more than these, and counts the others in its index."""
        raw = prefix.encode()
        request = rpc.RangeRequest(key=raw or b"\0", range_end=prefix_end(raw), limit=limit, keys_only=True)
        response = await self._call(lambda channel: channel.kv.Range, request, repeatable=True)
        return FirstKeys(tuple(map(to_key_value, response.kvs)), int(response.count))

    async def list_key(self, key: str) -> Listing:
        """See KVStore."""
        response = await self._call(
            lambda channel: channel.kv.Range, rpc.RangeRequest(key=key.encode()), repeatable=True
        )
        self._cluster_id = response.header.cluster_id
        return Listing(response.header.revision, self._cluster_id, tuple(to_key_value(kv) for kv in response.kvs))

    def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """See KVStore."""
        return self._watch(prefix, start_revision, is_prefix=True)

    def watch_key(self, key: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """See KVStore."""
        return self._watch(key, start_revision, is_prefix=False)

    async def _watch(self, name: str, start_revision: int, *, is_prefix: bool) -> AsyncGenerator[WatchBatch, None]:
        self._check_usable()
        channel = self._channels.current
        try:
            for may_log_in_again in (True, False):
                metadata = await self._tokens.metadata(channel)
                watch = EtcdWatch(channel, name, start_revision, self._cluster_id, metadata, is_prefix=is_prefix)
                stands = False
                try:
                    async with aclosing(watch.batches(self._try_timeout_s)) as batches:
                        async for batch in batches:
                            stands = True
                            yield batch
                except (RegistryLoginError, RegistryDeniedError):
                    if not self._tokens.reject(metadata) or stands or not may_log_in_again:
                        raise
        except RegistryUnavailableError:
            self._channels.leave_endpoint(channel)
            raise

    def move_on(self) -> None:
        """See KVStore."""
        self._channels.leave_endpoint(self._channels.current)

    async def close(self) -> None:
        """See KVStore. Calls and watches that are under way end with RegistryUnavailableError."""
        if not self._closed:
            self._closed = True
            self._keep_alives.close()
            self._server_versions.close()
            await self._channels.close()

    async def _put_if(
        self, conditions: Sequence[Any], key: str, value: bytes, lease_id: int, also_read: str | None = None
    ) -> Claim:
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=key.encode(), value=value, lease=lease_id))
        names = [key] if also_read is None else [key, also_read]
        reads = [rpc.RequestOp(request_range=rpc.RangeRequest(key=name.encode())) for name in names]
        # Read in both cases: where an answer was lost, that to the next attempt says that the comparison fails.
        request = rpc.TxnRequest(compare=conditions, success=[put, *reads], failure=reads)
        seen_revision, unsure = self._seen_revision, False

        def note(error: RegistryError) -> None:
            nonlocal unsure
            unsure = unsure or (isinstance(error, RegistryUnavailableError) and error.may_have_run)

        response = await self._call(lambda channel: channel.kv.Txn, request, repeatable=True, on_failure=note)
        found = [tuple(map(to_key_value, each.response_range.kvs)) for each in response.responses[-len(reads) :]]
        current, revision, beside = found[0][0] if found[0] else None, int(response.header.revision), None
        if also_read is not None:
            self._cluster_id = response.header.cluster_id
            beside = Listing(revision, self._cluster_id, found[1])
        if response.succeeded or not unsure:
            return Claim(bool(response.succeeded), revision, current, beside)
        # What made the comparison fail may be an earlier attempt, whose answer was lost.
        after = max((each.mod_revision for each in conditions if each.key == put.request_put.key), default=0)
        ours = await self._find_write(current, value, lease_id, after or seen_revision, is_new=not after)
        if ours is None:
            return Claim(False, revision, current, beside)
        return Claim(True, ours.mod_revision, ours, beside)

    async def _find_write(
        self, current: KeyValue | None, value: bytes, lease_id: int, after: int, *, is_new: bool
    ) -> KeyValue | None:
        """A key as a write of this value left it behind revision ``after``, whatever became of it since.

        None if there was no such write. Raise RegistryUnavailableError where that can't be told any more.
        """
        item = current
        for _ in range(_MOST_STEPS_BACK):
            if item is None:
                break
            if item.mod_revision <= after:
                return None
            # A key that is written over keeps its creation: one that was made later is another's, whatever it holds.
            if not is_new and item.create_revision > after:
                break
            could_be_ours = not is_new or item.create_revision == item.mod_revision
            if could_be_ours and item.value == value and item.lease_id == lease_id:
                return item
            item = await self._get_at(item.key, item.mod_revision - 1)
        text = "an answer was lost, and the key was deleted or written too often since to tell what became of the write"
        raise RegistryUnavailableError(text, may_have_run=True)

    async def _get_at(self, key: str, revision: int) -> KeyValue | None:
        """A key as it was; None also if that is compacted, or in the future of the cluster."""
        request = rpc.RangeRequest(key=key.encode(), revision=revision)
        try:
            kvs = (await self._call(lambda channel: channel.kv.Range, request, repeatable=True)).kvs
        except CompactedError:
            return None
        return to_key_value(kvs[0]) if kvs else None

    async def _call(
        self,
        method: _Method,
        request: Any,
        *,
        repeatable: bool,
        on_failure: Callable[[RegistryError], None] = lambda error: None,
    ) -> Any:
        self._check_usable()
        may_have_run = False

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
            nonlocal may_have_run
            try:
                return await self._try_once(method, request)
            except RegistryError as error:
                may_have_run = may_have_run or getattr(error, "may_have_run", False)
                on_failure(error)
                raise

        try:
            return await retrying(attempt)
        except RegistryUnavailableError as error:
            # The last attempt is not the only one that counts.
            error.may_have_run = may_have_run
            # A call that is tried once may only have met the one endpoint that is down.
            if repeatable and not self._closed:
                self._outage.call_failed(error)
            raise

    async def _try_once(self, method: _Method, request: Any) -> Any:
        channel = self._channels.current
        try:
            try:
                answer = await self._send(channel, method, request, may_log_in_again=True)
                self._server_versions.ask_version(channel)
                self._outage.call_answered()
                self._seen_revision = answer.header.revision
                return answer
            except RegistryUnavailableError:
                self._channels.leave_endpoint(channel)
                raise
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            raise closed_under("call") from None

    async def _send(self, channel: EndpointChannel, method: _Method, request: Any, *, may_log_in_again: bool) -> Any:
        metadata = await self._tokens.metadata(channel)
        try:
            call: Awaitable[Any] = method(channel)(request, timeout=self._try_timeout_s, metadata=metadata)
            return await call
        except grpc.RpcError as error:
            mapped = channel.explain(error)
            refused = isinstance(mapped, RegistryLoginError | RegistryDeniedError)
            # A refused call did not run.
            if refused and self._tokens.reject(metadata) and may_log_in_again:
                return await self._send(channel, method, request, may_log_in_again=False)
            raise mapped from error

    def _check_usable(self) -> None:
        if self._closed:
            raise RegistryUnavailableError("this connection is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("an EtcdKV belongs to the event loop it was made on; make another one for this loop")


def _conditions(held: Held | None) -> list[Any]:
    if held is None:
        return []
    key, equal = held.key.encode(), rpc.Compare.EQUAL
    there = rpc.Compare(result=rpc.Compare.GREATER, target=rpc.Compare.CREATE, key=key, create_revision=0)
    # For etcd a key that is not there has lease 0.
    return [there, rpc.Compare(result=equal, target=rpc.Compare.LEASE, key=key, lease=held.lease_id or -1)]
