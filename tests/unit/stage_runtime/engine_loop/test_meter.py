"""What the engine's work is counted as, and how its own figures are read."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stage_runtime.engine_loop.jobs import Work
from stage_runtime.engine_loop.meter import EngineMeter
from stage_runtime.engine_loop.running import Running
from stage_runtime.engines.base import EngineOutput


def running(resume: Any = None) -> Running:
    work = Work("k", "hub/r", "r", 0, {}, {}, (), (), 0.0, 100.0, resume=resume)
    return Running(work, 0.0, 0.0)


def test_tokens_are_counted_as_they_come_and_not_again_at_the_end() -> None:
    meter, request = EngineMeter(None), running()
    meter.count_output(request, EngineOutput("k", token_ids=(1, 2)))
    assert (meter.prompt_tokens, meter.completion_tokens) == (0, 2)
    end = EngineOutput("k", token_ids=(3,), finish_reason="stop", usage={"prompt_tokens": 7, "completion_tokens": 3})
    meter.count_output(request, end)
    meter.count_end(request, end)
    assert (meter.prompt_tokens, meter.completion_tokens) == (7, 3)


def test_an_engine_that_puts_out_text_alone_is_counted_by_its_usage() -> None:
    meter, request = EngineMeter(None), running()
    meter.count_output(request, EngineOutput("k", text="a b"))
    meter.count_end(request, EngineOutput("k", finish_reason="stop", usage={"completion_tokens": 2}))
    assert (meter.prompt_tokens, meter.completion_tokens) == (0, 2)


def test_what_another_replica_has_put_out_is_not_counted_here() -> None:
    """The usage of an answer that is continued is that of the whole answer; the last token was the other's, too."""
    meter = EngineMeter(None)
    request = running(resume=object())
    meter.count_end(
        request, EngineOutput("k", finish_reason="stop", usage={"prompt_tokens": 7, "completion_tokens": 9})
    )
    assert (meter.prompt_tokens, meter.completion_tokens) == (7, 0)


def engine_figures(*answers: Any) -> tuple[Callable[[], Mapping[str, float]], list[Any]]:
    left = list(answers)

    def metrics() -> Mapping[str, float]:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    return metrics, left


def test_the_engines_own_figures_are_read_now_and_then_and_unknown_ones_are_left_out() -> None:
    metrics, left = engine_figures({"requests_running": 3, "speed": 9.0, "kv_cache_usage": float("nan")}, {})
    meter = EngineMeter(metrics)
    meter.read_engine(100.0)
    assert meter.engine == {"requests_running": 3.0}
    meter.read_engine(100.2)
    assert len(left) == 1
    meter.read_engine(100.3)
    assert meter.engine == {}


def test_an_engine_without_figures_is_not_asked() -> None:
    meter = EngineMeter(None)
    meter.read_engine(100.0)
    assert meter.engine == {}


@pytest.mark.parametrize("wrong", [RuntimeError("no such counter"), {"requests_running": "many"}, None])
def test_figures_that_can_not_be_read_cost_a_line_and_nothing_else(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, _ = engine_figures({"requests_running": 1}, wrong)
    meter = EngineMeter(metrics)
    for moment_s in (100.0, 102.0, 104.0):
        meter.read_engine(moment_s)
    assert meter.engine == {}
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert caplog.messages[0].startswith("engine.metrics_failed")


def test_an_engine_that_has_done_nothing_counts_nothing() -> None:
    meter = EngineMeter(None)
    assert (meter.steps, meter.prompt_tokens, meter.completion_tokens, meter.engine) == (0, 0, 0, {})


def test_the_end_counts_what_a_usage_does_not_say_as_nothing() -> None:
    meter = EngineMeter(None)
    meter.count_end(running(), EngineOutput("k", finish_reason="stop"))
    assert (meter.prompt_tokens, meter.completion_tokens) == (0, 0)


def test_the_engines_figures_are_read_again_after_a_quarter_of_a_second() -> None:
    metrics, left = engine_figures({"requests_running": 1}, {"requests_running": 2, "kv_cache_usage": math.inf}, {})
    meter = EngineMeter(metrics)
    meter.read_engine(10.0)
    meter.read_engine(10.2)
    assert (meter.engine, len(left)) == ({"requests_running": 1.0}, 2)
    meter.read_engine(10.25)
    assert (meter.engine, len(left)) == ({"requests_running": 2.0}, 1)
