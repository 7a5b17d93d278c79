"""Tracing: one span for each request and one for each attempt of each of its stages, for OpenTelemetry.

Nothing of OpenTelemetry is imported before ``connect_tracing``: a hub that is not asked to trace has neither its cost
nor its packages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from hub.request import events as ev
from hub.request.outputs import of_stage
from hub.request.state import Phase
from omni_discovery import __version__
from omni_discovery.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from hub.orchestrator.active import AddRequest
    from hub.request.machine import RequestMachine

#: The headers of the W3C that say which trace a request belongs to.
TRACE_HEADERS: Final = ("traceparent", "tracestate")

#: Where a collector takes spans over HTTP, if the URL does not say.
_PATH: Final = "/v1/traces"
#: How long a batch of spans may take to leave, the last one of a hub that stops included.
_EXPORT_S: Final = 3.0


@dataclass(slots=True)
class _Attempt:
    number: int
    span: Span
    has_output: bool = False


@dataclass(slots=True)
class _Traced:
    span: Span
    context: Context
    is_companion: bool
    #: The attempts under way, by stage.
    attempts: dict[int, _Attempt] = field(default_factory=dict)


class Tracing:
    """The spans of one hub's requests; part of the orchestrator's task, but for ``close``, which blocks."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("omni_discovery", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._requests: dict[str, _Traced] = {}

    def begin(self, request: AddRequest) -> None:
        """A request is taken; its span begins when its bytes came, under the client's own span if it named one.

        That of a companion begins now, under its parent's.
        """
        parent = self._requests.get(request.parent_id)
        context = self._propagator.extract(dict(request.trace_headers)) if parent is None else parent.context
        age_s = max(0.0, time.perf_counter() - request.received_s) if parent is None else 0.0
        span = self._tracer.start_span(
            "omni.request" if parent is None else f"omni.companion {request.role}",
            context=context,
            kind=self._trace.SpanKind.SERVER if parent is None else self._trace.SpanKind.INTERNAL,
            start_time=time.time_ns() - int(age_s * 1e9),
            attributes={
                "omni.request_id": request.shown_id,
                "omni.stages": list(request.plan.stages),
                "omni.final_stages": list(request.plan.finals),
                "omni.priority": request.priority,
            },
        )
        self._requests[request.request_id] = _Traced(span, self._trace.set_span_in_context(span), parent is not None)

    def follow(self, request_id: str, machine: RequestMachine, event: ev.Event, actions: Sequence[ev.Action]) -> None:
        """A request's machine was told something, and decided this."""
        traced = self._requests.get(request_id)
        if traced is None:
            return
        _note(traced, event)
        for stage_id, attempt in list(traced.attempts.items()):
            if not machine.is_out(stage_id, attempt.number):
                del traced.attempts[stage_id]
                self._end_attempt(stage_id, attempt, machine, event)
        for action in actions:
            if isinstance(action, ev.Dispatch):
                traced.attempts[action.stage_id] = self._attempt(traced, action)

    def end(self, request_id: str, outcome: str, error: RequestError | None) -> None:
        """The request is over."""
        traced = self._requests.pop(request_id, None)
        if traced is None:
            return
        for attempt in traced.attempts.values():
            attempt.span.set_attribute("omni.outcome", "aborted")
            attempt.span.end()
        if not traced.is_companion:
            # A companion is always stopped by its parent, however it went.
            traced.span.set_attribute("omni.outcome", outcome)
        if error is not None:
            self._blame(traced.span, type(error).__name__, str(error))
        traced.span.end()

    def traceparent(self, request_id: str, stage_id: int) -> str:
        """The span of a stage's present attempt as the W3C's header names it; empty if there is none."""
        traced = self._requests.get(request_id)
        attempt = None if traced is None else traced.attempts.get(stage_id)
        carrier: dict[str, str] = {}
        if attempt is not None:
            self._propagator.inject(carrier, self._trace.set_span_in_context(attempt.span))
        return carrier.get("traceparent", "")

    def close(self) -> None:
        """Send what is left, within a bound; blocks."""
        self._provider.shutdown()

    def _attempt(self, traced: _Traced, action: ev.Dispatch) -> _Attempt:
        span = self._tracer.start_span(
            f"omni.stage {action.stage_id}",
            context=traced.context,
            kind=self._trace.SpanKind.CLIENT,
            attributes={
                "omni.stage_id": action.stage_id,
                "omni.attempt": action.attempt,
                "omni.resumed": action.resume is not None,
            },
        )
        return _Attempt(action.attempt, span)

    def _end_attempt(self, stage_id: int, attempt: _Attempt, machine: RequestMachine, event: ev.Event) -> None:
        run, span = machine.runs[stage_id], attempt.span
        concerns = getattr(event, "stage_id", None) == stage_id
        if run.phase is Phase.DONE:
            span.set_attribute("omni.outcome", "done")
            for part, seconds in of_stage(machine.state.public.pipeline_timings, stage_id).items():
                span.set_attribute(f"omni.{part}_s", seconds)
            if isinstance(event, ev.StageDone) and concerns:
                span.set_attribute("omni.finish_reason", event.message.finish_reason)
        elif concerns:
            span.set_attribute("omni.outcome", "failed")
            self._blame(span, type(event).__name__, getattr(event, "reason", "") or str(run.failure or ""))
        else:
            span.set_attribute("omni.outcome", "aborted")
        span.end()

    def _blame(self, span: Span, kind: str, reason: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, reason))


def _note(traced: _Traced, event: ev.Event) -> None:
    if not isinstance(event, ev.Sent | ev.Accepted | ev.Chunk):
        return
    attempt = traced.attempts.get(event.stage_id)
    if attempt is None or attempt.number != event.attempt:
        return
    match event:
        case ev.Sent(replica=replica):
            attempt.span.set_attribute("omni.replica", str(replica))
            attempt.span.set_attribute("omni.replica.epoch", replica.epoch)
            attempt.span.add_event("sent")
        case ev.Accepted():
            attempt.span.add_event("accepted")
        case ev.Chunk():
            if not attempt.has_output:
                attempt.has_output = True
                attempt.span.add_event("first output")


def traces_url(endpoint: str) -> str:
    """Where spans are sent to. Raise ConfigError if that can't be."""
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: spans go over HTTP; name the collector's URL for that,"
            " http://HOST:4318/v1/traces"
        )
    return endpoint if parts.path.strip("/") else parts._replace(path=_PATH).geturl()


def connect_tracing(endpoint: str, hub_id: str) -> Tracing:
    """Trace to a collector; it need not be there. Raise ConfigError if that can't be done here."""
    url = traces_url(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'omni-discovery[tracing]'"
        ) from error
    known: dict[str, Any] = {"service.name": "omni-hub", "service.version": __version__, "service.instance.id": hub_id}
    # What the environment says of the service, by OpenTelemetry's own rules, wins.
    provider = TracerProvider(resource=Resource(known).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_S)))
    return Tracing(provider)


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Of a request's headers, those that tracing reads."""
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}
