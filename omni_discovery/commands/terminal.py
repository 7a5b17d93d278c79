"""The console of the commands: text from the registry reaches a terminal as text, whatever stands in it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from omni_discovery.text import harmless, harmless_json


class TextConsole(Console):
    """A console on which no text is markup, and what a terminal might obey is shown as underscores.

    Control sequences of rich itself, such as colours and the cursor of a live table, are none of the text.
    """

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See Console: all that is printed passes here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON, with what a terminal might obey escaped."""
    sys.stdout.write(harmless_json(msgspec.json.encode(value).decode()) + "\n")
