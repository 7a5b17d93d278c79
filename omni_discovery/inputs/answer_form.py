"""What the form that an answer must have may cost to compile: a few bytes of schema can ask for all of a host's memory.

A grammar's compiler can't be stopped, so the bounds hold before one sees it, at the hub and at the replica.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeGuard

import msgspec

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.containers import decode_any
from omni_discovery.inputs.form_depth import check_levels, check_rules
from omni_discovery.inputs.form_width import SchemaWidth

#: Characters of a schema (without its signs) or a grammar; of a regular expression, or of all choices together.
MAX_FORM: Final = 64 << 10
MAX_TEXT: Final = 16 << 10
#: Of them the choices, however short: vLLM's server makes an object of each.
MAX_CHOICES: Final = 1024
#: A bound on lengths of strings in a schema, and on all numbers of items and properties in it together.
MAX_COUNT: Final = 1 << 16
#: What the counts of a regular expression may add to it, in characters and classes.
MAX_REPEATED: Final = 2048
#: All counts of a grammar together.
MAX_COUNTS: Final = 1 << 16
#: Classes of characters, written out, of an expression, of a grammar, or of all expressions of a schema together. Each
#: is compared with the whole vocabulary: about 5 ms for 50 000 tokens.
MAX_CLASSES: Final = 256
#: Parts of an expression that may be absent. What their number costs grows with its square at least: 64 take 0.6 s.
MAX_OPTIONAL: Final = 64
#: Of all objects of a schema together: the square of an object's properties, times its minProperties or maxProperties
#: and 4 more. Without those numbers only optional properties count. A vocabulary of 32 000 takes some seconds for that.
MAX_PROPERTY_WORK: Final = 1 << 15
#: Lists and objects of one schema, with those in texts of schemas inside of it.
MAX_PARTS: Final = 8192
#: What a list or an object costs to be checked, where a character or another value costs 1.
_PART_COST: Final = 8
#: What all forms of one request may cost to be checked: as much as 256 KiB of tools, and one more form.
MAX_COST: Final = 5 * MAX_FORM
#: Schemas up to this length are not checked again as long as they are among the latest.
_MOST_KNOWN_BYTES: Final = 1 << 18
#: Parts of a schema, or groups of an expression, inside each other.
MAX_DEPTH: Final = 64

#: Neither lists nor objects. Whether a value is a Mapping takes much longer to find out.
_SCALARS: Final = (str, int, float, type(None))
_LENGTHS: Final = ("minLength", "maxLength")
_NUMBERS: Final = ("minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
_NUMBER_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_VALUE_WORK: Final = 128
_TOO_MUCH_WORK: Final = (
    "too many optional properties, or bounds of numbers and formats. An object may have 90 optional properties, and "
    "fewer with minProperties or maxProperties; a schema may have "
    f"{MAX_PROPERTY_WORK // _VALUE_WORK} of minimum, maximum and format. Name properties in 'required', or ask for less"
)
_EXPRESSIONS: Final = ("pattern", "regex")
_GRAMMARS: Final = ("grammar", "ebnf")
#: Texts of JSON schemas inside of structural tags.
_SCHEMAS: Final = ("schema", "json_schema")
#: A key of llguidance's own: it puts expressions into the grammar, and ends the process for some that are none.
_GUIDANCE: Final = "x-guidance"
#: What puts other grammars into one, or moves llguidance's own limits; nothing would bound those. They are looked for
#: in texts and comments, too: a parser may see those end elsewhere.
_EMBEDDED: Final = re.compile(r"%(?:json|regex|lark)|%llguidance(?!\s*+\{\s*+\})")
_DIRECTIVE: Final = re.compile(r"^[ \t]*+(%[A-Za-z_]\w*+)", re.MULTILINE)
_DIRECTIVES: Final = frozenset({"%ignore", "%import", "%declare", "%llguidance"})
#: A token that a structural tag begins with is written into a grammar as it is.
_TOKEN: Final = re.compile(r"<[^<>\s]++>")
#: Digits past these are too many in any case, and Python refuses to read thousands of them.
_COUNTS: Final = re.compile(r"\{\s*+(\d*+)\s*+,?+\s*+(\d*+)\s*+\}")
_DIGITS: Final = 12
#: A class of characters: in brackets, the dot, or named by a letter. Other escaped characters are taken as themselves.
_CLASS: Final = re.compile(r"\\[wWdDsSpP]|\\.|[\[.]", re.DOTALL)
#: Of a grammar: classes and Lark's expressions, which are kept, or texts and comments, which hold no classes.
_QUOTED: Final = re.compile(r'(\[(?:\\.|[^\]\\\n])*+\]?|/(?:\\.|[^/\\\n])++/?)|"(?:\\.|[^"\\\n])*+"?|#[^\n]*+')


class FormBudget:
    """What the forms of one request may still cost to be checked."""

    def __init__(self) -> None:
        self._left = MAX_COST

    def charge(self, what: str, cost: int) -> None:
        """Count a form. Raise InvalidRequestError if all so far cost too much."""
        self._left -= cost
        if self._left < 0:
            raise InvalidRequestError(
                f"{what}: with this one the forms and tools of the request are too many, or too large; ask for less"
            )


def check_answer_form(what: str, form: Mapping[str, Any], budget: FormBudget | None = None) -> None:
    """Raise InvalidRequestError, naming the field, if one of vLLM's structured outputs may cost too much to compile.

    ``budget``: of the request, where it has more forms.
    """
    budget = budget or FormBudget()
    for name in ("json", "structural_tag"):
        if form.get(name) is not None:
            check_schema(f"{what}.{name}", form[name], budget)
    for name in ("regex", "whitespace_pattern"):
        if isinstance(form.get(name), str):
            budget.charge(f"{what}.{name}", len(form[name]))
            _check_expression(f"{what}.{name}", form[name])
    if isinstance(form.get("grammar"), str):
        budget.charge(f"{what}.grammar", len(form["grammar"]))
        _check_grammar(f"{what}.grammar", form["grammar"])
    choices = form.get("choice")
    if isinstance(choices, list | tuple):
        if len(choices) > MAX_CHOICES:
            raise InvalidRequestError(f"{what}.choice: {len(choices)} choices, where {MAX_CHOICES} are allowed")
        size = sum(len(choice) for choice in choices if isinstance(choice, str))
        budget.charge(f"{what}.choice", size + len(choices))
        if size > MAX_TEXT:
            raise InvalidRequestError(f"{what}.choice: {size} characters together, where {MAX_TEXT} are allowed")


def check_schema(what: str, schema: Any, budget: FormBudget | None = None) -> None:
    """Raise InvalidRequestError if a JSON schema, or what holds some, may cost too much; it may be given as text.

    What was found lately is known: the answers to one request, and the calls of one session, have the same.
    ``budget``: of the request, where it has more forms.
    """
    try:
        packed = msgspec.msgpack.encode(schema)
    except (TypeError, ValueError, OverflowError, RecursionError):
        # What can't come over the wire, either.
        packed = b""
    if not packed or len(packed) > _MOST_KNOWN_BYTES:
        flaw, cost = "", _cost_of(what, schema)
    else:
        flaw, cost = _flaw_of(what, packed)
    if flaw:
        raise InvalidRequestError(flaw)
    if budget is not None:
        budget.charge(what, cost)


@lru_cache(maxsize=64)
def _flaw_of(what: str, packed: bytes) -> tuple[str, int]:
    """What is wrong with a schema, empty if nothing is; and what it cost to find out."""
    try:
        return "", _cost_of(what, msgspec.msgpack.decode(packed))
    except InvalidRequestError as error:
        return str(error), 0


def _cost_of(what: str, schema: Any) -> int:
    """Check a schema; return what that cost."""
    counted = _Counted()
    _check_schema(what, schema, counted)
    return counted.values + counted.parts * _PART_COST + counted.steps


@dataclass(slots=True)
class _Counted:
    """What one schema has, with the texts of schemas inside of it."""

    #: Characters, and values that are no texts.
    values: int = 0
    #: Lists and objects.
    parts: int = 0
    #: Steps of following references.
    steps: int = 0

    def add_part(self, what: str) -> None:
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise InvalidRequestError(f"{what}: more than {MAX_PARTS} lists and objects; ask for a simpler form")


def _decoded(what: str, text: str) -> Any:
    _check_length(what, text, MAX_FORM)
    try:
        return decode_any(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        # Other readers take more than JSON, such as NaN: what they made of it would not be checked.
        raise InvalidRequestError(f"{what}: not JSON: {error}") from error


def _check_schema(what: str, schema: Any, counted: _Counted) -> None:
    if isinstance(schema, str):
        schema = _decoded(what, schema)
    total, size, classes, work, width = 0.0, 0, 0, 0.0, SchemaWidth(schema)
    for path, name, value in _walk(what, schema):
        if name == _GUIDANCE:
            raise InvalidRequestError(f"{path}: not served here; leave it out")
        size += len(name) + (len(value) if isinstance(value, str) else 1)
        if size > MAX_FORM:
            raise InvalidRequestError(f"{what}: longer than {MAX_FORM} characters; ask for a simpler form")
        if not isinstance(value, _SCALARS):
            counted.add_part(what)
        elif not name:
            # One of a list has no meaning of its own.
            continue
        _check_bound(path, name, value)
        total += _number_of(name, value)
        if total > MAX_COUNT:
            raise InvalidRequestError(
                f"{path}: numbers of items and properties are more than {MAX_COUNT} together; leave them out, or ask "
                f"for less"
            )
        width.add(path, value)
        work += _property_work(value) if isinstance(value, Mapping) else _value_work(name, value)
        if work > MAX_PROPERTY_WORK:
            raise InvalidRequestError(f"{path}: {_TOO_MUCH_WORK}")
        classes += _check_texts(path, name, value, counted)
        if classes > MAX_CLASSES:
            raise InvalidRequestError(f"{path}: more than {MAX_CLASSES} classes of characters in all expressions here")
    counted.values += size
    counted.steps += check_levels(what, schema)


def _check_bound(path: str, name: str, value: Any) -> None:
    if name in _LENGTHS and _is_number(value) and value > MAX_COUNT:
        raise InvalidRequestError(f"{path}: {_shown(value)} is more than {MAX_COUNT}; leave it out, or ask for less")


def _value_work(name: str, value: Any) -> int:
    """What one value costs: bounds of numbers and formats of texts are long grammars, written out."""
    is_costly = name == "format" if isinstance(value, str) else name in _NUMBER_BOUNDS and _is_number(value)
    return _VALUE_WORK if is_costly else 0


def _property_work(schema: Mapping[Any, Any]) -> float:
    """What the order of an object's properties costs: any of those that are left may come next."""
    named, patterns, required = (schema.get(each) for each in ("properties", "patternProperties", "required"))
    properties = len(named) if isinstance(named, Mapping) else 0
    most = max(_number_of(each, schema.get(each)) for each in ("minProperties", "maxProperties"))
    if isinstance(named, Mapping) and isinstance(required, list | tuple) and not most:
        properties -= len({each for each in required if isinstance(each, str)} & named.keys())
    properties += len(patterns) if isinstance(patterns, Mapping) else 0
    return properties**2 * (most + 4)


