"""Receipts as lines of text for a terminal of any width from 60 columns on; nothing is told by colour alone. Pure."""

from __future__ import annotations

import datetime
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from omni_discovery.receipts.receipt import (
    BY_BINDING,
    Candidate,
    Happening,
    Picking,
    Receipt,
    ReceiptLine,
    ReplicaReport,
    StageAttempt,
    Transfer,
    WaitingWork,
)
from omni_discovery.receipts.replay import Replayed
from omni_discovery.text import one_line

#: What a bar is made of: time before the work was sent, before its first output, and after that.
WAITED: Final = "."
WORKED: Final = "-"
PUT_OUT: Final = "="
LEGEND: Final = f"{WAITED} not sent yet   {WORKED} no output yet   {PUT_OUT} output"
#: The columns beside a bar.
_NAME: Final = 18
_TAIL: Final = 22
#: Lines of waiting requests, and of candidates of one pick.
_MOST_WAITING: Final = 20
_MOST_CANDIDATES: Final = 12
_KIB: Final = 1024
#: A hub may say any number: what no calendar has, and what no length or size comes near.
_NO_MOMENT: Final = "????-??-?? ??:??:??"
_MOST_S: Final = 1e9
_MOST_BYTES: Final = 1 << 60


def seconds(value: float) -> str:
    """A length of time with three digits that matter."""
    if value >= _MOST_S:
        return f"{value:.2g} s"
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{1000 * value:.{1 if value < 0.1 else 0}f} ms"


def size(count: int) -> str:
    """A number of bytes."""
    count = min(count, _MOST_BYTES)
    if count < _KIB:
        return f"{count} B"
    unit = "KiB" if count < _KIB**2 else "MiB" if count < _KIB**3 else "GiB"
    return f"{count / _KIB ** {'KiB': 1, 'MiB': 2, 'GiB': 3}[unit]:.1f} {unit}"


def clock(wall_s: float) -> str:
    """A moment of the wall clock, of this machine's zone; question marks for what no calendar has."""
    try:
        return datetime.datetime.fromtimestamp(wall_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OSError, OverflowError, ValueError):
        return _NO_MOMENT


def waterfall(receipt: Receipt, width: int, *, candidates: bool = True) -> list[str]:
    """One request, from its beginning to its end."""
    ends = [moment for each in receipt.attempts for moment in _moments(each)]
    whole_s = receipt.took_s or max([*ends, *(each.at_s for each in receipt.events), 1e-6])
    lines = [*_head(receipt), "", f"{'':{_NAME}}{LEGEND}"]
    attempts = sorted(receipt.attempts, key=lambda each: (_first(each), each.stage))
    shown: set[int] = set()
    for attempt in attempts:
        if attempt.stage not in shown:
            shown.add(attempt.stage)
            lines += [_transfer(each) for each in receipt.transfers if each.to_stage == attempt.stage]
        lines.append(_bar(attempt, whole_s, width))
        lines += [f"{'':{_NAME}}{note}" for note in _notes(attempt, receipt)]
    lines += [f"{'':{_NAME}}{each}" for each in _pauses(receipt.events, whole_s)]
    if candidates:
        lines += chain.from_iterable(_picking(each) for each in attempts)
    return wrapped(lines, width)


def _head(receipt: Receipt) -> Iterator[str]:
    name = receipt.shown_id or receipt.request_id
    role = f"  companion {receipt.role!r} of {receipt.parent_id}" if receipt.role else ""
    yield f"request {name}{role}"
    state = "still under way" if receipt.took_s is None else f"{receipt.outcome} after {seconds(receipt.took_s)}"
    yield f"  {state}, received {clock(receipt.received_at)} by hub {receipt.hub}"
    about = [
        ("label", receipt.label),
        ("key", receipt.key),
        ("priority", str(receipt.priority) if receipt.priority else ""),
        ("document", " ".join(each[:8] for each in receipt.fingerprints if each)),
    ]
    if given := [f"{label} {value}" for label, value in about if value]:
        yield "  " + "   ".join(given)
    if receipt.error:
        where = "" if receipt.error_stage is None else f" at stage {receipt.error_stage}"
        yield f"  failed{where}: {receipt.error}; the hub's log has a line with this id"


def _moments(attempt: StageAttempt) -> list[float]:
    all_s = attempt.due_s, attempt.sent_s, attempt.accepted_s, attempt.first_output_s, attempt.ended_s
    return [moment for moment in all_s if moment is not None]


def _first(attempt: StageAttempt) -> float:
    return min(_moments(attempt), default=0.0)


