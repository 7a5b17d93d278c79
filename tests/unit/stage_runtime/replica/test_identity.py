"""What a replica's record says of what it has loaded: the same for the same files, another for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from omni_discovery import __version__
from omni_discovery.deploy.document import StageConfig
from stage_runtime.replica.identity import FIELDS, is_deterministic, model_details, voices_of

MIB = 1 << 20


class Plain:
    """An engine that says nothing of its model."""


class Described:
    """One that does, and more than belongs into a record."""

    model_details: ClassVar[dict[str, Any]] = {
        "revision": "abc",
        "dtype": "bfloat16",
        "weights": "many",
        "code": "x" * 1000,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model: config, tokenizer, weights of 3 MiB."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"a": 0}')
    (folder / "sub" / "model.safetensors").write_bytes(b"h" * 100 + bytes(3 * MIB))
    return folder


def content(folder: Path) -> str:
    return model_details(str(folder), Plain())["content"]


def test_the_same_files_elsewhere_are_the_same_content(folder: Path, tmp_path: Path) -> None:
    before = content(folder)
    assert len(before) == 16
    assert content(folder.rename(tmp_path / "elsewhere")) == before


def test_papers_logs_and_hidden_files_make_no_other_content(folder: Path) -> None:
    before = content(folder)
    (folder / "README.md").write_text("read me")
    (folder / ".cache.json").write_text("{}")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.json").write_text("{}")
    assert content(folder) == before


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b'{"layers": 2}'),
        ("tokenizer.json", b'{"b": 0}'),
        ("sub/model.safetensors", b"H" * 100 + bytes(3 * MIB)),
        ("sub/model.safetensors", b"h" * 100 + bytes(2 * MIB) + b"\1" * MIB),
        ("sub/model.safetensors", b"h" * 100 + bytes(3 * MIB - 1)),
        ("more.safetensors", b"h"),
    ],
)
def test_another_file_of_the_model_makes_another_content(folder: Path, name: str, data: bytes) -> None:
    before = model_details(str(folder), Plain())
    (folder / name).write_bytes(data)
    after = model_details(str(folder), Plain())
    assert after["content"] != before["content"]
    assert (after["tokenizer"] != before["tokenizer"]) is (name == "tokenizer.json")


def test_what_the_engine_says_goes_in_as_far_as_a_record_has_place_for_it() -> None:
    found = model_details("org/name", Described())
    assert found == {"revision": "abc", "content": "abc", "dtype": "bfloat16", "code": "x" * 200}
    assert set(found) <= set(FIELDS)


def test_of_a_model_that_is_nowhere_only_the_code_is_known() -> None:
    found = model_details("", Plain())
    assert set(found) == {"code"}
    assert found["code"].startswith(f"omni-discovery {__version__}+")
    assert model_details("", Plain()) == found


def test_a_folder_that_can_not_be_read_is_a_warning_and_no_content(folder: Path) -> None:
    (folder / "broken.json").symlink_to(folder / "nowhere.json")
    assert set(model_details(str(folder), Plain())) == {"code"}


class Certain:
    """An engine that repeats itself."""

    deterministic = True


def test_the_document_has_the_last_word_on_whether_a_stage_repeats_itself() -> None:
    silent, yes, no = (
        StageConfig(stage_id=0, engine="e", **more)
        for more in ({}, {"deterministic": True}, {"deterministic": False})  # type: ignore[arg-type]
    )
    assert [is_deterministic(stage, Plain()) for stage in (silent, yes, no)] == [False, True, False]
    assert [is_deterministic(stage, Certain()) for stage in (silent, yes, no)] == [True, True, False]


def test_the_voices_of_an_engine_are_those_that_a_record_can_hold() -> None:
    class Speaking:
        voices: ClassVar[list[str]] = ["ann", "", "x" * 65, "bob", "ann", *(f"voice {number}" for number in range(300))]

    found = voices_of(Speaking())
    assert found[:3] == ("ann", "bob", "voice 0")
    assert len(found) == 256
    assert voices_of(Plain()) == ()
