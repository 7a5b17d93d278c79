"""``omni completion``: scripts for three shells, of which bash is asked here what it completes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from omni_discovery import plugins
from omni_discovery.commands.main import whole_parser
from omni_discovery.commands.shell.completion import SHELLS, script_of
from tests.unit.omni_discovery.commands.test_main import COMMANDS, GROUP, modules_after

#: Prints what bash makes of a line whose last word is to be completed.
ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
"$(complete -p omni | sed 's/.*-F \\([^ ]*\\) .*/\\1/')"
printf '%s\\n' "${COMPREPLY[@]}"
"""
#: Commands that list, and how they are asked for JSON.
LISTINGS = ("replicas", "hubs", "history", "doctor", "key list", "pipeline show")


@pytest.fixture(autouse=True)
def _commands_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pyproject.toml has them, however old the installed ones are."""
    entries = [EntryPoint(name, value, GROUP) for name, value in COMMANDS.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries if group == GROUP else [])


def completed(folder: Path, *words: str) -> set[str]:
    script = folder / "omni.bash"
    script.write_text(script_of(whole_parser(), "bash"))
    ended = subprocess.run(
        ["bash", "--norc", "-c", ASK, "ask", str(script), "omni", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert ended.stderr == ""
    return {line for line in ended.stdout.splitlines() if line}


def test_bash_completes_commands_flags_and_choices(tmp_path: Path) -> None:
    assert completed(tmp_path, "") >= COMMANDS.keys()
    assert completed(tmp_path, "repl") == {"replicas"}
    assert completed(tmp_path, "key", "") == {"create", "list", "revoke"}
    assert completed(tmp_path, "replicas", "--js") == {"--json"}
    assert completed(tmp_path, "serve", "--api", "") == {"omni", "vllm", "vllm-omni"}
    assert completed(tmp_path, "etcd", "grant-role", "n", "") == {"hub", "replica", "operator", "observer"}
    (tmp_path / "pair.yaml").touch()
    assert "pair.yaml" in completed(tmp_path, "serve", "--deploy-config", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_knows_every_command(shell: str) -> None:
    script = script_of(whole_parser(), shell)
    assert all(name in script for name in COMMANDS)
    assert "deploy-config" in script


@pytest.mark.parametrize("words", LISTINGS)
def test_every_listing_can_be_had_as_json(words: str) -> None:
    parser: argparse.ArgumentParser = whole_parser()
    for word in words.split():
        parser = next(parsers_of(parser))[word]
    assert "--json" in parser.format_help()


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[dict[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield action.choices


def test_the_script_is_written_without_anything_heavy() -> None:
    """And it is a script alone: the shell that reads it starts no program."""
    modules = modules_after("completion", "fish")
    assert not modules & {"numpy", "rich", "starlette", "torch", "uvicorn", "vllm", "zmq"}


def test_a_shell_that_is_unknown_is_told_which_there_are() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(COMMANDS), "completion", "tcsh"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "bash" in ended.stderr
    assert "fish" in ended.stderr


RUN = """
import json, sys
from importlib.metadata import EntryPoint
from omni_discovery import plugins
from omni_discovery.commands import main
commands = json.loads(sys.argv[1])
plugins.entry_points = lambda group: [EntryPoint(name, value, group) for name, value in commands.items()]
sys.exit(main.main(sys.argv[2:]))
"""
