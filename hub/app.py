"""One hub process: the registry's view, the orchestrator, the HTTP API and the stages that run beside it.

Start order is written once, in ``run_hub``; the stop order is its reverse. Nothing of it is done by threads of its own:
the child processes belong to the main thread, because they die with the thread that started them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import uvloop

from hub.api.http_server import HttpServer, bind
from hub.async_omni import AsyncOmni
from hub.local_stages import LocalStage, LocalStages
from omni_discovery import __version__
from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.deploy import DeployConfig, decode_deploy, describe_difference, encode_deploy
from omni_discovery.embedded import EmbeddedEtcd
from omni_discovery.errors import ConfigError, RegistryUnavailableError
from omni_discovery.messages import HubRecord
from omni_discovery.runtime_file import read_embedded, remove_endpoint, write_endpoint
from omni_discovery.security import KeyPair

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from hub.config import HubConfig

logger = logging.getLogger(__name__)

_SYNC_S: Final = 10.0
_SUPERVISOR_CHECK_S: Final = 0.5
#: Exit code of a supervisor that was given something it can't run with; it has said what.
_BAD_INPUT: Final = 2


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What one ``omni serve`` was asked to do. ``endpoints`` None means: an embedded etcd of our own."""

    deploy: DeployConfig
    hub: HubConfig
    endpoints: str | None
    namespace: str
    ttl_s: float
    policy: str
    host: str
    port: int
    local_stages: tuple[LocalStage, ...]
    replica_address: str | None
    runtime_dir: Path
    etcd_binary: Path | None


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

    async def run(self) -> int:
        """Start in order, serve, stop in the reverse order; return the exit code."""
        config = self._config
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)
        async with AsyncExitStack() as stack:
            omni = AsyncOmni(config.deploy, _hub_id(), KeyPair.generate(), config.hub, config.policy)
            await omni.start()
            # Replicas may still be draining work of ours: they are stopped while the sessions stand.
            stack.push_async_callback(omni.close)
            client = stack.enter_context(self._register(omni))
            if not await self._synced(client):
                return 130
            await asyncio.to_thread(self._publish_pipeline, client)
            stages = LocalStages(self._endpoints, config.namespace, config.ttl_s, config.replica_address)
            stack.push_async_callback(asyncio.to_thread, stages.stop)
            stages.start(config.local_stages)
            server = HttpServer(omni, config.deploy, int(time.time()))
            stack.push_async_callback(server.stop)
            server.start(self._listener)
            logger.info("hub.listening url=%s etcd=%s namespace=%s", self._url, self._endpoints, config.namespace)
            return await self._serve(stages)

    def _register(self, omni: AsyncOmni) -> OmniCoordClientForHub:
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
            hub=record,
            on_view=omni.apply_view,
        )

    async def _synced(self, client: OmniCoordClientForHub) -> bool:
        """Whether the first list is in; False if we were told to stop. Raise RegistryUnavailableError."""
        deadline_s = time.monotonic() + _SYNC_S
        while time.monotonic() < deadline_s:
            if client.view().revision:
                return True
            if self._stopping.is_set():
                return False
            await asyncio.sleep(0.02)
        raise RegistryUnavailableError(
            f"no etcd answered at {self._endpoints} within {_SYNC_S:.0f} s: start it, or correct --etcd-endpoints; "
            "without that flag an embedded etcd is used"
        )

    def _publish_pipeline(self, client: OmniCoordClientForHub) -> None:
        claim = client.create_pipeline(encode_deploy(self._config.deploy))
        if claim.won or claim.current is None:
            return
        in_force = decode_deploy(claim.current.value, claim.current.key)
        difference = describe_difference(self._config.deploy, in_force)
        if difference:
            raise ConfigError(
                f"namespace {self._config.namespace!r} already runs another pipeline: {difference}. "
                "Serve the same document, or another --namespace"
            )

    async def _serve(self, stages: LocalStages) -> int:
        """Wait for a signal; a supervisor that was given something it can't run with ends the hub, too."""
        while not self._stopping.is_set():
            for stage_id, code in stages.ended().items():
                logger.error("stage.ended stage=%d exit_code=%d: no local replica of it runs any more", stage_id, code)
                if code == _BAD_INPUT:
                    return _BAD_INPUT
            try:
                await asyncio.wait_for(self._stopping.wait(), _SUPERVISOR_CHECK_S)
            except TimeoutError:
                continue
        logger.info("hub.stopping")
        return 0


def _hub_id() -> str:
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:40].strip(".-_") or "hub"
    return f"{host}-{os.getpid()}"


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
