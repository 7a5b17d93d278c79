"""How deep a form may lead the compiler that reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.answer_form import check_answer_form
from omni_discovery.inputs.form_depth import MAX_RULE_LEVELS, MAX_SCHEMA_LEVELS, check_levels, check_rules


def chain_of(link: Callable[[dict[str, str]], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """Makes schemas of so many definitions, each of which names the next."""

    def make(count: int) -> dict[str, Any]:
        definitions = {f"a{each}": link({"$ref": f"#/$defs/a{each + 1}"}) for each in range(count)}
        return {"$defs": {**definitions, f"a{count}": {"type": "null"}}, "$ref": "#/$defs/a0"}

    return make


def rules_of(rule: str) -> Callable[[int], str]:
    """Makes grammars of so many rules, each of which names the next."""
    return lambda count: f'start: r0\n{"".join(rule.format(k, k + 1) for k in range(count))}r{count}: "a"'


#: Chains of each kind, by length.
SCHEMAS: dict[str, Callable[[int], dict[str, Any]]] = {
    "ref": chain_of(lambda ref: ref),
    "with_siblings": chain_of(lambda ref: {**ref, "type": ["object", "null"]}),
    "properties": chain_of(lambda ref: {"properties": {"x": ref}, "required": ["x"]}),
    "additional": chain_of(lambda ref: {"type": "object", "additionalProperties": ref}),
    "all": chain_of(lambda ref: {"allOf": [ref], "type": ["object", "null"]}),
    "any": chain_of(lambda ref: {"anyOf": [ref, {"type": "integer"}]}),
    "items": chain_of(lambda ref: {"items": ref}),
    "many_items": chain_of(lambda ref: {"items": {"items": {"items": {"items": {"items": ref}}}}}),
    "prefix": chain_of(lambda ref: {"prefixItems": [ref], "minItems": 1}),
    "objects_of_any": chain_of(lambda ref: {"properties": {"x": {"anyOf": [ref, {"type": "integer"}]}}}),
}
GRAMMARS: dict[str, Callable[[int], str]] = {
    "rules": rules_of("r{}: r{}\n"),
    "terms": lambda count: rules_of("r{}: r{}\n")(count).replace("r", "R").replace("staRt", "start"),
    "groups": rules_of('r{}: (r{} "b" | ["c"])*\n'),
    "deep_groups": rules_of(f'r{{}}: {"(" * 20}r{{}} "b"{")? " * 20}"x"\n'),
    "gbnf": lambda count: rules_of('r{}: (r{} "b" | "c")*\n')(count).replace("start", "root").replace(":", " ::="),
}


@pytest.mark.attack("L2")
@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_long_chain_of_references_is_refused(kind: str) -> None:
    """Longer ones ended a replica, with a signal, by a stack that is full."""
    schema = SCHEMAS[kind](300)
    for form in ({"json": schema}, {"json": json.dumps(schema)}, tag(schema), tag(json.dumps(schema))):
        with pytest.raises(InvalidRequestError, match=r"^form\..*levels deep"):
            check_answer_form("form", form)


def tag(schema: Any) -> dict[str, str]:
    structures = [{"begin": "<f>", "schema": schema, "end": "</f>"}]
    return {"structural_tag": json.dumps({"structures": structures, "triggers": ["<f"]})}


@pytest.mark.attack("L2")
@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_long_chain_of_rules_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^form\.grammar: its rules.*{MAX_RULE_LEVELS}"):
        check_answer_form("form", {"grammar": GRAMMARS[kind](600)})


@pytest.mark.attack("L2")
@pytest.mark.parametrize(
    "line",
    [
        "r{}: r{} /x\ny/\n",
        'r{}[capture="x:y"]: r{}\n',
        '  ?r{} : r{} // "\n',
        'r{} ::= r{} "\n"\n',
        'r{} ::= r{} # "\r',
        "r{} ::= r{} [\n]\n",
        'r{}[stop="::="]: r{}\n',
    ],
)
def test_no_quotation_hides_a_rule(line: str) -> None:
    with pytest.raises(InvalidRequestError, match="its rules"):
        check_rules("form", rules_of(line)(600))


@pytest.mark.attack("L2")
@pytest.mark.parametrize("ref", ["x:a#/$defs/a1", "other.json", "//host/a", "#name", "", "/$defs/a1"])
def test_a_reference_to_another_document_or_by_another_name_is_refused(ref: str) -> None:
    """Where it leads can't be followed here: a base may be named anywhere."""
    with pytest.raises(InvalidRequestError, match="only places of the schema itself"):
        check_answer_form("form", {"json": {"$defs": {"a1": {"$id": "x:a"}}, "items": {"$ref": ref}}})


