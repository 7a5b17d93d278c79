"""The floor: one put and one watch over grpc.aio, with nothing around them."""

from __future__ import annotations

from typing import Any

import grpc.aio

from omni_discovery.etcd._rpc import rpc, stubs
from omni_discovery.loop_thread import LoopThread
from omni_discovery.records.schema import encode_record
from tests.bench.actors import now_s
from tests.bench.expectation import Expectation
from tests.bench.ours import record

_PREFIX = "/bare/"


class BareWriter:
    """Puts values of the same size as a replica's record, on a connection that stands."""

    def __init__(self, endpoint: str) -> None:
        self._thread = LoopThread("bare-writer")
        self._endpoint = endpoint
        self._stub = self._thread.run(self._open(endpoint), 10.0)

    def load(self, queue_length: int) -> float:
        """Put; the moment before that."""
        request = rpc.PutRequest(key=(_PREFIX + "a").encode(), value=encode_record(record(7, queue_length)))
        return self._thread.run(self._put(self._stub, request), 10.0)

    def load_cold(self, queue_length: int) -> float:
        """The least a registration can be: connect, make a lease, put under it; the moment before that."""
        return self._thread.run(self._cold(queue_length), 10.0)

    def shut(self) -> None:
        self._thread.close()

    async def _open(self, endpoint: str) -> Any:
        self._channel = grpc.aio.insecure_channel(endpoint)
        return stubs.KVStub(self._channel)

    async def _put(self, stub: Any, request: Any) -> float:
        began_s = now_s()
        await stub.Put(request)
        return began_s

    async def _cold(self, queue_length: int) -> float:
        began_s = now_s()
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._endpoint, options=options) as channel:
            lease: Any = stubs.LeaseStub(channel)
            granted = await lease.LeaseGrant(rpc.LeaseGrantRequest(TTL=10))
            value = encode_record(record(7, queue_length))
            request = rpc.PutRequest(key=(_PREFIX + "a").encode(), value=value, lease=granted.ID)
            await stubs.KVStub(channel).Put(request)
            return began_s


class BareWatcher:
    """Watches the one key; a value counts as visible when its event was read."""

    def __init__(self, endpoint: str) -> None:
        self._expected = Expectation()
        self._thread = LoopThread("bare-watcher")
        self._task = self._thread.start(self._watch(endpoint))

    def arm(self, address: str, queue_length: int | None) -> None:
        self._expected.arm("a", queue_length)

    def seen(self, timeout_s: float) -> float:
        return self._expected.seen(timeout_s)

    def shut(self) -> None:
        self._task.cancel()
        self._thread.close()

    async def _watch(self, endpoint: str) -> None:
        channel = grpc.aio.insecure_channel(endpoint)
        create = rpc.WatchCreateRequest(key=_PREFIX.encode(), range_end=b"/bare0")
        call = stubs.WatchStub(channel).Watch()
        await call.write(rpc.WatchRequest(create_request=create))
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                raise ConnectionError("the watch ended")
            for event in response.events:
                _, _, rest = event.kv.value.partition(b'"queue_length":')
                if rest:
                    self._expected.note("a", int(rest.partition(b",")[0]))
