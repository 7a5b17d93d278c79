"""Files of keys: one that others can read is refused, with the command that mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_discovery.commands.access.secret_file import read_secret_file
from omni_discovery.errors import ConfigError


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_file_of_ones_own_and_of_a_group_is_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys"
    file.write_text("abc\n")
    file.chmod(mode)
    assert read_secret_file("--api-key-file", str(file)) == "abc\n"


@pytest.mark.attack("A29")
@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o666])
def test_a_file_that_everybody_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys"
    file.write_text("abc\n")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"--api-key-file {file}: every user .* chmod 600 {file}"):
        read_secret_file("--api-key-file", str(file))


def test_what_is_no_file_of_text_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such can't be read: No such file"):
        read_secret_file("--api-key-file", str(tmp_path / "no-such"))
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        read_secret_file("--api-key-file", str(tmp_path))
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is no text"):
        read_secret_file("--api-key-file", str(file))
    file.write_bytes(b"a" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="are no list of keys"):
        read_secret_file("--api-key-file", str(file))
