"""The engine's thread and answers that another replica began."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from omni_discovery.wire import FailureKind, Resume
from stage_runtime.config import NotResumableError
from stage_runtime.engine_loop.jobs import Outcome, RequestFailed, Work
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.engines.base import StageRequest
from tests.support.replica_engine import ScriptedEngine

SHOWN = Resume(token_ids=(1,), text="one")


class ResumingEngine(ScriptedEngine):
    """Goes on behind anything but an answer that begins with ``never``."""

    not_resumable: Mapping[str, str] | None = {"never": "it said so"}

    def add(self, request: StageRequest) -> None:
        if request.resume is not None and request.resume.text == "never":
            raise NotResumableError("never: it said so")
        super().add(request)


def loop_of(engine: ScriptedEngine, resume: Resume | None) -> tuple[EngineLoop, list[Outcome]]:
    said: list[Outcome] = []
    loop = EngineLoop(engine, Payloads(0, {}, lambda: 0.0), {}, said.extend, lambda: 0.0)
    loop.jobs.put(Work("k", "hub/k", "k", 1, {"prompt": "hi"}, {}, (), (), 0.0, 60.0, resume=resume, priority=-2))
    loop.turn()
    return loop, said


def test_what_was_shown_and_the_priority_reach_the_engine() -> None:
    engine = ResumingEngine()
    _, said = loop_of(engine, SHOWN)
    assert said == []
    assert (engine.requests["k"].resume, engine.requests["k"].priority) == (SHOWN, -2)


def test_an_answer_that_the_engine_can_not_continue_ends_with_the_reason() -> None:
    _, said = loop_of(ResumingEngine(), Resume(token_ids=(1,), text="never"))
    assert said == [RequestFailed("k", FailureKind.NOT_RESUMABLE, "never: it said so")]


@pytest.mark.parametrize("declared", [True, False])
def test_an_engine_that_does_not_know_of_continuations_is_never_given_one(declared: bool) -> None:
    """It would begin at the beginning: a third party's engine, written before there were any, or one that says no."""
    engine = ScriptedEngine()
    if declared:
        engine.not_resumable = None  # type: ignore[attr-defined]
    else:
        assert not hasattr(engine, "not_resumable")
    loop, said = loop_of(engine, SHOWN)
    assert [(type(end), end.kind) for end in said if isinstance(end, RequestFailed)] == [
        (RequestFailed, FailureKind.NOT_RESUMABLE)
    ]
    assert not engine.requests
    assert not len(loop)
