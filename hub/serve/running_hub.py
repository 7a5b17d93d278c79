"""A hub without an API: its identity, its view of the registry, the orchestrator and the local stages.

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
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import msgspec

from hub.api.door.config import DoorConfig
from hub.api.server import HttpConfig
from hub.async_omni import AsyncOmni
from hub.jobs.config import JobsConfig
from hub.orchestrator.tracing import connect_tracing
from hub.serve.identity import HubIdentity, acquire_identity, new_identity
from hub.serve.local_stages import LocalStages
from hub.serve.pipeline_claim import check_before_joining, claim_pipeline, keep_pipeline
from omni_discovery import __version__
from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.clients.wait_board import WaitBoard
from omni_discovery.commands.flags import CURVE
from omni_discovery.commands.history_log import HistoryLog, history_file, with_history
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.errors import ConfigError, RegistryError, RegistryUnavailableError
from omni_discovery.etcd.check import check_registry, check_ttl
from omni_discovery.etcd.config import RegistryConfig
from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.etcd.embedded_file import read_embedded, remove_endpoint, write_endpoint
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records.schema import HubRecord
from omni_discovery.stories import Stories, Waits
from omni_discovery.view.hub_watcher import ViewOptions
from omni_discovery.view.recent_events import RecentEvents
from omni_discovery.wire import VERSION_CUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hub.config import HubConfig
    from hub.replicas.factory import RemoteReplicaFactory
    from hub.serve.api_servers import ServerOptions
    from omni_discovery.commands.stage_options import StageOptions
    from omni_discovery.etcd.config import RegistrySecurity
    from omni_discovery.view.api_keys import OnApiKeys
    from omni_discovery.view.table import Delta, View

logger = logging.getLogger(__name__)

_SYNC_S: Final = 10.0
#: The hub's own HTTP API.
OMNI_API: Final = "omni"
#: A hub that has a saved view waits so long for etcd.
_SAVED_VIEW_AFTER_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The settings of one ``omni serve``. ``endpoints`` None means an embedded etcd."""

    deploy: DeployConfig
    hub: HubConfig
    endpoints: str | None
    security: RegistrySecurity
    namespace: str
    ttl_s: float
    policy: str
    host: str
    port: int
    #: The stages that run here; their ``endpoints`` are set once the embedded etcd has some.
    local_stages: tuple[StageOptions, ...]
    runtime_dir: Path
    etcd_binary: Path | None
    #: Folder for the hub's identity and saved view; None keeps neither.
    state_dir: Path | None = None
    #: ``curve``, or ``none`` for a data plane in plain text.
    zmq_security: str = CURVE
    #: Labels of this hub's place: replicas that have all of them are picked first.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: The HTTP API: ``omni``, or ``vllm`` with the flags of vLLM's server.
    api: str = OMNI_API
    api_flags: str = ""
    #: Who may use the HTTP ports, and which there are beside the API's.
    door: DoorConfig = field(default_factory=DoorConfig)
    #: What clients may do over HTTP.
    http: HttpConfig = field(default_factory=HttpConfig)
    #: Where videos lie, and how many.
    jobs: JobsConfig = field(default_factory=JobsConfig)
    #: The collector to which spans of requests are sent; None for none.
    traces_endpoint: str | None = None
    #: How long every stage may take until it can serve before the hub ends; None: no limit.
    init_timeout_s: float | None = None
    #: Whether numbers of requests and replicas are logged.
    log_stats: bool = False
    #: Hub processes behind the port, this one and those that it starts.
    api_servers: int = 1
    #: What a further one of those has from the first; None for the first.
    further: ServerOptions | None = None


def check_none_embedded(config: ServeConfig) -> None:
    """Raise ConfigError if this user's namespace has an embedded etcd on this machine already."""
    running = read_embedded(config.runtime_dir, config.namespace)
    if running is not None:
        raise ConfigError(
            f"process {running.pid} already serves namespace {config.namespace!r} with an embedded etcd: "
            f"join it with --etcd-endpoints {running.endpoint}, or choose another --namespace"
        )


def embed_etcd(stack: ExitStack, config: ServeConfig) -> str:
    """Start an embedded etcd; return its endpoint, which is also written to a file for the other commands."""
    check_none_embedded(config)
    endpoint = stack.enter_context(EmbeddedEtcd(binary=config.etcd_binary)).endpoint
    EtcdKV.version_log.be_brief(embedded=endpoint)
    write_endpoint(config.runtime_dir, config.namespace, endpoint)
    stack.callback(remove_endpoint, config.runtime_dir, config.namespace)
    _warn_if_alone(config, endpoint)
    return endpoint


def _warn_if_alone(config: ServeConfig, endpoint: str) -> None:
    """Log a warning if stages are missing here that no other host can bring to an embedded etcd."""
    local = {stage.stage_id for stage in config.local_stages}
    missing = [str(stage.stage_id) for stage in config.deploy.stages if stage.stage_id not in local]
    if missing:
        logger.warning(
            "embedded_etcd.this_machine_only endpoint=%s stages_elsewhere=%s: without --etcd-endpoints this hub runs an"
            " etcd of its own on a socket, which no other host can join; for stages on other hosts run an etcd and give"
            " --etcd-endpoints HOST:PORT to every host",
            endpoint,
            ",".join(missing),
        )


