"""What a request keeps of its own course: the last events, with nothing of prompts and outputs."""

from __future__ import annotations

import pytest

from hub.request import events as ev
from hub.request.story import MAX_EVENTS, Story, shown_reason
from omni_discovery.wire import FailureKind, HandOffPiece, StageFailed
from tests.support.request_walk import Walk


def lines_of(walk: Walk) -> list[str]:
    return walk.machine.story.lines()


def test_a_story_tells_events_with_stage_attempt_replica_and_what_followed() -> None:
    """1. the first replica of stage 0 rejects; 2. the second does it; 3. stage 1 fails for good"""
    walk = Walk(params={})
    walk.tell(ev.Submitted())
    walk.sent(0)
    walk.rejected(0, FailureKind.OVERLOADED)
    walk.accepted(0, replica_id=1)
    walk.words(0, "ab", "cd", "ef")
    walk.done(0, 3, to=[1])
    walk.accepted(1)
    walk.failed(1, FailureKind.INVALID, "no such size")
    assert repr(walk.machine).startswith("RequestMachine(r1, finished, ")
    assert lines_of(walk) == [
        "+0.000 Submitted -> Dispatch(0)",
        "+1.000 Sent stage=0 attempt=0 replica=0/0",
        "+2.000 Rejected stage=0 attempt=0 reason='no' -> Retry(0), Dispatch(0)",
        "+3.000 Sent stage=0 attempt=1 replica=0/1",
        "+4.000 Accepted stage=0 attempt=1",
        "+5.000 Chunk stage=0 attempt=1 modality=text -> Emit",
        "+8.000 StageDone stage=0 attempt=1 -> Emit, Dispatch(1)",
        "+9.000 Sent stage=1 attempt=0 replica=1/0",
        "+10.000 Accepted stage=1 attempt=0",
        "+11.000 StageFailed stage=1 attempt=0 reason='invalid' -> ReleasePayload(0), ReleasePayload(0), Finish",
    ]


def test_nothing_of_the_prompt_and_the_output_is_kept() -> None:
    walk = Walk(params={"seed": 17})
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.words(0, "secret", "words")
    walk.done(0, 2, to=[1])
    walk.accepted(1)
    walk.failed(1, FailureKind.ENGINE, "ValueError: can't parse 'secret words'")
    assert "StageFailed stage=1 attempt=0 reason='engine: ValueError'" in lines_of(walk)[-1]
    text = repr(list(walk.machine.story._entries)) + "".join(lines_of(walk))
    assert not [word for word in ("hi", "secret", "words", "17") if word in text.replace("machine", "")]


def test_a_long_answer_does_not_push_out_how_the_request_began() -> None:
    walk = Walk(params={})
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.words(0, *["x"] * 5 * MAX_EVENTS)
    assert len(lines_of(walk)) == 4
    assert lines_of(walk)[0].startswith("+0.000 Submitted")
    # One that is of no use is news.
    walk.chunk(0, 3)
    assert lines_of(walk)[-1].endswith("Chunk stage=0 attempt=0 modality=text -> Drop")


def test_the_last_events_are_kept_of_a_request_that_much_happens_to() -> None:
    walk = Walk(params={})
    walk.tell(ev.Submitted())
    for number in range(2 * MAX_EVENTS):
        walk.tell(ev.ClientBackpressure(is_behind=number % 2 == 0))
    assert len(lines_of(walk)) == len(walk.machine.story) == MAX_EVENTS
    assert lines_of(walk)[0] == "+0.000 ClientBackpressure reason='behind'"


def test_a_debugger_shows_where_a_request_stands() -> None:
    walk = Walk(params={})
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.chunk(0, 0)
    assert repr(walk.machine) == (
        "RequestMachine(r1, [StageRun(stage 0, ACCEPTED, attempt 0, replica 0/0, next seq 1), "
        "StageRun(stage 1, WAITING, attempt -1, no replica, next seq 0)])"
    )
    assert repr(walk.machine.state).startswith("RequestState(r1, [StageRun(stage 0, ACCEPTED")


def test_of_the_pieces_of_a_hand_off_only_the_first_is_kept() -> None:
    story = Story()
    about = {"epoch": 1, "request_id": "r", "attempt": 0, "queue_length": 0}
    for number in range(3):
        story.add_message(0.0, 0, HandOffPiece(**about, number=number, payloads=()), [])  # type: ignore[arg-type]
    assert len(story) == 1


@pytest.mark.parametrize(
    ("reason", "shown"),
    [("the prompt is 'secret'", "engine"), ("CUDA error: at 'secret'", "engine: CUDA error")],
)
def test_of_what_an_engine_says_only_the_kind_of_error_is_shown(reason: str, shown: str) -> None:
    about = {"epoch": 1, "request_id": "r", "queue_length": 0}
    assert shown_reason(StageFailed(**about, kind=FailureKind.ENGINE, reason=reason)) == shown
