"""The committed counts, one set for each interpreter that they were made with, and what has risen since."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Final

import msgspec

from tests.guard.paths import PATHS, REFERENCE

FILE: Final = File(__file__).with_name("baseline.json")
#: A path that takes so much more than in the baseline has risen.
MOST: Final = 0.10
RENEW: Final = "python -m tests.guard --record"


class Baseline(msgspec.Struct, frozen=True):
    """The counts that were made in one environment."""

    environment: dict[str, str]
    #: Instructions of one turn, by the name of the path.
    instructions: dict[str, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One path, and what it took in the baseline, as far as that can be compared."""

    name: str
    before: int
    now: int

    @property
    def rise(self) -> float:
        """The part by which it has risen; negative if it has fallen."""
        return self.now / self.before - 1

    @property
    def has_risen(self) -> bool:
        """Whether it has risen by more than may be."""
        return self.rise >= MOST

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.now} instructions ({self.rise:+.1%})"


def read(file: File = FILE) -> list[Baseline]:
    """The committed baselines."""
    return msgspec.json.decode(file.read_bytes(), type=list[Baseline])


def record(made: Baseline, file: File = FILE) -> None:
    """Put a baseline into the file in place of the one of the same interpreter."""
    kept = [each for each in read(file) if interpreter(each.environment) != interpreter(made.environment)]
    rows = sorted([*kept, made], key=lambda each: interpreter(each.environment))
    file.write_text(json.dumps(msgspec.to_builtins(rows), indent=1) + "\n")


def interpreter(environment: Mapping[str, str]) -> tuple[str, str]:
    """What decides most about the counts."""
    return environment["machine"], environment["python"]


def nearest(baselines: Sequence[Baseline], environment: Mapping[str, str]) -> Baseline:
    """The baseline whose environment shares the most with this one."""
    return max(baselines, key=lambda each: len(each.environment.items() & environment.items()))


def compare(baseline: Baseline, environment: Mapping[str, str], now: Mapping[str, int]) -> list[Row]:
    """Every path beside the baseline. Raise KeyError for one that it has not.

    Another interpreter takes another number of instructions for the same code: the baseline is then multiplied by what
    it takes more or less for code of no package of ours.
    """
    before = baseline.instructions
    is_same = interpreter(baseline.environment) == interpreter(environment)
    factor = 1.0 if is_same else now[REFERENCE.name] / before[REFERENCE.name]
    return [Row(path.name, round(factor * before[path.name]), now[path.name]) for path in PATHS]


def advice(baseline: Baseline, environment: Mapping[str, str]) -> str:
    """What to do where counts have risen."""
    differs = sorted(name for name in environment if environment[name] != baseline.environment.get(name))
    if not differs:
        return f"make them cheaper, or, if they are worth it, renew the baseline: {RENEW}"
    others = ", ".join(f"{name} {environment[name]}, not {baseline.environment.get(name)}" for name in differs)
    return f"this is {others}: if that is why, renew the baseline: {RENEW}"
