"""Simulated hub processes: the shipped AsyncOmni and its client of the registry, and the answers that clients get."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from hub import async_omni as async_omni_module
from hub.async_omni import AsyncOmni
from hub.config import HubConfig
from hub.replicas import stage_client as stage_client_module
from hub.replicas.events import Answered, ClientEvent
from omni_discovery.clients import base as client_base_module
from omni_discovery.clients.hub import OmniCoordClientForHub
from omni_discovery.records.schema import HubRecord, ReplicaInfo
from omni_discovery.view.hub_watcher import ViewOptions
from omni_discovery.wire import VERSION_CUT
from tests.simulation.network import SimConnection
from tests.simulation.registry import SimKV
from tests.simulation.replica import SimLoopThread, close_client, current_world
from tests.simulation.virtual_time import Process

if TYPE_CHECKING:
    from tests.simulation.world import World


class SimHub:
    """One hub process: what RunningHub starts, without HTTP, files and local stages."""

    def __init__(self, world: World, process: Process, hub_id: str) -> None:
        self._world, self.process, self.hub_id = world, process, hub_id
        plan = world.plan
        config = HubConfig(
            registry_ttl_s=plan.ttl_s,
            request_timeout_s=60.0,
            max_waiting=plan.max_waiting,
            max_in_flight=plan.max_in_flight,
            max_queued_outputs=plan.max_queued,
            receipts=0,
        )
        self.omni = AsyncOmni(world.deploy, hub_id, None, config, plan.policy)
        self.client: OmniCoordClientForHub | None = None
        self.is_ready = False

    async def start(self) -> None:
        """Start as RunningHub does."""
        omni, world = self.omni, self._world
        self._tap(omni)
        await omni.start()
        record = HubRecord(
            hub_id=self.hub_id,
            host=self.process.host,
            pid=1,
            version="0",
            started_at=world.now_s,
            wire_version=VERSION_CUT,
        )
        self.client = OmniCoordClientForHub(
            "10.9.0.0:2379",
            namespace=world.namespace,
            ttl_s=world.plan.ttl_s,
            hub=record,
            on_view=omni.apply_view,
            options=ViewOptions(
                applied_revision=omni.applied_revision,
                count=omni.hub_metrics.count_view,
                serves=lambda: omni.releases.served,
                health=omni.health,
            ),
        )
        omni.watch_health(self.client.request_beat)
        self.is_ready = True

    async def stop(self) -> None:
        """Withdraw, then end every request."""
        self.is_ready = False
        if self.client is not None:
            await close_client(self.client)
        await self.omni.close()

    async def answer(self, prompt: str, **options: Any) -> AsyncGenerator[Any, None]:
        """What the HTTP front end does with a request."""
        async for output in self.omni.generate({"prompt": prompt}, **options):
            yield output

    def leftovers(self) -> dict[str, int]:
        """What is kept of requests; all 0 when there are none."""
        orchestrator = self.omni._orchestrator
        assert orchestrator is not None
        clients = orchestrator._membership.clients.values()
        pools = [pool.core for pool in self.omni.releases.every]
        return {
            "queues": len(self.omni._queues),
            "ids": len(self.omni._inner_ids),
            "requests": len(orchestrator.request_states),
            "open aborts": sum(client.has_open_aborts for client in clients),
            "backlog": len(self.omni._admission.backlog),
            "bindings": sum(len(pool.members.in_flight(addr)) for pool in pools for addr in pool.members.entries),
        }

    def shown_replicas(self) -> dict[tuple[int, int], ReplicaInfo]:
        """What this hub believes to be registered, by key."""
        assert self.client is not None
        return dict(self.client.view().replicas)

    def _tap(self, omni: AsyncOmni) -> None:
        """Let the judge see each answer of a replica that the hub takes in."""
        connect, judge = omni._connect, self._world.judge

        def tapped(info: ReplicaInfo, on_event: Any) -> Any:
            def seen(event: ClientEvent) -> None:
                if isinstance(event, Answered):
                    judge.answer_taken(self, event)
                on_event(event)

            return connect(info, seen)

        omni._connect = tapped  # type: ignore[method-assign]


def patches() -> list[tuple[Any, str, Any]]:
    """The names of the hub's and the registry's modules that a simulation replaces, each with its stand-in."""

    class _Context:
        def destroy(self, linger: int = 0) -> None:
            del linger

    def open_connections(
        context: object, info: Any, hub_id: str, keys: object, config: Any, listener: Any, *_: Any
    ) -> Any:
        del context, keys
        world, identity = current_world(), f"{hub_id}/{secrets.token_hex(16)}"
        addrs = {"input": info.input_addr, "output": info.output_addr}
        return {name: SimConnection(world, name, addr, identity, config, listener) for name, addr in addrs.items()}

    def kv(endpoints: object, *, security: object = None, **timeouts: float) -> SimKV:
        del endpoints, security
        return SimKV(current_world(), **timeouts)

    return [
        (async_omni_module, "make_context", _Context),
        (stage_client_module, "open_connections", open_connections),
        (client_base_module, "LoopThread", SimLoopThread),
        (client_base_module, "EtcdKV", kv),
    ]
