"""The attacks: the catalogue, the marks of tests and docs/attacks.md say the same, and the table says what happened."""

from __future__ import annotations

import re

import pytest

from tests.support.attack_table import GOT_THROUGH, seen
from tests.support.attacks import ATTACKS, NOT_YET, PAGE, marked, with_tables

ROWS = [attack.row for attack in ATTACKS]


def test_the_rows_are_all_there_once_and_none_is_marked_that_is_not() -> None:
    first = [f"A{number}" for number in range(1, 32)] + [f"C{number}" for number in range(1, 30)]
    assert ROWS[: len(first)] == first
    later = ROWS[len(first) :]
    assert sorted(set(later), key=lambda row: (row[0], int(row[1:]))) == later
    assert {row[0] for row in later} == set("DEFGHIJKLMNOPQRSTUVWXYZ")
    assert set(marked()) <= set(ROWS)


def test_a_row_without_a_test_is_named_with_the_reason() -> None:
    assert set(ROWS) - set(marked()) <= set(NOT_YET)
    assert set(NOT_YET) <= set(ROWS)
    assert all(NOT_YET.values())


def test_the_page_names_the_tests_of_each_row() -> None:
    """To correct it: python -m tests.support.attacks. While tests are being written, it may lack some of a row."""
    text = PAGE.read_text(encoding="utf-8")
    if not NOT_YET:
        assert with_tables(text) == text
    tests = marked()
    for row in set(ROWS) - set(NOT_YET):
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
        named = set(re.findall(r"`([^`]+)`", line.split(" | ")[-1]))
        assert named
        assert named <= tests[row], row


def test_the_page_has_every_row_as_the_catalogue_has_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for each in ATTACKS:
        assert f"\n| {each.row} | {each.attack} | {each.expected} | {each.since} | " in text, each.row


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([("passed", "a")], "failed as it should (1 test)"),
        ([("passed", "a"), ("passed", "b")], "failed as it should (2 tests)"),
        ([("passed", "a"), ("failed", "x::y")], f"{GOT_THROUGH}: x::y"),
        ([("passed", "a"), ("skipped", "no root")], "failed as it should (1 test, 1 not run: no root)"),
        ([("failed", "x::y[1]"), ("failed", "x::y[2]"), ("failed", "x::z")], f"{GOT_THROUGH}: x::y and 1 more"),
        ([("skipped", "no root"), ("skipped", "no root")], "not tested: no root"),
        ([("error", "x::y (setup)")], "not tested: x::y (setup)"),
        ([], "not tested: being written"),
    ],
)
def test_a_row_of_the_table_says_what_became_of_the_attack(outcomes: list[tuple[str, str]], said: str) -> None:
    assert seen(outcomes, "being written") == said
