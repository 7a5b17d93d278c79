"""Lines of a deploy document's YAML: mappings whose keys know their line, and what only the text shows to be wrong.

PyYAML lets the last of two equal keys win, and keeps no places. This loader refuses equal keys and returns mappings
with ``Key`` as keys, so that an error which is found later can name the line. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import yaml

_MERGE: Final = "tag:yaml.org,2002:merge"
_TEXT: Final = "tag:yaml.org,2002:str"
#: ``${VAR}`` anywhere, ``$VAR`` as a whole part of a path or list.
_VARIABLE: Final = re.compile(r"\$\{[A-Za-z_][^}]{0,127}+\}|(?:^|(?<=[/:,=]))\$[A-Z_][A-Z0-9_]*(?=$|[/:,=])")
#: Sampling parameters may hold any text, stop words for example.
_FREE_TEXT: Final = frozenset(("default_sampling_params",))


class Problem(NamedTuple):
    """One error of a document. ``line`` counts from 1; 0 if the error has no line in the file.

    ``variable`` is the variable of a shell that the error is about, if it is about one.
    """

    text: str
    line: int = 0
    variable: str = ""


class Key(str):
    """A key of a mapping with its line in the file, from 1. Equal to the plain string."""

    __slots__ = ("line",)

    line: int

    def __new__(cls, name: str, line: int) -> Key:
        """Make the key ``name`` of line ``line``."""
        key = super().__new__(cls, name)
        key.line = line
        return key


def move_key(mapping: dict[Any, Any], old: str, new: str) -> None:
    """Give the value under ``old`` the key ``new``, which keeps the line of ``old``; ``new`` must not be there."""
    key = _key_of(mapping, old)
    mapping[Key(new, key.line) if isinstance(key, Key) else new] = mapping.pop(old)


def take_keys(mapping: dict[Any, Any], names: Iterable[str]) -> dict[Any, Any]:
    """Take the keys ``names`` out of ``mapping``, as far as it has them; return them with their lines and values."""
    keys = [_key_of(mapping, name) for name in names if name in mapping]
    return {key: mapping.pop(key) for key in keys}


def line_at(document: Any, steps: Sequence[str | int]) -> int:
    """Return the line of the place that ``steps`` lead to, or of the nearest place around it; 0 if none is known.

    0 also for a value that is not from the file: its key has no line, because a flag or a default has put it there.
    """
    line, value = 0, document
    for step in steps:
        if isinstance(value, Mapping):
            if step not in value:
                break
            key = _key_of(value, step)
            line = key.line if isinstance(key, Key) else 0
            value = value[step]
        elif isinstance(value, list | tuple) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            break
        if isinstance(value, Mapping) and isinstance(step, int):
            line = min((key.line for key in value if isinstance(key, Key)), default=line)
    return line


def line_of_key(name: object) -> int:
    """Return the line of a key; 0 if it has none."""
    return name.line if isinstance(name, Key) else 0


def without_lines(value: Any) -> Any:
    """Return a copy of a document with plain strings as keys. Raise RecursionError for one that holds itself."""
    if isinstance(value, dict):
        return {str(name) if isinstance(name, Key) else name: without_lines(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_lines(part) for part in value]
    return value


#: How many levels of mappings and lists a document may have: engines' arguments have a handful.
MOST_LEVELS: Final = 64


def is_too_deep(document: Any) -> bool:
    """Whether a document has more levels than any reader needs, or holds itself. Never runs out of stack."""
    level = {id(document): document}
    for _ in range(MOST_LEVELS + 1):
        # A part that stands in one level several times is looked at once.
        level = {
            id(part): part
            for value in level.values()
            if isinstance(value, dict | list)
            for part in (value.values() if isinstance(value, dict) else value)
            if isinstance(part, dict | list)
        }
        if not level:
            return False
    return True


def load_yaml(text: str) -> tuple[Any, list[Problem]]:
    """Read one YAML document; return it with ``Key`` for its keys, and what is wrong with its text.

    Problems are keys that stand twice in one mapping and variables of a shell, which are not expanded here. Raise
    yaml.YAMLError if the text is no YAML.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, []
        problems: list[Problem] = []
        _check_node(node, "", problems, set())
        return loader.construct_document(node), problems
    finally:
        loader.dispose()


def _key_of(mapping: Mapping[Any, Any], name: Any) -> Any:
    return next((key for key in mapping if key == name), name)


class _Loader(yaml.SafeLoader):
    """SafeLoader whose mappings have ``Key`` for keys that are strings."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        plain = super().construct_mapping(node, deep)
        lines = {name.value: name.start_mark.line + 1 for name, _ in node.value if isinstance(name, yaml.ScalarNode)}
        return {
            Key(name, lines[name]) if type(name) is str and name in lines else name: value
            for name, value in plain.items()
        }


def _check_node(node: Any, place: str, problems: list[Problem], seen: set[int]) -> None:
    """Append the problems of ``node`` and of all below it; each node is looked at once, however often it is used."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        _check_mapping(node, place, problems, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, part in enumerate(node.value):
            stage_id = _stage_id_of(part) if place == "stages" else None
            _check_node(part, f"{place}[{index}]" if stage_id is None else f"stage {stage_id}", problems, seen)
    elif node.tag == _TEXT and (found := _VARIABLE.search(node.value)):
        text = (
            f"{place}: {found[0]} is not expanded in a deploy document: write the value, or put it in before the start "
            "('envsubst < FILE > NEW_FILE'), or give it on the command line with --stage-overrides"
        )
        problems.append(Problem(text, node.start_mark.line + 1, found[0]))


def _check_mapping(node: yaml.MappingNode, place: str, problems: list[Problem], seen: set[int]) -> None:
    first: dict[tuple[str, str], int] = {}
    for name, part in node.value:
        if not isinstance(name, yaml.ScalarNode) or name.tag == _MERGE:
            _check_node(part, place, problems, seen)
            continue
        key, line, here = (name.tag, name.value), name.start_mark.line + 1, f"{place}.{name.value}".lstrip(".")
        if key in first:
            problems.append(Problem(f"{here}: the key is in line {first[key]} already; keep one of the two", line))
        first.setdefault(key, line)
        if name.value not in _FREE_TEXT:
            _check_node(part, here, problems, seen)


def _stage_id_of(node: Any) -> str | None:
    """Return the text of the stage's ``stage_id``, if the node is a mapping that has one."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    ids = [part.value for name, part in pairs if name.value == "stage_id" and isinstance(part, yaml.ScalarNode)]
    return ids[0] if ids else None
