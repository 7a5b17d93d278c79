"""In how many ways an answer may go on at one place."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.answer_form import check_answer_form
from omni_discovery.inputs.form_width import MAX_BRANCHES, MAX_EXPRESSIONS, MAX_NAMED


@pytest.mark.attack("Z88")
@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"grammar": "start: x\nx: " + '"a" x | ' * 63 + '"b"'}, "form.grammar: x stands in 65 places"),
        ({"grammar": "start: " + '"a" | ' * 65 + '"b"'}, 'form.grammar: "a" stands in 65 places'),
        ({"grammar": "root ::= " + '["] x | ' * 63 + "x\nx ::= [a]"}, "form.grammar: x stands in 65 places"),
        ({"grammar": "start: " + " ".join(f"r{each}" for each in range(300))}, str(MAX_NAMED)),
        ({"grammar": "start: " + "T " * 97 + "\nT: /a/"}, str(MAX_EXPRESSIONS)),
        ({"grammar": 'start: p::0x0\np::_ : p::incr(_) "b" | "a"'}, "only rules without parameters"),
        ({"json": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}] * 130}}, str(MAX_BRANCHES)),
        ({"json": {"oneOf": [{"anyOf": [{}] * 9}] * 20}}, str(MAX_BRANCHES)),
        ({"json": {"allOf": [{"anyOf": [{}] * 12}, {"anyOf": [{}] * 12}]}}, str(MAX_BRANCHES)),
        ({"json": {"$ref": "#/a", "anyOf": [{}] * 12, "a": {"oneOf": [{}] * 12}}}, str(MAX_BRANCHES)),
    ],
)
def test_a_form_that_may_go_on_in_too_many_ways_is_refused(form: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^form") as caught:
        check_answer_form("form", form)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": "start: item*\nitem: " + " | ".join(f'"word{each}"' for each in range(1000))},
        {"grammar": 'start: SCOPE*\nSCOPE: "::"\n# p::x'},
        {"grammar": "start: " + "PLUS | " * 60 + 'PLUS\nPLUS: "+"'},
        {"json": {"anyOf": [{"type": "null"}, {"const": 1}, {"type": ["string", "integer"]}] * 200}},
        {"json": {"properties": {f"p{each}": {"anyOf": [{"type": "object"}, {"type": "null"}]} for each in range(80)}}},
        {"json": {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{}] * 100}}}},
    ],
)
def test_long_forms_whose_ways_part_at_once_are_fine(form: dict[str, Any]) -> None:
    check_answer_form("form", form)
