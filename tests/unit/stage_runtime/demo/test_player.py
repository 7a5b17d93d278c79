"""Sound that is saved while it comes."""

from __future__ import annotations

import wave
from pathlib import Path

import pytest

from stage_runtime.demo.player import Player, write_wav


def samples_of(file: Path) -> tuple[int, bytes]:
    with wave.open(str(file)) as made:
        return made.getframerate(), made.readframes(made.getnframes())


def test_the_file_can_be_opened_while_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "answer.wav"
    player = Player(file, aloud=False)
    player.put(b"\1\0" * 8000, 16000)
    assert samples_of(file)[1][:4000] == b"\1\0" * 2000
    player.put(b"\2\0", 16000)
    player.close()
    assert samples_of(file) == (16000, b"\1\0" * 8000 + b"\2\0")


def test_without_sound_there_is_no_file(tmp_path: Path) -> None:
    Player(tmp_path / "answer.wav", aloud=True).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("script", "heard"), [("cat > $OUT", b"\1\0\2\0"), ("exit 1", None)])
def test_a_player_of_this_host_hears_it_and_one_that_fails_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, heard: bytes | None
) -> None:
    program = tmp_path / "bin" / "aplay"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    (program.parent / "cat").symlink_to("/bin/cat")
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("OUT", str(tmp_path / "heard"))
    player = Player(tmp_path / "answer.wav", aloud=True)
    for piece in (b"\1\0", b"\2\0"):
        player.put(piece, 16000)
    player.close()
    assert samples_of(tmp_path / "answer.wav") == (16000, b"\1\0\2\0")
    if heard is not None:
        assert (tmp_path / "heard").read_bytes() == heard


def test_a_whole_file_is_written_at_once(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", b"\3\0", 8000)
    assert samples_of(tmp_path / "a.wav") == (8000, b"\3\0")
    assert [file.name for file in tmp_path.iterdir()] == ["a.wav"]