def _bar(attempt: StageAttempt, whole_s: float, width: int) -> str:
    columns = max(10, width - _NAME - _TAIL)
    moments = _moments(attempt)
    ended_s = whole_s if attempt.ended_s is None else attempt.ended_s
    begin_s = min(moments, default=ended_s)
    sent_s = ended_s if attempt.sent_s is None else attempt.sent_s
    outs = [each for each in (attempt.first_output_s, attempt.first_piece_s) if each is not None]
    first_s = min(outs, default=ended_s)

    def column(moment_s: float) -> int:
        return round(columns * min(1.0, max(0.0, moment_s / whole_s)))

    begin, sent, first, end = column(begin_s), column(sent_s), column(first_s), column(ended_s)
    bar = (
        " " * begin + WAITED * (sent - begin) + WORKED * (first - max(sent, begin)) + PUT_OUT * (end - max(first, sent))
    )
    if end <= begin:
        bar = " " * min(begin, columns - 1) + WORKED
    number = f" #{attempt.attempt}" if attempt.attempt else ""
    name = f"{attempt.replica or f'{attempt.stage}/?'}{number}"
    took = seconds(max(0.0, ended_s - begin_s))
    return f"stage {name:<{_NAME - 7}} {bar:<{columns}} {took:>8} {attempt.outcome or 'runs'}"


def _notes(attempt: StageAttempt, receipt: Receipt) -> Iterator[str]:
    for wait in attempt.waits:
        end_s = wait.to_s if wait.to_s is not None else receipt.took_s
        yield f"waited {'' if end_s is None else seconds(max(0.0, end_s - wait.from_s))} for {wait.what}".replace(
            "  ", " "
        )
    if attempt.first_output_s is not None and attempt.stage in receipt.final_stages:
        yield f"first {_kind(attempt.modality)} at {seconds(attempt.first_output_s)}"
    if attempt.first_piece_s is not None:
        yield f"first piece handed on at {seconds(attempt.first_piece_s)}"
    if attempt.continues:
        yield "continued behind what the client had seen of the attempt before"
    if attempt.repeats:
        yield "made again what the client had seen, which was compared and dropped"
    if attempt.outcome not in {"", "done", "aborted"}:
        yield f"{attempt.outcome}: {one_line(attempt.reason) or 'no reason is known'}"


def _kind(modality: str) -> str:
    return {"audio": "sound", "image": "picture"}.get(modality, modality or "output")


def _transfer(each: Transfer) -> str:
    pieces = "" if each.pieces == 1 else f" in {each.pieces} pieces"
    fetched = "" if each.seconds is None else f", fetched in {seconds(each.seconds)}"
    way = f"{each.from_stage} -> {each.to_stage}"
    return f"hand-off {way:<{_NAME - 9}}{size(each.size_bytes)}{pieces} by {each.connector or '?'}{fetched}"


def _pauses(events: Sequence[Happening], whole_s: float) -> Iterator[str]:
    """From when to when the client was behind, so that replicas were paused for it."""
    behind_s: float | None = None
    for event in events:
        if event.what != "ClientBackpressure":
            continue
        if event.detail == "behind":
            behind_s = event.at_s if behind_s is None else behind_s
        elif behind_s is not None:
            yield f"paused for {seconds(event.at_s - behind_s)} from {seconds(behind_s)} on: the client was behind"
            behind_s = None
    if behind_s is not None:
        yield f"paused from {seconds(behind_s)} on, for {seconds(whole_s - behind_s)}: the client was behind"


def _picking(attempt: StageAttempt) -> Iterator[str]:
    picking = attempt.picking
    if picking is None:
        return
    yield ""
    number = f" attempt {attempt.attempt}" if attempt.attempt else ""
    yield f"stage {attempt.stage}{number}: {_decision(picking)}, view at revision {attempt.view_revision}"
    ordered = sorted(picking.candidates, key=lambda each: (each.replica != picking.chosen, bool(each.out), each.tier))
    for each in ordered[:_MOST_CANDIDATES]:
        yield f"  {'*' if each.replica == picking.chosen else ' '} {each.replica:<8} {candidate(each)}"
    more = len(ordered) - _MOST_CANDIDATES + picking.cut
    if more > 0:
        yield f"    and {more} more: --json has {len(ordered)} of {len(ordered) + picking.cut}"


def _decision(picking: Picking) -> str:
    if picking.how == BY_BINDING:
        return f"{picking.chosen}, where the request, or the one that it belongs to, was"
    by = picking.policy if picking.how == "policy" else picking.how
    return f"{picking.chosen} by {by}, of {picking.free} free and {picking.known} known"


