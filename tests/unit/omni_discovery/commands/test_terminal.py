"""The console of the commands shows text as text."""

from __future__ import annotations

import json
import re

import pytest
from rich.table import Table
from rich.text import Text

from omni_discovery.commands.output import say
from omni_discovery.commands.terminal import TextConsole, print_json
from tests.support.terminal import HOSTILE, obeyed


@pytest.mark.attack("A18")
def test_hostile_text_is_text_wherever_it_stands_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """As a plain cell, a styled one, a title, a caption, and by itself; names of styles and emoji are text, too."""
    table = Table(title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, style="bold red"))
    console = TextConsole()
    console.print(table)
    console.print(HOSTILE, style="red")
    say(HOSTILE)
    shown = capsys.readouterr().out
    assert obeyed(shown) == []
    assert "[red]not a style[/] :smile:" in shown


@pytest.mark.attack("A18")
def test_json_keeps_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"host": HOSTILE})
    shown = capsys.readouterr().out
    assert obeyed(shown) == []
    assert json.loads(shown) == {"host": HOSTILE}


#: A control sequence that sets a colour; bold and dim are none.
COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


@pytest.mark.parametrize("asked", ["", "1"])
def test_no_color_takes_the_colours_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    """As https://no-color.org has it: set, and not empty."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", asked)
    TextConsole().print(Text("up", style="green"))
    shown = capsys.readouterr().out
    assert "up" in shown
    assert bool(COLOUR.search(shown)) is not bool(asked)
