"""How deep a compiler of answers' forms goes: it calls itself for each level, and its thread has one stack.

What runs out of the stack ends the whole process, so the bounds hold before. llguidance takes up to 5 KiB for a level.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from omni_discovery.errors import InvalidRequestError

#: Levels of a schema one behind the other, with those that a $ref leads to. 1600 fit into a stack of 8 MiB.
MAX_SCHEMA_LEVELS: Final = 256
#: Names that one $ref may lead through; a schema is not nested deeper.
MAX_NAMES: Final = 64
#: Steps of following all $ref of a schema, each from every place that it may count from: some milliseconds.
MAX_STEPS: Final = 20_000
#: Rules of a grammar, and levels of groups in each, together. 2500 fit into a stack of 8 MiB.
MAX_RULE_LEVELS: Final = 512

#: Texts, expressions and comments, as Lark and as GBNF have them.
_LARK_QUOTED: Final = r'"(?:\\.|[^"\\\n])*+"?|(?:\#|//)[^\n]*+|/(?:\\.|[^/\\])++/?'
_GBNF_QUOTED: Final = r'"(?:\\.|[^"\\])*+"?|\#[^\n]*+|\[(?:\\.|[^\]\\])*+\]?'
#: What a schema in another document is called there. Its references count from it on, as they do from a place with $id.
_SCHEMAS: Final = frozenset({"schema", "json_schema", "parameters", "input_schema"})
#: A line that may begin a rule; what is quoted; a bracket. A line of an expression counts as one, too.
_PARTS: Final = tuple(
    re.compile(rf"(?P<rule>^[ \t]*+[?!]*+[\w-](?=[^:\n]*+:))|{quoted}|(?P<open>[(\[])|(?P<close>[)\]])", re.M | re.S)
    for quoted in (_LARK_QUOTED, _GBNF_QUOTED)
)


def check_rules(what: str, grammar: str) -> None:
    """Raise InvalidRequestError if a grammar, of Lark or GBNF, has too many rules, and groups inside each other."""
    text = grammar.replace("\r", "\n")
    if max(_rule_levels(parts, text) for parts in _PARTS) > MAX_RULE_LEVELS:
        raise InvalidRequestError(
            f"{what}: its rules, and the levels of groups in each, are more than {MAX_RULE_LEVELS} together; join some"
            f" rules, or ask for a simpler form"
        )


def _rule_levels(parts: re.Pattern[str], text: str) -> int:
    total = deepest = depth = 0
    for found in parts.finditer(text):
        match found.lastgroup:
            case "rule":
                total += deepest + 1
                deepest = depth = 0
            case "open":
                depth += 1
                deepest = max(deepest, depth)
            case "close":
                depth = max(0, depth - 1)
    return total + deepest


def part_of(schema: Any, ref: str) -> Any:
    """What a ``$ref`` like #/$defs/name leads to, counted from the whole schema; None for nothing."""
    return _named(schema, _names_in(ref))


def check_levels(what: str, schema: Any) -> int:
    """Raise InvalidRequestError if references of a schema, or of what holds some, lead too deep, or out of it.

    Return how many steps it took to follow them. What holds references is not nested too deep. A reference that may
    name several places counts for all of them.
    """
    places = list(_places(schema))
    references = [(place, ref) for place in places if (ref := _reference_of(place)) is not None]
    if not references:
        return 0
    by_id = {id(place.value): place for place in places}
    leads_to: list[tuple[_Place, _Place]] = []
    steps = 0
    for place, ref in references:
        if (ref != "#" and not ref.startswith("#/")) or ref.count("/") > MAX_NAMES:
            raise InvalidRequestError(f"{what}: $ref {ref[:64]!r}: only places of the schema itself, like #/$defs/name")
        roots = list(_roots_of(place))
        steps += len(roots) * (1 + ref.count("/"))
        if steps > MAX_STEPS:
            raise InvalidRequestError(f"{what}: too many $ref below places with an 'id'; use fewer of both")
        names = _names_in(ref)
        named = [_named(root.value, names) for root in roots]
        leads_to += [(place, by_id[id(value)]) for value in named if id(value) in by_id]
    graph = _Graph(places, leads_to)
    if graph.longest_path() > MAX_SCHEMA_LEVELS:
        raise InvalidRequestError(
            f"{what}: its $ref lead more than {MAX_SCHEMA_LEVELS} levels deep, one behind the other; ask for a flatter "
            f"form"
        )
    return steps


