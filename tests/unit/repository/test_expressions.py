"""Regular expressions of the code against texts that make a backtracking search slow."""

from __future__ import annotations

import ast
import itertools
import multiprocessing
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from omni_discovery.inputs.answer_form import check_answer_form
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.echo.speech import Speech

ROOT: Final = Path(__file__).resolve().parents[3]
PACKAGES: Final = ("omni_discovery", "hub", "stage_runtime")
#: As long as a grammar may be. With the square of it, a search takes a minute; with a higher power, for ever.
LENGTH: Final = 64 << 10
LIMIT_S: Final = 30.0
#: Texts that are read slower than this at a small length are tried at the whole one.
SMALL: Final = 2048
SUSPICIOUS_S: Final = 0.0003
#: What an expression may stumble over: a beginning of what it looks for, and what it repeats.
BEGINNINGS: Final = (
    *("", "{", "{1,", "%", "%0", "$", "${a", "[", "float", "int1", "a", "a.", "a=", " a", "a:", "a://", "GPU-", "/"),
    *(
        " - at `$",
        "unknown field `",
        "missing required field `",
        "code: [",
        "<f8[",
        "1.",
        "1",
        "-",
        ".a",
        "..",
        "v.",
        '"',
    ),
)
PUMPS: Final = (
    " ",
    "0",
    "a",
    "A",
    "_",
    ".",
    "-",
    "\t\n",
    "a.",
    "0a",
    "${a",
    "{ ",
    "{1",
    "code: [",
    " - at `$",
    " a",
    "%0",
    '\\"',
    "[",
)
ENDS: Final = ("!", "\x00", "`x")
#: The methods that begin anew at each character; the others look once.
SEARCHES: Final = frozenset(("search", "findall", "finditer", "sub", "split"))


def expressions() -> list[tuple[str, str, bool]]:
    """The place, the text and whether it is searched for of every expression in the code."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            searched = {ast.unparse(call.func.value) for call in calls if _method(call) in SEARCHES}
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                    name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                    if ast.unparse(node.value.func) == "re.compile":
                        found.append((f"{path.relative_to(ROOT)}: {name}", _text_of(node.value), name in searched))
            found += [
                (f"{path.relative_to(ROOT)}: line {call.lineno}", _text_of(call), _method(call) in SEARCHES)
                for call in calls
                if _method(call) != "compile" and ast.unparse(call.func) == f"re.{_method(call)}" and call.args
            ]
    return found


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _text_of(call: ast.Call) -> str:
    """The expression; formatted parts are numbers of times."""
    text = ast.unparse(call.args[0])
    value = eval(text, {"_NAME_BYTES": 16})  # noqa: S307 - it is a literal of this repository
    return value.decode() if isinstance(value, bytes) else str(value)


def run_expression(text: str, is_searched: bool) -> None:
    compiled = re.compile(text)
    for beginning, pump, end in itertools.product(BEGINNINGS, PUMPS, ENDS):
        for length in (SMALL, LENGTH):
            hostile = (beginning + pump * (length // len(pump)))[:length] + end
            begun_s = time.process_time()
            if is_searched:
                sum(1 for _ in compiled.finditer(hostile))
            else:
                compiled.fullmatch(hostile)
                compiled.match(hostile)
            if time.process_time() - begun_s < SUSPICIOUS_S:
                break


def ends_in_time(act: Callable[..., object], *args: object) -> bool:
    """Whether it ends. In a process of its own: no other thread runs while an expression is searched for."""
    process = multiprocessing.get_context("fork").Process(target=act, args=args, daemon=True)
    process.start()
    process.join(LIMIT_S)
    is_alive = process.is_alive()
    process.kill()
    process.join()
    return not is_alive and process.exitcode == 0


def test_the_expressions_of_the_code_are_found() -> None:
    found = [place for place, _, _ in expressions()]
    assert "omni_discovery/inputs/answer_form.py: _COUNTS" in found
    assert len(found) > 40


@pytest.mark.attack("E5")
@pytest.mark.parametrize(("place", "text", "is_searched"), expressions(), ids=lambda each: str(each)[:80])
def test_an_expression_reads_a_hostile_text_once(place: str, text: str, is_searched: bool) -> None:
    assert ends_in_time(run_expression, text, is_searched), f"{place}: make its repetitions possessive (*+, ++)"


@pytest.mark.parametrize(
    ("text", "is_searched"),
    [
        (r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}", True),
        (r" - at `\$(.*)`$", True),
        (r"\$\{[A-Za-z_]\w*[^}]*\}", True),
        (r"%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z%]", True),
        (r"code: \[([^\]]+)\]", True),
        (r"float[0-9]+[a-z0-9_]*", False),
        (r'"(?:\\.|[^"\\])*"', True),
    ],
)
def test_expressions_that_read_a_text_again_and_again_are_found(
    monkeypatch: pytest.MonkeyPatch, text: str, is_searched: bool
) -> None:
    monkeypatch.setitem(globals(), "LIMIT_S", 2.0)
    assert not ends_in_time(run_expression, text, is_searched)


@pytest.mark.attack("E5")
@pytest.mark.parametrize("what", ["regex", "grammar", "whitespace_pattern"])
@pytest.mark.parametrize("text", ["{" + " " * 16_000, "{ " * 8_000, "{1 , 1 " * 2_000, "{" + "0" * 16_000])
def test_a_form_full_of_brackets_and_spaces_is_read_at_once(what: str, text: str) -> None:
    assert ends_in_time(check_answer_form, "form", {what: text + "x"})


@pytest.mark.attack("E5")
def test_a_text_of_spaces_has_no_words() -> None:
    speech = Speech(StageRequest("a", "a"), None, 0.0)
    assert ends_in_time(speech.add_text, " " * 3_000_000)
    speech.add_text(" \n ")
    assert not speech.words
    speech.add_text("  two  words \n")
    assert list(speech.words) == ["  two ", " words \n"]
