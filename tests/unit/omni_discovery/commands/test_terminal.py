"""The console of the commands shows text as text."""

from __future__ import annotations

import json

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
