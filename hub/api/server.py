"""The HTTP server: uvicorn on sockets that are bound before the other parts of the hub start."""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from hub.api.connections import ConnectionLimits
from hub.api.cross_origin import WebPolicy, guarded
from hub.api.door.handshakes import TlsListener, accept_waiting
from hub.api.exchange import Exchanges
from hub.api.generation.body import MAX_BODY_BYTES
from hub.api.held_headers import HeldHeaders
from hub.api.long_bodies import LongBodies
from hub.api.protocols import BoundedServer
from omni_discovery.sockets.listen import BACKLOG

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence

    from starlette.types import ASGIApp

    from hub.api.protocols import BoundedHttp
    from hub.async_omni import AsyncOmni

#: How long open answers may go on when the hub stops.
_GRACE_S: Final = 5
#: How long the requests may take to come of clients that were connected at the last moment.
_LAST_REQUESTS_S: Final = 0.2
#: How long clients without a request may take to close.
_GOODBYE_S: Final = 1.0
#: Interval at which answers are ended after that, including those that began meanwhile.
_LATECOMERS_S: Final = 0.5


class _Server(uvicorn.Server):
    """uvicorn with bounds for the begin and the end of TLS, and without its signal handlers: the hub's own decide."""

    def __init__(self, config: uvicorn.Config, bounded: BoundedServer) -> None:
        super().__init__(config)
        self._bounded = bounded
        self._listeners: list[socket.socket] = []
        self.servers = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        config, loop = self.config, asyncio.get_running_loop()
        self.servers: list[Any] = [
            await loop.create_unix_server(self._connection, sock=each, backlog=config.backlog)
            if each.family == socket.AF_UNIX
            else await loop.create_server(self._connection, sock=each, backlog=config.backlog)
            if config.ssl is None
            else TlsListener(each, config.ssl, self._bounded, self._connection)
            for each in sockets or []
        ]
        self._listeners = list(sockets or [])
        self.started = True

    async def stop_listening(self) -> None:
        """Accept nothing new; clients that the kernel has connected until now are served. Idempotent."""
        loop = asyncio.get_running_loop()
        for server, listener in zip(self.servers, self._listeners, strict=False):
            # Nothing waits in between: whoever is connected by the kernel before the close is cut off by it.
            if isinstance(server, TlsListener):
                server.accept_last()
                listener.close()
                continue
            waiting = accept_waiting(listener)
            server.close()
            listener.close()
            for sock, _ in waiting:
                await loop.connect_accepted_socket(self._connection, sock)
        self._listeners.clear()

    def _connection(self) -> BoundedHttp:
        make: Callable[..., Any] = self.config.http_protocol_class
        made: BoundedHttp = make(config=self.config, server_state=self.server_state, app_state={})
        return made


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """What an HTTP server lets clients do."""

    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    policy: WebPolicy = field(default_factory=WebPolicy)
    #: Requests that one client may have under way; 0 for no bound.
    most_per_client: int = 0
    #: Whether each request leaves a line in the log.
    access_log: bool = False
    #: How long the headers of an answer wait for its first piece, counted from the request; None: until it comes.
    headers_wait_s: float | None = None


class HttpServer:
    """The HTTP server of one port of a hub.

    ``tls``: serve HTTPS with it. ``forwarded_allow_ips``: the proxies that may say who the client is; empty: none.
    """

    def __init__(
        self,
        omni: AsyncOmni,
        app: ASGIApp,
        http: HttpConfig | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        forwarded_allow_ips: str = "",
    ) -> None:
        http = http or HttpConfig()
        self._bounded = BoundedServer(http.limits, lambda reason: omni.hub_metrics.http_cuts.labels(reason).inc())
        held = HeldHeaders(guarded(app, http.policy), http.headers_wait_s)
        config = uvicorn.Config(
            Exchanges(LongBodies(held, http.limits.max_held_bytes), logs=http.access_log),
            **self._bounded.protocols,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_graceful_shutdown=2 * _GRACE_S,
            ws_max_size=MAX_BODY_BYTES,
            # A small frame must not become a large one here.
            ws_per_message_deflate=False,
            proxy_headers=bool(forwarded_allow_ips),
            forwarded_allow_ips=forwarded_allow_ips,
        )
        config.load()
        config.ssl = tls
        self._omni = omni
        self._server = _Server(config, self._bounded)
        self._task: asyncio.Task[None] | None = None
        self._hurries = asyncio.Event()

    def start(self, listeners: Sequence[socket.socket]) -> None:
        """Start to serve the sockets of a port; until then connections wait in their backlogs."""
        self._task = asyncio.create_task(self._server.serve(sockets=list(listeners)))

    async def stop(self) -> None:
        """Accept nothing new; open answers may end within 5 s, then they are ended with an error. Idempotent."""
        if self._task is not None and self._server.started:
            await self._server.stop_listening()
            await asyncio.sleep(_LAST_REQUESTS_S)
        self._server.should_exit = True
        if self._task is not None:
            hurried = asyncio.create_task(self._hurries.wait())
            for timeout_s in (_GOODBYE_S, _GRACE_S - _GOODBYE_S):
                await asyncio.wait({self._task, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                self._drop_idle()
            hurried.cancel()
            while not self._task.done():
                # Each open answer ends with an error instead of being cut. The sessions stay open: replicas that are
                # stopped now wait for this hub to acknowledge their drain.
                self._omni.end_requests()
                # One that still waits for its client has no answer that could end.
                self._bounded.drop_waiting()
                await asyncio.wait({self._task}, timeout=_LATECOMERS_S)
                self._bounded.drop_closing()
            await asyncio.gather(self._task, return_exceptions=True)

    def _drop_idle(self) -> None:
        """Cut what is closed already but for TLS's goodbye, which an idle client does not answer."""
        for connection in self._server.server_state.connections.copy():
            # A WebSocket has no cycle, which is one request and its answer.
            cycle = getattr(connection, "cycle", connection)
            if cycle is None or getattr(cycle, "response_complete", False):
                connection.transport.abort()

    def hurry(self) -> None:
        """Have ``stop``, now or later, end open answers at once. Used on the loop."""
        self._hurries.set()