class _Place:
    """A list or an object of the document."""

    __slots__ = ("is_root", "level", "parent", "region", "value")

    def __init__(self, value: Any, name: str, parent: _Place | None) -> None:
        self.value = value
        self.parent = parent
        #: Whether references below may count from here.
        self.is_root = (
            parent is None
            or name in _SCHEMAS
            or (isinstance(value, Mapping) and any(isinstance(value.get(each), str) for each in ("$id", "id")))
        )
        #: The place nearest above, or this one, that a reference leads to, or the whole.
        self.region = self
        #: Levels from there, and with it.
        self.level = 1


def _places(document: Any) -> Iterator[_Place]:
    """Every list and object, each behind the one that it is in."""
    waiting = [_Place(document, "", None)] if isinstance(document, Mapping | list | tuple) else []
    while waiting:
        place = waiting.pop()
        yield place
        inside = place.value.items() if isinstance(place.value, Mapping) else (("", each) for each in place.value)
        waiting += [_Place(each, name, place) for name, each in inside if isinstance(each, Mapping | list | tuple)]


def _reference_of(place: _Place) -> str | None:
    found = place.value.get("$ref") if isinstance(place.value, Mapping) else None
    return found if isinstance(found, str) else None


def _roots_of(place: _Place) -> Iterator[_Place]:
    """The places above one, and itself, that its schema may begin at."""
    root: _Place | None = place
    while root is not None:
        if root.is_root:
            yield root
        root = root.parent


def _names_in(ref: str) -> list[str]:
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in ref.split("/")[1:]]


def _named(value: Any, names: Sequence[str]) -> Any:
    """What these names lead to, one inside the other; None for nothing."""
    for name in names:
        value = _inside(value, name)
        if value is None:
            break
    return value


def _inside(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name)
    if isinstance(value, list | tuple) and name.isdecimal() and len(name) < 6 and int(name) < len(value):
        return value[int(name)]
    return None


class _Graph:
    """Which parts of a document lead to which: a part begins at the whole or where a reference leads to."""

    def __init__(self, places: list[_Place], leads_to: list[tuple[_Place, _Place]]) -> None:
        begins = {id(target) for _, target in leads_to}
        self._next: dict[_Place, list[_Place]] = {}
        #: The deepest level of each part.
        self._levels: dict[_Place, int] = {}
        for place in places:
            above = place.parent
            if above is None or id(place) in begins:
                self._next[place] = []
                if above is not None:
                    self._next[above.region].append(place)
            else:
                place.region, place.level = above.region, above.level + 1
            self._levels[place.region] = max(self._levels.get(place.region, 0), place.level)
        for place, target in leads_to:
            self._next[place.region].append(target)

    def longest_path(self) -> int:
        """Levels of the longest way from part to part; of a circle, all its parts count, once. Tarjan's algorithm."""
        order: dict[_Place, int] = {}
        low: dict[_Place, int] = {}
        #: The longest way from each part of the circles that are done.
        done: dict[_Place, int] = {}
        open_parts: list[_Place] = []
        for start in self._next:
            if start in order:
                continue
            stack: list[tuple[_Place, Iterator[_Place]]] = []
            self._enter(start, order, low, open_parts, stack)
            while stack:
                part, following = stack[-1]
                for each in following:
                    if each not in order:
                        self._enter(each, order, low, open_parts, stack)
                        break
                    if each not in done:
                        low[part] = min(low[part], order[each])
                else:
                    stack.pop()
                    if stack:
                        low[stack[-1][0]] = min(low[stack[-1][0]], low[part])
                    if low[part] == order[part]:
                        self._close_circle(part, open_parts, done)
        return max(done.values(), default=0)

    def _enter(
        self,
        part: _Place,
        order: dict[_Place, int],
        low: dict[_Place, int],
        open_parts: list[_Place],
        stack: list[tuple[_Place, Iterator[_Place]]],
    ) -> None:
        order[part] = low[part] = len(order)
        open_parts.append(part)
        stack.append((part, iter(self._next[part])))

    def _close_circle(self, first: _Place, open_parts: list[_Place], done: dict[_Place, int]) -> None:
        circle = [open_parts.pop()]
        while circle[-1] is not first:
            circle.append(open_parts.pop())
        # What a circle leads to is done before it.
        behind = max((done.get(each, 0) for part in circle for each in self._next[part]), default=0)
        for part in circle:
            done[part] = behind
        for part in circle:
            done[part] += sum(self._levels[each] for each in circle)
