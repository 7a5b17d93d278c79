"""Work on its way to the engine."""

from __future__ import annotations

from typing import Any

import msgspec

from omni_discovery.wire import FailureKind, PayloadRef, Resume, ToolAnswer
from stage_runtime.config import PayloadError
from stage_runtime.engine_loop.jobs import Finished, NextSegment, RequestFailed, SegmentEnded, WindowUpdate, Work
from stage_runtime.engine_loop.running import Running, SegmentedRequest, end_of, failed, refusal_of, request_of
from stage_runtime.engines.base import EngineOutput
from stage_runtime.engines.capabilities import capabilities_of
from tests.support.replica_engine import ScriptedEngine


def work(**fields: Any) -> Work:
    return Work("a", "hub/a", "a", 0, {"prompt": "hi"}, {"seed": 1}, (), (2,), 0.0, 60.0, **fields)


def test_the_engine_gets_hand_offs_by_stage_and_those_of_companions_by_role() -> None:
    fetched: Any = {"": {0: {"n": 1}}, "negative": {0: {"n": 2}}}
    request = request_of(work(), {"seed": 7, "max_tokens": 3}, {1: {"n": 3}}, fetched)
    assert request.payloads == {0: {"n": 1}, 1: {"n": 3}}
    assert request.companions == {"negative": {0: {"n": 2}}}
    assert request.params == {"seed": 1, "max_tokens": 3}


def test_pieces_are_awaited_from_stages_whose_hand_off_is_not_there_whole() -> None:
    assert request_of(work(stream_from=(0, 1)), {}, {1: {}}, {}).stream_from == (0,)


def test_what_a_job_does_not_say_is_the_usual() -> None:
    assert (work().priority, work().segment, work().stream_to) == (0, None, ())
    segment = NextSegment("a", 1, {}, ())
    assert (segment.is_last, segment.kept_from) == (False, 0)
    assert WindowUpdate("a", 2, 1).again is False


def test_the_timings_of_segments_add_up_but_for_the_first_output() -> None:
    request = SegmentedRequest()
    for first_s in (1.0, 5.0):
        end = Finished("a", "length", (), {"n": 2}, {"first_output": first_s, "generate": 2.0})
        assert request.end_segment(end) == SegmentEnded("a", "length", (), {"n": 2})
    assert request.is_idle
    assert request.finish("a") == Finished("a", "length", (), {"n": 4}, {"first_output": 1.0, "generate": 4.0})


def test_only_work_in_segments_waits_for_the_next_one() -> None:
    segmented = SegmentedRequest()
    running = Running(work(), 0.0, 0.0, segmented=segmented)
    assert not Running(work(), 0.0, 0.0).is_idle
    assert not running.is_idle
    segmented.is_idle = True
    assert running.is_idle


def end(output: EngineOutput, *, is_cancelled: bool = False, fails: str = "") -> Any:
    """How the request ends that was accepted at 0 s, added at 3 s, and stored from 10 s to 12 s."""
    moments_s = iter([10.0, 12.0])
    running = Running(work(), 3.0, 1.0, 4.0, is_cancelled=is_cancelled)

    def hand_over(_work: Work, _output: EngineOutput) -> tuple[PayloadRef, ...]:
        if fails:
            raise PayloadError(fails)
        return (REF,)

    return end_of(running, output, hand_over, lambda: next(moments_s))


REF = PayloadRef(from_stage=0, to_stage=2, key="k", connector="c", size_bytes=1)
TIMINGS_S = {"queue": 2.0, "generate": 7.0, "transfer": 3.0, "first_output": 4.0}


def test_an_end_says_why_with_what_was_handed_over_and_how_long_each_part_took() -> None:
    called = ToolAnswer(content="x")
    output = EngineOutput("a", finish_reason="length", usage={"n": 1}, stop_reason=7, called=called)
    assert end(output) == Finished("a", "length", (REF,), {"n": 1}, TIMINGS_S, 7, called)
    assert end(EngineOutput("a")).finish_reason == "stop"


def test_an_error_a_cancellation_and_a_hand_off_that_is_not_stored_hand_nothing_over() -> None:
    error = EngineOutput("a", finish_reason="error", error=(FailureKind.INVALID, "no", 422))
    assert end(error) == RequestFailed("a", FailureKind.INVALID, "no", 422)
    assert end(EngineOutput("a", finish_reason="stop", usage={"n": 1}), is_cancelled=True) == Finished(
        "a", "abort", (), {"n": 1}, TIMINGS_S
    )
    assert end(EngineOutput("a", finish_reason="stop"), fails="full") == RequestFailed("a", FailureKind.PAYLOAD, "full")


def test_nothing_came_out_first_where_nothing_came_out() -> None:
    assert "first_output" not in Running(work(), 3.0, 1.0).timings(10.0, 12.0)


def refusal(now_s: float = 0.0, engine: Any = None, **fields: Any) -> FailureKind | None:
    job = msgspec.structs.replace(work(), **fields)
    found = refusal_of(job, capabilities_of(ScriptedEngine() if engine is None else engine), now_s)
    return None if found is None else found.kind


def test_work_is_refused_past_its_deadline_or_where_the_engine_can_not_do_it() -> None:
    assert refusal(59.9) is None
    assert refusal(60.0) is FailureKind.DEADLINE
    assert refusal(resume=Resume(text="x", token_ids=(1,))) is FailureKind.NOT_RESUMABLE
    assert refusal(segment=0) is FailureKind.INVALID
    assert refusal(payloads=(REF,)) is None
    assert refusal(payloads=(REF, msgspec.structs.replace(REF, role="negative"))) is FailureKind.INVALID


def test_a_refusal_names_the_stage_whose_hand_off_it_is_about() -> None:
    assert failed("a", PayloadError("gone", 3)) == RequestFailed("a", FailureKind.PAYLOAD, "gone", from_stage=3)
    assert failed("a", RuntimeError("it broke")).from_stage is None
