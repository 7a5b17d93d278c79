"""A hub and scripted replicas on real sockets: what a client gets."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from omni_discovery import wire
from omni_discovery.errors import InvalidRequestError, RequestError
from omni_discovery.stories import Stories, read_stories
from tests.support.hub_fakes import (
    PAIR,
    QUICK,
    FakeReplica,
    accept_only,
    collect,
    echo,
    picture,
    running_hub,
    text_of,
    until,
)
from tests.support.quiet import soon_s


async def test_a_prompt_comes_back_in_pieces_then_an_end_then_the_summary() -> None:
    async with running_hub(FakeReplica(echo)) as omni:
        outputs = await collect(omni.generate({"prompt": "to be or"}, request_id="r1"))
    assert text_of(outputs) == "to be or "
    assert [output.finish_reason for output in outputs if not output.text] == ["stop", "done"]
    assert outputs[-1].is_summary
    assert {"total", "stage0.queue", "stage0.submit", "stage0.total"} <= set(outputs[-1].timings_s)
    assert {output.request_id for output in outputs} == {"r1"}
    assert outputs[0].replica.startswith("0/")


async def test_text_and_picture_come_from_two_stages() -> None:
    thinker, painter = FakeReplica(echo), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        outputs = await collect(omni.generate({"prompt": "a cat"}, params={0: {"seed": 7}}))
    assert text_of(outputs) == "a cat "
    assert [output.data for output in outputs if output.data] == [b"PNG"]
    assert [(o.stage_id, o.modality) for o in outputs if o.finish_reason] == [
        (0, "text"),
        (1, "image"),
        (-1, "summary"),
    ]


async def test_a_stage_is_told_its_parameters_its_handoffs_and_who_is_next() -> None:
    thinker, painter = FakeReplica(echo), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        await collect(omni.generate({"prompt": "a cat"}, params={0: {"seed": 7}, 1: {"steps": 4}}))
    (first,), (second,) = thinker.of(wire.Submit), painter.of(wire.Submit)
    assert (first.inputs, first.params, first.next_stages) == ({"prompt": "a cat"}, {"max_tokens": 8, "seed": 7}, (1,))
    assert (second.params, second.next_stages) == ({"steps": 4}, ())
    assert [(ref.from_stage, ref.to_stage) for ref in second.payloads] == [(0, 1)]
    assert first.epoch == thinker.info.epoch
    assert first.request_id == second.request_id


async def test_a_thinker_that_refuses_leaves_the_painter_alone() -> None:
    """1. the thinker hands nothing over
    2. the text comes, the request ends well, the painter never hears of it
    """

    def refuse(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.chunk(submit, 0, text="no")
        replica.done(submit, 1, hands_over=False)

    painter = FakeReplica(picture, stage_id=1)
    async with running_hub(FakeReplica(refuse), painter, deploy=PAIR) as omni:
        outputs = await collect(omni.generate({"prompt": "x"}))
        assert text_of(outputs) == "no"
        assert outputs[-1].finish_reason == "done"
        assert painter.of(wire.Submit) == []


async def test_text_only_never_reaches_the_painter() -> None:
    thinker, painter = FakeReplica(echo), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        await collect(omni.generate({"prompt": "x"}, modalities=["text"]))
        assert thinker.of(wire.Submit)[0].next_stages == ()
        assert painter.of(wire.Submit) == []


async def test_unknown_modalities_and_stages_are_refused_before_anything_is_sent() -> None:
    replica = FakeReplica()
    async with running_hub(replica) as omni:
        with pytest.raises(InvalidRequestError, match="text"):
            await collect(omni.generate({"prompt": "x"}, modalities=["smell"]))
        with pytest.raises(InvalidRequestError, match="stage 4"):
            await collect(omni.generate({"prompt": "x"}, params={4: {}}))
        assert replica.of(wire.Submit) == []


async def test_requests_spread_by_the_load_as_known_now() -> None:
    """Three replicas, nine requests that stay: three each, though no replica ever reports."""
    replicas = [FakeReplica(accept_only, replica_id=number) for number in range(3)]
    async with running_hub(*replicas, policy="least-load") as omni:
        running = [omni.generate({"prompt": "x"}) for _ in range(9)]
        readers = [asyncio.ensure_future(anext(outputs)) for outputs in running]
        await until(lambda: sum(len(replica.of(wire.Submit)) for replica in replicas) == 9)
        assert [len(replica.of(wire.Submit)) for replica in replicas] == [3, 3, 3]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def test_a_thousand_requests_at_once_all_get_their_own_text() -> None:
    replicas = [FakeReplica(echo, replica_id=number) for number in range(3)]
    patient = replace(QUICK, pick_timeout_s=30.0, accept_limit_s=30.0, request_timeout_s=60.0)
    async with running_hub(*replicas, config=patient) as omni:
        answers = await asyncio.gather(*(collect(omni.generate({"prompt": f"n{number}"})) for number in range(1000)))
        assert [text_of(outputs) for outputs in answers] == [f"n{number} " for number in range(1000)]


async def test_a_burst_that_makes_every_replica_slow_wears_out_no_retries() -> None:
    """1. far more requests than the retry budget allows for come at once, and every replica takes ten times the first
       limit to accept one
    2. some are tried elsewhere; the others stay where they are, and none waits for a retry that the budget holds back
    """

    def slowly(replica: FakeReplica, submit: wire.Submit) -> None:
        asyncio.get_running_loop().call_later(0.5, echo, replica, submit)

    replicas = [FakeReplica(slowly, replica_id=number) for number in range(3)]
    patient = replace(QUICK, accept_timeout_s=0.05, accept_limit_s=30.0, request_timeout_s=60.0)
    async with running_hub(*replicas, config=patient) as omni:
        async with asyncio.timeout(soon_s(8.0)):
            answers = await asyncio.gather(*(collect(omni.generate({"prompt": f"n{number}"})) for number in range(500)))
        assert [text_of(outputs) for outputs in answers] == [f"n{number} " for number in range(500)]
        assert 0 < (omni.metrics.get_sample_value("omni_hub_retries_total", {"stage": "0"}) or 0) < 250


async def test_what_happened_to_a_request_that_failed_is_left_for_doctor_unless_the_client_was_wrong(
    tmp_path: Path,
) -> None:
    """1. a request that no replica should have had; 2. one whose engine fails; 3. only the second one is written"""
    kinds = [wire.FailureKind.INVALID, wire.FailureKind.DEADLINE]

    def fail(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.fail(submit, kinds.pop(0))

    stories = Stories(tmp_path / "omni", "n")
    async with running_hub(FakeReplica(fail), stories=stories) as omni:
        for request_id in ("r1", "r2"):
            with pytest.raises(RequestError):
                await collect(omni.generate({"prompt": "a secret"}, request_id=request_id))
    stories.flush()
    (story,) = read_stories(tmp_path / "omni", "n")
    assert story.kind == "request"
    assert re.fullmatch(r"r2~\d+", story.name), "the id that lines of the log have"
    assert "StageFailed" in story.lines[-1]
    assert "secret" not in str(story)


async def test_the_story_of_a_request_can_be_read_while_it_runs_and_is_logged_when_it_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. a request works, and its story says where; 2. its engine fails for good, and the log has all of it
    3. a request that ends well leaves no story behind
    """
    caplog.set_level(logging.DEBUG, logger="hub.orchestrator.requests")
    submits: list[wire.Submit] = []

    def accept(replica: FakeReplica, submit: wire.Submit) -> None:
        submits.append(submit)
        replica.accept(submit)

    replica = FakeReplica(accept)
    async with running_hub(replica) as omni:
        outputs = asyncio.ensure_future(collect(omni.generate({"prompt": "a secret"}, request_id="r1")))
        await until(lambda: any("Accepted" in line for line in omni._running_orchestrator().stories().get("r1", [])))
        replica.fail(submits[0], wire.FailureKind.INVALID)
        with pytest.raises(InvalidRequestError):
            await outputs
        assert omni._running_orchestrator().stories() == {}
        (story,) = [record.getMessage() for record in caplog.records if "request.story" in record.getMessage()]
        assert re.match(r"request\.story request=r1~\d+\n", story)
        assert [line.split()[1] for line in story.splitlines()[1:]] == ["Submitted", "Sent", "Accepted", "StageFailed"]
        assert story.endswith("-> Finish")
        assert "secret" not in story
        replica.script = echo
        caplog.clear()
        await collect(omni.generate({"prompt": "hi"}))
    assert not [record for record in caplog.records if "request.story" in record.getMessage()]
