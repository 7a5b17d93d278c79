"""What the form that an answer must have may cost to compile: a few bytes of schema can ask for all of a host's memory.

A grammar's compiler can't be stopped, so the bounds hold before one sees it, at the hub and at the replica.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeGuard

import msgspec

from omni_discovery.errors import InvalidRequestError

#: Characters of a schema (without its signs) or a grammar; of a regular expression, or of all choices together.
MAX_FORM: Final = 64 << 10
MAX_TEXT: Final = 16 << 10
#: A bound on lengths of strings in a schema, and on all numbers of items and properties in it together.
MAX_COUNT: Final = 1 << 16
#: What the counts of a regular expression may multiply it to, in characters; in a grammar, all counts together.
MAX_REPEATED: Final = 1 << 16
#: Parts of a schema, or groups of an expression, inside each other.
MAX_DEPTH: Final = 64

_LENGTHS: Final = ("minLength", "maxLength")
_NUMBERS: Final = ("minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
_EXPRESSIONS: Final = ("pattern", "regex")
_GRAMMARS: Final = ("grammar", "ebnf")
#: Digits past these are too many in any case, and Python refuses to read thousands of them.
_COUNTS: Final = re.compile(r"\{\s*+(\d*+)\s*+,?+\s*+(\d*+)\s*+\}")
_DIGITS: Final = 12


def check_answer_form(what: str, form: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError, naming the field, if one of vLLM's structured outputs may cost too much to compile."""
    for name in ("json", "structural_tag"):
        if form.get(name) is not None:
            check_schema(f"{what}.{name}", form[name])
    for name in ("regex", "whitespace_pattern"):
        if isinstance(form.get(name), str):
            _check_expression(f"{what}.{name}", form[name])
    if isinstance(form.get("grammar"), str):
        _check_grammar(f"{what}.grammar", form["grammar"])
    choices = form.get("choice")
    if isinstance(choices, list | tuple):
        size = sum(len(choice) for choice in choices if isinstance(choice, str))
        if size > MAX_TEXT:
            raise InvalidRequestError(f"{what}.choice: {size} characters together, where {MAX_TEXT} are allowed")


def check_schema(what: str, schema: Any) -> None:
    """Raise InvalidRequestError if a JSON schema, or what holds some, may cost too much; it may be given as text."""
    if isinstance(schema, str):
        _check_length(what, schema, MAX_FORM)
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            # The engine refuses it with a better reason.
            return
    total, size = 0.0, 0
    for path, name, value in _walk(what, schema):
        size += len(name) + (len(value) if isinstance(value, str) else 1)
        if size > MAX_FORM:
            raise InvalidRequestError(f"{what}: longer than {MAX_FORM} characters; ask for a simpler form")
        if name in _LENGTHS and _is_number(value) and value > MAX_COUNT:
            raise InvalidRequestError(
                f"{path}: {_shown(value)} is more than {MAX_COUNT}; leave it out, or ask for less"
            )
        total += _number_of(name, value)
        if total > MAX_COUNT:
            raise InvalidRequestError(
                f"{path}: numbers of items and properties are more than {MAX_COUNT} together; leave them out, or ask "
                f"for less"
            )
        _check_texts(path, name, value)


def _check_texts(path: str, name: str, value: Any) -> None:
    if name in _EXPRESSIONS and isinstance(value, str):
        _check_expression(path, value)
    if name in _GRAMMARS and isinstance(value, str):
        _check_grammar(path, value)
    if name == "patternProperties" and isinstance(value, Mapping):
        for each in value:
            _check_expression(path, str(each))


def _walk(what: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Every value inside, with its path and its name; those in a list have the list's. Raise if it is too deep."""
    waiting = [(what, "", value, 0)]
    while waiting:
        path, name, value, depth = waiting.pop()
        yield path, name, value
        if not isinstance(value, Mapping | list | tuple):
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


def _check_grammar(what: str, grammar: str) -> None:
    _check_length(what, grammar, MAX_FORM)
    # A rule is compiled once however often it is named, so the counts add up.
    if sum(_most(found) for found in _COUNTS.finditer(grammar)) > MAX_REPEATED:
        raise InvalidRequestError(f"{what}: its counts are more than {MAX_REPEATED} together; ask for less")


def _check_expression(what: str, expression: str) -> None:
    """Refuse what its counts multiply to too much: each group is as long as its parts, times its count."""
    _check_length(what, expression, MAX_TEXT)
    groups, last, place = [0], 0, 0
    while place < len(expression):
        char = expression[place]
        counts = _COUNTS.match(expression, place) if char == "{" else None
        if counts is not None and (counts[1] or counts[2]):
            # The part before is in the sum once already.
            more = last * max(0, _most(counts) - 1)
            groups[-1] += more
            last += more
            place = counts.end()
        else:
            # A sign like * belongs to the part before, whose count may follow.
            place, last = (place + 1, last) if char in "*+?" else _next_part(expression, place, groups)
        if max(groups[-1], last) > MAX_REPEATED:
            raise InvalidRequestError(f"{what}: its counts make it longer than {MAX_REPEATED}; ask for less")
        if len(groups) > MAX_DEPTH:
            raise InvalidRequestError(f"{what}: groups are nested more than {MAX_DEPTH} deep")


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
