"""What lists something, for a script and for a terminal without colours, asked of a real etcd by the real commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import DEFAULTS, OMNI
from tests.support.registry import etcdctl
from tests.support.terminal import on_terminal

LISTINGS = (["replicas"], ["hubs"], ["history"], ["doctor"], ["status"], ["key", "list"], ["pipeline", "show"])
#: Control sequences that set a colour; bold and dim are none.
COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


@pytest.fixture
def filled(endpoint: str, namespace: str) -> list[str]:
    """The flags that lead to a namespace with one of each: some of it is shown in colour."""
    addresses = {"input_addr": "tcp://127.0.0.1:1", "output_addr": "tcp://127.0.0.1:2"}
    record = {"schema": 1, "stage_id": 0, "replica_id": 0, "status": "error", "reason": "broken", **addresses}
    stage = {"stage_id": 0, "engine": "echo", "final_output": "text"}
    for key, value in (
        ("replicas/0/0", record),
        ("hubs/h1", {"hub_id": "h1", "host": "gpu-1", "address": "http://10.0.0.1:8000"}),
        ("pipeline", {"model": "m", "stages": [stage]}),
    ):
        etcdctl(endpoint, "put", f"/omni/v1/{namespace}/{key}", json.dumps(value))
    flags = ["--etcd-endpoints", endpoint, "--namespace", namespace]
    subprocess.run([*OMNI, "key", "create", "alice", *flags], check=True, capture_output=True)
    return flags


def test_each_prints_an_object_a_line_with_json(filled: list[str], tmp_path: Path) -> None:
    for words in LISTINGS:
        asked = [*OMNI, *words, "--json", *filled]
        ended = subprocess.run(asked, capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False)
        lines = [json.loads(line) for line in ended.stdout.splitlines()]
        assert lines, (words, ended.stderr)
        assert all(isinstance(line, dict) for line in lines), words


def test_none_writes_control_characters_into_a_pipe(filled: list[str], tmp_path: Path) -> None:
    """Also where its environment is that of a terminal with colours."""
    terminal = {**environment(), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    for words in LISTINGS:
        ended = subprocess.run([*OMNI, *words, *filled], capture_output=True, cwd=tmp_path, env=terminal, check=False)
        shown = (ended.stdout + ended.stderr).decode()
        assert len(shown) > 20, words
        assert all(char.isprintable() or char == "\n" for char in shown), (words, shown)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in DEFAULTS}


def test_none_is_coloured_where_no_color_is_set(
    filled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert COLOUR.search(on_terminal(["replicas", *filled], tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")
    for words in LISTINGS:
        shown = on_terminal([*words, *filled], tmp_path)
        assert len(shown) > 20, words
        assert not COLOUR.search(shown), (words, shown)
