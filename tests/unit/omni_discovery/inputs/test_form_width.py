"""In how many ways an answer may go on at one place."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.answer_form import check_answer_form
from omni_discovery.inputs.form_width import MAX_BRANCHES

ARRAY = {"type": "array", "items": {"$ref": "#"}}
#: Two lists whose branches are as many as the bound, once they are joined.
LEFT, RIGHT = [{"minItems": each} for each in range(10)], [{"maxItems": 50 + each} for each in range(17)]
UNION = {"anyOf": [{"type": "object"}, {"type": "array"}]}
OPTIONAL = {"anyOf": [{"type": "object"}, {"type": "null"}]}


@pytest.mark.attack("Z87")
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [ARRAY] * (MAX_BRANCHES + 2)},
        {"oneOf": [{"anyOf": [ARRAY] * 9}] * 20},
        {"anyOf": [{"enum": [[1]]}] * (MAX_BRANCHES + 2)},
        {"anyOf": [{"const": {"a": 1}}] * (MAX_BRANCHES + 2)},
        {"anyOf": [{"type": ["string", "array"]}] * (MAX_BRANCHES + 2)},
        {"allOf": [{"anyOf": LEFT}, {"anyOf": RIGHT}]},
        {"anyOf": LEFT, "oneOf": RIGHT},
        {"$ref": "#/$defs/a", "anyOf": LEFT, "$defs": {"a": {"oneOf": RIGHT}}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"anyOf": LEFT}], "$defs": {"a": {"allOf": [{"anyOf": RIGHT}]}}},
        {"allOf": [UNION] * 8},
    ],
)
def test_a_schema_that_may_go_on_in_too_many_ways_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^form.json.*: anyOf and oneOf have more than {MAX_BRANCHES}"):
        check_answer_form("form", {"json": schema})


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [ARRAY] * MAX_BRANCHES},
        {"anyOf": [{"type": "null"}, {"const": 1}, {"enum": ["a", 2, None]}, {"type": ["string", "integer"]}] * 200},
        {"anyOf": [{"$ref": "#/$defs/color"}] * 200, "$defs": {"color": {"enum": ["red", "blue"]}}},
        {"properties": {f"p{each}": OPTIONAL for each in range(80)}},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{}] * 100}}},
        {"allOf": [{"anyOf": LEFT[:8]}, {"anyOf": RIGHT[:16]}]},
        {
            "properties": {f"p{each}": UNION for each in range(60)},
            "allOf": [{"$ref": "#/$defs/a"}, {}],
            "$defs": {"a": {}},
        },
        {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"allOf": [{"oneOf": [{"const": str(each)} for each in range(200)]}, {"type": "string"}]},
        {"allOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": {"anyOf": [{"const": each} for each in range(200)]}}},
    ],
)
def test_usual_schemas_are_fine(schema: Any) -> None:
    check_answer_form("form", {"json": schema})