def candidate(each: Candidate) -> str:
    """One replica of a pick, in words."""
    words = [f"load {each.load}/{each.capacity}"]
    words += [f"weight {each.weight:g}"] if each.weight != 1.0 else []
    words += [f"credits {each.credits}"] if each.credits is not None else []
    words += ["far"] if not each.is_local else []
    words += ["probe"] if each.is_probed else []
    words += [each.host] if each.host else []
    words += [each.version] if each.version else []
    return f"out: {one_line(each.out)}" if each.out else "  ".join(words)


def replayed_line(attempt: StageAttempt, replayed: Replayed) -> str:
    """What became of a pick that was made again."""
    where = f"stage {attempt.stage} attempt {attempt.attempt}: "
    picking = attempt.picking
    if picking is None:
        return f"{where}not picked: it never left the hub"
    if replayed.lacks:
        return f"{where}{picking.chosen} then; can't be made again, the receipt lacks {replayed.lacks}"
    if replayed.note:
        return f"{where}{picking.chosen or 'nobody'}; {replayed.note}"
    if replayed.choice == picking.chosen:
        return f"{where}{picking.policy} chose {picking.chosen}, and chooses it again"
    return f"{where}{picking.policy} chose {picking.chosen} then, and now {replayed.choice or 'nobody'}"


def listed(lines: Sequence[ReceiptLine], width: int) -> list[str]:
    """A list of requests, two lines for each, and why it failed."""
    found = []
    for each in lines:
        names = each.shown_id or each.request_id
        found.append(f"{clock(each.received_at)}  {names}")
        after = "under way" if each.took_s is None else f"{each.outcome} after {seconds(each.took_s)}"
        words = [after, each.error, f"went to {' '.join(each.replicas) or 'nobody'}"]
        words += [f"label {each.label}"] if each.label else []
        found.append("    " + ", ".join(word for word in words if word))
        if each.reason and each.outcome == "failed":
            found.append(f"    at last: {one_line(each.reason)}")
    return wrapped(found, width)


def waiting(works: Sequence[WaitingWork], width: int) -> list[str]:
    """What waits, and for what: first each cause with its number, then the requests that wait for the longest time."""
    if not works:
        return ["nothing waits"]
    found = ["1 waits" if len(works) == 1 else f"{len(works)} wait"]
    for (stage, what), count in Counter((each.stage, each.what) for each in works).most_common():
        found.append(f"  {count} {'' if stage is None else f'at stage {stage} '}for {what}")
    found.append("")
    first = works[:_MOST_WAITING]
    for each in first:
        where = "answer " if each.stage is None else f"stage {each.stage}"
        found.append(f"  {seconds(each.since_s):>8}  {where}  {each.shown_id or each.request_id}")
    if len(works) > _MOST_WAITING:
        found.append(f"  and {len(works) - _MOST_WAITING} more: --json has them")
    return wrapped(found, width)


def replica_lines(report: ReplicaReport, width: int) -> list[str]:
    """Why a replica gets what it gets, from one hub's view."""
    now = report.now
    host = f" on {now.host}" if now.host else ""
    found = [f"replica {now.replica}{host}, as hub {report.hub} sees it"]
    about = [f"load {now.load} of {now.capacity}", f"weight {now.weight:g}"]
    about += [f"{now.credits} credit{'s' * (now.credits != 1)} of this hub"] if now.credits is not None else []
    there = (
        "1 request of this hub is there"
        if report.in_flight == 1
        else f"{report.in_flight} requests of this hub are there"
    )
    found.append(f"  {', '.join(about)}; {there}")
    found.append(f"  of {report.picks} picks that this hub keeps, {report.chosen} chose it")
    if report.passed_over:
        found.append(f"  {report.passed_over} chose another though it was free")
    found += [f"  {count} left it out: {reason}" for reason, count in sorted(report.left_out.items(), key=_count)]
    if report.last_chosen_at is not None:
        found.append(f"  chosen last at {clock(report.last_chosen_at)}")
    found.append("why: nothing keeps it from being picked" if not report.why else "why:")
    return wrapped([*found, *(f"  {one_line(reason)}" for reason in report.why)], width)


def _count(item: tuple[str, int]) -> int:
    return -item[1]


def wrapped(lines: Iterable[str], width: int) -> list[str]:
    """The lines, those that are too long as several, each a little further in than the first."""
    found: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        found += textwrap.wrap(line.rstrip(), width, subsequent_indent=f"{indent}  ", drop_whitespace=True) or [""]
    return found
