"""Lazy exports: names that a package offers without importing the modules that define them (PEP 562).

A package's ``__init__`` imports its public names under ``TYPE_CHECKING``, for type checkers and editors. At run time
this module imports each name at its first use. So ``import hub`` loads neither etcd's client nor ZMQ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for the module named ``package``.

    ``homes`` maps each exported name to the module that defines it, or to ``module:name`` where it has another name
    there. An imported object becomes an attribute of the package, so each name is looked up here once.
    """

    def get_attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, original = homes[name].partition(":")
        value = getattr(import_module(module), original or name)
        setattr(sys.modules[package], name, value)
        return value

    def list_attributes() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get_attribute, list_attributes
