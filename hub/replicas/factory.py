"""Clients of replicas that a factory of the embedding program makes, each as a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from hub.replicas.stage_client import StageClient
    from omni_discovery.records.schema import ReplicaInfo

logger = logging.getLogger(__name__)

#: Makes the client of the replica with this stage id and this replica id: an object with StageClient's methods.
RemoteReplicaFactory: TypeAlias = Callable[[int, int], Awaitable[Any]]

#: How long a factory may take for one client.
_LIMIT_S: Final = 10.0


class ClientAttacher:
    """Has clients made, one at a time for each address; ``attach`` gets each with the record that it was made for."""

    def __init__(self, factory: RemoteReplicaFactory, attach: Callable[[ReplicaInfo, StageClient], None]) -> None:
        self._factory = factory
        self._attach = attach
        #: The factory's tasks, by input address.
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def make_client(self, info: ReplicaInfo) -> None:
        """Begin to make the client of a replica, unless that is under way."""
        if info.input_addr not in self._under_way and not self._closed:
            self._under_way[info.input_addr] = asyncio.create_task(self._make(info))

    def close(self) -> None:
        """Cancel the factory's tasks; a client that is made all the same is closed. Idempotent."""
        self._closed = True
        for task in self._under_way.values():
            task.cancel()

    async def _make(self, info: ReplicaInfo) -> None:
        client: StageClient | None = None
        try:
            async with asyncio.timeout(_LIMIT_S):
                client = await self._factory(info.stage_id, info.replica_id)
        except Exception as error:
            # The next change of the record tries again, and each load that the replica publishes is one.
            logger.warning("replica.unattached replica=%s: %r", info.name, error, exc_info=True)
        finally:
            del self._under_way[info.input_addr]
        if client is None:
            return
        if self._closed:
            client.close()
        else:
            self._attach(info, client)
