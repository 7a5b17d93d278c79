"""In how many ways an answer of a form may go on at one place: for each token, the engine's step goes through them all.

llguidance reads an answer by Earley's algorithm, with a row of half-read rules for each piece of it. What a row costs
grows with the square of their number at least, and it is counted only once it is made. A rule stands in a row by the
place that names it: so the places are bounded, whatever leads to them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError

#: Places of a grammar that name the same rule, or have the same text.
MAX_SAME: Final = 64
#: Places that name any rule, and those of expressions, or their names: many may take the same character.
MAX_NAMED: Final = 256
MAX_EXPRESSIONS: Final = 96
#: Branches of anyOf and oneOf in a schema, but for scalars and for the first of each list. Where allOf joins some, what
#: they come to multiplied.
MAX_BRANCHES: Final = 128

#: Half-read rules of one answer so far, and of all that its next token may make of them, at a replica. llguidance's own
#: bounds are 2000 and 50 000, and each rule costs the more, the more there are. What is beyond ends its request.
MAX_ROW: Final = 500
MAX_STEP: Final = 8000

#: What a place of a grammar may be, in Lark and in GBNF, where a bracket begins a class.
_LARK: Final = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*+"?i?)|(?P<comment>(?:\#|//)[^\n]*+)|(?P<expression>/(?:\\.|[^/\\\n])++/?|<[^>\n]*+>?)'
    r"|(?P<parameter>::(?!=))|(?P<name>[A-Za-z_]\w*+)"
)
_GBNF: Final = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*+"?)|(?P<comment>\#[^\n]*+)|(?P<expression>\[(?:\\.|[^\]\\])*+\]?)'
    r"|(?P<name>[A-Za-z_][\w-]*+)",
    re.DOTALL,
)
#: A terminal that is a text and nothing more.
_LITERAL: Final = re.compile(
    r'^[ \t]*+([A-Z_][A-Z0-9_]*+)(?:\.\d++)?[ \t]*+:[ \t]*+"(?:\\.|[^"\\\n])*+"i?[ \t]*+$', re.M
)
_TERMINAL: Final = re.compile(r"_*+[A-Z]")
_LISTS: Final = ("anyOf", "oneOf")
_SCALARS: Final = frozenset({"string", "number", "integer", "boolean", "null"})
#: Whether a value is a Mapping takes much longer to find out.
_NO_OBJECTS: Final = (str, int, float, list, type(None))
#: What joins the branches of several lists into one.
_JOINING: Final = ("anyOf", "oneOf", "allOf", "$ref")


def check_grammar_width(what: str, grammar: str) -> None:
    """Raise InvalidRequestError if a grammar, of Lark or GBNF, names too much, or has rules with parameters."""
    text = grammar.replace("\r", "\n")
    literals = frozenset(_LITERAL.findall(text))
    _check_places(what, _LARK, text, literals)
    if "::=" in text:
        _check_places(what, _GBNF, text, literals)


def _check_places(what: str, tokens: re.Pattern[str], text: str, literals: frozenset[str]) -> None:
    #: Rules and texts, and how often each is there.
    places: Counter[str] = Counter()
    named = expressions = 0
    for found in tokens.finditer(text):
        kind, token = found.lastgroup, found[0]
        if kind == "parameter":
            raise InvalidRequestError(f"{what}: :: is not served here, only rules without parameters")
        if kind == "expression" or (kind == "name" and _TERMINAL.match(token) and token not in literals):
            expressions += 1
        elif kind in ("text", "name"):
            places[token] += 1
            named += kind == "name"
    most, count = max(places.items(), key=lambda each: each[1], default=("", 0))
    if count > MAX_SAME:
        raise InvalidRequestError(
            f"{what}: {most[:64]} stands in {count} places, where {MAX_SAME} are allowed; make what they have in common"
            f" one rule, and name that"
        )
    if named > MAX_NAMED or expressions > MAX_EXPRESSIONS:
        raise InvalidRequestError(
            f"{what}: {named} names of rules, where {MAX_NAMED} are allowed, and {expressions} expressions and names of"
            f" terminals, where {MAX_EXPRESSIONS} are; ask for a simpler form"
        )


class SchemaWidth:
    """The branches of one schema, counted object by object."""

    def __init__(self) -> None:
        self._branches = 0
        self._multiplied = 1
        self._are_joined = False

    def add(self, path: str, schema: Any) -> None:
        """Count a value of a schema. Raise InvalidRequestError for too many branches."""
        if isinstance(schema, _NO_OBJECTS) or not isinstance(schema, Mapping):
            return
        joining = [name for name in _JOINING if name in schema]
        joined = schema.get("allOf")
        self._are_joined |= len(joining) > 1 or (isinstance(joined, list | tuple) and len(joined) > 1)
        for name in _LISTS:
            branches = schema.get(name)
            if not isinstance(branches, list | tuple):
                continue
            more = max(0, sum(not _is_scalar(each) for each in branches) - 1)
            self._branches += more
            self._multiplied = min(self._multiplied * (more + 1), MAX_BRANCHES + 1)
        if self._branches > MAX_BRANCHES or (self._are_joined and self._multiplied > MAX_BRANCHES):
            raise InvalidRequestError(
                f"{path}: anyOf and oneOf have more than {MAX_BRANCHES} branches in all that are no scalars, or come to"
                f" more where allOf joins some; ask for a simpler form"
            )


def _is_scalar(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    if "const" in schema or "enum" in schema:
        return True
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list | tuple) else [kinds]
    return all(isinstance(kind, str) and kind in _SCALARS for kind in kinds) and not any(
        name in schema for name in _JOINING
    )
