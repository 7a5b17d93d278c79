"""Spans of requests over real sockets, kept in memory by OpenTelemetry's own exporter."""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from hub.api.routes import build_app
from hub.async_omni import AsyncOmni
from hub.cli import check_flags
from hub.command import ServeCommand
from hub.orchestrator.tracing import Tracing, connect_tracing, traces_url
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.errors import ConfigError, EngineFailedError, InvalidRequestError
from tests.support.hub_fakes import (
    PAIR,
    QUICK,
    FakeReplica,
    accept_only,
    collect,
    deploy_of,
    echo,
    picture,
    running_hub,
    started_hub,
    text_of,
    until,
)
from tests.support.quiet import soon_s

#: The example of the W3C's document.
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACES = ("--otlp-traces-endpoint", "http://h:4318")
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    yield (exporter := InMemorySpanExporter())
    exporter.shutdown()


@asynccontextmanager
async def traced_hub(exporter: InMemorySpanExporter, *replicas: FakeReplica) -> Any:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    omni = AsyncOmni(deploy_of(PAIR), "hub-1", KeyPair.generate(), QUICK, "round-robin", tracing=tracing)
    try:
        async with started_hub(omni, *(replica.info for replica in replicas)):
            yield omni
    finally:
        assert tracing._requests == {}
        tracing.close()
        for replica in replicas:
            replica.kill()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def of_requests(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == "omni.request"]


