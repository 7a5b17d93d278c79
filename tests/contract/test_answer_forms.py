"""What passes the bounds on forms of answers does not end the process that compiles it: llguidance, as it is."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.answer_form import check_answer_form
from omni_discovery.inputs.form_width import MAX_ROW
from tests.support.attacks import ROOT
from tests.unit.omni_discovery.inputs.test_form_depth import GRAMMARS, SCHEMAS

Form = tuple[str, Any]


def compiled(forms: list[Form]) -> list[str]:
    """What became of each form, in a process of its own, with a quarter of the usual stack."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_forms"],
        cwd=ROOT,
        input=json.dumps(forms),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = ended.stdout.splitlines()
    assert ended.returncode == 0, (ended.returncode, forms[len(said)], ended.stderr[-2000:])
    assert len(said) == len(forms)
    return said


def fits(form: Form) -> bool:
    kind, value = form
    try:
        check_answer_form("form", {kind: json.dumps(value) if kind == "structural_tag" else value})
    except InvalidRequestError:
        return False
    return True


def longest(kind: str, make: Callable[[int], Any]) -> Form:
    """The longest chain of a kind that the bounds let through."""
    least, most = 1, 4096
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits((kind, make(middle))) else (least, middle)
    return kind, make(least)


@pytest.mark.attack("L2")
def test_the_deepest_forms_within_the_bounds_take_less_than_a_quarter_of_the_stack() -> None:
    chains = [longest("json", make) for make in SCHEMAS.values()]
    chains += [longest("grammar", make) for make in GRAMMARS.values()]
    assert set(compiled(chains)) <= {"made", "refused"}


@pytest.mark.attack("L1")
@pytest.mark.attack("L2")
@pytest.mark.attack("L3")
def test_random_forms_within_the_bounds_end_no_process() -> None:
    chance = random.Random(20261123)
    makers = (schema_of, grammar_of, expression_of, tag_of)
    forms = [form for _ in range(150) for make in makers if fits(form := make(chance))]
    said = compiled(forms)
    panics = [(form, each) for form, each in zip(forms, said, strict=True) if each.startswith("panic")]
    assert not panics
    # The forms are no noise: llguidance makes many of them.
    assert said.count("made") > 60


def joined(count: int) -> Form:
    parts = [{"$ref": "#/$defs/p"}, {"anyOf": [{"minItems": each} for each in range(count)]}]
    parts.append({"anyOf": [{"maxItems": 50 + each} for each in range(count)]})
    named = {"p": {"type": "array", "items": {"$ref": "#/$defs/r"}}, "r": {"allOf": parts}}
    return "json", {"$defs": named, "$ref": "#/$defs/r"}


def nested(number: int) -> Any:
    """An array of arrays, and so on, each of its own length."""
    inner: Any = {"type": "array", "items": {"type": "integer"}, "minItems": number}
    for _ in range(8):
        inner = {"type": "array", "items": {"anyOf": [inner, {"type": "integer"}]}, "maxItems": number + 9}
    return inner


#: Schemas whose answers may go on in so many ways at one place.
WIDE: dict[str, Callable[[int], Form]] = {
    "arrays": lambda count: ("json", {"anyOf": [{"type": "array", "items": {"$ref": "#"}}] * count}),
    "nested": lambda count: ("json", {"anyOf": [nested(each) for each in range(count)]}),
    "joined": joined,
}


def longest_of(make: Callable[[int], Form]) -> Form:
    return longest(make(1)[0], lambda count: make(count)[1])