class RunningHub:
    """One hub on the running loop, from its registration to its withdrawal. ``address`` is the URL of its API.

    The thread of the loop has to live as long as the hub: the kernel ends the local stages with it.
    """

    def __init__(
        self,
        config: ServeConfig,
        endpoints: str,
        address: str,
        stopping: asyncio.Event,
        on_api_keys: OnApiKeys | None = None,
        *,
        remote_replica_factory: RemoteReplicaFactory | None = None,
        admin_url: str = "",
    ) -> None:
        self._config = config
        self._admin_url = admin_url
        self._remote_replica_factory = remote_replica_factory
        #: Receives the API keys of etcd; None: nobody asks for any.
        self._on_api_keys = on_api_keys
        self._endpoints = endpoints
        self._address = address
        #: Set to stop the hub, also while it is starting.
        self._stopping = stopping
        #: The revision at which this hub put the deploy document; 0 if there was one already.
        self._put_pipeline_at = 0
        #: Whether etcd has answered before this hub joined and the document and TTL were checked.
        self._is_checked = False
        self._client: OmniCoordClientForHub | None = None
        #: Receives what happened to requests that failed and to a lost lease, for ``omni doctor``.
        self._stories = Stories(config.runtime_dir, config.namespace, endpoints)
        #: Receives which replicas and hubs came and went, for ``omni history``.
        self._history = HistoryLog(history_file(config.runtime_dir, config.namespace))
        #: Receives which child processes wait to be started again; None before the hub has started.
        self.waits: Waits | None = None
        #: The last changes of replicas and hubs, for the dashboard; followed where there is a port for that.
        self.events = RecentEvents()

    async def start(self, stack: AsyncExitStack) -> tuple[AsyncOmni, LocalStages] | None:
        """Start in order; leaving ``stack`` stops it in the reverse order. None if it is stopped before it serves.

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
            stories=self._stories,
            remote_replica_factory=self._remote_replica_factory,
        )
        stack.callback(self._stories.flush)
        await omni.start()
        # Closed after the local stages have stopped: replicas drain this hub's requests over its sessions.
        stack.push_async_callback(omni.close)
        record = self._record(omni)
        self._client = client = self._register(omni, record, identity.view)
        stack.callback(lambda: self._history.append_stop(record, time.time()))
        # In a thread: it waits up to a few seconds for etcd, while the loop sends aborts and ends answers.
        stack.push_async_callback(asyncio.to_thread, client.close)
        if not await self._synced(client):
            return None
        await self._agree_on_pipeline(client, stack)
        board = WaitBoard(self._endpoints, config.namespace, config.security)
        self.waits = Waits(config.runtime_dir, config.namespace, self._endpoints, board=board)
        stages = LocalStages(client.view, waits=self.waits)
        omni.hub_metrics.watch_host(stages.samples)
        stack.push_async_callback(asyncio.to_thread, stages.stop)
        stages.start(tuple(msgspec.structs.replace(stage, endpoints=self._endpoints) for stage in config.local_stages))
        return omni, stages

    @property
    def client(self) -> OmniCoordClientForHub:
        """The client of the registry. Used once the hub has started."""
        assert self._client is not None  # noqa: S101 - `start` has made it
        return self._client

    async def take_back_pipeline(self) -> None:
        """Delete the deploy document if this hub has put it: a wrong one must not block its correction."""
        if self._put_pipeline_at and self._client is not None:
            try:
                await asyncio.to_thread(self._client.drop_pipeline, self._put_pipeline_at)
            except RegistryError as error:
                logger.warning("hub.pipeline_not_taken_back reason=%s", error)

    def _identity(self) -> HubIdentity:
        config, host = self._config, socket.gethostname()
        # An embedded etcd starts empty: nothing of it is worth keeping.
        if config.endpoints is None or config.state_dir is None:
            return new_identity(host)
        return acquire_identity(config.state_dir, config.namespace, self._endpoints, host)

    def _record(self, omni: AsyncOmni) -> HubRecord:
        return HubRecord(
            hub_id=omni.hub_id,
            curve_public_key=omni.public_key,
            address=self._address,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            started_at=time.time(),
            admin=self._admin_url or msgspec.UNSET,
            wire_version=VERSION_CUT,
        )

    def _register(self, omni: AsyncOmni, record: HubRecord, saved_view: Path | None) -> OmniCoordClientForHub:
        client = OmniCoordClientForHub(
            self._endpoints,
            namespace=self._config.namespace,
            ttl_s=self._config.ttl_s,
            tls=self._config.security.tls,
            user=self._config.security.user,
            password=self._config.security.password,
            hub=record,
            on_view=with_history(self._with_events(omni.apply_view), self._history),
            on_api_keys=self._on_api_keys,
            options=ViewOptions(
                saved_view=saved_view,
                applied_revision=omni.applied_revision,
                count=omni.hub_metrics.count_view,
                observe_echo=omni.hub_metrics.observe_echo,
                serves=lambda: omni.releases.served,
                health=omni.health,
            ),
        )
        omni.watch_health(client.request_beat)
        client.keep_stories(self._stories)
        return client

    def _with_events(self, on_view: Callable[[View, Delta], None]) -> Callable[[View, Delta], None]:
        """The callback, and the events of what it is told, which are kept on this loop."""
        if self._config.door.admin is None:
            return on_view
        loop = asyncio.get_running_loop()

        def on_view_kept(view: View, delta: Delta) -> None:
            on_view(view, delta)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.events.follow_view, view, delta, time.time())

        return on_view_kept

    async def _synced(self, client: OmniCoordClientForHub) -> bool:
        """Wait for a view of the registry; return False if the hub was stopped before. Raise RegistryError.

        While etcd is unreachable, the saved view will do; not if etcd refuses the login or the certificate.
        """
        settled = threading.Event()
        registry = self._registry()
        # The client only retries; the check raises the reason why that is in vain.
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
                    "hub.started_from_saved_view replicas=%d age_s=%.0f: etcd at %s gave no list; the view is stale",
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