def spans_of(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The only request's span, and those of its stages in the order in which they began."""
    spans = exporter.get_finished_spans()
    (request,) = of_requests(exporter)
    return request, sorted((span for span in spans if span is not request), key=lambda span: span.start_time or 0)


async def test_a_request_has_a_span_and_each_of_its_stages_one_beneath_it(exporter: InMemorySpanExporter) -> None:
    async with traced_hub(exporter, FakeReplica(echo), FakeReplica(picture, stage_id=1, replica_id=3)) as omni:
        await collect(omni.generate({"prompt": "a cat"}, request_id="r1"))
    request, stages = spans_of(exporter)
    assert [span.name for span in stages] == ["omni.stage 0", "omni.stage 1"]
    assert request.kind is SpanKind.SERVER
    assert request.parent is None
    assert attributes(request)["omni.request_id"] == "r1"
    assert attributes(request)["omni.outcome"] == "ok"
    assert request.context is not None
    for span in stages:
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
        said = attributes(span)
        assert said["omni.outcome"] == "done"
        assert {"omni.queue_s", "omni.submit_s", "omni.first_output_s"} <= said.keys()
        assert [event.name for event in span.events].count("first output") == 1
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time  # type: ignore[operator]
    assert [attributes(span)["omni.replica"] for span in stages] == ["0/0", "1/3"]


async def test_the_span_of_an_attempt_tells_how_its_replica_was_picked(exporter: InMemorySpanExporter) -> None:
    replicas = FakeReplica(echo), FakeReplica(echo, replica_id=1), FakeReplica(picture, stage_id=1, replica_id=3)
    async with traced_hub(exporter, *replicas) as omni:
        pool = omni.releases.newest.pools[0].core
        pool.upsert(replace(replicas[1].info, cordoned=True), 0.0)
        await collect(omni.generate({"prompt": "a secret"}, request_id="r1"))
    _, [first, _] = spans_of(exporter)
    [picked] = [event for event in first.events if event.name == "picked"]
    told = dict(picked.attributes or {})
    assert told.pop("omni.view.revision", 0)
    assert told == {
        "omni.pick.how": "policy",
        "omni.pick.chosen": "0/0",
        "omni.pick.known": 2,
        "omni.pick.free": 1,
        "omni.pick.left_out": ("1 cordoned",),
    }


async def test_a_replica_is_told_the_span_of_each_attempt(exporter: InMemorySpanExporter) -> None:
    """What its engine makes of that is in the same trace, beneath the attempt; without tracing there is nothing."""

    def fail(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.fail(submit)

    replicas = FakeReplica(fail), FakeReplica(echo, replica_id=1)
    async with traced_hub(exporter, *replicas) as omni:
        await collect(omni.generate({"prompt": "x"}, modalities=["text"], trace_headers={"traceparent": TRACEPARENT}))
    _, stages = spans_of(exporter)
    told = [submit.trace for replica in replicas for submit in replica.of(wire.Submit)]
    assert told == [f"00-{TRACE_ID}-{span.context.span_id:016x}-01" for span in stages if span.context]
    assert len(told) == 2
    untraced = FakeReplica(echo)
    async with running_hub(untraced) as omni:
        await collect(omni.generate({"prompt": "x"}))
    assert [submit.trace for submit in untraced.of(wire.Submit)] == [""]


async def test_the_clients_own_trace_goes_on_in_the_hub(exporter: InMemorySpanExporter) -> None:
    """The header comes over HTTP; one that is nonsense begins a trace of its own."""
    async with traced_hub(exporter, FakeReplica(echo), FakeReplica(picture, stage_id=1)) as omni:
        transport = httpx.ASGITransport(build_app(omni, deploy_of(PAIR), 0))
        body = {"messages": [{"role": "user", "content": "x"}], "modalities": ["image"]}
        async with httpx.AsyncClient(transport=transport, base_url="http://hub") as client:
            for traceparent in (TRACEPARENT, "00-what-is-this"):
                answer = await client.post("/v1/chat/completions", json=body, headers={"traceparent": traceparent})
                assert answer.status_code == 200
    spans = exporter.get_finished_spans()
    ours, other = of_requests(exporter)
    assert ours.parent is not None
    assert ours.parent.is_remote
    assert f"{ours.parent.span_id:016x}" == PARENT_ID
    assert [f"{span.context.trace_id:032x}" for span in spans if span.context].count(TRACE_ID) == 3
    assert other.parent is None


async def test_each_attempt_has_a_span_and_says_why_it_failed(exporter: InMemorySpanExporter) -> None:
    """1. the first replica's engine fails, the second one does the work
    2. two spans of stage 0: one failed, with the reason, one done
    """

    def fail(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.fail(submit)

    async with traced_hub(exporter, FakeReplica(fail), FakeReplica(echo, replica_id=1)) as omni:
        assert text_of(await collect(omni.generate({"prompt": "x"}, modalities=["text"]))) == "x "
    request, (first, second) = spans_of(exporter)
    assert [attributes(span)["omni.attempt"] for span in (first, second)] == [0, 1]
    assert attributes(first)["omni.outcome"] == "failed"
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description == "it broke"
    assert attributes(second)["omni.outcome"] == "done"
    assert request.status.status_code is StatusCode.UNSET


async def test_a_request_that_fails_or_is_left_ends_its_spans(exporter: InMemorySpanExporter) -> None:
    """None stays open, whatever ends the request."""

    def fail(replica: FakeReplica, submit: wire.Submit) -> None:
        if submit.inputs["prompt"] == "stay":
            replica.accept(submit)
            replica.chunk(submit, 0, text="word")
        else:
            replica.fail(submit)

    async with traced_hub(exporter, FakeReplica(fail)) as omni:
        with pytest.raises(EngineFailedError):
            await collect(omni.generate({"prompt": "x"}, modalities=["text"]))
        with pytest.raises(InvalidRequestError):
            await collect(omni.generate({"prompt": object()}, modalities=["text"]))
        left = omni.generate({"prompt": "stay"}, modalities=["text"])
        await anext(left)
        await left.aclose()
        await until(lambda: len(of_requests(exporter)) == 3)
    requests = of_requests(exporter)
    assert [attributes(span)["omni.outcome"] for span in requests] == ["failed", "failed", "cancelled"]
    assert [attributes(span).get("error.type") for span in requests] == [
        "EngineFailedError",
        "InvalidRequestError",
        None,
    ]
    last = exporter.get_finished_spans()[-2]
    assert attributes(last)["omni.outcome"] == "aborted"


async def test_the_spans_of_companions_are_beneath_their_parents(exporter: InMemorySpanExporter) -> None:
    """All of one request is one trace."""
    async with traced_hub(exporter, FakeReplica(echo), FakeReplica(picture, stage_id=1)) as omni:
        await collect(omni.generate({"prompt": "a cat"}, companions={"negative": {"prompt": "blurry"}}))
        await until(lambda: len(exporter.get_finished_spans()) == 5)
    by_name = {span.name: span for span in exporter.get_finished_spans()}
    request, companion = by_name["omni.request"], by_name["omni.companion negative"]
    assert companion.parent == request.context
    assert len({span.context.trace_id for span in exporter.get_finished_spans() if span.context}) == 1


async def test_a_hub_that_stops_ends_the_spans_of_what_ran(exporter: InMemorySpanExporter) -> None:
    replica = FakeReplica(accept_only)
    async with traced_hub(exporter, replica) as omni:
        outputs = omni.generate({"prompt": "x"}, modalities=["text"])
        reading = asyncio.ensure_future(anext(outputs))
        await until(lambda: len(replica.of(wire.Submit)) == 1)
        await omni.close()
        await asyncio.gather(reading, return_exceptions=True)
    assert sorted(span.name for span in exporter.get_finished_spans()) == ["omni.request", "omni.stage 0"]


def test_a_collector_is_named_by_a_url_for_http() -> None:
    assert traces_url("http://host:4318") == "http://host:4318/v1/traces"
    assert traces_url("https://host/otlp/v1/traces") == "https://host/otlp/v1/traces"
    for wrong in ("grpc://host:4317", "host:4318", "http://"):
        with pytest.raises(ConfigError, match="http://HOST:4318/v1/traces"):
            traces_url(wrong)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--headless", "--stage-id", "0", "--etcd-endpoints", "h:1", *TRACES], "is for a hub"),
        (["model", "--otlp-traces-endpoint", "grpc://h:4317"], "spans go over HTTP"),
    ],
)
def test_flags_that_can_not_be_meant_are_refused(flags: list[str], said: str) -> None:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    with pytest.raises(ConfigError, match=said):
        check_flags(parser.parse_args(flags))


def test_a_collector_that_does_not_answer_holds_up_the_end_of_a_hub_for_seconds_only() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        tracing = connect_tracing(f"http://127.0.0.1:{mute.getsockname()[1]}", "hub-1")
        tracing._tracer.start_span("of a request").end()
        begun_s = time.monotonic()
        tracing.close()
        assert time.monotonic() - begun_s < soon_s(8.0)


def test_a_hub_that_does_not_trace_imports_nothing_of_it() -> None:
    code = (
        "import sys, hub.serve.app, hub.orchestrator.tracing; "
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    assert printed.strip() == "[]"