@pytest.mark.attack("Z87")
def test_the_widest_forms_within_the_bounds_take_a_moment() -> None:
    """Of a thousand branches, one token took half a minute."""
    widest = [longest_of(make) for make in WIDE.values()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    compiled(widest)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 15


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.attack("Z87")
def test_vllm_reads_answers_within_our_limits() -> None:
    """Of a form that a few characters make ambiguous; all else of the library is there."""
    from vllm.v1.structured_output import backend_guidance

    from stage_runtime.engines.vllm.forms.limits import limit_forms

    limit_forms()
    limit_forms()
    backend: Any = backend_guidance
    library = backend.llguidance
    assert library.grammar_from("grammar", 'start: "a"')
    matcher = library.LLMatcher(
        library.LLTokenizer("byte"), library.LLMatcher.grammar_from_lark("start: x\nx: x x | /a/")
    )
    taken = [matcher.consume_token(ord("a")) for _ in range(2000)]
    assert not taken[-1]
    assert f"max is {MAX_ROW}" in matcher.get_error()


def schema_of(chance: random.Random) -> Form:
    count = chance.randint(1, 40)
    places = [f"#/$defs/a{each}" for each in range(count)] + ["#"]

    def part(depth: int) -> dict[str, Any]:
        inner = (lambda: part(depth + 1)) if depth < 5 else (lambda: {"$ref": chance.choice(places)})
        makers: list[Callable[[], dict[str, Any]]] = [
            lambda: {"$ref": chance.choice(places)},
            lambda: {"type": "object", "properties": {"x": inner(), "y": inner()}, "required": ["x"]},
            lambda: {"type": "object", "additionalProperties": inner()},
            lambda: {"type": "array", "items": inner(), "maxItems": chance.choice([0, 1, 500])},
            lambda: {"prefixItems": [inner()], "minItems": 1},
            lambda: {"anyOf": [inner(), inner()]},
            lambda: {"oneOf": [inner(), {"type": "integer"}]},
            lambda: {"allOf": [inner(), {"properties": {"z": inner()}}]},
            lambda: {"type": "string", "pattern": chance.choice(["^a.*b$", "[a-z]{1,9}", "(", "a|", "\\d+$"])},
            lambda: {"type": "string", "minLength": chance.choice([0, 3, 65536]), "maxLength": 65536},
            lambda: {"type": chance.choice(["integer", "number"]), "minimum": chance.choice([-1e9, 0, 0.5, 1e15])},
            lambda: {"type": "number", "multipleOf": chance.choice([0.01, 3, -3, 0, 1e-9])},
            lambda: {"enum": ["a", 1, None, {"b": [True]}]},
            lambda: {"const": '\x00\ud7ff\\"'},
            lambda: {"type": "string", "format": chance.choice(["date", "uuid", "ipv6", "regex"])},
        ]
        return chance.choice(makers)()

    return "json", {"$defs": {f"a{each}": part(0) for each in range(count)}, **part(0)}


def grammar_of(chance: random.Random) -> Form:
    count = chance.randint(1, 30)

    def body(rule: int) -> str:
        names = [f"r{chance.randint(0, count)}", f"r{min(rule + 1, count)}", f"T{chance.randint(0, 3)}"]
        signs = ['"a"', '"b"i', "/[a-z]+/", "/(a|b)*c/", '"a".."z"', *names, *names]
        many = ["", "", "", "?", "*", "+", "{1,3}", "{0,70}"]
        groups = ["{}", "{}", "({})", "({} | {})", "[{}]"]
        one = (chance.choice(groups).format(chance.choice(signs), chance.choice(signs)) for _ in range(3))
        return " ".join(each + (chance.choice(many) if each[-1] != "]" else "") for each in one)

    rules = [f"r{each}: {body(each)}\n" for each in range(count)]
    ends = 'T0: "x"\nT1: T0 "y"\nT2: /[0-9]{1,4}/\nT3: T1 | T2\n'
    return "grammar", f'start: r0\n{"".join(rules)}r{count}: "z"\n{ends}'


def expression_of(chance: random.Random) -> Form:
    signs = [*"abc.()|[]{}?*+^$-\\", "[a-z]", "\\d", "(?:a|b)", "{2,3}", "(?i)", "\\b", "\u00e9", "[^a]", "(a)*"]
    return "regex", "".join(chance.choices(signs, k=chance.randint(1, 12)))


def tag_of(chance: random.Random) -> Form:
    trigger = chance.choice(["<f", "<f>", "<f g>", "", "{", "\n", '"', "<|a|>"])
    tags = [{"begin": trigger + chance.choice(["", "=g>", "\n"]), "schema": schema_of(chance)[1], "end": "</f>"}]
    return "structural_tag", {"structures": tags, "triggers": [trigger]}
