"""A whole hub that sends its spans to a collector."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.hub import ECHO_PAIR, Hub

pytestmark = pytest.mark.e2e


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Its address, and what it was sent."""
    got: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            got.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()
        thread.join(10.0)


def test_the_spans_of_a_request_have_left_when_the_hub_has_ended(tmp_path: Path) -> None:
    with collector() as (url, got):
        hub = Hub.of_yaml(tmp_path, ECHO_PAIR, "--otlp-traces-endpoint", url)
        try:
            hub.wait_ready()
            status, body = hub.ask("a cat", include_timings=True)
            assert status == 200
            assert {"stage0.generate", "stage1.transfer", "total"} <= body["timings_s"].keys()
            assert 'omni_hub_stage_seconds_count{part="generate",stage="1"} 1.0' in hub.get("/metrics")[1]
        finally:
            assert hub.stop() == []
    resources = [resource for request in got for resource in request.resource_spans]
    names = {pair.key: pair.value.string_value for resource in resources for pair in resource.resource.attributes}
    assert names["service.name"] == "omni-hub"
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"omni.request", "omni.stage 0", "omni.stage 1"}
    assert len({span.trace_id for span in spans}) == 1
