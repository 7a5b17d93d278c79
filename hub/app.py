"""One hub process: the registry's view, the orchestrator, the HTTP API and the stages that run beside it.

Start order is written once, in ``run_hub``; the stop order is its reverse. Nothing of it is done by threads of its own:
the child processes belong to the main thread, because they die with the thread that started them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import uvloop

from hub.api.http_server import HttpServer, bind
from hub.async_omni import AsyncOmni
from hub.identity import HubIdentity, new_identity, take_identity
from hub.local_stages import LocalStage, LocalStages
from hub.pipeline_claim import claim_pipeline, keep_pipeline
from omni_discovery import __version__
from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.config import RegistryConfig
from omni_discovery.data_plane_flags import CURVE
from omni_discovery.deploy import DeployConfig
from omni_discovery.embedded import EmbeddedEtcd
from omni_discovery.errors import ConfigError, RegistryUnavailableError
from omni_discovery.history_log import remembering
from omni_discovery.hub_watcher import ViewOptions
from omni_discovery.messages import HubRecord
from omni_discovery.registry_check import check_registry, check_ttl
from omni_discovery.runtime_file import read_embedded, remove_endpoint, write_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import FrameType

    from hub.config import HubConfig
    from omni_discovery.registry_security import RegistrySecurity

logger = logging.getLogger(__name__)

_SYNC_S: Final = 10.0
#: A hub that has a saved view waits so long for etcd.
_SAVED_VIEW_AFTER_S: Final = 3.0
_SUPERVISOR_CHECK_S: Final = 0.5
#: Exit code of a supervisor that was given something it can't run with; it has said what.
_BAD_INPUT: Final = 2


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


def run_hub(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code. Raise OmniError if it can't begin."""
    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as stack:
        listener = stack.enter_context(bind(config.host, config.port))
        endpoints = config.endpoints or _embed(stack, config)
        return uvloop.run(_Hub(config, endpoints, listener).run())


def _embed(stack: ExitStack, config: ServeConfig) -> str:
    running = read_embedded(config.runtime_dir, config.namespace)
    if running is not None:
        raise ConfigError(
            f"process {running.pid} already serves namespace {config.namespace!r} with an embedded etcd: "
            f"join it with --etcd-endpoints {running.endpoint}, or choose another --namespace"
        )
    endpoint = stack.enter_context(EmbeddedEtcd(binary=config.etcd_binary)).endpoint
    write_endpoint(config.runtime_dir, config.namespace, endpoint)
    stack.callback(remove_endpoint, config.runtime_dir, config.namespace)
    return endpoint


class _Hub:
    """The part of a hub that lives on the event loop, from its registration to its withdrawal."""

    def __init__(self, config: ServeConfig, endpoints: str, listener: socket.socket) -> None:
        self._config = config
        self._endpoints = endpoints
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._stopping = asyncio.Event()
        #: At which revision this hub put the deploy document; 0 if it stood there.
        self._put_pipeline_at = 0

    async def run(self) -> int:
        """Start in order, serve, stop in the reverse order; return the exit code."""
        config = self._config
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)
        async with AsyncExitStack() as stack:
            identity = self._identity()
            stack.callback(identity.close)
            hub = replace(config.hub, registry_ttl_s=config.ttl_s)
            keys = identity.keys if config.zmq_security == CURVE else None
            omni = AsyncOmni(config.deploy, identity.hub_id, keys, hub, config.policy, config.labels)
            await omni.start()
            # Replicas may still be draining work of ours: they are stopped while the sessions stand.
            stack.push_async_callback(omni.close)
            client = stack.enter_context(self._register(omni, identity.view))
            if not await self._synced(client):
                return 130
            await self._agree_on_pipeline(client, stack)
            stages = LocalStages(
                self._endpoints,
                config.namespace,
                config.ttl_s,
                config.replica_address,
                config.security_flags,
                config.drain_timeout_s,
            )
            stack.push_async_callback(asyncio.to_thread, stages.stop)
            stages.start(config.local_stages)
            server = HttpServer(omni, config.deploy, int(time.time()))
            stack.push_async_callback(server.stop)
            server.start(self._listener)
            logger.info("hub.listening url=%s etcd=%s namespace=%s", self._url, self._endpoints, config.namespace)
            code = await self._serve(stages, omni)
            if code == _BAD_INPUT and self._put_pipeline_at:
                # What can't run here must not stand in the way of its own correction.
                await asyncio.to_thread(client.drop_pipeline, self._put_pipeline_at)
            return code

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
            address=self._url,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            started_at=time.time(),
        )
        return OmniCoordClientForHub(
            self._endpoints,
            namespace=self._config.namespace,
            ttl_s=self._config.ttl_s,
            tls=self._config.security.tls,
            user=self._config.security.user,
            password=self._config.security.password,
            hub=record,
            on_view=remembering(omni.apply_view, self._config.runtime_dir, self._config.namespace),
            options=ViewOptions(
                saved_view=saved_view, applied_revision=omni.applied_revision, count=omni.hub_metrics.count_view
            ),
        )

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

    async def _has_view(self, client: OmniCoordClientForHub, check: asyncio.Task[None]) -> bool:
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
            await asyncio.to_thread(check_ttl, self._registry())
            self._put_pipeline_at = await asyncio.to_thread(claim_pipeline, client, deploy, namespace)
        keeping = asyncio.create_task(keep_pipeline(client, deploy, namespace))
        stack.callback(keeping.cancel)

    async def _serve(self, stages: LocalStages, omni: AsyncOmni) -> int:
        """Wait for a signal; a supervisor that was given something it can't run with ends the hub, too."""
        while not self._stopping.is_set():
            for stage_id, code in stages.ended().items():
                # Code 0: an operator has drained them all.
                level = logging.ERROR if code else logging.INFO
                logger.log(
                    level, "stage.ended stage=%d exit_code=%d: no local replica of it runs any more", stage_id, code
                )
                if code == _BAD_INPUT:
                    return _BAD_INPUT
            if not omni.is_running:
                logger.error("hub.failed: its orchestrator has ended, and nothing can be served without it")
                return 1
            try:
                await asyncio.wait_for(self._stopping.wait(), _SUPERVISOR_CHECK_S)
            except TimeoutError:
                continue
        logger.info("hub.stopping")
        return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