@pytest.mark.attack("L2")
def test_references_count_from_a_place_with_a_name_of_its_own_too() -> None:
    chain = SCHEMAS["properties"](300)
    short = {name: {"type": "null"} for name in chain["$defs"]}
    with pytest.raises(InvalidRequestError, match="levels deep"):
        check_answer_form("form", {"json": {"$defs": short, "items": {"$id": "http://h/a", **chain}}})


@pytest.mark.attack("L2")
def test_a_reference_may_be_written_with_signs_for_others() -> None:
    """They are those of JSON Pointer and of URIs: here for the names ``a/~ 1``, ``a/~ 2`` and so on."""
    definitions = {f"a/~ {each}": {"$ref": f"#/%24defs/a~1~0%20{each + 1}"} for each in range(300)}
    with pytest.raises(InvalidRequestError, match="levels deep"):
        check_levels("form", {"$defs": definitions, "$ref": "#/$defs/a~1~0 0"})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {str(each): {"items": {"$ref": "#"}} for each in range(200)}},
        # A tree of expressions, each of which may hold all others.
        {"$defs": {f"e{k}": {"anyOf": [{"$ref": f"#/$defs/e{j}"} for j in range(40)]} for k in range(40)}},
        # Many definitions beside each other.
        {
            "$defs": {f"a{k}": {"properties": {"x": {"items": {"type": "null"}}}} for k in range(400)},
            "prefixItems": [{"$ref": f"#/$defs/a{k}"} for k in range(400)],
        },
        {"properties": {"$ref": {"type": "string"}, "x": {"$ref": "#/properties/$ref"}}},
        {"$defs": {"a": True}, "items": {"$ref": "#/$defs/a"}},
        {"items": {"$ref": "#/$defs/that/are/not/there"}},
        SCHEMAS["ref"](200),
        SCHEMAS["properties"](80),
        [],
        True,
    ],
)
def test_usual_references_and_circles_are_fine(schema: Any) -> None:
    check_levels("form", schema)


def test_a_circle_counts_once_and_what_it_leads_to_behind_it() -> None:
    """100 levels in a circle, then a chain: refused exactly where both together are too long."""
    circle: dict[str, Any] = {f"c{k}": {"items": {"$ref": f"#/$defs/c{(k + 1) % 50}"}} for k in range(50)}
    circle["c7"] = {"anyOf": [circle["c7"], {"$ref": "#/$defs/a0"}]}
    for count in (100, 300):
        schema = SCHEMAS["ref"](count)
        schema["$defs"].update(circle)
        schema["$ref"] = "#/$defs/c0"
        if count < MAX_SCHEMA_LEVELS - 110:
            check_levels("form", schema)
        else:
            with pytest.raises(InvalidRequestError, match="levels deep"):
                check_levels("form", schema)


@pytest.mark.parametrize(
    "grammar",
    [
        "".join(f'r{k}: ("a" | r{k + 1}) "({{["\n' for k in range(200)),
        'root ::= "(" root ")" | [^(]+ # ((((\n' * 100,
        "start: " + " | ".join('("a")' for _ in range(5000)),
        "start: a\n" + '  | "((("\n' * 3000,
        "",
    ],
)
def test_usual_grammars_are_fine(grammar: str) -> None:
    check_rules("form", grammar)


@pytest.mark.attack("M11")
@pytest.mark.parametrize("ref", ["#" + "/" * 60_000, "#/" + "/".join("a" * 63), "#/a"])
def test_references_that_count_from_many_places_are_bounded(ref: str) -> None:
    """A reference is followed from each place above it with an id: 60 000 names below 58 of them took seconds."""
    schema: dict[str, Any] = {"x": [{"$ref": ref}] * (1 if len(ref) > 1000 else 1000)}
    for _ in range(58):
        schema = {"id": "x", "a": schema}
    with pytest.raises(InvalidRequestError, match=r"\$ref"):
        check_levels("form", schema)


@pytest.mark.attack("O2")
def test_a_long_reference_is_read_once_wherever_it_counts_from() -> None:
    """Its escapes were read again for each place above it with an id: 62 KB below 58 of them took 170 ms."""

    def cost_s(ids: int) -> float:
        schema: dict[str, Any] = {"$ref": "#/" + "%41" * 20_000}
        for place in range(58):
            schema = {"id" if place < ids else "title": "x", "a": schema}
        begun_s = time.process_time()
        check_levels("form", schema)
        return time.process_time() - begun_s

    few_s, many_s = (min(cost_s(ids) for _ in range(5)) for ids in (1, 58))
    assert many_s < 10 * few_s
