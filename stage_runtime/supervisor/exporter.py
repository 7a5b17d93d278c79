"""Where a supervisor's samples go: to Prometheus over HTTP at a port of its own, and to the hub that started it."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from omni_discovery.commands.access.secret_file import read_secret_file
from omni_discovery.errors import ConfigError
from omni_discovery.metrics.samples import LatestSamples, Sample, encode_sample
from omni_discovery.records.api_key import digest_of

logger = logging.getLogger(__name__)


class _Quiet(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is of http.server
        """See http.server."""


def _ask_for_token(app: Any, token: str, source: str) -> Any:
    """The application for those only who send the token. Raise ConfigError for a file without one."""
    if not token:
        raise ConfigError(f"--metrics-token-file {source} is empty: write a token into it")
    wanted = digest_of(token)

    def guarded(environ: dict[str, Any], start_response: Any) -> Any:
        scheme, _, given = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(digest_of(given.strip()), wanted):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"the token of --metrics-token-file is needed: Authorization: Bearer TOKEN\n"]

    return guarded


class MetricsExporter:
    """Takes the samples of one supervisor and its replicas. ``close`` is idempotent."""

    def __init__(self) -> None:
        self._latest = LatestSamples()
        self._hub: socket.socket | None = None
        self._is_serving = False
        self._stop_server = contextlib.ExitStack()

    @property
    def is_used(self) -> bool:
        """Whether anybody gets the samples."""
        return self._hub is not None or self._is_serving

    def send_to_hub(self, metrics_fd: int) -> None:
        """Send each sample to the hub at the other end of this socket, which is taken over."""
        self._hub = socket.socket(fileno=metrics_fd)
        self._hub.set_inheritable(False)
        self._hub.setblocking(False)

    def serve(self, host: str, port: int, token_file: str = "") -> str:
        """Serve ``/metrics`` in threads of its own; return the URL. Raise ConfigError if that is not possible.

        ``token_file`` holds the token that clients need; empty: they need none.
        """
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
            from prometheus_client.exposition import ThreadingWSGIServer

            from omni_discovery.metrics.collector import HostCollector, add_build_info
        except ImportError as error:
            raise ConfigError(
                f"--metrics-port needs more packages ({error}): pip install 'omni-discovery[stage]'"
            ) from error
        registry = CollectorRegistry()
        add_build_info(registry, "supervisor")
        registry.register(HostCollector(lambda: self._latest.latest(time.monotonic())))
        app = make_wsgi_app(registry)
        if token_file:
            app = _ask_for_token(app, read_secret_file("--metrics-token-file", token_file).strip(), token_file)

        class Server(ThreadingWSGIServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            server = make_server(host, port, app, Server, _Quiet)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port}: can't listen at {host}: {error.strerror or error}; choose another port or"
                " --metrics-host"
            ) from error
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        self._is_serving = True
        self._stop_server.callback(thread.join, 5.0)
        self._stop_server.callback(server.server_close)
        self._stop_server.callback(server.shutdown)
        url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
        logger.info("supervisor.metrics url=%s", url)
        return url

    def export(self, sample: Sample) -> None:
        """Show this sample from now on. Never waits and never fails: a hub that reads too slowly misses it."""
        self._latest.take_sample(sample, time.monotonic())
        if self._hub is not None:
            with contextlib.suppress(OSError):
                self._hub.send(encode_sample(sample))

    def close(self) -> None:
        """Close the port and the socket."""
        self._stop_server.close()
        self._is_serving = False
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.close()
