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
_LISTS: Final = frozenset({list, tuple})
_EXACT: Final = _LISTS | {dict}


def check_nesting(what: str, value: Any) -> None:
    """Raise InvalidRequestError, which names ``what``, if lists and maps in it are nested deeper than MAX_NESTING."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_NESTING):
        if not level:
            return
        level = _containers_in(level)
    if level:
        raise InvalidRequestError(f"{what}: lists and objects are nested more than {MAX_NESTING} deep")


def _containers_in(level: list[Any]) -> list[Any]:
    """What the lists and maps of one level hold that may hold more.

    All of a level are gone through together, by the interpreter's own loops: a client may send 50 000 of them, and the
    hub's loop waits.
    """
    inside = [
        each.values() if (kind := type(each)) is dict or (kind not in _LISTS and isinstance(each, Mapping)) else each
        for each in level
    ]
    children = inside[0] if len(inside) == 1 else list(chain.from_iterable(inside))
    kinds = {kind for kind in set(map(type, children)) if kind in _EXACT or issubclass(kind, _CONTAINERS)}
    # Empty ones hold nothing deeper, but the level that they are on counts: one of them stands for all.
    if not kinds:
        return []
    found = [child for child in children if type(child) in kinds and child]
    return found or [()]
