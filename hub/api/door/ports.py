"""Ports: all listening sockets of a hub, and an HTTP server for each: the API, and those for operators and metrics."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from hub.api.admin.app import build_admin, build_local
from hub.api.client_quota import ClientQuota
from hub.api.cross_origin import WebPolicy, web_policy
from hub.api.dashboard.entry import PAGES
from hub.api.dashboard.routes import AdminSite, Dashboard
from hub.api.door.guard import Door, Locks, OnlyMetrics, OwnHostOnly
from hub.api.door.keys import KeyRing, read_key
from hub.api.door.tls import follow_files, load_context
from hub.api.server import HttpServer
from omni_discovery.errors import ConfigError
from omni_discovery.processes import make_private, write_private
from omni_discovery.receipts.asking import listen_locally, remove_local
from omni_discovery.sockets.hosts import is_loopback
from omni_discovery.sockets.listen import Sharing, bind

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import ASGIApp

    from hub.api.dashboard.routes import DashboardParts
    from hub.api.door.config import DoorConfig, OwnPort
    from hub.api.door.keys import ApiKey
    from hub.api.server import HttpConfig
    from hub.async_omni import AsyncOmni

logger = logging.getLogger(__name__)

_TOKEN_BYTES: Final = 16
#: A socket that is bound to one of these listens at every address.
_ANY_ADDRESS: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - nothing is bound here


@dataclass(frozen=True, slots=True)
class _Port:
    """Its bound sockets, and how its URL begins."""

    listeners: tuple[socket.socket, ...]
    number: int
    url: str


class Ports:
    """Binds at once; raises ConfigError for an address, or a file for TLS, that can't be used.

    ``close`` closes the sockets; it is for a hub that never served. ``sharing`` is that of the API's port.
    """

    def __init__(
        self,
        host: str,
        port: int,
        door: DoorConfig,
        runtime_dir: Path,
        namespace: str,
        sharing: Sharing = Sharing.NONE,
    ) -> None:
        self._door = door
        self._tls = None if door.tls is None else load_context(door.tls)
        self._token_folder, self._namespace = runtime_dir, namespace
        self._stack = ExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._servers: list[HttpServer] = []
        self._dashboard: Dashboard | None = None
        self.keys = KeyRing(door.keys, from_etcd=door.keys_from_etcd)
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            self._api = self._bind(host, port, "--port", "--host", sharing)
            self._admin = self._bind_own(door.admin, "admin")
            self._metrics = self._bind_own(door.metrics, "metrics")
            undo.pop_all()

    @property
    def url(self) -> str:
        """Where the API is."""
        return self._api.url

    def start(
        self, omni: AsyncOmni, app: ASGIApp, http: HttpConfig, parts: DashboardParts | None = None, etcd: str = ""
    ) -> None:
        """Serve the API and what else there is. Raise ConfigError if the token for operators can't be written.

        ``parts``: of the dashboard at the port for operators; None: there is none. ``etcd``: as ``build_local`` has it.
        """
        door, metrics = self._door, None
        if door.metrics_token is not None:
            metrics = KeyRing([door.metrics_token])
        metrics_moved = self._metrics is not None or door.metrics_moved
        locks = Locks(self.keys if door.asks_for_key else None, metrics, metrics_moved=metrics_moved)
        self._serve_locked(omni, app, locks, self._api, http)
        # The ports of operators check the Host by themselves, and have no clients to bound.
        operators = replace(http, policy=WebPolicy(), most_per_client=0)
        if self._metrics is not None and door.metrics is not None:
            locks, policy = Locks(metrics=metrics), web_policy(door.metrics.host, (), ())
            metered = replace(operators, policy=policy)
            self._serve_locked(omni, OnlyMetrics(app), locks, self._metrics, metered)
            logger.info("hub.metrics url=%s/metrics", self._metrics.url)
        if self._admin is not None and door.admin is not None:
            names = (door.admin.host, socket.gethostname())
            ring = KeyRing([door.admin_token or self._make_token(self._admin)])
            calls: ASGIApp = Door(build_admin(omni), Locks(ring), omni.hub_metrics.count_key, omni.rejections.count)
            if parts is not None:
                self._dashboard = Dashboard(parts, ring, omni.rejections.count, is_open=door.dashboard_open)
                calls = AdminSite(calls, self._dashboard.app())
            # The check of the Host is outermost: a page that came in by another name learns nothing.
            self._serve(omni, OwnHostOnly(calls, names, PAGES), self._admin, operators)
            logger.info("hub.admin url=%s/admin/", self._admin.url)
            if parts is not None:
                logger.info("hub.dashboard url=%s/dashboard/", self._admin.url)
        self._start_local(omni, operators, etcd)
        if self._tls is not None and door.tls is not None:
            self._tasks.append(asyncio.create_task(follow_files(self._tls, door.tls)))

    def _start_local(self, omni: AsyncOmni, http: HttpConfig, etcd: str) -> None:
        """Serve a socket that only this user can reach, for ``omni why`` and ``omni bench`` on this machine.

        Clients are served without it: where it can't be made, that is logged and the hub goes on.
        """
        try:
            listener = self._stack.enter_context(listen_locally(self._token_folder, self._namespace))
            self._stack.callback(remove_local, self._token_folder, self._namespace)
        except (OSError, ConfigError) as error:
            logger.warning("hub.no_receipts_socket: 'omni why' needs --admin-port to ask this hub: %s", error)
            return
        server = HttpServer(omni, build_local(omni, self.url, etcd), http)
        server.start((listener,))
        self._servers.append(server)

    @property
    def admin_url(self) -> str:
        """Where other machines reach the port for operators; empty if they don't."""
        admin = self._door.admin
        if self._admin is None or admin is None or is_loopback(admin.host):
            return ""
        if admin.host not in _ANY_ADDRESS:
            return self._admin.url
        scheme = self._admin.url.partition(":")[0]
        return f"{scheme}://{socket.gethostname()}:{self._admin.number}"

    async def stop(self) -> None:
        """Stop all servers, as HttpServer.stop does. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._dashboard is not None:
            # Its streams have no end of their own.
            self._dashboard.close()
        await asyncio.gather(*(server.stop() for server in self._servers))

    def hurry(self) -> None:
        """See HttpServer.hurry."""
        for server in self._servers:
            server.hurry()

    def close(self) -> None:
        """Close the sockets, and remove the token that was made. Idempotent."""
        self._stack.close()

    @property
    def number(self) -> int:
        """The number of the API's port."""
        return self._api.number

    def _bind(self, host: str, port: int, port_flag: str, host_flag: str, sharing: Sharing = Sharing.NONE) -> _Port:
        listeners = bind(host, port, port_flag, host_flag, sharing)
        for each in listeners:
            self._stack.enter_context(each)
        bound_host, bound_port = listeners[0].getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        authority = f"[{bound_host}]:{bound_port}" if ":" in bound_host else f"{bound_host}:{bound_port}"
        return _Port(listeners, bound_port, f"{scheme}://{authority}")

    def _bind_own(self, port: OwnPort | None, name: str) -> _Port | None:
        return None if port is None else self._bind(port.host, port.port, f"--{name}-port", f"--{name}-host")

    def _serve_locked(self, omni: AsyncOmni, app: ASGIApp, locks: Locks, port: _Port, http: HttpConfig) -> None:
        if http.most_per_client:
            # Behind the door, where it is known whose key the client has.
            app = ClientQuota(app, http.most_per_client)
        self._serve(omni, Door(app, locks, omni.hub_metrics.count_key, omni.rejections.count), port, http)

    def _serve(self, omni: AsyncOmni, app: ASGIApp, port: _Port, http: HttpConfig) -> None:
        server = HttpServer(omni, app, http, tls=self._tls, forwarded_allow_ips=self._door.forwarded_allow_ips)
        server.start(port.listeners)
        self._servers.append(server)

    def _make_token(self, port: _Port) -> ApiKey:
        """Make a token for operators and leave it in a file that only this user can read."""
        token = secrets.token_hex(_TOKEN_BYTES)
        folder = self._token_folder
        file = folder / f"{self._namespace}.admin-{port.number}.token"
        try:
            make_private(folder)
            write_private(file, f"{token}\n".encode())
        except OSError as error:
            raise ConfigError(f"the token for operators can't be left in {file}: {error}") from error
        self._stack.callback(_remove, file)
        logger.info("hub.admin_token file=%s: what is in it opens the port for operators", file)
        return read_key("admin", token, "the token")


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink()