def _check_texts(path: str, name: str, value: Any, counted: _Counted) -> int:
    """Check the expressions of one value; return how many classes they have."""
    if name in _EXPRESSIONS and isinstance(value, str):
        return _check_expression(path, value)
    if name in _GRAMMARS and isinstance(value, str):
        return _check_grammar(path, value)
    if name == "patternProperties" and isinstance(value, Mapping):
        return sum(_check_expression(path, str(each)) for each in value)
    if name in _SCHEMAS and isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        # Each text inside another one is longer by its escaped quotation marks: they end soon.
        _check_schema(path, value, counted)
    if name == "triggers" and isinstance(value, list | tuple):
        for each in value:
            _check_trigger(path, each)
    return 0


def _check_trigger(path: str, trigger: Any) -> None:
    if trigger == "":
        raise InvalidRequestError(f"{path}: one is empty; give the text that begins a tag")
    if isinstance(trigger, str) and trigger[0] == "<" and trigger[-1] == ">" and _TOKEN.fullmatch(trigger) is None:
        raise InvalidRequestError(f"{path}: {trigger[:64]!r} is no token; one has no spaces, and no < or > inside")


def _walk(what: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Every value inside, with its path and its name; those in a list have the list's. Raise if it is too deep."""
    waiting = [(what, "", value, 0)]
    while waiting:
        path, name, value, depth = waiting.pop()
        yield path, name, value
        if isinstance(value, _SCALARS) or not isinstance(value, Mapping | list | tuple):
            continue
        if depth >= MAX_DEPTH:
            raise InvalidRequestError(f"{what}: nested more than {MAX_DEPTH} deep")
        if isinstance(value, Mapping):
            waiting += [(f"{what}: {str(key)[:64]}", str(key), each, depth + 1) for key, each in value.items()]
        else:
            waiting += [(path, "", each, depth + 1) for each in value]


def _check_length(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise InvalidRequestError(f"{what}: {len(text)} characters, where {most} are allowed")


def _check_classes(what: str, text: str) -> int:
    """Return how many classes of characters an expression or a grammar has; refuse too many."""
    # Those in brackets hold no others, but dots and brackets that are themselves: the count is never too low.
    found = sum(len(each) == 1 or each[1] in "wWdDsSpP" for each in _CLASS.findall(text))
    if found > MAX_CLASSES:
        text = f"{what}: {found} classes of characters like [a-z], where {MAX_CLASSES} are allowed; count with {{n}}"
        raise InvalidRequestError(text)
    return found


def _check_grammar(what: str, grammar: str) -> int:
    _check_length(what, grammar, MAX_FORM)
    plain = _QUOTED.sub(r"\1", grammar)
    embedded = [found[0] for found in _EMBEDDED.finditer(grammar)]
    embedded += [found for found in _DIRECTIVE.findall(plain) if found not in _DIRECTIVES]
    if embedded:
        raise InvalidRequestError(
            f"{what}: {embedded[0][:64]} is not served here, only rules, %ignore and %import; ask for a schema or an "
            f"expression by itself, and write the percent sign of a text as \\u0025"
        )
    check_rules(what, grammar)
    # A rule is compiled once however often it is named, so the counts add up.
    if sum(_most(found) for found in _COUNTS.finditer(grammar)) > MAX_COUNTS:
        raise InvalidRequestError(f"{what}: its counts are more than {MAX_COUNTS} together; ask for less")
    return _check_classes(what, plain)


def _check_expression(what: str, expression: str) -> int:
    """Refuse what its counts multiply to too much: each group is as long as its parts, times its count.

    Return how many classes of characters it has.
    """
    _check_length(what, expression, MAX_TEXT)
    classes = _check_classes(what, expression)
    groups, last, place, added, optional = [0], 0, 0, 0, 0
    while place < len(expression):
        char = expression[place]
        counts = _COUNTS.match(expression, place) if char == "{" else None
        if counts is not None and (counts[1] or counts[2]):
            # The part before is in the sum once already.
            more = last * max(0, _most(counts) - 1)
            groups[-1] += more
            last += more
            added += more
            optional += not int(counts[1][:_DIGITS] or 0)
            place = counts.end()
        else:
            # A sign like * belongs to the part before, whose count may follow.
            # Behind another sign or a bracket, ? says something else.
            optional += char == "?" and expression[place - 1 : place] not in ("", "(", "*", "+", "?", "}")
            place, last = (place + 1, last) if char in "*+?" else _next_part(expression, place, groups)
        if added > MAX_REPEATED:
            raise InvalidRequestError(f"{what}: its counts make it longer by more than {MAX_REPEATED}; ask for less")
        if optional > MAX_OPTIONAL:
            raise InvalidRequestError(f"{what}: more than {MAX_OPTIONAL} parts with ? or {{0,n}}; ask for less")
        if len(groups) > MAX_DEPTH:
            raise InvalidRequestError(f"{what}: groups are nested more than {MAX_DEPTH} deep")
    return classes


def _next_part(expression: str, place: int, groups: list[int]) -> tuple[int, int]:
    """Read one character, class or bracket; return where the next begins, and how long the part behind it is."""
    char = expression[place]
    if char == "(":
        groups.append(0)
        return place + 1, 0
    if char == ")":
        inner = groups.pop() if len(groups) > 1 else 0
        groups[-1] += inner
        return place + 1, inner
    groups[-1] += 1
    if char == "\\":
        return place + 2, 1
    return (_end_of_class(expression, place) if char == "[" else place + 1), 1


def _end_of_class(expression: str, place: int) -> int:
    place += 1
    if expression[place : place + 1] == "^":
        place += 1
    # A bracket that comes first is one of the class.
    if expression[place : place + 1] == "]":
        place += 1
    while place < len(expression) and expression[place] != "]":
        place += 2 if expression[place] == "\\" else 1
    return place + 1


def _most(counts: re.Match[str]) -> int:
    return max(int(digits[:_DIGITS] or 0) for digits in counts.groups())


def _number_of(name: str, value: Any) -> float:
    if name in _NUMBERS and _is_number(value):
        # A float can't hold every whole number.
        return min(max(0.0, value), 1e18)
    if isinstance(value, Mapping) and value.get("type") == "repeat":
        # A format of structural tags.
        return sum(_number_of("maxItems", value.get(bound)) for bound in ("min", "max"))
    return 0.0


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: float) -> str:
    return f"{value:.6g}" if abs(value) < 1 << 62 else "the number"
