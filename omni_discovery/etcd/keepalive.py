"""KeepAlives: all lease renewals of one connection over one LeaseKeepAlive stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

import grpc
import grpc.aio

from omni_discovery.errors import (
    LeaseNotFoundError,
    RegistryDeniedError,
    RegistryError,
    RegistryLoginError,
    RegistryUnavailableError,
)
from omni_discovery.etcd._rpc import rpc
from omni_discovery.etcd.auth import Metadata, Tokens
from omni_discovery.etcd.channel import HAS_LEADER, EndpointChannel, EndpointChannels, closed_under, was_cancelled


class _Stream:
    """One bidirectional LeaseKeepAlive call: one task reads it, one writes it."""

    def __init__(self, channel: EndpointChannel, metadata: Metadata) -> None:
        self.channel = channel
        self.metadata = metadata
        self._requests: asyncio.Queue[int] = asyncio.Queue()
        #: Unanswered renewals by lease id. etcd answers the renewals of one lease in order.
        self._waiting: dict[int, deque[asyncio.Future[int]]] = {}
        self._task = asyncio.create_task(self._run(), name=f"lease-keepalive-{channel.endpoint}")

    @property
    def ended(self) -> bool:
        return self._task.done()

    def send(self, lease_id: int) -> asyncio.Future[int]:
        """Send a renewal; the future's result is the new TTL in seconds, 0 if the lease is gone."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(lease_id, deque()).append(future)
        self._requests.put_nowait(lease_id)
        return future

    def end(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        failure: RegistryError = RegistryUnavailableError("the keep-alive stream ended", may_have_run=True)
        call = self.channel.lease.LeaseKeepAlive(metadata=(*HAS_LEADER, *self.metadata))
        writer = asyncio.create_task(self._write(call), name=f"lease-keepalive-writer-{self.channel.endpoint}")
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._settle(response.ID, response.TTL)
        except grpc.RpcError as error:
            failure = self.channel.explain(error)
        finally:
            writer.cancel()
            call.cancel()
            self._fail_all(failure)

    async def _write(self, call: Any) -> None:
        # The reader reports a broken call.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await call.write(rpc.LeaseKeepAliveRequest(ID=await self._requests.get()))

    def _settle(self, lease_id: int, ttl_s: int) -> None:
        waiting = self._waiting.get(lease_id)
        if waiting:
            future = waiting.popleft()
            if not future.done():
                future.set_result(ttl_s)
        if not waiting:
            self._waiting.pop(lease_id, None)

    def _fail_all(self, failure: RegistryError) -> None:
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(failure)
                    # The waiter may have been cancelled; an unread exception would be logged.
                    future.exception()
        self._waiting.clear()


class KeepAlives:
    """Renews leases; opens a new stream when the last one broke or stopped answering."""

    def __init__(self, channels: EndpointChannels, tokens: Tokens, timeout_s: float) -> None:
        self._channels = channels
        self._tokens = tokens
        self._timeout_s = timeout_s
        self._stream: _Stream | None = None

    async def renew_lease(self, lease_id: int) -> float:
        """Return the new TTL in seconds. Raise LeaseNotFoundError if the server says so, or another RegistryError."""
        stream = await self._open()
        try:
            ttl_s = await self._renew_on(stream, lease_id)
        except (RegistryLoginError, RegistryDeniedError):
            if not self._tokens.reject(stream.metadata):
                raise
            ttl_s = await self._renew_on(await self._open(), lease_id)
        if ttl_s <= 0:
            raise LeaseNotFoundError(f"lease {lease_id:x} is gone")
        return float(ttl_s)

    async def _open(self) -> _Stream:
        if self._stream is None or self._stream.ended:
            channel = self._channels.current
            try:
                metadata = await self._tokens.metadata(channel)
            except RegistryUnavailableError:
                self._channels.leave_endpoint(channel)
                raise
            if self._stream is None or self._stream.ended:
                self._stream = _Stream(channel, metadata)
        return self._stream

    async def _renew_on(self, stream: _Stream, lease_id: int) -> int:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await stream.send(lease_id)
        except TimeoutError:
            self._drop(stream)
            text = f"no answer to a renewal within {self._timeout_s} s from {stream.channel.endpoint}"
            raise RegistryUnavailableError(text, may_have_run=True) from None
        except RegistryUnavailableError:
            self._drop(stream)
            raise
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            raise closed_under("renewal") from None

    def _drop(self, stream: _Stream) -> None:
        stream.end()
        self._channels.leave_endpoint(stream.channel)
        if self._stream is stream:
            self._stream = None

    def close(self) -> None:
        """End the stream."""
        if self._stream is not None:
            self._stream.end()
            self._stream = None
