"""The lanes of ``make test``: no test file is forgotten, none runs twice."""

from __future__ import annotations

from pathlib import Path

from tests.support.lanes import LANES

TESTS = Path(__file__).parents[2]


def lanes_of(file: Path) -> list[tuple[str, ...]]:
    path = file.relative_to(TESTS.parent)
    places = {str(each) for each in (path, *path.parents)}
    return [lane for lane in LANES if places & set(lane)]


def test_each_test_file_is_in_one_lane() -> None:
    files = list(TESTS.rglob("test_*.py"))
    assert len(files) > 500
    assert not [str(file) for file in files if len(lanes_of(file)) != 1]


def test_what_the_lanes_name_is_there() -> None:
    named = [place for lane in LANES for place in lane if not place.startswith("--")]
    assert not [place for place in named if not (TESTS.parent / place).exists()]
