"""What pyproject.toml says of the package is true of the code: version, entry points, what the wheel leaves out."""

from __future__ import annotations

import ast
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import omni_discovery

ROOT = Path(__file__).resolve().parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
GROUPS = {"console_scripts": PROJECT["project"]["scripts"], **PROJECT["project"]["entry-points"]}
POINTS = [EntryPoint(name, value, group) for group, points in GROUPS.items() for name, value in points.items()]


def imported(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_the_version_is_written_the_same_twice() -> None:
    assert omni_discovery.__version__ == PROJECT["project"]["version"]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_every_entry_point_names_what_there_is(point: EntryPoint) -> None:
    assert callable(point.load())


def test_the_wheel_holds_the_packages_with_their_types_and_leaves_training_and_speech_out() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in WHEEL["packages"])
    assert WHEEL["exclude"] == [f"stage_runtime/demo/{name}" for name in ("training", "talker", "vocoder")]


def test_nothing_in_the_wheel_imports_what_it_leaves_out() -> None:
    left_out = [ROOT / folder for folder in WHEEL["exclude"]]
    assert all(folder.is_dir() for folder in left_out)
    names = tuple(folder.replace("/", ".") for folder in WHEEL["exclude"])
    for package in WHEEL["packages"]:
        for file in (ROOT / package).rglob("*.py"):
            if not any(file.is_relative_to(folder) for folder in left_out):
                assert not [name for name in imported(file) if name.startswith(names)], file
