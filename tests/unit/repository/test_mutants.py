"""The small changes by which the unit tests of the cores are judged."""

from __future__ import annotations

from collections import Counter

from tests.mutants.changes import all_changes, sample
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.runner import ROOT

SOURCE = """
LIMIT = 3

class Box:
    size: int = 1

    def fits(self, count: int) -> bool:
        if count > LIMIT and not self.full:
            self.refused += 1
            return False
        return count <= max(self.size, LIMIT)
"""


def test_a_change_is_one_statement_made_otherwise() -> None:
    changes = {(each.function, each.before, each.after) for each in all_changes("box.py", SOURCE)}
    wanted = {
        ("", "size: int = 1", "size: int = 2"),
        ("Box.fits", "if count > LIMIT and (not self.full):", "if count >= LIMIT and (not self.full):"),
        ("Box.fits", "if count > LIMIT and (not self.full):", "if count > LIMIT or not self.full:"),
        ("Box.fits", "if count > LIMIT and (not self.full):", "if not self.full:"),
        ("Box.fits", "if count > LIMIT and (not self.full):", "if count > LIMIT and self.full:"),
        ("Box.fits", "if count > LIMIT and (not self.full):", "if False:"),
        ("Box.fits", "self.refused += 1", "pass"),
        ("Box.fits", "self.refused += 1", "self.refused -= 1"),
        ("Box.fits", "return False", "return True"),
        ("Box.fits", "return count <= max(self.size, LIMIT)", "return count <= min(self.size, LIMIT)"),
    }
    assert wanted <= changes
    assert not [before for _, before, _ in changes if before.startswith("LIMIT")]


def test_a_compiled_change_is_in_force_and_leaves_the_others_alone() -> None:
    for change in all_changes("box.py", SOURCE):
        change.compiled("box.py")
    (made,) = [each for each in all_changes("box.py", SOURCE) if each.after == "return count <= min(self.size, LIMIT)"]
    space: dict[str, type] = {}
    exec(made.compiled("box.py"), space)  # noqa: S102 - the text above
    assert space["Box"]().fits(3) is False


def test_the_same_seed_draws_the_same_changes() -> None:
    drawn = [[each.name for each in sample("box.py", SOURCE, 5, seed)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 5


def test_changes_that_are_called_equivalent_can_be_made_today() -> None:
    """A reason stands only for the code that it was written for."""
    paths = Counter(path for path, *_ in EQUIVALENT)
    possible = {each.name for path in paths for each in all_changes(path, (ROOT / path).read_text(encoding="utf-8"))}
    assert EQUIVALENT.keys() - possible == set()
