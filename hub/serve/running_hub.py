"""A hub without a face: its identity, the registry's view, the orchestrator and the stages that run beside it.

``omni serve`` puts HTTP in front of it, ``Omni`` Python calls. Start order is written once, in ``RunningHub.start``;
the stop order is its reverse.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from hub.async_omni import AsyncOmni
from hub.orchestrator.tracing import connect_tracing
from hub.serve.identity import HubIdentity, new_identity, take_identity
from hub.serve.local_stages import LocalStage, LocalStages
from hub.serve.pipeline_claim import check_before_joining, claim_pipeline, keep_pipeline
from omni_discovery import __version__
from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.commands.flags import CURVE
from omni_discovery.commands.history_log import remembering
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.errors import ConfigError, RegistryError, RegistryUnavailableError
from omni_discovery.etcd.check import check_registry, check_ttl
from omni_discovery.etcd.config import RegistryConfig
from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.etcd.embedded_file import read_embedded, remove_endpoint, write_endpoint
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records.schema import HubRecord
from omni_discovery.stories import Stories
from omni_discovery.view.hub_watcher import ViewOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hub.config import HubConfig
    from omni_discovery.etcd.config import RegistrySecurity

logger = logging.getLogger(__name__)

_SYNC_S: Final = 10.0
#: The hub's own HTTP API.
OMNI_API: Final = "omni"
#: A hub that has a saved view waits so long for etcd.
_SAVED_VIEW_AFTER_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What one ``omni serve`` was asked to do. ``endpoints`` None means: an embedded etcd of our own."""

    deploy: DeployConfig
    hub: HubConfig
    endpoints: str | None
    security: RegistrySecurity
    #: What the supervisors of local stages need to log in, to talk and to drain as we want it.
    security_flags: tuple[str, ...]
    namespace: str
    ttl_s: float
    policy: str
    host: str
    port: int
    local_stages: tuple[LocalStage, ...]
    replica_address: str | None
    runtime_dir: Path
    etcd_binary: Path | None
    #: Where the hub's identity and last view outlive it; None keeps nothing.
    state_dir: Path | None = None
    #: ``curve``, or ``none`` for a data plane that everybody can read.
    zmq_security: str = CURVE
    #: Where this hub is: replicas that have all of these labels come first.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: How long local replicas may take to drain.
    drain_timeout_s: float = 60.0
    #: Which HTTP API: ``omni``, or ``vllm`` with the flags for vLLM's server.
    api: str = OMNI_API
    api_flags: str = ""
    #: Whether operators may call the replicas over HTTP, and with them whoever reaches the port.
    admin_api: bool = False
    #: Where spans of requests go; None: nowhere.
    traces_endpoint: str | None = None


def check_none_embedded(config: ServeConfig) -> None:
    """Raise ConfigError if this user's namespace has an embedded etcd on this machine already."""
    running = read_embedded(config.runtime_dir, config.namespace)
    if running is not None:
        raise ConfigError(
            f"process {running.pid} already serves namespace {config.namespace!r} with an embedded etcd: "
            f"join it with --etcd-endpoints {running.endpoint}, or choose another --namespace"
        )


def embed_etcd(stack: ExitStack, config: ServeConfig) -> str:
    """Start an etcd of our own and tell its endpoint, also to the other commands on this machine."""
    check_none_embedded(config)
    endpoint = stack.enter_context(EmbeddedEtcd(binary=config.etcd_binary)).endpoint
    EtcdKV.version_log.be_brief(embedded=endpoint)
    write_endpoint(config.runtime_dir, config.namespace, endpoint)
    stack.callback(remove_endpoint, config.runtime_dir, config.namespace)
    return endpoint


