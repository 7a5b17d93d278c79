"""What a field means that is left out: part of what a type says, and easily changed by mistake."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, Final

import msgspec

_FACTORIES: Final = (dict, list, set, tuple, frozenset)


def unusual_defaults(package: str, *without: str) -> dict[str, Any]:
    """By type and field: what a field is that is left out, where that is not empty, zero, false, None or unset.

    Of all modules of a package but ``without``, and of all dataclasses and msgspec's structs that they define.
    """
    found = {}
    for each in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if each.name in without or each.ispkg:
            continue
        module = importlib.import_module(f"{package}.{each.name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                found.update({f"{kind.__qualname__}.{name}": default for name, default in _defaults_of(kind)})
    return {name: default for name, default in found.items() if default or _is_nan(default)}


def _is_nan(value: Any) -> bool:
    return bool(value != value)


def _defaults_of(kind: type) -> Iterator[tuple[str, Any]]:
    if issubclass(kind, msgspec.Struct):
        # Not by ``msgspec.structs.fields``: it also looks up the types, of which some are there for mypy alone.
        names, defaults = kind.__struct_fields__, kind.__struct_defaults__
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            if default is not msgspec.NODEFAULT and default is not msgspec.UNSET:
                yield name, default.factory() if hasattr(default, "factory") else default
    elif dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            if field.default is not dataclasses.MISSING:
                yield field.name, field.default
            elif field.default_factory in _FACTORIES:
                yield field.name, field.default_factory()
