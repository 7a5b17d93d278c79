"""Targets in the folder of the start: found there last, and not where other users can write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stage_runtime.engines.callable.start_folder import add_start_folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_target_here.py").write_text("")
    return tmp_path


def test_a_module_that_is_nowhere_else_is_looked_for_there_last(here: Path) -> None:
    before = list(sys.path)
    assert add_start_folder("a_target_here.sub") == ""
    assert add_start_folder("a_target_here") == ""
    assert sys.path == [*before, str(here)]


def test_for_a_module_that_is_installed_nothing_is_looked_for_there() -> None:
    before = list(sys.path)
    assert add_start_folder("msgspec") == ""
    assert sys.path == before


@pytest.mark.attack("D1")
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_where_others_can_write_is_left_out_with_the_reason(here: Path, mode: int) -> None:
    before = list(sys.path)
    here.chmod(mode)
    assert add_start_folder("a_target_here") == (
        f"nothing is imported from the folder {here}: others can write to {here}"
    )
    assert sys.path == before


def test_a_folder_that_is_gone_is_left_out_with_the_reason(here: Path) -> None:
    here.joinpath("a_target_here.py").unlink()
    Path(here).rmdir()
    assert "can't be read" in add_start_folder("a_target_here")
