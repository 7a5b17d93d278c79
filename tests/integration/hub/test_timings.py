"""Where a request's time went, as its client and the figures of the hub tell it."""

from __future__ import annotations

import json
from typing import Any

import httpx

from hub.api.routes import build_app
from hub.async_omni import AsyncOmni
from omni_discovery import wire
from tests.support.hub_fakes import PAIR, FakeReplica, collect, deploy_of, picture, running_hub

BODY = {"messages": [{"role": "user", "content": "x"}]}
#: What a stage's timings are called, if its replica tells its own.
PARTS = ("queue", "submit", "first_output", "generate", "transfer")


def timed(replica: FakeReplica, submit: wire.Submit) -> None:
    """Accept, say a word, hand over, and tell where the time went; one of the names breaks headers."""
    replica.accept(submit)
    replica.chunk(submit, 0, text="word")
    about = {"epoch": submit.epoch, "request_id": submit.request_id, "attempt": submit.attempt, "queue_length": 0}
    payloads = tuple(replica.payload(submit, stage_id) for stage_id in submit.next_stages)
    timings_s = {"queue": 0.25, "generate": 3.0, "transfer": 0.5, "\r\nX": float("nan")}
    replica.say(wire.StageDone(seq=1, finish_reason="stop", payloads=payloads, timings_s=timings_s, **about))


async def post(omni: AsyncOmni, **fields: Any) -> httpx.Response:
    transport = httpx.ASGITransport(build_app(omni, deploy_of(PAIR), 0))
    async with httpx.AsyncClient(transport=transport, base_url="http://hub") as client:
        answer = await client.post("/v1/chat/completions", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_client_that_asks_is_told_where_the_time_of_each_stage_went() -> None:
    """In the body, in the last event of a stream, and always in the header; else the body says nothing of it."""
    async with running_hub(FakeReplica(timed), FakeReplica(picture, stage_id=1), deploy=PAIR) as omni:
        answer = await post(omni, include_timings=True)
        timings_s = answer.json()["timings_s"]
        assert {f"stage0.{part}" for part in PARTS} <= timings_s.keys()
        assert {"stage1.queue", "stage1.submit", "stage1.first_output", "total", "hub_in"} <= timings_s.keys()
        assert timings_s["stage0.generate"] == 3.0
        assert timings_s["stage0.queue"] >= 0.25
        assert "stage0.generate;dur=3000.000" in answer.headers["Server-Timing"]
        assert "timings_s" not in (await post(omni)).json()
        streamed = (await post(omni, include_timings=True, stream=True)).text
        *_, last, end = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
        assert end == "[DONE]"
        assert json.loads(last)["choices"] == []
        assert json.loads(last)["timings_s"]["stage0.generate"] == 3.0


async def test_the_figures_count_the_time_of_each_stage_once() -> None:
    """A second end of the same attempt changes nothing."""

    def twice(replica: FakeReplica, submit: wire.Submit) -> None:
        timed(replica, submit)
        replica.done(submit, 1)

    async with running_hub(FakeReplica(twice), FakeReplica(picture, stage_id=1), deploy=PAIR) as omni:
        outputs = await collect(omni.generate({"prompt": "x"}))
        value = omni.metrics.get_sample_value
        for part in PARTS:
            assert value("omni_hub_stage_seconds_count", {"stage": "0", "part": part}) == 1.0
        assert value("omni_hub_stage_seconds_sum", {"stage": "0", "part": "generate"}) == 3.0
        # The painter told nothing of its own.
        assert value("omni_hub_stage_seconds_count", {"stage": "1", "part": "first_output"}) == 1.0
        assert value("omni_hub_stage_seconds_count", {"stage": "1", "part": "generate"}) is None
        assert outputs[-1].timings_s["stage0.generate"] == 3.0
