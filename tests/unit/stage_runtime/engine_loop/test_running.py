"""Work on its way to the engine."""

from __future__ import annotations

from typing import Any

from stage_runtime.engine_loop.jobs import Finished, NextSegment, SegmentEnded, WindowUpdate, Work
from stage_runtime.engine_loop.running import Running, SegmentedRequest, request_of


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
