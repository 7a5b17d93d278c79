"""Code and commands that the documentation shows: they can be read, import what there is, and use flags that exist."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support.alerts import RULES
from tests.support.binaries import require_promtool
from tests.support.reference import commands

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"hub", "omni_discovery", "stage_runtime"}
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
#: What stands for something of the reader's in commands.
PLACES = {"$PAIR": "pair.yaml", "$ETCD": "127.0.0.1:2379", "$HOST": "127.0.0.1", "$PORT": "8000"}

#: With settings or a folder before it.
_OMNI = re.compile(r"(?:\w+=\S* )*(?:\S+/)?omni (.*)")
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[Any]:
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, (kind, text) in enumerate(_BLOCK.findall(page.read_text(encoding="utf-8")))
        if kind == language
    ]


def omni_commands() -> list[Any]:
    """Each ``omni ...`` of a shell block, without what is before and behind it."""
    found = []
    for page in PAGES:
        for language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
            if language != "bash":
                continue
            for line in re.sub(r"[ \t]*\\\n\s*", " ", text).splitlines():
                if command := _OMNI.match(line.partition(" #")[0].partition(" > ")[0].rstrip("& ")):
                    words = shlex.split(command[1])
                    found.append(pytest.param(words, id=f"{page.relative_to(ROOT)}-{' '.join(words[:2])}"))
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise AssertionError(message)


@pytest.mark.parametrize("text", blocks("python"))
def test_python_can_be_read_and_imports_what_there_is(text: str) -> None:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
            module = importlib.import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_can_be_read(text: str) -> None:
    assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("text", [block for block in blocks("yaml") if "scrape_configs:" in str(block.values[0])])
def test_prometheus_takes_its_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "prometheus.yaml").write_text(text)
    command = [require_promtool(), "check", "config", "--syntax-only", "prometheus.yaml"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize("text", blocks("toml"))
def test_toml_can_be_read(text: str) -> None:
    assert tomllib.loads(text)


@pytest.mark.parametrize("text", blocks("json"))
def test_json_can_be_read(text: str) -> None:
    assert json.loads(text)


@pytest.mark.parametrize("text", blocks("bash"))
def test_a_shell_reads_what_is_pasted_and_nothing_in_it_is_a_redirection_by_mistake(text: str) -> None:
    """What the reader fills in is written in capitals: `<this>` would read a file."""
    read = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=30, check=False)
    assert read.stderr == ""
    assert re.findall(r"(?<![<\w])<[a-zA-Z][^<>\n]*>", text) == []


@pytest.mark.parametrize("words", omni_commands())
def test_commands_use_flags_that_exist(words: list[str]) -> None:
    # Where its output goes is for the shell.
    its_own = words[: words.index(">")] if ">" in words else words
    name, *rest = [PLACES.get(word, word) for word in its_own]
    parser = _Parser(prog=f"omni {name}")
    commands()[name].add_arguments(parser)
    parser.parse_args(rest)


TROUBLE: Final = "docs/operations/trouble.md"


def alerts_of_the_page() -> dict[str, str]:
    """What the page of troubles says of each alert, by the heading."""
    page = (ROOT / TROUBLE).read_text(encoding="utf-8")
    _, *parts = re.split(r"^### (Omni\w+)$", page, flags=re.MULTILINE)
    return {name: text.partition("\n## ")[0] for name, text in zip(parts[::2], parts[1::2], strict=True)}


def test_the_page_of_troubles_has_a_section_for_each_alert_and_no_other() -> None:
    assert list(alerts_of_the_page()) == list(RULES)


@pytest.mark.parametrize("name", RULES)
def test_each_alert_links_to_what_it_looks_like_why_and_what_to_do(name: str) -> None:
    """The heading's anchor is its name in lower case."""
    link = RULES[name]["annotations"]["runbook_url"]
    assert link == f"{{{{ $externalLabels.omni_docs }}}}{TROUBLE}#{name.lower()}"
    said = re.findall(r"^\*\*([^*]+):\*\* (\S.*)$", alerts_of_the_page()[name], re.MULTILINE)
    assert [part for part, _ in said] == ["Looks like", "Why", "Do"]
    assert all(len(text) > 20 for _, text in said)
