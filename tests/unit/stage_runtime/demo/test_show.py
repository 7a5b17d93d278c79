"""What the demo draws in a terminal, with colour and without."""

from __future__ import annotations

import io
import re

import pytest
from PIL import Image
from rich.console import Console

from stage_runtime.demo.show import has_colour, picture


@pytest.mark.parametrize("asked", ["", "1"])
def test_a_picture_without_colour_is_drawn_in_shades_of_ink(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """Half blocks without their colours would be one grey area: nobody could read the digits."""
    monkeypatch.setenv("NO_COLOR", asked)
    console = Console(force_terminal=True, color_system="truecolor", file=io.StringIO())
    assert has_colour(console) is not bool(asked)
    drawn = io.BytesIO()
    half = Image.new("L", (32, 32), 255)
    half.paste(0, (0, 0, 16, 32))
    half.save(drawn, "PNG")
    console.print(picture(drawn.getvalue(), colour=has_colour(console)))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    first = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()[0]
    assert len(set(first)) == (2 if asked else 1)
    assert ("\x1b[38;2" in shown) is not bool(asked)
