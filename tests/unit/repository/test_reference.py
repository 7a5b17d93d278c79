"""The generated pages of docs/reference are what the code makes."""

from __future__ import annotations

import typing

import pytest

from omni_discovery.records import keys
from tests.support import reference
from tests.support.processes import DEFAULTS


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults of flags are read from it."""
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["flags.md", "metrics.md", "keys.md", "events.md"])
def test_a_page_is_what_the_code_makes(name: str) -> None:
    """If it is not: ``python -m tests.support.reference``."""
    assert (reference.FOLDER / name).read_text(encoding="utf-8") == reference.pages()[name]


def test_there_are_no_other_generated_pages() -> None:
    made = {path.name for path in reference.FOLDER.glob("*.md") if "tests.support.reference" in path.read_text()}
    assert made == reference.pages().keys()


def test_every_command_and_every_flag_is_explained() -> None:
    rows = [line for line in reference.flags_page().splitlines() if line.startswith("| `")]
    unexplained = [line for line in rows if line.endswith("| |")]
    assert set(unexplained) <= {"| `YAML` | | | |"}
    for name in reference.commands():
        assert f"## `omni {name}`" in reference.flags_page()


def test_every_kind_of_key_is_described() -> None:
    assert reference.key_rows().keys() == set(typing.get_args(keys.RegistryKey))


def test_the_template_of_each_key_is_one_that_the_registry_reads() -> None:
    """With numbers and names in its places, a template is read as the kind that it stands for."""
    places = {"<namespace>": "ns", "<stage_id>": "1", "<replica_id>": "2", "<hub_id>": "front", "<name>": "a1"}
    for kind, row in reference.key_rows().items():
        key = row.path
        for place, value in places.items():
            key = key.replace(place, value)
        assert isinstance(keys.parse_key("ns", key), kind)
