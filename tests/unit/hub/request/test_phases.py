"""The table of phases: no event asks for a change that it does not list, and every change that it lists happens."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hub.request import events as ev
from hub.request.machine import RequestMachine
from hub.request.plan import StageGraph
from hub.request.state import ALLOWED, Phase, RequestState, StageRun
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.wire import FailureKind
from tests.support import state_diagram
from tests.support.request_walk import BRANCHING, PAIR, Walk, apply, finish_of

DOCUMENTS = {
    "pair": PAIR,
    "branching": BRANCHING,
    "pieces": "async_chunk: true\n" + PAIR,
    "pieces of branches": "async_chunk: true\n" + BRANCHING,
}


def test_every_phase_has_a_row_and_none_leads_to_itself() -> None:
    assert set(ALLOWED) == set(Phase)
    assert all(phase not in after for phase, after in ALLOWED.items())


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("after", Phase)
def test_a_change_that_the_table_does_not_list_is_refused_and_changes_nothing(before: Phase, after: Phase) -> None:
    run = _run_in(before)
    if after in ALLOWED[before]:
        run.to(after)
        assert run.phase is after
        return
    with pytest.raises(RuntimeError, match=f"stage 3 can't go from {before.name} to {after.name}"):
        run.to(after)
    assert run.phase is before


def _run_in(phase: Phase) -> StageRun:
    ways: dict[Phase, list[Phase]] = {Phase.WAITING: []}
    while phase not in ways:
        ways |= {after: [*way, after] for before, way in ways.items() for after in ALLOWED[before] if after not in ways}
    run = StageRun(3)
    for each in ways[phase]:
        run.to(each)
    return run


def test_every_arrow_of_the_diagram_is_a_way_through_the_table() -> None:
    """One event may go several steps: a lost attempt by WAITING, an answer before Accepted by ACCEPTED."""
    for source, target in state_diagram.edges():
        if target == "OVER" or (source, target) == ("ACCEPTED", "ACCEPTED"):
            continue
        one = ALLOWED[Phase[source]]
        two = {after for phase in one for after in ALLOWED[phase]}
        assert Phase[target] in one | two, f"{source} --> {target}"


def test_the_table_lists_nothing_that_can_not_happen() -> None:
    """What the diagram is made of asks for all but one: a stage that was skipped waits again in a request of branches.

    1. stage 1 leaves nothing for stage 3, which is skipped; 2. the hand-off for stage 2 is gone: all begin again
    """
    walk = Walk(BRANCHING, modalities=["audio"], params={})
    walk.tell(ev.Submitted())
    walk.accepted(0)
    walk.done(0, 0, to=[1, 2])
    walk.accepted(1)
    walk.done(1, 0)
    assert walk.machine.runs[3].phase is Phase.SKIPPED
    walk.accepted(2)
    walk.failed(2, FailureKind.PAYLOAD)
    assert {run.phase for run in walk.machine.runs.values()} == {Phase.DISPATCHED, Phase.WAITING}
    listed = {(before, after) for before, afters in ALLOWED.items() for after in afters}
    assert state_diagram.steps() | {(Phase.SKIPPED, Phase.WAITING)} == listed


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    document=st.sampled_from(sorted(DOCUMENTS)),
    more=st.sampled_from([{}, {"segmented": True}, {"companions": {"negative": {"prompt": ""}}}]),
    choices=st.lists(st.integers(0, 10_000), max_size=60),
)
def test_no_order_of_events_asks_for_an_illegal_change(
    document: str, more: dict[str, object], choices: list[int]
) -> None:
    """``StageRun.to`` raises for one; a request whose every event was applied ends with one Finish, or goes on."""
    graph = StageGraph(parse_deploy(DOCUMENTS[document], "phases.yaml"))
    plan = graph.plan(None, False if more else None)
    machine = RequestMachine(RequestState("r1", {"prompt": "x"}, plan, graph.merge_params(None), **more))  # type: ignore[arg-type]
    machine.handle(ev.Submitted(), 1.0)
    for choice in choices:
        # An end of the whole request is drawn seldom, or most examples would be short.
        events = [e for name, e in state_diagram.said_of(machine) if name not in state_diagram.ENDS or choice > 9_800]
        actions = apply(machine, events[choice % len(events)], 1.0)
        if machine.finished:
            assert finish_of(actions)
            break
    assert machine.finished or any(run.running or run.phase is Phase.WAITING for run in machine.runs.values())
