"""The hot paths take no more instructions than the committed baseline says, and a rise is seen."""

from __future__ import annotations

import shutil
from pathlib import Path as File

import pytest

from tests.guard.baseline import MOST, Baseline, Row, advice, compare, nearest, read, record
from tests.guard.count import ALL, Counts, count, environment
from tests.guard.paths import PATHS, REFERENCE
from tests.support.binaries import absent

_HERE = {"machine": "x86_64", "python": "3.11.9", "libc": "glibc 2.36", "msgspec": "0.22.0"}
_OTHER = {**_HERE, "python": "3.11.2"}


def _made(instructions: int, of: dict[str, str] | None = None, reference: int = 100) -> Baseline:
    names = {path.name: instructions for path in PATHS}
    return Baseline(_HERE if of is None else of, {**names, REFERENCE.name: reference})


@pytest.fixture(scope="module")
def counts() -> Counts:
    """All paths as they are, and once more each with an eighth wasted by a function inside of it."""
    if shutil.which("valgrind") is None:
        absent("valgrind is not there: apt-get install valgrind")
    known = nearest(read(), environment()).instructions
    return count({path.name: known[path.name] // 8 for path in PATHS}, known)


def test_no_hot_path_takes_a_tenth_more_than_in_the_baseline(counts: Counts) -> None:
    here = environment()
    baseline = nearest(read(), here)
    risen = [str(row) for row in compare(baseline, here, counts.plain) if row.has_risen]
    assert not risen, "\n".join([*risen, advice(baseline, here)])


def test_every_path_is_found_that_is_made_dearer_by_an_eighth(counts: Counts) -> None:
    here = environment()
    rows = compare(Baseline(here, counts.plain), here, {**counts.plain, **counts.dearer})
    assert [str(row) for row in rows if not row.has_risen] == []


def test_a_tenth_more_has_risen_and_less_has_not() -> None:
    assert Row("a", 1000, 1000 + round(1000 * MOST)).has_risen
    assert not Row("a", 1000, 1099).has_risen
    assert not Row("a", 1000, 100).has_risen
    assert str(Row("a", 1000, 1250)) == "a: 1000 -> 1250 instructions (+25.0%)"


def test_with_another_interpreter_the_baseline_is_scaled_by_what_that_takes_for_other_code() -> None:
    """1. it takes half as much more for all code: nothing has risen; 2. the same counts by the same Python: all have"""
    baseline, now = _made(1000), _made(1500, _OTHER, reference=150)
    assert not any(row.has_risen for row in compare(baseline, _OTHER, now.instructions))
    assert all(row.has_risen for row in compare(baseline, _HERE, now.instructions))
    assert "python 3.11.2, not 3.11.9: if that is why" in advice(baseline, _OTHER)
    assert "renew the baseline: python -m tests.guard --record" in advice(baseline, _HERE)


def test_a_path_that_the_baseline_has_not_is_an_error() -> None:
    short = Baseline(_HERE, {PATHS[0].name: 1, REFERENCE.name: 1})
    with pytest.raises(KeyError):
        compare(short, _HERE, _made(1).instructions)


def test_each_interpreter_has_a_baseline_of_its_own_and_the_nearest_is_taken(tmp_path: File) -> None:
    file = tmp_path / "baseline.json"
    file.write_text("[]")
    for made in (_made(1), _made(2, _OTHER), _made(3)):
        record(made, file)
    assert read(file) == [_made(2, _OTHER), _made(3)]
    assert nearest(read(file), {**_OTHER, "msgspec": "1"}) == _made(2, _OTHER)


def test_the_baselines_have_every_path_and_no_other() -> None:
    assert [each.instructions.keys() ^ {path.name for path in ALL} for each in read()] == [set()] * len(read())
