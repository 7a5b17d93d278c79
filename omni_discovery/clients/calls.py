"""ClientCalls: the calls of a registry client's connection for code on another event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from omni_discovery.errors import RegistryUnavailableError

if TYPE_CHECKING:
    import concurrent.futures

    from omni_discovery.kv import Claim, Held, KeyValue, KVCalls, Listing, Summary

_Result = TypeVar("_Result")

#: Runs a call on the loop of the connection. Raise RuntimeError once that is closed.
Start = Callable[[Callable[["KVCalls"], Coroutine[Any, Any, Any]]], "concurrent.futures.Future[Any]"]


class ClientCalls:
    """See KVCalls. Each call runs on the connection's loop, and is waited for on the caller's."""

    def __init__(self, start: Start) -> None:
        self._start = start

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """See KVCalls."""
        return await self._wait(lambda kv: kv.put(key, value, lease_id))

    async def create(self, key: str, value: bytes, lease_id: int = 0, *, also_read: str | None = None) -> Claim:
        """See KVCalls."""
        return await self._wait(lambda kv: kv.create(key, value, lease_id, also_read=also_read))

    async def compare_and_put(
        self, key: str, value: bytes, mod_revision: int, lease_id: int = 0, *, held: Held | None = None
    ) -> Claim:
        """See KVCalls."""
        return await self._wait(lambda kv: kv.compare_and_put(key, value, mod_revision, lease_id, held=held))

    async def delete(self, key: str, mod_revision: int = 0) -> bool:
        """See KVCalls."""
        return await self._wait(lambda kv: kv.delete(key, mod_revision))

    async def get(self, key: str) -> KeyValue | None:
        """See KVCalls."""
        return await self._wait(lambda kv: kv.get(key))

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        """See KVCalls."""
        return await self._wait(lambda kv: kv.list(prefix, keys_only=keys_only))

    async def summary(self, prefix: str) -> Summary:
        """See KVCalls."""
        return await self._wait(lambda kv: kv.summary(prefix))

    async def _wait(self, call: Callable[[KVCalls], Coroutine[Any, Any, _Result]]) -> _Result:
        try:
            future = self._start(call)
        except RuntimeError as error:
            raise RegistryUnavailableError(f"the connection to etcd is closed: {error}") from error
        result: _Result = await asyncio.wrap_future(future)
        return result
