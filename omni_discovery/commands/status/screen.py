"""The screen of ``omni status``: one text, as wide as the terminal, with commands that can be pasted. Pure."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.text import Text

from omni_discovery.commands.tables import age
from omni_discovery.text import one_line

if TYPE_CHECKING:
    from omni_discovery.commands.findings.checks import Finding
    from omni_discovery.commands.status.overview import HubSummary, Loading, StageLine

#: Needs, hubs and replicas on their way up that are shown; the others are counted.
_MOST_NEEDS: Final = 8
_MOST_HUBS: Final = 5
_MOST_LOADING: Final = 6
_INDENT: Final = "    "
_BAR: Final = 20
_UNKNOWN: Final = "?"
#: Characters of a finding that are shown; `omni doctor` has all.
_MOST_TEXT: Final = 400
#: A topic that is a word within so many characters of a finding is not said before it.
_HEAD: Final = 60


@dataclass(frozen=True, slots=True)
class Status:
    """All that ``omni status`` has found out. ``stages`` and ``hubs`` are None where etcd did not say."""

    namespace: str
    endpoints: str
    clock: str
    needs: tuple[Finding, ...]
    unknown: tuple[str, ...]
    stages: tuple[StageLine, ...] | None
    hubs: tuple[HubSummary, ...] | None
    #: The name of this machine.
    host: str = ""

    @property
    def code(self) -> int:
        """The exit code: 2 if etcd could not be read, 1 if something needs a hand, else 0."""
        if self.stages is None:
            return 2
        return 1 if self.needs else 0


@dataclass(frozen=True, slots=True)
class Flags:
    """What is put behind a command, so that it reaches the same registry.

    ``given`` are the flags of this command line; ``endpoints`` is where etcd was found, for commands that don't find an
    embedded one by themselves.
    """

    given: tuple[str, ...]
    endpoints: str

    def behind(self, words: Sequence[str]) -> tuple[str, ...]:
        """The flags for a command."""
        finds_none = words[:2] == ("omni", "serve") and "--etcd-endpoints" not in self.given
        return ("--etcd-endpoints", self.endpoints, *self.given) if finds_none else self.given


def status_text(status: Status, flags: Flags, width: int) -> Text:
    """The screen; ``flags`` are put behind each command."""
    text = Text()
    head = f"namespace {status.namespace} at etcd {status.endpoints}, {status.clock}"
    for line in _wrapped(head, width, ""):
        text.append(f"{line}\n", style="dim")
    for part in (_needs(status, flags, width), _unknown(status, width), _stages(status, width), _hubs(status, width)):
        if part:
            text.append("\n")
            text.append_text(part)
    text.rstrip()
    return text


def shell_lines(words: Sequence[str], flags: Flags, width: int) -> list[str]:
    """A command as lines of at most ``width`` columns, if its words allow that, which a shell reads as one.

    What is for etcdctl is preceded by the settings that it needs.
    """
    if words[0] == "etcdctl":
        environment = [*map(shlex.quote, ("omni", "etcd", "env", *flags.given))]
        first = _broken(['eval "$(omni', *environment[1:-1], f'{environment[-1]})"'], width)
        return [*first, *_broken([*map(shlex.quote, words)], width)]
    return _broken([*map(shlex.quote, (*words, *flags.behind(words)))], width)


def _broken(words: Sequence[str], width: int) -> list[str]:
    """Words joined by spaces, broken where a line would be too long."""
    lines, line = [], ""
    for word in words:
        longer = f"{line} {word}" if line else word
        if line and len(longer) > width - len(" \\"):
            lines.append(f"{line} \\")
            line = f"  {word}"
        else:
            line = longer
    return [*lines, line]


def _needs(status: Status, flags: Flags, width: int) -> Text:
    text = Text()
    if not status.needs:
        if status.stages is None:
            return text
        text.append("nothing needs you", style="bold green")
        text.append(", as far as is known\n" if status.unknown else "\n")
        return text
    count = len(status.needs)
    text.append(f"{'one thing needs' if count == 1 else f'{count} things need'} you\n", style="bold red")
    text.append_text(numbered(status.needs, status.host, flags, width))
    return text


def numbered(needs: Sequence[Finding], host: str, flags: Flags, width: int) -> Text:
    """What needs somebody, each with its number, its advice and the command for that; ``host`` is this machine."""
    text, count = Text(), len(needs)
    shown: set[tuple[tuple[str, ...], str]] = set()
    for number, need in enumerate(needs[:_MOST_NEEDS], 1):
        text.append_text(_need(number, need, flags, width))
        if need.more and (need.more, need.more_host) not in shown:
            shown.add((need.more, need.more_host))
            text.append_text(_more(need, host, flags, width))
    if count > _MOST_NEEDS:
        text.append(f"    and {count - _MOST_NEEDS} more:\n")
        for line in shell_lines(("omni", "doctor"), flags, width - 6):
            text.append(f"      {line}\n", style="cyan")
    return text


def _need(number: int, need: Finding, flags: Flags, width: int) -> Text:
    """One need: what is wrong, and the advice with its command."""
    text = Text()
    said = one_line(need.text)
    said = said if len(said) <= _MOST_TEXT else f"{said[:_MOST_TEXT]}..."
    topic = "" if need.topic in said[:_HEAD].split() else f"{need.topic}: "
    first, *rest = _wrapped(f"{number:>2}. {topic}{said}", width, _INDENT)
    text.append(f"{first}\n", style="bold")
    for line in rest:
        text.append(f"{line}\n")
    advice = _advice(need)
    for line in _wrapped(_INDENT + advice, width, _INDENT) if advice else ():
        text.append(f"{line}\n", style="dim")
    for line in shell_lines(need.command, flags, width - 6) if need.command else ():
        text.append(f"      {line}\n", style="cyan")
    return text


def _more(need: Finding, host: str, flags: Flags, width: int) -> Text:
    """The command that tells more of a need, and where to type it if not on this ``host``."""
    text = Text()
    where = "" if need.more_host == host else f", asked on {one_line(need.more_host)}"
    lead = f"{_MORE.get(need.more[-1], _MORE_OF_ONE)}{where}:"
    for line in _wrapped(_INDENT + lead, width, _INDENT):
        text.append(f"{line}\n", style="dim")
    for line in shell_lines(need.more, flags, width - 6):
        text.append(f"      {line}\n", style="cyan")
    return text


#: What a command is for, where the advice does not say it.
_LEADS: Final[Mapping[tuple[str, ...], str]] = {
    ("omni", "history"): "How its processes ended",
    ("omni", "replicas"): "Who is there",
    ("omni", "hubs"): "When it beat last",
    ("etcdctl", "endpoint"): "What its members say",
}


#: What ``omni why`` tells, by its last word.
_MORE: Final[Mapping[str, str]] = {
    "--last-failures": "Which requests failed last, where they had been and how they ended",
    "--waiting": "Which requests wait, and what for",
}
_MORE_OF_ONE: Final = "What the hub sends to it, and why not more"


def _advice(need: Finding) -> str:
    """The advice, without the command if that stands in it: it is shown below."""
    text = one_line(need.advice)
    if not need.command:
        return text
    before, found, behind = text.partition(one_line(" ".join(need.command)))
    if found:
        return f"{before.rstrip()}{behind}".rstrip(":") + ":"
    lead = next((lead for words, lead in _LEADS.items() if need.command[: len(words)] == words), "")
    return f"{text}. {lead}:" if lead else f"{text}:"


def _unknown(status: Status, width: int) -> Text:
    text = Text()
    if status.unknown:
        text.append("not known\n", style="bold yellow")
        for each in status.unknown:
            for line in _wrapped(f"  - {one_line(each)}", width, _INDENT):
                text.append(f"{line}\n")
    return text


_COLUMNS: Final = ("stage", "asked", "up", "starting", "other", "busy", "waiting", "failed", "refused")


def _stages(status: Status, width: int) -> Text:
    text = Text()
    if status.stages is None:
        return text
    if not status.stages:
        text.append("no stage: there is neither a deploy document nor a replica\n")
        return text
    rows = [_COLUMNS, *map(_row, status.stages)]
    wide = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    wide[0] = min(wide[0], max(5, width - sum(wide[1:]) - 2 * len(_COLUMNS)))
    for row, stage in zip(rows, (None, *status.stages), strict=True):
        first = row[0] if len(row[0]) <= wide[0] else f"{row[0][: wide[0] - 1]}~"
        line = f"{first:<{wide[0]}}" + "".join(f"  {cell:>{wide[at]}}" for at, cell in enumerate(row) if at)
        is_short = stage is not None and stage.asked is not None and stage.up < stage.asked
        text.append(f"{line}\n", style="dim" if stage is None else "yellow" if is_short else "")
    if any(_UNKNOWN in row for row in rows):
        text.append(f"{_UNKNOWN}: not known, since no hub says it\n", style="dim")
    loading = [each for stage in status.stages for each in stage.loading]
    for each in loading[:_MOST_LOADING]:
        text.append(f"  {_progress(each)}\n")
    if len(loading) > _MOST_LOADING:
        text.append(f"  and {len(loading) - _MOST_LOADING} more on their way up\n")
    return text


def _row(stage: StageLine) -> tuple[str, ...]:
    numbers = (stage.asked, stage.up, stage.starting, stage.other)
    counts = (stage.waiting, stage.failed, stage.refused)
    return (
        f"{stage.stage_id} {stage.engine}".rstrip(),
        *map(_number, numbers),
        f"{stage.busy}/{stage.slots}",
        *map(_number, counts),
    )


def _number(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)


def _progress(loading: Loading) -> str:
    """A replica's start: with a bar where its engine says how far it is."""
    phase = one_line(loading.phase) or "starting"
    if not loading.progress:
        return f"{loading.name} {phase}"
    done = round(_BAR * min(1.0, loading.progress))
    return f"{loading.name} [{'#' * done}{'.' * (_BAR - done)}] {100 * loading.progress:3.0f} % {phase}"


def _hubs(status: Status, width: int) -> Text:
    text = Text()
    for hub in (status.hubs or ())[:_MOST_HUBS]:
        beat = "no beat yet" if hub.beat_age_s is None else f"beat {age(hub.beat_age_s)} ago"
        if hub.requests is None:
            requests = "requests not known"
        else:
            things = "request" if hub.requests == 1 else "requests"
            requests = f"{hub.requests} {things} in {age(hub.window_s)}, {hub.failed} failed"
        revoked = ", revoked" if hub.revoked else ""
        for line in _wrapped(f"hub {hub.hub_id} on {one_line(hub.host)}{revoked}: {requests}, {beat}", width, _INDENT):
            text.append(f"{line}\n", style="red" if hub.revoked else "")
    if status.hubs is not None and len(status.hubs) > _MOST_HUBS:
        text.append(f"and {len(status.hubs) - _MOST_HUBS} more hubs\n")
    if status.hubs is not None and not status.hubs:
        text.append("no hub\n")
    return text


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
