"""In how many ways an answer of a schema may go on at one place: for each token, the engine's step goes through them.

llguidance reads an answer by Earley's algorithm, with a row of half-read rules for each piece of it. What a row costs
grows with the square of their number at least, and it is counted only once it is made. Of a schema, those stand in one
row that begin with the same bracket: branches of anyOf and oneOf, and what allOf joins them to.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.form_depth import part_of

#: Branches of all anyOf and oneOf of a schema, but for scalars and the first of each list; where several are joined, as
#: many as that makes.
MAX_BRANCHES: Final = 160
#: Half-read rules of one answer so far, and of all that its next token may make of them, at a replica. llguidance's own
#: bounds are 2000 and 50 000, and each rule costs the more, the more there are. What is beyond ends its request. A
#: choice has a rule for each of its texts.
MAX_ROW: Final = 1100
MAX_STEP: Final = 8000

_LISTS: Final = ("anyOf", "oneOf")
_SCALARS: Final = frozenset({"string", "number", "integer", "boolean", "null"})
#: What is joined to one, where an object has several.
_JOINING: Final = ("anyOf", "oneOf", "allOf", "$ref")
#: Whether a value is a Mapping takes much longer to find out.
_NO_OBJECTS: Final = (str, int, float, list, type(None))
#: Levels of what is joined; more count as too many branches.
_MOST_LEVELS: Final = 64


class SchemaWidth:
    """The branches of one schema, counted object by object."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._branches = 0
        #: In how many ways each object that is joined to others may begin, by its identity.
        self._ways: dict[int, int] = {}

    def add(self, path: str, part: Any) -> None:
        """Count a value of the schema. Raise InvalidRequestError for too many branches."""
        if isinstance(part, _NO_OBJECTS) or not isinstance(part, Mapping):
            return
        joined = part.get("allOf")
        if sum(name in part for name in _JOINING) > 1 or (isinstance(joined, list | tuple) and len(joined) > 1):
            self._branches += self._ways_of(part, 0) - 1
        else:
            self._branches += sum(max(0, len(self._several(part, name)) - 1) for name in _LISTS)
        if self._branches > MAX_BRANCHES:
            raise InvalidRequestError(
                f"{path}: anyOf and oneOf have more than {MAX_BRANCHES} branches in all, or come to more where they are"
                f" joined by allOf; put what stands in several places into $defs once, or ask for a simpler form"
            )

    def _several(self, part: Mapping[Any, Any], name: str) -> list[Any]:
        """The branches of a list, but for scalars."""
        branches = part.get(name)
        return [each for each in branches if not self._is_scalar(each)] if isinstance(branches, list | tuple) else []

    def _is_scalar(self, branch: Any) -> bool:
        if isinstance(branch, Mapping) and isinstance(branch.get("$ref"), str):
            branch = part_of(self._schema, branch["$ref"])
        if not isinstance(branch, Mapping) or any(name in branch for name in _JOINING):
            return False
        values = branch["enum"] if isinstance(branch.get("enum"), list | tuple) else [branch.get("const", {})]
        if all(isinstance(each, str | int | float | None) for each in values):
            return True
        kinds = branch.get("type")
        return all(
            isinstance(each, str) and each in _SCALARS for each in (kinds if isinstance(kinds, list) else [kinds])
        )

    def _ways_of(self, part: Any, level: int) -> int:
        """In how many ways something may begin, all that is joined to it multiplied; MAX_BRANCHES + 2 for more."""
        most = MAX_BRANCHES + 2
        if not isinstance(part, Mapping) or self._is_scalar(part):
            return 1
        if level > _MOST_LEVELS:
            return most
        if (known := self._ways.get(id(part))) is not None:
            return known
        # A circle counts once.
        self._ways[id(part)] = 1
        factors = [sum(self._ways_of(each, level + 1) for each in self._several(part, name)) for name in _LISTS]
        joined = part.get("allOf")
        beside = list(joined) if isinstance(joined, list | tuple) else []
        if isinstance(part.get("$ref"), str):
            beside.append(part_of(self._schema, part["$ref"]))
        factors += [self._ways_of(each, level + 1) for each in beside]
        ways = self._ways[id(part)] = min(most, prod(max(1, each) for each in factors))
        return ways
