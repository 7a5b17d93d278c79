"""What a form may ask of a grammar's compiler."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs import answer_form
from omni_discovery.inputs.answer_form import (
    MAX_CLASSES,
    MAX_COUNT,
    MAX_FORM,
    MAX_OPTIONAL,
    MAX_PARTS,
    MAX_REPEATED,
    MAX_TEXT,
    check_answer_form,
    check_schema,
)


def object_of(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"a{each}": {} for each in range(count)}, **more}


HUGE = {"type": "array", "items": {"type": "integer"}, "minItems": 10**9, "maxItems": 10**9}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.attack("D5")
@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"json": HUGE}, "form.json: m"),
        ({"json": json.dumps(HUGE)}, "form.json: m"),
        ({"json": {"type": "array", "minItems": 1e300}}, "minItems"),
        ({"json": {"type": "array", "minItems": 10**400}}, "minItems"),
        ({"json": {"type": "string", "minLength": 10**9}}, "minLength"),
        ({"json": {"type": "string", "maxLength": 10**400}}, "maxLength"),
        ({"json": {"type": "object", "minProperties": 10**6}}, "minProperties"),
        ({"json": {"prefixItems": [{"type": "array", "minItems": 4096}] * 17}}, "together"),
        ({"json": {"type": "string", "pattern": "^a{1000000}$"}}, "pattern"),
        ({"json": {"patternProperties": {"(a{999}){999}": {}}}}, "counts"),
        ({"json": {"enum": ["a" * 600] * 200}}, str(MAX_FORM)),
        ({"json": nested(100_000)}, "deep"),
        ({"json": '"' + "a" * MAX_FORM + '"'}, str(MAX_FORM)),
        ({"structural_tag": json.dumps({"format": {"type": "json_schema", "json_schema": HUGE}})}, "structural_tag"),
        ({"structural_tag": json.dumps({"format": {"type": "repeat", "min": 10**9, "max": 10**9}})}, "structural_tag"),
        ({"structural_tag": json.dumps({"format": {"type": "regex", "pattern": "a{99999}"}})}, "pattern"),
        ({"regex": "(a{1,300}){1,300}"}, "form.regex"),
        ({"regex": "((a{1,300})+){1,300}"}, "form.regex"),
        ({"regex": "[^]{2}\\]]{300}{300}"}, "form.regex"),
        ({"regex": "a{" + "9" * 9000 + "}"}, "form.regex"),
        ({"regex": "(" * 5000}, "deep"),
        ({"regex": "a" * (MAX_TEXT + 1)}, str(MAX_TEXT)),
        ({"regex": "^[a-z]{4096}$"}, str(MAX_REPEATED)),
        ({"regex": "([a-z]{64}){64}"}, str(MAX_REPEATED)),
        ({"json": {"type": "string", "pattern": "^[a-z]{4096}$"}}, str(MAX_REPEATED)),
        ({"regex": "[a-z]" * 3000}, str(MAX_CLASSES)),
        ({"regex": r"\w." * 200}, str(MAX_CLASSES)),
        ({"grammar": "root ::= " + "[a-z] " * 4096}, str(MAX_CLASSES)),
        ({"json": {"properties": {str(each): {"pattern": "[a-z]" * 100} for each in range(9)}}}, str(MAX_CLASSES)),
        ({"regex": "a?" * 512}, str(MAX_OPTIONAL)),
        ({"regex": "(ab){,1}" * 100}, str(MAX_OPTIONAL)),
        ({"grammar": 'root ::= ["] ' + "[a-z] " * 300 + '["]'}, str(MAX_CLASSES)),
        ({"grammar": '# "\nroot ::= ' + "[a-z] " * 300 + '# "'}, str(MAX_CLASSES)),
        ({"grammar": 'start: /"' + "[a-z]" * 300 + '"/'}, str(MAX_CLASSES)),
        ({"json": {}, "whitespace_pattern": " {1000000}"}, "whitespace_pattern"),
        ({"grammar": 'root ::= "a"{100000}'}, "form.grammar"),
        ({"grammar": "a" * (MAX_FORM + 1)}, str(MAX_FORM)),
        ({"choice": ["a" * 500_000]}, "form.choice"),
        ({"json": "no json"}, "form.json: not JSON"),
        ({"json": '{"maxItems": 1000000000, "minimum": NaN}'}, "form.json: not JSON"),
        ({"structural_tag": json.dumps({"structures": [{"schema": json.dumps(HUGE)}]})}, "structural_tag: schema: m"),
        ({"choice": ["a" * 500] * 1024}, "form.choice"),
        ({"choice": [""] * 1025}, "form.choice: 1025 choices, where 1024 are allowed"),
    ],
)
def test_a_form_that_may_cost_too_much_is_refused_by_its_field_and_bound(form: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^form") as caught:
        check_answer_form("form", form)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "array", "items": {"type": "string", "maxLength": MAX_COUNT}, "maxItems": 100}},
        {"json": '{"type": "object", "properties": {"minItems": {"type": "integer", "minimum": 1000000000}}}'},
        {"json": {"$ref": "#"}},
        {"json": nested(20)},
        {"json": {"properties": {"schema": {"const": "{"}, "guidance": {"const": "%json"}}}},
        {"regex": r"\(\d{3}\) [0-9]{4}-(jan|feb){1,2}[{}]{2}x{2,}?{"},
        {"regex": r"([a-z]{1,63}\.){1,8}[a-z]{2,63}"},
        {"regex": r"a\.\[" * 2000},
        {"regex": "a{1,3}?" * 100 + "(?:b)" * 100 + "c*?" * 100},
        {"grammar": "root ::= " + '"[a-z] . [" ' * 1000},
        {"grammar": 'root ::= "{" [a-z]{1,30} "}"'},
        {"grammar": '%llguidance {}\n%import common.INT\n%ignore /[ ]+/\nstart: INT "%d" "100%" /%[a-f]/'},
        {"grammar": 'root ::= [%a-z] "%s" # %d'},
        {"structural_tag": '{"structures": [{"begin": "<f=g>", "schema": {}, "end": ""}], "triggers": ["<f=g>", "{"]}'},
        {"choice": ["yes", "no"], "json": None},
        {"choice": ["a short label"] * 1024},
        {"json_object": True},
    ],
)
def test_usual_forms_are_fine(form: dict[str, Any]) -> None:
    check_answer_form("form", form)


@pytest.mark.attack("D5")
def test_a_response_format_and_a_tool_are_read_as_schemas() -> None:
    for holder in ({"type": "json_schema", "json_schema": {"schema": HUGE}}, {"function": {"parameters": HUGE}}):
        with pytest.raises(InvalidRequestError, match=r"^tools\[0\]: m"):
            check_schema("tools[0]", holder)


@pytest.mark.attack("E6")
@pytest.mark.parametrize(
    "schema",
    [
        object_of(1000, minProperties=1, maxProperties=300, additionalProperties=False),
        object_of(300, minProperties=30, maxProperties=60),
        object_of(64, minProperties=64),
        object_of(4000),
        object_of(91),
        object_of(400, required=["a1", "a2", "b", 7]),
        {"patternProperties": {f"^{each}": {} for each in range(200)}},
        {"anyOf": [object_of(30, title=str(each)) for each in range(20)]},
        {"$defs": {str(each): object_of(90) for each in range(3)}, "$ref": "#/$defs/0"},
        {"type": "array", "items": object_of(130), "maxItems": 2},
        {"prefixItems": [{"type": "integer", "minimum": -(2**63) + each, "maximum": 2**62} for each in range(200)]},
        {"prefixItems": [{"type": "string", "format": "ipv6"}] * 300},
    ],
)
def test_a_schema_whose_properties_may_come_in_too_many_orders_is_refused(schema: dict[str, Any]) -> None:
    for form in ({"json": schema}, {"json": json.dumps(schema)}):
        with pytest.raises(InvalidRequestError, match=r"^form\.json: .*optional properties"):
            check_answer_form("form", form)


@pytest.mark.parametrize(
    "schema",
    [
        object_of(90),
        {"properties": {"format": {"format": "date"}, "minimum": {"minimum": 1}}},
        {"prefixItems": [{"type": "integer", "minimum": 0, "maximum": each} for each in range(120)]},
        object_of(1000, required=[f"a{each}" for each in range(990)]),
        object_of(12, minProperties=1, maxProperties=200),
        {"anyOf": [object_of(15, title=str(each)) for each in range(36)]},
        {"type": "object", "minProperties": 1, "maxProperties": 50_000},
    ],
)
def test_schemas_with_many_properties_are_fine(schema: dict[str, Any]) -> None:
    check_answer_form("form", {"json": schema})


@pytest.mark.attack("L1")
@pytest.mark.parametrize("value", [{"item_separator": "("}, {}, None, 7])
def test_a_key_that_ends_the_compiler_is_refused_wherever_it_is(value: Any) -> None:
    """Its expressions are no part of the schema, and one that is none ended the process."""
    schema = {"type": "object", "properties": {"a": {"items": {"x-guidance": value}}}}
    tags = {"structures": [{"begin": "<f>", "schema": schema, "end": ""}], "triggers": ["<f"]}
    for form in ({"json": schema}, {"json": json.dumps(schema)}, {"structural_tag": json.dumps(tags)}):
        with pytest.raises(InvalidRequestError, match="x-guidance: not served here"):
            check_answer_form("form", form)
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]: x-guidance: not served here"):
        check_schema("tools[0]", {"function": {"parameters": schema}})


@pytest.mark.attack("L3")
@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ('start: %json {"type": "array", "items": {"type": "string", "maxLength": 100000000}}', "%json"),
        ('start: a\na: "x" %json{"x-guidance": {"item_separator": "("}}', "%json"),
        ('start: %regex {"substring_chars": "abab"}', "%regex"),
        ('start: %lark {\nstart: "a"\n}', "%lark"),
        ('%llguidance {"max_items_in_row": 99999999}\nstart: "a"', "%llguidance"),
        ('start: "a"\n  %override a: "b"', "%override"),
        ('start: /a\nb"/ %json {} "', "%json"),
        ('start: "a" # %json {}', "%json"),
    ],
)
def test_a_grammar_holds_no_other_grammar_and_moves_no_limit(grammar: str, named: str) -> None:
    """None of the bounds on schemas and expressions would hold for what is inside."""
    with pytest.raises(InvalidRequestError, match=f"^form.grammar: {named} is not served here, only rules, %ignore"):
        check_answer_form("form", {"grammar": grammar})


@pytest.mark.attack("L3")
@pytest.mark.attack("L6")
@pytest.mark.parametrize("trigger", ["", "<a b>", "<a>\nx: %json {}\ny: <b>", "<a\n>"])
def test_a_tag_begins_with_a_text_or_with_one_token(trigger: str) -> None:
    """A token is written into the grammar as it is, so it must not hold more."""
    tags = {"structures": [{"begin": trigger, "schema": {}, "end": ""}], "triggers": ["<f", trigger]}
    with pytest.raises(InvalidRequestError, match=r"^form\.structural_tag: triggers: "):
        check_answer_form("form", {"structural_tag": json.dumps(tags)})


@pytest.mark.attack("M11")
def test_what_was_found_of_a_form_is_known_for_the_next_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. a schema is walked once, whichever way it ends; 2. another field, or another schema, is another matter"""
    walked: list[str] = []
    walk = answer_form._walk
    monkeypatch.setattr(answer_form, "_walk", lambda what, schema: walked.append(what) or walk(what, schema))
    for name in ("first", "first", "second"):
        check_schema(name, {"type": "object", "title": "known once"})
    assert walked == ["first", "second"]
    walked.clear()
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="first: maxLength"):
            check_schema("first", {"maxLength": 1 << 20, "title": "refused once"})
    assert walked == ["first"]


@pytest.mark.attack("O2")
@pytest.mark.parametrize("is_text", [False, True])
def test_a_form_of_thousands_of_empty_lists_is_refused(is_text: bool) -> None:
    """Each costs as much as a dozen characters; those in texts of schemas count with the others."""
    many = [[]] * (MAX_PARTS // 2)
    tag = {"schema": json.dumps(many)} if is_text else {"schema": many}
    check_answer_form("form", {"structural_tag": [tag]})
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_PARTS} lists and objects"):
        check_answer_form("form", {"structural_tag": [tag, tag]})