class RunningHub:
    """One hub on the running loop, from its registration to its withdrawal. ``address`` is where its clients reach it.

    The thread of the loop has to live as long as the hub: the local stages die with the thread that started them.
    """

    def __init__(self, config: ServeConfig, endpoints: str, address: str, stopping: asyncio.Event) -> None:
        self._config = config
        self._endpoints = endpoints
        self._address = address
        #: Set by whoever wants it to stop, also while it is still starting.
        self._stopping = stopping
        #: At which revision this hub put the deploy document; 0 if it stood there.
        self._put_pipeline_at = 0
        #: Whether etcd had answered before this hub joined, and nothing was wrong.
        self._is_checked = False
        self._client: OmniCoordClientForHub | None = None

    async def start(self, stack: AsyncExitStack) -> tuple[AsyncOmni, LocalStages] | None:
        """Start in order; leaving ``stack`` stops it in the reverse order. None if told to stop before it could serve.

        Raise OmniError.
        """
        config = self._config
        self._is_checked = await asyncio.to_thread(check_before_joining, self._registry(), config.deploy)
        identity = self._identity()
        stack.callback(identity.close)
        hub = replace(config.hub, registry_ttl_s=config.ttl_s)
        keys = identity.keys if config.zmq_security == CURVE else None
        tracing = None if config.traces_endpoint is None else connect_tracing(config.traces_endpoint, identity.hub_id)
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        omni = AsyncOmni(
            config.deploy,
            identity.hub_id,
            keys,
            hub,
            config.policy,
            config.labels,
            tracing,
            # vLLM's server has the config and tokenizer of the model.
            fixed_models=config.api != OMNI_API,
        )
        await omni.start()
        # Replicas may still be draining work of ours: they are stopped while the sessions stand.
        stack.push_async_callback(omni.close)
        self._client = client = self._register(omni, identity.view)
        # It waits for etcd, a few seconds at most, while the loop still has aborts to send and answers to end.
        stack.push_async_callback(asyncio.to_thread, client.close)
        if not await self._synced(client):
            return None
        await self._agree_on_pipeline(client, stack)
        stages = LocalStages(
            self._endpoints,
            config.namespace,
            config.ttl_s,
            client.view,
            config.replica_address,
            config.security_flags,
            config.drain_timeout_s,
        )
        stack.push_async_callback(asyncio.to_thread, stages.stop)
        stages.start(config.local_stages)
        return omni, stages

    async def take_back_pipeline(self) -> None:
        """What can't run here must not stand in the way of its own correction."""
        if self._put_pipeline_at and self._client is not None:
            try:
                await asyncio.to_thread(self._client.drop_pipeline, self._put_pipeline_at)
            except RegistryError as error:
                logger.warning("hub.pipeline_not_taken_back reason=%s", error)

    def _identity(self) -> HubIdentity:
        config, host = self._config, socket.gethostname()
        # An embedded etcd is another one at each start: nothing of it is worth keeping.
        if config.endpoints is None or config.state_dir is None:
            return new_identity(host)
        return take_identity(config.state_dir, config.namespace, self._endpoints, host)

    def _register(self, omni: AsyncOmni, saved_view: Path | None) -> OmniCoordClientForHub:
        record = HubRecord(
            hub_id=omni.hub_id,
            curve_public_key=omni.public_key,
            address=self._address,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            started_at=time.time(),
        )
        client = OmniCoordClientForHub(
            self._endpoints,
            namespace=self._config.namespace,
            ttl_s=self._config.ttl_s,
            tls=self._config.security.tls,
            user=self._config.security.user,
            password=self._config.security.password,
            hub=record,
            on_view=remembering(omni.apply_view, self._config.runtime_dir, self._config.namespace),
            options=ViewOptions(
                saved_view=saved_view,
                applied_revision=omni.applied_revision,
                count=omni.hub_metrics.count_view,
                serves=lambda: omni.releases.served,
            ),
        )
        client.keep_stories(Stories(self._config.runtime_dir, self._config.namespace))
        return client

    async def _synced(self, client: OmniCoordClientForHub) -> bool:
        """Whether there is a view to begin with; False if we were told to stop. Raise RegistryError.

        While etcd is away, the saved view will do; not if etcd refuses us.
        """
        settled = threading.Event()
        registry = self._registry()
        # The client only goes on trying; the check says why that is in vain.
        check = asyncio.create_task(asyncio.to_thread(check_registry, registry, _SYNC_S, settled.is_set))
        try:
            return await self._has_view(client, check)
        finally:
            settled.set()
            await asyncio.gather(check, return_exceptions=True)

    def _registry(self) -> RegistryConfig:
        config = self._config
        return RegistryConfig(self._endpoints, config.namespace, config.security, ttl_s=config.ttl_s)

    async def _has_view(self, client: OmniCoordClientForHub, check: asyncio.Task[bytes | None]) -> bool:
        began_s = time.monotonic()
        while time.monotonic() < began_s + 2 * _SYNC_S:
            view = client.view()
            if client.is_synced:
                return True
            if view.stale_since_s is not None and view.revision and time.monotonic() > began_s + _SAVED_VIEW_AFTER_S:
                logger.warning(
                    "hub.started_from_saved_view replicas=%d age_s=%.0f: no etcd answers at %s; the view is stale",
                    len(view.replicas),
                    time.time() - view.stale_since_s,
                    self._endpoints,
                )
                return True
            if self._stopping.is_set():
                return False
            if check.done():
                check.result()
            await asyncio.sleep(0.02)
        raise RegistryUnavailableError(f"no list of replicas from {self._endpoints} within {2 * _SYNC_S:.0f} s")

    async def _agree_on_pipeline(self, client: OmniCoordClientForHub, stack: AsyncExitStack) -> None:
        deploy, namespace = self._config.deploy, self._config.namespace
        if client.is_synced:
            if not self._is_checked:
                await asyncio.to_thread(check_ttl, self._registry())
            self._put_pipeline_at = await asyncio.to_thread(claim_pipeline, client, deploy, namespace)
        keeping = asyncio.create_task(keep_pipeline(client, deploy, namespace))
        stack.callback(keeping.cancel)
