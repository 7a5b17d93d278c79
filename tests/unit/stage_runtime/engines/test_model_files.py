"""A local model that is not all there is named by its file before an engine gets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from omni_discovery.text import essence
from stage_runtime.engines.base import create_engine
from stage_runtime.engines.files import check_model_files

HEADER = json.dumps({"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
WHOLE = len(HEADER).to_bytes(8, "little") + HEADER + bytes(16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(WHOLE)
    return tmp_path


def stage(folder: Path, **engine_args: Any) -> StageConfig:
    return StageConfig(stage_id=3, engine="vllm", model=str(folder), engine_args=engine_args)


def test_a_whole_model_passes(folder: Path) -> None:
    check_model_files(stage(folder), folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (WHOLE[:-1], "is cut short: copy it again"),
        (WHOLE[:20], "is cut short: copy it again"),
        (b"", "is cut short: copy it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (WHOLE[:8] + bytes(len(HEADER) + 16), "is damaged: copy it again"),
        (WHOLE.replace(b"[0, 16]", b'"0, 16"'), "is damaged: copy it again"),
    ],
)
def test_a_file_that_is_not_whole_is_named(folder: Path, content: bytes, said: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=f"stage 3: {folder}/model.safetensors .*{said}"):
        check_model_files(stage(folder), folder)
    # Nothing of it is read then.
    check_model_files(stage(folder, load_format="dummy"), folder)


def test_a_link_into_nothing_is_named(folder: Path) -> None:
    (folder / "more.safetensors").symlink_to(folder / "gone")
    with pytest.raises(ConfigError, match=r"more.safetensors can't be read \(No such file"):
        check_model_files(stage(folder), folder)


def test_an_empty_folder_is_told_before_vllm_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=f"stage 3: no config.json in {tmp_path}"):
        create_engine(stage(tmp_path))


def test_the_essence_of_what_others_say_is_one_line() -> None:
    class ValidationError(ValueError):
        def errors(self) -> list[dict[str, Any]]:
            return [
                {"loc": (), "msg": "Value error, no such\n  file"},
                {"loc": ("model", 0), "msg": "Input should be a text"},
            ]

    assert essence(ValidationError("1 validation error\nfor it")) == "no such file; model.0: Input should be a text"
    assert essence(ValueError("one\n  two")) == "one two"
