"""The retry rule, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub.request.retry import (
    ENGINE_DIED,
    Loss,
    Shown,
    Verdict,
    decide,
    error_of,
    is_permanent,
    is_poison,
    is_suspicious,
    may_not_resume,
    unavailable_error,
)
from omni_discovery.errors import EngineFailedError, OverloadedError, ReplicaLostError, StageUnavailableError
from omni_discovery.wire import FailureKind
from stage_runtime.config import EngineDeadError
from stage_runtime.engine_loop.jobs import Outcome, RequestFailed, Work
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads
from tests.support.replica_engine import ScriptedEngine

#: A stage whose replica died before it showed anything.
QUIET = Loss(
    permanent=False, exhausted=False, poison=False, handoff_gone=False, shown=Shown.NOTHING, request_shown=False
)
losses = st.builds(
    Loss,
    *[st.booleans()] * 4,
    shown=st.sampled_from(Shown),
    request_shown=st.booleans(),
).map(lambda loss: replace(loss, request_shown=loss.request_shown or loss.shown is not Shown.NOTHING))


@pytest.mark.parametrize(
    ("shown", "verdict"),
    [
        (Shown.NOTHING, Verdict.AGAIN),
        (Shown.PIECES, Verdict.AGAIN),
        (Shown.TOKENS, Verdict.CONTINUE),
        (Shown.OTHER, Verdict.FAIL),
        (Shown.LONG, Verdict.FAIL),
    ],
)
def test_what_was_shown_of_the_stage_decides_how_it_goes_on(shown: Shown, verdict: Verdict) -> None:
    assert decide(replace(QUIET, shown=shown, request_shown=True)).verdict is verdict


def test_what_other_stages_have_shown_does_not_matter_to_a_stage_that_showed_nothing() -> None:
    assert decide(replace(QUIET, request_shown=True)).verdict is Verdict.AGAIN


def test_a_handoff_that_is_gone_means_anew_or_never() -> None:
    gone = replace(QUIET, handoff_gone=True)
    assert decide(gone).verdict is Verdict.RESTART
    assert decide(replace(gone, request_shown=True)).verdict is Verdict.FAIL


@given(losses)
def test_a_fault_of_the_request_and_the_last_attempt_and_poison_always_fail(loss: Loss) -> None:
    for name in ("permanent", "exhausted", "poison"):
        assert decide(replace(loss, **{name: True})).verdict is Verdict.FAIL


@given(losses)
def test_nothing_that_was_seen_is_ever_produced_twice(loss: Loss) -> None:
    verdict = decide(loss).verdict
    if loss.request_shown:
        assert verdict is not Verdict.RESTART
    if verdict is Verdict.AGAIN:
        assert loss.shown in (Shown.NOTHING, Shown.PIECES)
    assert (verdict is Verdict.CONTINUE) <= (loss.shown is Shown.TOKENS)


@given(losses)
def test_a_failure_says_why_where_the_loss_alone_does_not(loss: Loss) -> None:
    decision = decide(loss)
    assert bool(decision.why) == (decision.verdict is Verdict.FAIL and not loss.permanent)


@pytest.mark.parametrize(
    ("blamed", "deaths", "expected"),
    [(0, 0, False), (0, 2, False), (0, 3, True), (1, 1, False), (1, 2, False), (1, 3, True), (2, 2, True)],
)
def test_a_suspect_has_one_more_attempt_and_nobody_survives_three_deaths(
    blamed: int, deaths: int, expected: bool
) -> None:
    assert is_poison(blamed, deaths) is expected


@pytest.mark.parametrize(("blamed", "deaths", "expected"), [(1, 1, False), (2, 2, False), (2, 3, True)])
def test_a_second_death_in_the_company_of_other_suspects_proves_nothing(
    blamed: int, deaths: int, expected: bool
) -> None:
    assert is_poison(blamed, deaths, was_alone=False) is expected


@pytest.mark.parametrize(
    ("deaths", "had_output", "expected"), [(1, False, True), (1, True, False), (2, False, True), (2, True, True)]
)
def test_work_that_was_seen_to_run_well_is_no_suspect_for_its_first_death(
    deaths: int, had_output: bool, expected: bool
) -> None:
    assert is_suspicious(deaths, had_output=had_output) is expected


@given(losses)
def test_poison_is_told_as_such_whatever_else_holds(loss: Loss) -> None:
    """Clients send a request again that found no attempts left, but must not send this one."""
    decision = decide(replace(loss, permanent=False, poison=True))
    assert decision.is_poison
    assert "too many replicas were lost" in decision.why


def test_a_replica_whose_engine_dies_says_so_in_the_words_that_the_rule_looks_for() -> None:
    said: list[Outcome] = []
    engine = ScriptedEngine()
    loop = EngineLoop(engine, Payloads(0, {}, lambda: 0.0), {}, said.extend, lambda: 0.0)
    engine.steps.append(RuntimeError("device lost"))
    loop.jobs.put(Work("k", "hub/k", "k", 0, {"prompt": "hi"}, {}, (), (), 0.0, 60.0))
    with pytest.raises(EngineDeadError):
        loop.turn()
    (broken,) = said
    assert isinstance(broken, RequestFailed)
    assert broken.kind is FailureKind.ENGINE
    assert broken.reason.startswith(ENGINE_DIED)


@pytest.mark.parametrize(
    ("params", "doubtful"),
    [
        ({}, False),
        ({"temperature": 0.7, "max_tokens": 9, "stop": [], "presence_penalty": 0.0, "seed": None}, False),
        ({"seed": 0}, True),
        ({"stop": "x"}, True),
        ({"frequency_penalty": -0.1}, True),
    ],
)
def test_some_parameters_make_it_doubtful_that_an_answer_can_be_continued(
    params: dict[str, object], doubtful: bool
) -> None:
    assert may_not_resume(params) is doubtful


def test_another_replica_would_say_the_same_of_these_alone() -> None:
    said = {kind for kind in FailureKind if is_permanent(kind)}
    assert said == {FailureKind.INVALID, FailureKind.DEADLINE, FailureKind.NOT_RESUMABLE}


@pytest.mark.parametrize("kind", list(FailureKind))
def test_every_kind_of_failure_has_an_error_that_keeps_the_reason(kind: FailureKind) -> None:
    assert "because" in str(error_of(kind, 3, "because"))


def test_what_can_not_be_resumed_is_told_as_a_loss() -> None:
    assert isinstance(error_of(FailureKind.NOT_RESUMABLE, 0, "x"), ReplicaLostError)


def test_the_error_of_an_empty_stage_names_what_the_last_replica_said() -> None:
    assert str(unavailable_error(1, "nobody", None)) == "nobody"
    lost = unavailable_error(1, "nobody", ReplicaLostError("replica 1/0 died"))
    assert isinstance(lost, StageUnavailableError)
    assert "1/0 died" in str(lost)
    assert isinstance(unavailable_error(1, "nobody", OverloadedError("full")), OverloadedError)
    assert isinstance(unavailable_error(1, "nobody", EngineFailedError("oom")), EngineFailedError)
