"""TopApp: the screen of ``omni top`` and its keys. What a row says is decided in ``rows.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

from rich.text import Text
from textual.app import App
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from omni_discovery.commands.operate import OperatorAction
from omni_discovery.commands.top.dialogs import (
    OWN_WEIGHT,
    ConfirmDialog,
    ListPage,
    TextPage,
    WeightDialog,
    parse_weight,
    plain,
)
from omni_discovery.commands.top.pages import NO_REQUESTS, history_lines, replica_title, request_line, time_of_day
from omni_discovery.commands.top.rows import Choice, columns, event_line, fitted, groups, headline
from omni_discovery.commands.top.source import ended
from omni_discovery.errors import OmniError
from omni_discovery.view.recent_events import Tone

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from omni_discovery.commands.top.rows import Column, ReplicaRow, StageGroup
    from omni_discovery.commands.top.source import TopSource
    from omni_discovery.records.schema import ReplicaInfo

#: How often the screen is drawn anew.
_TURN_S: Final = 0.5
_STYLES: Final = {Tone.GOOD: "green", Tone.QUIET: "cyan", Tone.WARN: "yellow", Tone.BAD: "bold red"}
_KEYS: Final = (
    *(("c", "cordon"), ("u", "uncordon"), ("d", "drain"), ("w", "weight"), ("h", "history"), ("r", "slowest")),
    *(("s", "sort"), ("/", "filter"), ("q", "quit")),
)
#: From this width on the keys stand two columns apart, and the one that turns the order round is named, too.
_WIDE: Final = 100


class TopApp(App[None]):
    """``source`` is started and closed with the screen."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    ModalScreen { background: ansi_default; }
    ConfirmDialog, WeightDialog { align: center middle; }
    .dialog { width: 64; max-width: 100%; height: auto; border: solid ansi_default; padding: 0 1; }
    .bar, #head, #titles, #note, #keys { height: 1; }
    OptionList { height: 1fr; scrollbar-size-vertical: 1; }
    OptionList, OptionList:focus { background: ansi_default; background-tint: ansi_default 0%; }
    OptionList > .option-list--option-highlighted, OptionList:focus > .option-list--option-highlighted {
        text-style: reverse; background: ansi_default; color: ansi_default;
    }
    OptionList > .option-list--option-disabled { color: ansi_default; text-style: bold; }
    #events { height: 6; border-top: solid ansi_default; }
    #filter { display: none; height: 1; }
    #filter.open { display: block; }
    #keys { text-style: none; }
    VerticalScroll { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("c", "act('cordon')", "cordon"),
        ("u", "act('uncordon')", "uncordon"),
        ("d", "act('drain')", "drain"),
        ("w", "weight", "weight"),
        ("h", "history", "history"),
        ("r", "slowest", "slowest"),
        ("s", "sort", "sort"),
        ("o", "reverse", "reverse"),
        ("slash", "filter", "filter"),
        ("escape", "clear_filter", "all"),
        ("q", "quit", "quit"),
    ]

    def __init__(self, source: TopSource, namespace: str) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.source = source
        self._namespace = namespace
        self._choice = Choice()
        #: The replicas that are shown, by name, and all lines' names from above.
        self._rows: dict[str, ReplicaRow] = {}
        self._names: list[str] = []

    def compose(self) -> ComposeResult:
        """See App."""
        yield Static(id="head")
        yield Static(id="titles")
        yield OptionList(id="rows", compact=True)
        yield Static(id="events")
        yield Static(id="note")
        yield Input(placeholder="words: a state, a host, stage 1, ...", id="filter", compact=True)
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Start, and draw anew now and then."""
        self.source.start()
        self._note(f"which replica: ↑ ↓ · waiting for etcd · namespace {self._namespace}")
        self.query_one("#rows").focus()
        self.set_interval(_TURN_S, self.draw)
        self.draw()

    async def on_unmount(self) -> None:
        """Stop what was started."""
        await self.source.close()

    def on_resize(self) -> None:
        """Draw for another width."""
        self.draw()

    # ---- drawing

    def draw(self) -> None:
        """Show what there is now. Other screens above this one stay as they are."""
        moment, width = self.source.moment(), self.size.width
        base = self.screen_stack[0] if self.screen_stack else None
        if base is None or not width or not base.query("#rows"):
            return
        rows, found = base.query_one("#rows", OptionList), groups(moment, self._choice)
        # Where there are more rows than lines, the bar that says so takes one column.
        lines = sum(1 + len(group.rows) for group in found)
        chosen = columns(width - (lines > rows.size.height))
        left_out = sum(group.left_out for group in found)
        head = headline(moment, self._choice, self._namespace, self.source.problem, left_out)
        base.query_one("#head", Static).update(plain(_cut(head, width), "bold"))
        titles = " ".join(fitted(each.title, each) for each in chosen)
        base.query_one("#titles", Static).update(plain(titles.rstrip(), "underline"))
        self._draw_rows(rows, found, chosen)
        top = int(rows.scroll_offset.y)
        self.source.in_sight = [name for name in self._names[top : top + rows.size.height] if name in self._rows]
        base.query_one("#events", Static).update(self._events(width))
        base.query_one("#keys", Static).update(_keys(width))
        if moment.view.revision and self._note_is_first:
            self._note("" if found else "nothing is here yet: omni status says what is asked for")

    def _draw_rows(self, rows: OptionList, found: list[StageGroup], chosen: list[Column]) -> None:
        """Change the lines that are there, and list them anew only where others are there now."""
        options = []
        self._rows = {row.name: row for group in found for row in group.rows}
        for group in found:
            line = " ".join(fitted(each.of_stage(group), each) for each in chosen)
            style = "bold" if group.able else "bold red"
            options.append(Option(plain(line.rstrip(), style), id=f"stage {group.stage_id}", disabled=True))
            options += [Option(_line(row, chosen), id=row.name) for row in group.rows]
        names = [str(option.id) for option in options]
        if names == self._names:
            for option in options:
                rows.replace_option_prompt(str(option.id), option.prompt)
            return
        marked = self._marked_name(rows)
        self._names = names
        rows.clear_options()
        rows.add_options(options)
        first = next((at for at, name in enumerate(names) if name in self._rows), None)
        rows.highlighted = names.index(marked) if marked in self._rows else first

    def _marked_name(self, rows: OptionList) -> str:
        at = rows.highlighted
        return "" if at is None or at >= rows.option_count else str(rows.get_option_at_index(at).id)

    def _events(self, width: int) -> Text:
        newest = list(self.source.events.newest_first())[:5]
        if not newest:
            return plain("no event since this screen was opened", "dim")
        text = Text()
        for number, event in enumerate(newest):
            line = event_line(event, time_of_day(event.at), width)
            text.append_text(plain(f"{line}\n" if number < len(newest) - 1 else line, _STYLES[event.tone]))
        return text

    def _note(self, text: str) -> None:
        self._note_is_first = "waiting for etcd" in text
        self.screen_stack[0].query_one("#note", Static).update(plain(_cut(text, self.size.width)))

    # ---- keys

    def _marked(self) -> ReplicaInfo | None:
        """The replica on which the cursor is; a note says if there is none."""
        row = self._rows.get(self._marked_name(self.screen_stack[0].query_one("#rows", OptionList)))
        if row is None:
            self._note("no replica is chosen: ↑ ↓ chooses one")
            return None
        return row.info

    def action_act(self, name: str) -> None:
        """Cordon, uncordon or drain the chosen replica."""
        if (info := self._marked()) is not None:
            self.run_worker(self._act(info, OperatorAction(name)))

    async def _act(self, info: ReplicaInfo, action: OperatorAction, weight: float | None = None) -> None:
        if not await self._is_sure(info, action, weight):
            self._note(f"replica {info.name} is left as it is")
            return
        self._note(f"{action} {info.name}: waiting for its answer")
        self._note(await ended(self.source.carry_out(info, action, weight)))
        self.draw()

    async def _is_sure(self, info: ReplicaInfo, action: OperatorAction, weight: float | None) -> bool:
        """Ask before a drain, and before a stage is left with nobody."""
        takes_away = action in (OperatorAction.CORDON, OperatorAction.DRAIN) or weight == 0
        if not takes_away:
            return True
        try:
            is_last = await self.source.is_last(info)
        except OmniError as error:
            self._note(f"not done: {error}")
            return False
        question = ""
        if action is OperatorAction.DRAIN:
            question = (
                f"Drain replica {info.name} on {info.host}?\n"
                f"It finishes the {info.queue_length} requests that it has, withdraws and ends."
            )
        if is_last:
            last = f"No other replica of stage {info.stage_id} takes work: its requests wait, and then get a 503."
            question = f"{question}\n\n{last}" if question else f"{last}\nDo it all the same: {action} {info.name}?"
        if not question:
            return True
        is_sure: bool = await self.push_screen_wait(ConfirmDialog(question))
        return is_sure

    def action_weight(self) -> None:
        """Ask for a weight, and set it."""
        if (info := self._marked()) is not None:
            self.run_worker(self._weigh(info))

    async def _weigh(self, info: ReplicaInfo) -> None:
        text = await self.push_screen_wait(WeightDialog(info.name, info.weight))
        if text is not None:
            await self._act(info, OperatorAction.WEIGHT, None if text == OWN_WEIGHT else parse_weight(text))

    def on_option_list_option_selected(self, _: OptionList.OptionSelected) -> None:
        """Enter opens a replica's last events, as ``h`` does."""
        self.action_history()

    def action_history(self) -> None:
        """Show the last events of the chosen replica."""
        if (info := self._marked()) is not None:
            self.run_worker(self._show_history(info))

    async def _show_history(self, info: ReplicaInfo) -> None:
        width = self.size.width - 2
        self._note(f"reading the history of {info.name}")
        try:
            lives = await self.source.lives_of(info)
        except OmniError as error:
            self._note(f"not known: {error}")
            return
        lines = history_lines(lives, self.source.events.newest_first(), info.name, width)
        lines += await self.source.why(info, width)
        self._note("")
        await self.push_screen_wait(TextPage(_cut(replica_title(info), width), lines))

    def action_slowest(self) -> None:
        """Show the requests that took longest, and the way of the one that is chosen."""
        self.run_worker(self._show_slowest())

    async def _show_slowest(self) -> None:
        found, width = self.source.slowest(), self.size.width - 2
        if not found:
            await self.push_screen_wait(TextPage("the slowest requests", [NO_REQUESTS]))
            return
        title = "the slowest of the last requests: took, received, what became of it, id, where it went"
        while True:
            lines = [request_line(line, width) for line in found]
            at = await self.push_screen_wait(ListPage(_cut(title, width), lines))
            if at is None:
                return
            name = found[at].request_id
            way = await self.source.receipt(name, width)
            await self.push_screen_wait(TextPage(f"request {found[at].shown_id or name}", way))

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._choice = replace(self._choice, order=self._choice.order.next())
        self.draw()

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._choice = replace(self._choice, reverse=not self._choice.reverse)
        self.draw()

    def action_filter(self) -> None:
        """Ask for words; rows are filtered while they are typed."""
        line = self.query_one("#filter", Input)
        line.add_class("open")
        line.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter by what is typed so far."""
        if event.input.id == "filter":
            self._choice = replace(self._choice, needle=event.value)
            self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Back to the rows; the filter stays."""
        if event.input.id == "filter":
            self._close_filter()

    def action_clear_filter(self) -> None:
        """Show all rows again."""
        self.query_one("#filter", Input).value = ""
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self.query_one("#rows").focus()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _line(row: ReplicaRow, chosen: list[Column]) -> Text:
    """One replica: its state in the colour of that, the rest in none."""
    text = Text()
    for number, column in enumerate(chosen):
        text.append_text(
            plain((" " if number else "") + fitted(column.of_replica(row), column), _STYLES[row.tone])
            if column.title == "state"
            else plain((" " if number else "") + fitted(column.of_replica(row), column))
        )
    text.rstrip()
    return text


def _keys(width: int) -> Text:
    """The status bar."""
    text = Text()
    keys = (*_KEYS[:7], ("o", "reverse"), *_KEYS[7:]) if width >= _WIDE else _KEYS
    for number, (key, what) in enumerate(keys):
        text.append(("  " if width >= _WIDE else " ") if number else "")
        text.append(key, style="bold reverse")
        text.append(f" {what}")
    return text
