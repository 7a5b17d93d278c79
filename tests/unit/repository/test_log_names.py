"""A replica has one name in every log line and error: ``<stage>/<replica id>``, as the tables show it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: The ordinal of a start, or an id without its stage, in a text.
OTHER_NAMES = re.compile(r"replica=%d|ordinal=%|stage (?:%d|\{[^}]+\}) (?:#|replica %d|replica \{[^}]*replica_id)")


@pytest.mark.parametrize("package", ["hub", "omni_discovery", "stage_runtime"])
def test_no_text_names_a_replica_in_another_way(package: str) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / package).rglob("*.py")}
    found = [f"{path}: {match[0]}" for path, text in texts.items() for match in OTHER_NAMES.finditer(text)]
    assert found == []
