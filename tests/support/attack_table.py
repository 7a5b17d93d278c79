"""A pytest plugin, ``-p tests.support.attack_table``: at the end, what became of each attack of docs/attacks.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import pytest

from tests.support.attacks import ATTACKS, NOT_YET

GOT_THROUGH: Final = "GOT THROUGH"
_KEY: Final = pytest.StashKey[dict[str, list[str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_KEY] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Note the rows of each test; a row that is in no list is an error."""
    known = {attack.row for attack in ATTACKS}
    for item in items:
        rows = [str(row) for mark in item.iter_markers("attack") for row in mark.args]
        if strange := set(rows) - known:
            raise pytest.UsageError(f"{item.nodeid}: no attack is called {', '.join(sorted(strange))}")
        if rows:
            config.stash[_KEY][item.nodeid] = rows


def seen(outcomes: Iterable[tuple[str, str]], otherwise: str) -> str:
    """What the table says of a row, given the outcome of each of its tests and the reason or the test's name.

    Outcomes are ``passed``, ``failed``, ``error`` and ``skipped``.
    """
    said = list(outcomes)
    count = Counter(outcome for outcome, _ in said)
    if count["failed"]:
        return f"{GOT_THROUGH}: {_some(why for outcome, why in said if outcome == 'failed')}"
    untested = [why for outcome, why in said if outcome in {"error", "skipped"}]
    if not count["passed"]:
        return f"not tested: {_some(untested) or otherwise}"
    more = f", {len(untested)} not run: {untested[0]}" if untested else ""
    return f"failed as it should ({count['passed']} test{'s' if count['passed'] > 1 else ''}{more})"


def _some(reasons: Iterable[str]) -> str:
    """The first reason, and how many others there are; the values of a test's parameters are left out."""
    first, *others = dict.fromkeys(reason.partition("[")[0] for reason in reasons) or [""]
    return f"{first} and {len(others)} more" if others else first


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    outcomes: dict[str, list[tuple[str, str]]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            for row in config.stash[_KEY].get(report.nodeid, ()):
                outcomes.setdefault(row, []).append((outcome, _why(report)))
    lines = [
        (attack.row, attack.attack, attack.expected, seen(outcomes.get(attack.row, ()), _otherwise(attack.row)))
        for attack in ATTACKS
    ]
    heads = ("row", "attack", "expected", "seen")
    widths = [max(len(line[column]) for line in (heads, *lines)) for column in range(3)]
    terminalreporter.section("attacks")
    for line in (heads, *lines):
        start = "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=False))
        terminalreporter.write_line(f"{start}  {line[3]}", red=line[3].startswith(GOT_THROUGH))


def _otherwise(row: str) -> str:
    return NOT_YET.get(row, "no test of it was chosen")


def _why(report: pytest.TestReport) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    when = "" if report.when == "call" else f" ({report.when})"
    return report.nodeid.partition("tests/")[2] + when
