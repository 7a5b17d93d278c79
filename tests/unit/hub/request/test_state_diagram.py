"""The state diagram in the docs is what the code does."""

from __future__ import annotations

import pytest

from hub.request.state import Phase
from tests.support import state_diagram
from tests.support.state_diagram import BEGIN, END, PAGE, diagram, edges, page_with


@pytest.fixture(scope="module")
def found() -> state_diagram.Edges:
    return edges()


def test_the_page_shows_the_diagram_that_the_code_makes() -> None:
    """If it does not: ``python -m tests.support.state_diagram``."""
    text = PAGE.read_text()
    assert text == page_with(text, diagram())


def test_the_machine_is_told_of_every_kind_of_event() -> None:
    """A new one needs an example in ``tests/support/state_diagram.py``."""
    assert state_diagram.kinds_of_events() <= state_diagram.kinds_told()


def test_every_phase_is_reached(found: state_diagram.Edges) -> None:
    assert {phase.name for phase in Phase} <= {target for _, target in found} | {"WAITING"}


def test_a_request_can_end_from_every_phase(found: state_diagram.Edges) -> None:
    assert {source for source, target in found if target == "OVER"} == {phase.name for phase in Phase}


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no marks"):
        page_with("nothing here", "x")
    assert page_with(f"a\n{BEGIN}\nold\n{END}\nb", "new") == f"a\n{BEGIN}\nnew\n{END}\nb"
