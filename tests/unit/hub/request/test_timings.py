"""Where the time of a request went: names, the replica's part, what is exported."""

from __future__ import annotations

import pytest

from hub.request import events as ev
from hub.request.outputs import STAGE_PARTS, of_stage, with_replica
from omni_discovery import wire
from tests.support.request_walk import Walk, heard, of


def done(seq: int, **timings_s: float) -> wire.StageDone:
    return wire.StageDone(
        epoch=7, request_id="r1", seq=seq, finish_reason="stop", queue_length=0, timings_s=dict(timings_s)
    )


def test_a_stage_that_is_done_has_all_its_parts() -> None:
    """It waited 1 s in the hub and 0.5 s at the replica, whose own names are kept beside."""
    walk = Walk(modalities=["text"])
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.chunk(0, 0)
    message = done(1, queue=0.5, generate=0.75, transfer=0.25, first_output=9.0)
    actions = walk.tell(heard(0, 0, message))
    timings_s = of(actions, ev.Emit)[-1].output.timings_s
    parts = {"queue": 1.5, "submit": 1.0, "first_output": 2.0, "generate": 0.75, "transfer": 0.25, "total": 3.0}
    assert of_stage(timings_s, 0) == parts
    assert tuple(parts) == STAGE_PARTS
    assert timings_s["stage0.replica.queue"] == 0.5
    assert walk.machine.state.public.pipeline_timings == timings_s


def test_what_can_be_no_length_of_time_is_not_believed() -> None:
    for nonsense in (float("nan"), float("inf"), -1.0):
        assert with_replica(1.0, {"queue": nonsense, "generate": nonsense, "transfer": nonsense}) == {}


@pytest.mark.attack("Q43")
def test_of_thousands_of_timings_of_a_replica_the_first_are_kept() -> None:
    walk = Walk(modalities=["text"])
    walk.tell(ev.Submitted())
    walk.accepted(0)
    many = {"queue": 0.5} | {f"n{number}": 1.0 for number in range(60_000)} | {"generate": 0.75}
    end, summary = of(walk.tell(heard(0, 0, done(0, **many))), ev.Emit)[-2:]
    assert list(end.output.timings_s)[-1] == "n62"
    assert len(end.output.timings_s) == 64
    assert len(summary.output.timings_s) < 80
    assert summary.output.timings_s["stage0.generate"] == 0.75


def test_a_stage_that_was_done_again_tells_of_the_attempt_that_counts() -> None:
    """1. the first replica is lost after 5 s of work that showed nothing
    2. the second one's timings are those of the stage
    """
    walk = Walk(modalities=["text"])
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.now_s += 5.0
    walk.lost(0)
    walk.accepted(0, replica_id=1)
    walk.chunk(0, 0)
    timings_s = of(walk.tell(heard(0, 1, done(1, queue=0.0, generate=1.0, transfer=0.0))), ev.Emit)[-1]
    assert of_stage(timings_s.output.timings_s, 0) == {
        "queue": 1.0,
        "submit": 1.0,
        "first_output": 2.0,
        "generate": 1.0,
        "transfer": 0.0,
        # From the dispatch of that attempt to its end.
        "total": 3.0,
    }
