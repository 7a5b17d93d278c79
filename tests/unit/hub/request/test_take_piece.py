"""Pieces of text by the short way: whatever happens, a machine does and shows the same as by the long way alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from hub.request import events as ev
from hub.request.outputs import is_plain_text
from hub.request.state import StageRun
from omni_discovery import wire
from tests.support.request_walk import BRANCHING, Heard, Walk, apply, chunk, done, of

_TEXTS = "stages: [{stage_id: 0, engine: e, final_output: text}, {stage_id: 1, engine: e, final_output: text}]"


class _ShortWay(Walk):
    """A walk whose plain pieces are offered to the short way first."""

    took = 0

    def tell(self, event: ev.Event | Heard) -> list[ev.Action]:
        if isinstance(event, Heard) and is_plain_text(event.message) and not event.attachments:
            output = self.machine.take_piece(event.stage_id, event.message, self.now_s + 1.0)
            if output is not None:
                self.now_s += 1.0
                self.took += 1
                actions: list[ev.Action] = [ev.Emit(output)]
                self.actions += actions
                return actions
        return super().tell(event)


def _state(walk: Walk) -> dict[str, Any]:
    """All that a machine knows."""
    state = walk.machine.state
    runs = {
        run.stage_id: {field.name: getattr(run, field.name) for field in fields(StageRun)}
        for run in state.runs.values()
    }
    for run in runs.values():
        run["replay"] = None if run["replay"] is None else vars(run["replay"])
        run["failure"] = str(run["failure"])
    story = walk.machine.story.lines()
    return {"runs": runs, "public": state.public, "finished": state.finished, "tried": state.tried, "story": story}


def _partial(walk: Walk, run: StageRun, number: int) -> None:
    message = msgspec.structs.replace(chunk(run.next_seq, ""), partial_image=number, attempt=max(0, run.attempt))
    walk.tell(Heard(run.stage_id, message, (b"file",)))


def _done(walk: Walk, run: StageRun, _number: int) -> None:
    message = done(run.stage_id, run.next_seq, walk.machine.state.plan.next_stages[run.stage_id])
    walk.tell(Heard(run.stage_id, msgspec.structs.replace(message, attempt=max(0, run.attempt))))


#: What may happen to a stage; the number means something else to each.
_HAPPENINGS: dict[str, Callable[[Walk, StageRun, int], object]] = {
    "piece": lambda walk, run, number: walk.chunk(
        run.stage_id, run.next_seq, f"w{run.next_seq}", token_ids=range(number % 3)
    ),
    "late": lambda walk, run, _: walk.chunk(run.stage_id, max(0, run.next_seq - 1), "late"),
    "gap": lambda walk, run, _: walk.chunk(run.stage_id, run.next_seq + 1, "gap"),
    "stale": lambda walk, run, _: walk.chunk(run.stage_id, run.next_seq, "stale", attempt=run.attempt - 1),
    "partial": _partial,
    "picture": lambda walk, run, _: walk.chunk(run.stage_id, run.next_seq, "", attachments=(b"file",)),
    "lost": lambda walk, run, number: walk.lost(run.stage_id, has_ended=bool(number % 2)),
    "failed": lambda walk, run, number: walk.failed(run.stage_id, list(wire.FailureKind)[number]),
    "sent": lambda walk, run, number: walk.sent(run.stage_id, number),
    "accepted": lambda walk, run, number: walk.accepted(run.stage_id, number),
    "done": _done,
    "behind": lambda walk, _, number: walk.tell(ev.ClientBackpressure(bool(number % 2))),
}
_STEP = st.tuples(st.sampled_from(["piece"] * 8 + list(_HAPPENINGS)), st.integers(0, 3), st.integers(0, 5))


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([_TEXTS, BRANCHING]),
    st.lists(_STEP, max_size=60),
    st.booleans(),
    st.sets(st.integers(0, 3)),
)
def test_the_short_way_does_what_the_long_one_does(
    deploy: str, steps: list[tuple[str, int, int]], begins: bool, deterministic: set[int]
) -> None:
    short, long = _ShortWay(deploy, attempts=4), Walk(deploy, attempts=4)
    for walk in (short, long):
        walk.deterministic = deterministic
        walk.tell(ev.Submitted())
        if begins:
            walk.accepted(0)
    for kind, stage_id, number in steps:
        for walk in (short, long):
            if stage_id in walk.machine.runs:
                _HAPPENINGS[kind](walk, walk.machine.runs[stage_id], number)
        assert _state(short) == _state(long)
    assert [str(each) for each in short.actions] == [str(each) for each in long.actions]


def test_nearly_all_pieces_of_a_plain_answer_go_the_short_way() -> None:
    """All but the first, which says what the others need not; so the property above is about something."""
    walk = _ShortWay(_TEXTS)
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.words(0, *["word"] * 50)
    assert walk.took == 49
    assert len(of(walk.actions, ev.Emit)) == 50
    walk.tell(ev.Cancelled(None))
    assert apply(walk.machine, Heard(0, chunk(50)), 100.0) == []
    assert walk.machine.take_piece(0, chunk(50), 100.0) is None
