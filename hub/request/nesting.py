"""How deep a client's values are nested: the limit is far below what any encoder or engine can take. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError

#: Lists and maps that may lie inside each other in what a client sends, the outermost one included.
MAX_NESTING: Final = 64

_CONTAINERS: Final = (Mapping, list, tuple)
#: The usual types of them, for which no class is gone through.
_EXACT: Final = frozenset({dict, list, tuple})


def check_nesting(what: str, value: Any) -> None:
    """Raise InvalidRequestError, which names ``what``, if lists and maps in it are nested deeper than MAX_NESTING."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_NESTING):
        if not level:
            return
        level = list(chain.from_iterable(map(_containers_in, level)))
    if level:
        raise InvalidRequestError(f"{what}: lists and objects are nested more than {MAX_NESTING} deep")


def _containers_in(value: Any) -> list[Any]:
    children = value.values() if type(value) is dict or isinstance(value, Mapping) else value
    # Long lists hold token ids: their types are gone through by the interpreter's own loop.
    kinds = {kind for kind in set(map(type, children)) if kind in _EXACT or issubclass(kind, _CONTAINERS)}
    # Empty ones hold nothing deeper, but the level that they are on counts: one of them stands for all.
    if not kinds:
        return []
    found = [child for child in children if type(child) in kinds and child]
    return found or [()]
