"""The retry rule, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub.retry import Loss, Verdict, decide, error_of, unavailable_error
from omni_discovery.errors import EngineFailedError, OverloadedError, ReplicaLostError, StageUnavailableError
from omni_discovery.wire import FailureKind

#: A first stage whose replica died before it showed anything.
QUIET = Loss(
    permanent=False,
    exhausted=False,
    cannot_have_run=False,
    accepted=True,
    takes_handoffs=False,
    handoff_gone=False,
    stage_shown=False,
    request_shown=False,
)
losses = st.builds(Loss, *[st.booleans()] * 8)


def test_a_first_stage_that_showed_nothing_is_done_again() -> None:
    assert decide(QUIET) is Verdict.AGAIN


def test_a_stage_whose_output_was_seen_is_not_done_again() -> None:
    assert decide(replace(QUIET, stage_shown=True, request_shown=True)) is Verdict.FAIL


def test_work_that_was_refused_goes_elsewhere_even_if_an_earlier_stage_was_seen() -> None:
    loss = replace(QUIET, cannot_have_run=True, accepted=False, takes_handoffs=True, request_shown=True)
    assert decide(loss) is Verdict.AGAIN


def test_a_later_stage_lost_after_it_took_the_work_begins_the_request_anew() -> None:
    assert decide(replace(QUIET, takes_handoffs=True)) is Verdict.RESTART


def test_a_later_stage_that_never_accepted_is_sent_the_same_handoff_again() -> None:
    assert decide(replace(QUIET, takes_handoffs=True, accepted=False)) is Verdict.AGAIN


def test_where_text_was_seen_the_old_handoff_is_tried_once_more() -> None:
    assert decide(replace(QUIET, takes_handoffs=True, request_shown=True)) is Verdict.AGAIN


def test_a_handoff_that_is_gone_means_anew_or_never() -> None:
    gone = replace(QUIET, takes_handoffs=True, handoff_gone=True)
    assert decide(gone) is Verdict.RESTART
    assert decide(replace(gone, request_shown=True)) is Verdict.FAIL


@given(losses)
def test_a_fault_of_the_request_and_the_last_attempt_always_fail(loss: Loss) -> None:
    assert decide(replace(loss, permanent=True)) is Verdict.FAIL
    assert decide(replace(loss, exhausted=True)) is Verdict.FAIL


@given(losses)
def test_nothing_that_was_seen_is_ever_produced_twice(loss: Loss) -> None:
    if loss.stage_shown:
        assert decide(loss) is Verdict.FAIL
    if loss.request_shown:
        assert decide(loss) is not Verdict.RESTART


@pytest.mark.parametrize("kind", list(FailureKind))
def test_every_kind_of_failure_has_an_error_that_keeps_the_reason(kind: FailureKind) -> None:
    assert "because" in str(error_of(kind, 3, "because"))


def test_the_error_of_an_empty_stage_names_what_the_last_replica_said() -> None:
    assert str(unavailable_error(1, "nobody", None)) == "nobody"
    lost = unavailable_error(1, "nobody", ReplicaLostError("replica 1/0 died"))
    assert isinstance(lost, StageUnavailableError)
    assert "1/0 died" in str(lost)
    assert isinstance(unavailable_error(1, "nobody", OverloadedError("full")), OverloadedError)
    assert isinstance(unavailable_error(1, "nobody", EngineFailedError("oom")), EngineFailedError)
