"""One fault in each file of this folder: its story, what breaks and heals it, and what is promised meanwhile.

A file has ``FAULT``; the first line of its docstring is what the tables say. ``python -m tests.fault --list`` prints
all of them.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.fault.judge import Promise
from tests.fault.site import Site


def nothing(site: Site) -> None:
    """The product heals itself, or has nothing to heal."""
    del site


def possible(site: Site) -> str:
    """Nothing keeps a site from having it."""
    del site
    return ""


def needs(program: str) -> Callable[[Site], str]:
    """What says whether a program is there, by which the fault is made."""

    def why_not(_: Site) -> str:
        is_there = shutil.which(program) or shutil.which(program, path="/usr/sbin")
        return "" if is_there else f"{program} is not there"

    return why_not


#: What a replica's or an etcd's end costs.
USUAL: Final = Promise()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is done to a site that works, and what it must keep."""

    break_it: Callable[[Site], None]
    #: What it needs of a site before there is load, and what takes that back.
    prepare: Callable[[Site], None] = nothing
    restore: Callable[[Site], None] = nothing
    heal: Callable[[Site], None] = nothing
    #: How long it lasts, beside what ``break_it`` itself takes.
    lasts_s: float = 0.0
    promise: Promise = USUAL
    #: Why this site can't have it; empty if it can.
    why_not: Callable[[Site], str] = possible
    #: Whether any hub has to notice it.
    is_noticed: bool = True


def all_faults() -> dict[str, tuple[Fault, str]]:
    """Every fault with the first line of its story, by name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        found[module.name.replace("_", "-")] = (loaded.FAULT, (loaded.__doc__ or "").splitlines()[0].rstrip("."))
    return found
