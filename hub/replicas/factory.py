"""Attaching: clients of replicas that somebody else makes, and that takes its time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from hub.replicas.stage_client import StageClient
    from omni_discovery.records.schema import ReplicaInfo

logger = logging.getLogger(__name__)

#: Makes the client of the replica with this stage id and this replica id. What it gives has the face of a StageClient.
RemoteReplicaFactory: TypeAlias = Callable[[int, int], Awaitable[Any]]

#: How long a factory may take.
_LIMIT_S: Final = 10.0


class Attaching:
    """Part of the orchestrator's task. ``attach`` gets each client with the record that it was made for."""

    def __init__(self, factory: RemoteReplicaFactory, attach: Callable[[ReplicaInfo, StageClient], None]) -> None:
        self._factory = factory
        self._attach = attach
        #: By input address: one client is made at a time.
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def begin(self, info: ReplicaInfo) -> None:
        """Have a client made, unless that is under way."""
        if info.input_addr not in self._under_way and not self._closed:
            self._under_way[info.input_addr] = asyncio.create_task(self._make(info))

    def close(self) -> None:
        """Take nobody in any more; a client that is finished all the same is closed. Idempotent."""
        self._closed = True
        for task in self._under_way.values():
            task.cancel()

    async def _make(self, info: ReplicaInfo) -> None:
        client: StageClient | None = None
        try:
            async with asyncio.timeout(_LIMIT_S):
                client = await self._factory(info.stage_id, info.replica_id)
        except Exception as error:
            # It is tried again when the record changes, as it does with each load that is published.
            said = (info.stage_id, info.replica_id, error)
            logger.warning("replica.unattached stage=%d replica=%d: %r", *said, exc_info=True)
        finally:
            del self._under_way[info.input_addr]
        if client is None:
            return
        if self._closed:
            client.close()
        else:
            self._attach(info, client)
