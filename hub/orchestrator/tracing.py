"""Tracing: OpenTelemetry spans, one for each request and one for each attempt of each of its stages.

OpenTelemetry is imported in ``connect_tracing`` only: a hub without tracing neither pays for it nor needs its packages.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from hub.request import events as ev
from hub.request.outputs import of_stage
from hub.request.state import Phase
from omni_discovery import __version__, wire
from omni_discovery.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from hub.orchestrator.active import AddRequest
    from hub.receipts.raw import DispatchMark
    from hub.request.machine import RequestMachine

#: The W3C headers that name the trace of a request.
TRACE_HEADERS: Final = ("traceparent", "tracestate")

#: The path where a collector takes spans over HTTP, if the URL has none.
_PATH: Final = "/v1/traces"
#: Timeout of the export of one batch of spans, also of the last batch when the hub stops.
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

    def begin_request(self, request: AddRequest) -> str:
        """Begin a request's span at the time when it was received, under the client's own span if its headers name one.

        Return the id of its trace.

        The span of a companion begins now, under its parent's.
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
        return self._trace.format_trace_id(span.get_span_context().trace_id)

    def follow_request(
        self,
        request_id: str,
        machine: RequestMachine,
        stage_id: int | None,
        event: ev.Event | ev.StageMessage,
        actions: Sequence[ev.Action],
    ) -> None:
        """Update the spans after a machine has taken an event or a replica's answer and returned ``actions``.

        ``stage_id`` is the stage that the event is about; None: the whole request.
        """
        traced = self._requests.get(request_id)
        if traced is None:
            return
        if stage_id is not None:
            _note(traced, stage_id, event)
        for each, attempt in list(traced.attempts.items()):
            if not machine.is_out(each, attempt.number):
                del traced.attempts[each]
                self._end_attempt(each, attempt, machine, event, is_cause=each == stage_id)
        for action in actions:
            if isinstance(action, ev.Dispatch):
                traced.attempts[action.stage_id] = self._attempt(traced, action)

    def note_pick(self, request_id: str, mark: DispatchMark) -> None:
        """Add to the span of an attempt that was sent how its replica was picked."""
        traced = self._requests.get(request_id)
        attempt = None if traced is None else traced.attempts.get(mark.stage_id)
        if attempt is None or attempt.number != mark.attempt or mark.snapshot is None:
            return
        how, chosen, _, known, free, faces = mark.snapshot[:6]
        left_out = Counter(face[10].partition(":")[0] for face in faces if face[10])
        attempt.span.add_event(
            "picked",
            {
                "omni.pick.how": how,
                "omni.pick.chosen": f"{mark.stage_id}/{chosen}",
                "omni.pick.known": known,
                "omni.pick.free": free,
                "omni.pick.left_out": [f"{count} {reason}" for reason, count in left_out.most_common()],
                "omni.view.revision": mark.view_revision,
            },
        )

    def end_request(self, request_id: str, outcome: str, error: RequestError | None) -> None:
        """End the spans of a request."""
        traced = self._requests.pop(request_id, None)
        if traced is None:
            return
        for attempt in traced.attempts.values():
            attempt.span.set_attribute("omni.outcome", "aborted")
            attempt.span.end()
        if not traced.is_companion:
            # A companion is always stopped by its parent, so its outcome says nothing.
            traced.span.set_attribute("omni.outcome", outcome)
        if error is not None:
            self._set_error(traced.span, type(error).__name__, str(error))
        traced.span.end()

    def traceparent(self, request_id: str, stage_id: int) -> str:
        """The W3C ``traceparent`` header of the span of a stage's present attempt; empty if there is none."""
        traced = self._requests.get(request_id)
        attempt = None if traced is None else traced.attempts.get(stage_id)
        carrier: dict[str, str] = {}
        if attempt is not None:
            self._propagator.inject(carrier, self._trace.set_span_in_context(attempt.span))
        return carrier.get("traceparent", "")

    def close(self) -> None:
        """Export the remaining spans, within a bound; blocks."""
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

    def _end_attempt(
        self,
        stage_id: int,
        attempt: _Attempt,
        machine: RequestMachine,
        event: ev.Event | ev.StageMessage,
        *,
        is_cause: bool,
    ) -> None:
        run, span = machine.runs[stage_id], attempt.span
        if run.phase is Phase.DONE:
            span.set_attribute("omni.outcome", "done")
            for part, seconds in of_stage(machine.state.public.pipeline_timings, stage_id).items():
                span.set_attribute(f"omni.{part}_s", seconds)
            if isinstance(event, wire.StageDone) and is_cause:
                span.set_attribute("omni.finish_reason", event.finish_reason)
        elif is_cause:
            span.set_attribute("omni.outcome", "failed")
            self._set_error(span, type(event).__name__, getattr(event, "reason", "") or str(run.failure or ""))
        else:
            span.set_attribute("omni.outcome", "aborted")
        span.end()

    def _set_error(self, span: Span, kind: str, reason: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, reason))


def _note(traced: _Traced, stage_id: int, event: ev.Event | ev.StageMessage) -> None:
    """Note what the event says of a stage's attempt that goes on."""
    if not isinstance(event, ev.Sent | wire.Accepted | wire.Chunk):
        return
    attempt = traced.attempts.get(stage_id)
    if attempt is None or attempt.number != event.attempt:
        return
    match event:
        case ev.Sent(replica=replica):
            attempt.span.set_attribute("omni.replica", str(replica))
            attempt.span.set_attribute("omni.replica.epoch", replica.epoch)
            attempt.span.add_event("sent")
        case wire.Accepted():
            attempt.span.add_event("accepted")
        case wire.Chunk():
            if not attempt.has_output:
                attempt.has_output = True
                attempt.span.add_event("first output")


def traces_url(endpoint: str) -> str:
    """The URL that spans are sent to. Raise ConfigError for an endpoint that is no HTTP URL."""
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: spans go over HTTP; name the collector's URL for that,"
            " http://HOST:4318/v1/traces"
        )
    return endpoint if parts.path.strip("/") else parts._replace(path=_PATH).geturl()


def connect_tracing(endpoint: str, hub_id: str) -> Tracing:
    """Trace to a collector, which need not be up. Raise ConfigError for a bad URL or if OpenTelemetry is missing."""
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
    # The environment's attributes of the service win, as OpenTelemetry defines it.
    provider = TracerProvider(resource=Resource(known).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_S)))
    return Tracing(provider)


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a request that name its trace."""
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}
