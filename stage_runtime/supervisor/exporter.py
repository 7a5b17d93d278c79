"""Where a supervisor's samples go: to Prometheus over HTTP at a port of its own, and to the hub that started it."""

from __future__ import annotations

import contextlib
import logging
import socket
import time

from omni_discovery.errors import ConfigError
from omni_discovery.metrics.samples import LatestSamples, Sample, encode_sample

logger = logging.getLogger(__name__)


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

    def serve(self, host: str, port: int) -> str:
        """Serve ``/metrics`` in threads of its own; return the URL. Raise ConfigError if that is not possible."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server

            from omni_discovery.metrics.collector import HostCollector, add_build_info
        except ImportError as error:
            raise ConfigError(
                f"--metrics-port needs more packages ({error}): pip install 'omni-discovery[stage]'"
            ) from error
        registry = CollectorRegistry()
        add_build_info(registry, "supervisor")
        registry.register(HostCollector(lambda: self._latest.latest(time.monotonic())))
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port}: can't listen at {host}: {error.strerror or error}; choose another port or"
                " --metrics-host"
            ) from error
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
