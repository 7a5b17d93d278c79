"""Where a supervisor's samples go: to Prometheus over HTTP at a port of its own, and to the hub that started it."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import sys
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from omni_discovery.commands.access.secret_file import read_secret_file
from omni_discovery.errors import ConfigError
from omni_discovery.metrics.samples import LatestSamples, Sample, encode_sample
from omni_discovery.records.api_key import digest_of
from omni_discovery.sockets.hosts import is_loopback, is_own_host
from omni_discovery.sockets.listen import bind

logger = logging.getLogger(__name__)


#: Connections that are open at the same time. Each has a thread and a descriptor, also before it shows the token.
_MOST_CONNECTIONS: Final = 32
#: How long a client may say or read nothing.
_SILENCE_S: Final = 5.0


#: The longest head of a request. The library would take 100 lines of 64 KiB, and go through all that they say.
_MOST_HEAD_BYTES: Final = 16 << 10


class _BoundedHead:
    """What a client sends, of which no more lines are read than a head may have: ConnectionError then."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left_bytes = _MOST_HEAD_BYTES

    def readline(self, size: int = -1) -> bytes:
        """See io.BufferedIOBase."""
        line: bytes = self._file.readline(size)
        self._left_bytes -= len(line)
        if self._left_bytes < 0:
            raise ConnectionError(f"the head of a request has more than {_MOST_HEAD_BYTES} bytes")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Quiet(WSGIRequestHandler):
    """Logs no requests, and reads no long ones."""

    timeout = _SILENCE_S
    rfile: Any

    def setup(self) -> None:
        """See socketserver."""
        super().setup()
        self.rfile = _BoundedHead(self.rfile)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is of http.server
        """See http.server."""


class _Server(ThreadingMixIn, WSGIServer):
    """The server of one socket, a thread for each of a bounded number of connections: one more closes the oldest."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, app: Any) -> None:
        #: Open connections, the oldest first. Guarded by the condition, which is notified when one is closed.
        self._connections: dict[Any, None] = {}
        self._closed_one = threading.Condition()
        super().__init__(listener.getsockname()[:2], _Quiet, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self.set_app(app)

    def get_request(self) -> tuple[Any, Any]:
        """See socketserver."""
        try:
            return super().get_request()
        except OSError:
            # Without a descriptor the connection goes on waiting, and would be tried again at once, for ever.
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """See socketserver."""
        with self._closed_one:
            while len(self._connections) >= _MOST_CONNECTIONS:
                with contextlib.suppress(OSError):
                    # Its thread sees the end and closes it.
                    next(iter(self._connections)).shutdown(socket.SHUT_RDWR)
                self._closed_one.wait(1.0)
            self._connections[request] = None
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        """See socketserver."""
        super().close_request(request)
        with self._closed_one:
            self._connections.pop(request, None)
            self._closed_one.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or said nothing is no error of this process."""
        logger.debug("supervisor.metrics_connection_failed client=%s reason=%r", client_address, sys.exception())


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


def _refuse_other_names(app: Any) -> Any:
    """The application for those only who ask for this machine: a web page can give its own name any address."""

    def guarded(environ: dict[str, Any], start_response: Any) -> Any:
        # Browsers always say whom they ask.
        if is_own_host(str(environ.get("HTTP_HOST", "localhost")), ()):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"this port is asked by an address, or as localhost\n"]

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
        elif is_loopback(host):
            app = _refuse_other_names(app)
        listeners = bind(host, port, "--metrics-port", "--metrics-host")
        for listener in listeners:
            server = _Server(listener, app)
            thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
            thread.start()
            self._stop_server.callback(thread.join, 5.0)
            self._stop_server.callback(server.server_close)
            self._stop_server.callback(server.shutdown)
        self._is_serving = True
        url = f"http://{f'[{host}]' if ':' in host else host}:{listeners[0].getsockname()[1]}/metrics"
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
