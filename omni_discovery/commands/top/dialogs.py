"""What ``omni top`` lays over its table: a question, the weight to set, a page of text, a list to choose from."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from rich.text import Text
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from omni_discovery.records.schema import MOST_WEIGHT
from omni_discovery.text import harmless

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.binding import BindingType

#: The answer of WeightDialog that asks for the replica's own weight again.
OWN_WEIGHT: Final = ""


def plain(text: str, style: str = "") -> Text:
    """A text of others as a text: none of it is markup, and nothing in it moves a cursor."""
    return Text(harmless(text), style=style)


class ConfirmDialog(ModalScreen[bool]):
    """Asks a question; only ``y`` is a yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "answer(True)", "yes"),
        ("n", "answer(False)", "no"),
        ("escape", "answer(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """See Screen."""
        with Vertical(classes="dialog"):
            yield Static(plain(self._question))
            yield Static(plain("\ny yes   n no", "bold"))

    def action_answer(self, answer: bool) -> None:
        """End with the answer."""
        self.dismiss(answer)


def parse_weight(text: str) -> float | None:
    """The weight that was typed; None if it is none."""
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if 0 <= weight <= MOST_WEIGHT else None


class WeightDialog(ModalScreen[str | None]):
    """Asks for a weight. Ends with a number as text, with ``OWN_WEIGHT``, or with None where nothing is to be done."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "leave", "back")]

    def __init__(self, name: str, weight: float) -> None:
        super().__init__()
        self._name_of_replica = name
        self._weight = weight

    def compose(self) -> ComposeResult:
        """See Screen."""
        with Vertical(classes="dialog"):
            yield Static(plain(f"weight of replica {self._name_of_replica}, which is {self._weight:g} now"))
            yield Input(placeholder="1 is usual, 0 is nothing at all, empty is its own again", compact=True)
            yield Static(plain("", "bold red"), id="wrong")
            yield Static(plain("enter sets it   esc leaves it", "bold"))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Check what was typed."""
        text = event.value.strip()
        if text == OWN_WEIGHT or parse_weight(text) is not None:
            self.dismiss(text)
        else:
            wrong = f"{text!r} is no weight; right would be a number from 0 to {MOST_WEIGHT:g}"
            self.query_one("#wrong", Static).update(plain(wrong, "bold red"))

    def action_leave(self) -> None:
        """End without an answer."""
        self.dismiss(None)


class TextPage(ModalScreen[None]):
    """A page of lines that can be scrolled."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "leave", "back"), ("q", "leave", "back")]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title_text = title
        self._lines = lines

    def compose(self) -> ComposeResult:
        """See Screen."""
        yield Static(plain(self._title_text, "bold"), classes="bar")
        with VerticalScroll():
            yield Static(plain("\n".join(self._lines)))
        yield Static(plain("esc back   ↑ ↓ scroll", "bold"), classes="bar")

    def action_leave(self) -> None:
        """Go back."""
        self.dismiss(None)


class ListPage(ModalScreen[int | None]):
    """A list of lines; ends with the number of the one that was chosen, or with None."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "leave", "back"), ("q", "leave", "back")]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title_text = title
        self._lines = lines

    def compose(self) -> ComposeResult:
        """See Screen."""
        yield Static(plain(self._title_text, "bold"), classes="bar")
        yield OptionList(*(Option(plain(line)) for line in self._lines), compact=True)
        yield Static(plain("enter opens it   esc back", "bold"), classes="bar")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """End with what was chosen; the rows below this list have not been."""
        event.stop()
        self.dismiss(event.option_index)

    def action_leave(self) -> None:
        """Go back."""
        self.dismiss(None)
