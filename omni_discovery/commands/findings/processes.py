"""Findings of ``omni doctor`` about processes: what failed lately on this machine, and who waits, here or elsewhere.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from omni_discovery.commands.findings.checks import Finding, Grade
from omni_discovery.records.waits import HAS_ENDED, WaitRecord
from omni_discovery.stories import Story, Wait, same_registry, share_endpoint
from omni_discovery.text import one_line
from omni_discovery.view.table import View

#: Stories older than this are history, and of the others so many are shown, each with so many of its last lines.
_RECENT_S: Final = 3600.0
_MOST_RECENT: Final = 5
_LINES_SHOWN: Final = 10
#: How much of its last line is shown of a story that is told in brief, in characters.
_END_SHOWN: Final = 120
_MORE: Final = "how they came to that: omni doctor --recent"


#: As many lines of the same text in a row are shown as three.
_REPEATS: Final = 4


def recent_findings(
    stories: Sequence[Story], registry: str, endpoints: str, now_s: float, *, brief: bool = False
) -> list[Finding]:
    """Findings about leases and requests that failed on this machine within the last hour, the latest last.

    Only those of the registry of this name, empty if it is not known, or at these endpoints. ``brief``: only how each
    of them ended, so that the findings about now are not lost among them.
    """
    ours = [story for story in stories if same_registry(story, registry, endpoints)]
    recent = [story for story in ours if now_s - story.at_s <= _RECENT_S][-_MOST_RECENT:]
    if not brief:
        return [Finding(Grade.NOTE, "recent", _story_text(story, now_s)) for story in recent]
    found = [Finding(Grade.NOTE, "recent", _end_of(story, now_s)) for story in recent]
    if any(len(story.lines) > 1 for story in recent):
        found[-1] = replace(found[-1], advice=_MORE)
    return found


#: Waits that are shown, and how long a wait may be that is nothing to speak of.
_MOST_WAITS: Final = 8
_SHORT_WAIT_S: Final = 1.0
_GOES_ON: Final = "it goes on by itself once that has come"


def waiting_findings(
    waits: Sequence[Wait], shown: Sequence[WaitRecord], host: str, endpoints: str, now_s: float
) -> list[Finding]:
    """Findings about processes that wait, the longest first; a short wait is nothing to speak of.

    ``waits`` are those of this machine, which is called ``host``; ``shown`` are in the registry, at ``endpoints``.
    """
    shown_here = {record.pid for record in shown if record.host == host}
    here = {wait.pid for wait in waits}
    found: list[tuple[float, Finding]] = []
    for wait in waits:
        if now_s - wait.since_s < _SHORT_WAIT_S:
            continue
        is_ours = wait.pid in shown_here or share_endpoint(wait.endpoints, endpoints)
        where = "" if is_ours else f", at the etcd {wait.endpoints}"
        text = f"{wait.who}, process {wait.pid} of this machine{where}, waits for {now_s - wait.since_s:.0f} s: "
        # Another etcd may be somebody's own pipeline of the same name.
        grade = Grade.PROBLEM if is_ours else Grade.NOTE
        found.append((wait.since_s, Finding(grade, "waiting", text + one_line(wait.reason), _GOES_ON)))
    for record in shown:
        if record.host == host and record.pid in here:
            continue
        for entry in record.waits:
            text = f"{one_line(entry.who)}, process {record.pid} on {one_line(record.host)}, waits for "
            text += f"{max(0.0, now_s - entry.since):.0f} s: {one_line(entry.reason)}"
            found.append((entry.since, Finding(Grade.PROBLEM, "waiting", text, _GOES_ON)))
    return [finding for _, finding in sorted(found, key=lambda each: each[0])[:_MOST_WAITS]]


_START_AGAIN: Final = "correct that, then start it again there"


def ended_findings(last_words: Sequence[WaitRecord], view: View, now_s: float) -> list[Finding]:
    """Findings about supervisors that have ended for their settings, and were not started again with success."""
    there = {(info.stage_id, info.host) for info in view.replicas.values()}
    found = []
    for record in last_words:
        for entry in record.waits:
            if entry.stage_id is None or (entry.stage_id, record.host) in there:
                continue
            ago_s = max(0.0, now_s - entry.since)
            text = f"{one_line(entry.who)} on {one_line(record.host)} ended {ago_s:.0f} s ago: "
            command = ("omni", "serve", "--headless", "--stage-id", str(entry.stage_id))
            text += one_line(entry.reason).removeprefix(f"{HAS_ENDED}: ")
            found.append(Finding(Grade.PROBLEM, "ended", text, _START_AGAIN, command, stage_id=entry.stage_id))
    return found[:_MOST_WAITS]


def _story_text(story: Story, now_s: float) -> str:
    return "\n".join([_head(story, now_s), *(f"  {line}" for line in _without_repeats(story.lines)[-_LINES_SHOWN:])])


def _end_of(story: Story, now_s: float) -> str:
    """A story's last line alone, and of that no more than a few lines of a terminal."""
    last = one_line(story.lines[-1]) if story.lines else ""
    cut = last if len(last) <= _END_SHOWN else f"{last[:_END_SHOWN]}..."
    return f"{_head(story, now_s)} {cut}".rstrip()


def _head(story: Story, now_s: float) -> str:
    ago_s = max(0.0, now_s - story.at_s)
    return f"{one_line(story.kind)} {one_line(story.name)} of process {story.pid}, {ago_s:.0f} s ago:"


def _without_repeats(lines: Sequence[str]) -> list[str]:
    """The lines of a story; of those in a row that differ in their time alone only the first, their number, the last.

    A line's time is its first word.
    """
    shown: list[str] = []
    for _text, group in groupby(lines, lambda line: line.partition(" ")[2] or line):
        same = list(group)
        shown += same if len(same) < _REPEATS else [same[0], f"... {len(same) - 2} more of these", same[-1]]
    return shown
