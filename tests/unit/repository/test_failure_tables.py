"""Every test that docs/failure-tests.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
PAGE = TESTS.parent / "docs" / "failure-tests.md"
CONTRACTS = TESTS.parent / "stage_runtime" / "testing.py"

_FILE = re.compile(r"`((?:unit|contract|integration|e2e|fault)/(?:\w+/)*test_\w+)`(?:: ([^`|]+))?")
_NAME = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
#: The tables before this heading tell the story of a test in words of their own.
_BY_NAME_FROM = "## Routing, overload, requests"


def named(text: str) -> list[tuple[str, list[str]]]:
    """The files that a text names, each with the fragments of test names behind it."""
    return [(file, fragments(said)) for file, said in _FILE.findall(text)]


def fragments(said: str) -> list[str]:
    """What stands between commas, up to the next dot or semicolon, as it is in the name of a function."""
    said = re.split(r"[·;(]", said)[0]
    return [re.sub(r"\W+", "_", part.strip().lower()) for part in said.split(", ") if part.strip()]


def names_of_tests(file: Path) -> list[str]:
    """The tests of a file, with those of a contract that one of its classes derives from."""
    text = file.read_text()
    inherited = CONTRACTS.read_text() if "(ConnectorContract)" in text else ""
    return _NAME.findall(text + inherited)


def test_every_file_that_is_named_is_there() -> None:
    missing = {file for file, _ in named(PAGE.read_text()) if not (TESTS / f"{file}.py").exists()}
    assert missing == set()


@pytest.mark.parametrize(
    "row",
    [
        line
        for line in PAGE.read_text().partition(_BY_NAME_FROM)[2].splitlines()
        if line[:3] in {"| 2", "| 3", "| 4", "| W", "| S"}
    ],
)
def test_every_test_that_is_named_is_there(row: str) -> None:
    """Each row names one at least, or says why there is none; a fragment is part of the name of a test of that file."""
    found = named(row)
    assert found
    for file, wanted in found:
        names = names_of_tests(TESTS / f"{file}.py")
        for fragment in wanted:
            assert any(fragment in name for name in names), f"{file} has no test of that name: {fragment}"


def test_no_failure_is_left_out() -> None:
    text = PAGE.read_text()
    of_the_peer = [*range(1, 6), *range(9, 31), *range(34, 39), *range(43, 54)]
    wanted = [*range(1, 47), *(f"W{number}" for number in of_the_peer)]
    assert [number for number in wanted if f"\n| {number} |" not in text] == []
