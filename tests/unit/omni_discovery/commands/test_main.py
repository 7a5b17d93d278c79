"""How ``omni`` finds its sub-commands: what it imports for that, and what a broken one does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from omni_discovery import plugins
from omni_discovery.commands import main as omni
from omni_discovery.errors import OmniError

ROOT = Path(__file__).resolve().parents[4]
(GROUP,) = plugins.COMMAND_GROUPS
#: As pyproject.toml has them, however old the installed ones are.
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
PACKAGES = ("omni_discovery", "hub", "stage_runtime")
HEAVY = {"asyncio", "etcd3", "grpc", "msgspec", "numpy", "rich", "starlette", "torch", "uvicorn", "vllm", "yaml", "zmq"}
#: For each sub-command its module, and fifteen in all for folders and what they stand on.
MOST_MODULES = len(COMMANDS) + 15

PROGRAM = """
import json, sys
from importlib.metadata import EntryPoint
from omni_discovery import plugins
from omni_discovery.commands import main
commands = json.loads(sys.argv[1])
plugins.entry_points = lambda group: [EntryPoint(name, value, group) for name, value in commands.items()]
try:
    main.main(sys.argv[2:])
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)))
"""


def modules_after(*words: str) -> set[str]:
    """What a fresh interpreter has imported once ``omni`` with these words has ended."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS), *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stderr == ""
    return set(json.loads(ended.stdout.splitlines()[-1]))


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".", 1)[0] in PACKAGES}


def test_help_imports_little_so_that_it_is_there_at_once() -> None:
    modules = modules_after("--help")
    assert not modules & HEAVY
    assert len(ours(modules)) <= MOST_MODULES, sorted(ours(modules))


def test_a_sub_command_is_imported_without_the_others() -> None:
    modules = modules_after("replicas", "--help")
    assert not modules & HEAVY
    found = {name for name in ours(modules) if name.startswith("omni_discovery.commands.")}
    assert found == {f"omni_discovery.commands.{name}" for name in ("main", "output", "registry", "replicas")}
    assert not any(name.startswith(("hub", "stage_runtime")) for name in ours(modules))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_sub_command_shows_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(COMMANDS, name, "--help")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: omni {name} ")


class Hello:
    """A sub-command of a third party."""

    summary = "say hello"

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("name")

    def run(self, arguments: Any) -> int:
        if arguments.name == "nobody":
            raise OmniError("there is nobody")
        sys.stdout.write(f"hello {arguments.name}\n")
        return 3


def broken() -> Any:
    raise RuntimeError("not today")


def run(commands: dict[str, str], *words: str) -> int:
    points = EntryPoints(EntryPoint(name, value, GROUP) for name, value in commands.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "entry_points", lambda group: points.select(group=group))
        return omni.main(list(words))


THEIRS = {"hello": f"{__name__}:Hello", "gone": "no_such_module:Gone", "broken": f"{__name__}:broken"}


def test_a_third_partys_sub_command_runs_and_stands_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(THEIRS, "hello", "you") == 3
    assert run(THEIRS, "hello", "nobody") == 1
    assert capsys.readouterr() == ("hello you\n", "omni: there is nobody\n")
    with pytest.raises(SystemExit):
        run(THEIRS, "--help")
    assert re.search(r"^ +hello +say hello$", capsys.readouterr().out, re.MULTILINE)


def test_a_broken_sub_command_is_named_and_takes_no_other_away(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(THEIRS, "--help")
    told = capsys.readouterr()
    assert "say hello" in told.out
    assert told.err.splitlines() == [
        "omni: the command 'broken' can't be loaded: not today",
        "omni: the command 'gone' can't be loaded: No module named 'no_such_module'",
    ]
    assert run(THEIRS, "gone") == 2
    assert capsys.readouterr().err == "omni: the command 'gone' can't be loaded: No module named 'no_such_module'\n"
    assert run(THEIRS, "helo") == 2
    assert capsys.readouterr().err.endswith("omni: 'helo' is no command of omni; did you mean omni hello?\n")
    assert run(THEIRS, "unknown") == 2
    assert capsys.readouterr().err.endswith("omni: 'unknown' is no command of omni; there are: broken, gone, hello\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "m", "--deploy", "d"], "--deploy is no flag of omni serve; did you mean --deploy-config?"),
        (
            ["serve", "m", "--max-modle-len=3"],
            "--max-modle-len is no flag of omni serve; did you mean --max-model-len?",
        ),
        (["serve", "m", "--zzz", "3"], "an argument of a newer vLLM goes into engine_args: --stage-overrides"),
        (["replicas", "--namespce", "x"], "--namespce is no flag of omni replicas; did you mean --namespace?"),
        (["replicas", "all"], "'all' is no argument of omni replicas"),
    ],
)
def test_a_flag_that_nobody_knows_is_refused_with_the_one_that_may_be_meant(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert omni.main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("omni: ")
    assert said in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "m", "--prot", "80"], ["--prot is no flag of omni serve; did you mean --port?"]),
        (["serve", "m", "--port", "x"], ["argument --port: invalid int value: 'x'"]),
        (
            ["serve", "m", "--prot", "80", "--stage-id", "x"],
            ["--prot is no flag of omni serve; did you mean --port?", "argument --stage-id: invalid int value: 'x'"],
        ),
        (["cordon", "--unod"], ["--unod is no flag of omni cordon; did you mean --undo?", "required: STAGE/REPLICA"]),
        (["cordon", "0"], ["'0' is no replica; right would be STAGE/REPLICA, for example 1/3"]),
        (["pipeline"], ["required: ACTION"]),
    ],
)
def test_a_wrong_argument_is_an_error_of_a_line_and_no_screen_of_flags(
    capsys: pytest.CaptureFixture[str], words: list[str], said: list[str]
) -> None:
    """The error itself, the nearest flag, and where all of them stand."""
    assert omni.main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("omni: ")
    assert told.endswith(f" (see omni {words[0]} --help)\n")
    lines = told.splitlines()
    assert len(lines) == len(said)
    assert [text for text, line in zip(said, lines, strict=True) if text not in line] == []
    assert "usage:" not in told
