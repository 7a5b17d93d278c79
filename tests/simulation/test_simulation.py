"""A whole cluster on a virtual clock, in children of the tests: a simulation replaces the clocks of its process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
_LIMIT_S: Final = 600.0
#: Each mistake with a seed that finds it soon, and the rule that the judge names.
FOUND: Final = (
    ("send an output twice", 101, "answer"),
    ("lend one slot too many", 101, "slots"),
    ("tell etcd the prompt", 101, "secret"),
)


def simulate(*arguments: str) -> tuple[int, str]:
    """The exit code and the output of ``python -m tests.simulation``."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_seeds_break_no_rule() -> None:
    code, said = simulate("--seeds", "100:110", "--jobs", "2")
    assert code == 0, said


def test_what_was_found_once_is_not_found_again() -> None:
    code, said = simulate("--regressions", "--jobs", "2")
    assert code == 0, said
    assert len(list((ROOT / "tests/simulation/regressions").glob("*.json"))) == int(
        said.split(" runs of")[0].split()[-1]
    )


def test_a_seed_gives_the_same_history_each_time() -> None:
    digests = {re.findall("digest=([0-9a-f]+)", simulate("--seed", "101")[1])[0] for _ in range(2)}
    assert len(digests) == 1


@pytest.mark.parametrize(("mistake", "seed", "rule"), FOUND)
def test_the_judge_finds_a_mistake_that_is_made_on_purpose(mistake: str, seed: int, rule: str) -> None:
    code, said = simulate("--mistakes", mistake, "--seed", str(seed))
    assert code == 0, said
    assert rule in said.split("|")[3]
