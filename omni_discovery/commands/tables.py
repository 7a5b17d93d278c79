"""A view of the registry as text: tables of replicas and of hubs, or JSON lines for scripts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from omni_discovery.deploy.document import decode_deploy
from omni_discovery.deploy.fingerprint import OTHER_DOCUMENT, mismatches_in_force
from omni_discovery.errors import ConfigError
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.text import one_line
from omni_discovery.view.record_bounds import too_many

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from omni_discovery.commands.hubs import HubLine
    from omni_discovery.view.hub_reports import HubReports, SeenTrouble
    from omni_discovery.view.replica_map import ReplicaId
    from omni_discovery.view.table import View

_STYLE: Final = {
    ReplicaStatus.UP: "green",
    ReplicaStatus.STARTING: "cyan",
    ReplicaStatus.DRAINING: "yellow",
    ReplicaStatus.DOWN: "dim",
    ReplicaStatus.ERROR: "bold red",
}


#: Columns that may be cut.
_QUEUE: Final = 2
_STATUS: Final = 1
_MODEL: Final = 3
_ADDRESS: Final = 4
_PROCESS: Final = 5
#: What no other column takes from the addresses: an IPv4 address and a port.
_LEAST_ADDRESS: Final = 21
#: The longest text of a record below a table, in characters; --json has it whole.
_MOST_NOTE: Final = 240
#: Replicas that a line below a table names.
_MOST_NAMES: Final = 32
#: Keys that a line below a table names.
_MOST_KEYS: Final = 3
_YEAR_S: Final = 365.25 * 86400


def replica_table(
    view: View, namespace: str, now_s: float, width: int = 80, reports: HubReports | None = None
) -> Table:
    """Return the replicas of a view as a table of ``width`` columns; ages are counted to ``now_s``, wall-clock seconds.

    ``reports`` are those of the hubs of the view; None: they are not known now.

    Names of replicas are never cut, addresses only where they alone would fill the table; the process column gets the
    width that is left, then a long reason is cut.
    """
    unlike = {
        (info.stage_id, info.replica_id): why for info, why in mismatches_in_force(in_key_order(view), view.pipeline)
    }
    troubles = {} if reports is None else reports.troubles
    rows = [
        _row(info, now_s, unlike=key in unlike, troubles=troubles.get(key, ()))
        for key, info in sorted(view.replicas.items())
    ]
    table = Table(
        title=_title(view, namespace, now_s),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    names = ("replica", "status", "queue", "model", "address", "process", "age")
    wanted = [max(len(name), *(len(row[at]) for row in rows), 1) for at, name in enumerate(names)]
    wanted[_MODEL] = min(wanted[_MODEL], 16)
    leasts = (
        (_PROCESS, 7),
        (_STATUS, 14),
        (_MODEL, 6),
        (_PROCESS, 4),
        (_ADDRESS, _LEAST_ADDRESS),
        (_QUEUE, 9),
        (_STATUS, 8),
    )
    _narrow(wanted, leasts, width)
    for at, name in enumerate(names):
        right = at in (0, 2, len(names) - 1)
        table.add_column(
            name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis", width=wanted[at]
        )
    for row in rows:
        table.add_row(*row)
    shown = zip(in_key_order(view), rows, strict=True)
    cut = [info for info, row in shown if info.reason and len(row[_STATUS]) > wanted[_STATUS]]
    table.caption = _notes(view, unlike, cut, reports, now_s)
    return table


def _narrow(wanted: list[int], leasts: Sequence[tuple[int, int]], width: int) -> None:
    """Make columns of a table that is too wide narrower, in this order, each down to its least."""
    for at, least in leasts:
        too_wide = sum(wanted) + 2 * len(wanted) - width
        wanted[at] = max(min(wanted[at], least), wanted[at] - max(0, too_wide))


def _notes(
    view: View,
    unlike: Mapping[ReplicaId, str],
    cut: Collection[ReplicaInfo],
    reports: HubReports | None,
    now_s: float,
) -> Text | None:
    """Return the lines below the table.

    Empty stages, what hubs report, reasons that were ``cut``, and what the marks stand for.
    """
    lines = [] if view.replicas else ["no replica is registered yet"]
    if view.replicas and not view.hubs:
        lines.append("no hub is registered: these replicas get no requests")
    lines += [f"stage {stage_id}: nobody" for stage_id in _deserted(view)]
    if view.bad:
        named = ", ".join(one_line(key) for key in sorted(view.bad)[:_MOST_KEYS])
        more = f" and {len(view.bad) - _MOST_KEYS} more" if len(view.bad) > _MOST_KEYS else ""
        lines.append(f"not shown, since they can't be read: {named}{more}; omni doctor says what to do")
    if view.refused_count:
        lines.append(f"{too_many(view.refused_count)}; omni doctor says what to do")
    if view.refused_hubs:
        lines.append(f"{too_many(view.refused_hubs, 'hubs')}; omni doctor says what to do")
    if reports is None:
        lines.append("what the hubs report of these replicas can't be read now: ejections are unknown")
    else:
        lines += reports.lines(now_s)
    lines += [f"{info.stage_id}/{info.replica_id}, {_note(info.reason)}" for info in cut]
    lines += [
        f"! control/{info.stage_id}/{info.replica_id}, {_note(info.control_error)}"
        for info in in_key_order(view)
        if info.control_error
    ]
    for why in dict.fromkeys(unlike.values()):
        names = [f"{stage_id}/{replica_id}" for (stage_id, replica_id), each in unlike.items() if each == why]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        lines.append(f"≠ {', '.join(names[:_MOST_NAMES])}{more}: {why}")
    left = sum(why == OTHER_DOCUMENT for why in unlike.values())
    if left:
        lines.append(f"rollout: {left} of {len(view.replicas)} replicas left to restart")
    return Text("\n".join(lines), style="red", justify="left") if lines else None


def _deserted(view: View) -> list[int]:
    """Return the stages of the pipeline in force without a registered replica."""
    if view.pipeline is None:
        return []
    try:
        deploy = decode_deploy(view.pipeline, "pipeline")
    except ConfigError:
        # 'omni doctor' reports that.
        return []
    there = {stage_id for stage_id, _ in view.replicas}
    return [stage.stage_id for stage in deploy.stages if stage.stage_id not in there]


def replica_json(view: View, reports: HubReports) -> Iterator[dict[str, Any]]:
    """Yield what JSON shows of each replica, in key order; ``troubles`` is what hubs report of it."""
    for info in in_key_order(view):
        troubles = [
            {**msgspec.to_builtins(seen.trouble), "hubs": seen.hubs}
            for seen in reports.troubles.get((info.stage_id, info.replica_id), ())
        ]
        # Not dataclasses.asdict: it copies what a record holds, level by level, and a record may have hundreds.
        shown = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
        # As etcdctl shows it: a number of 64 bits is rounded by many that read JSON.
        shown["lease_id"] = f"{info.lease_id:x}"
        yield {**shown, "params": msgspec.to_builtins(info.params), "troubles": troubles}


def in_key_order(view: View) -> list[ReplicaInfo]:
    """Return the replicas of a view ordered by stage, then replica id."""
    return [view.replicas[key] for key in sorted(view.replicas)]


def _title(view: View, namespace: str, now_s: float) -> Text:
    counts = f"{_count(len(view.replicas), 'replica')}, {_count(len(view.hubs), 'hub')}"
    title = Text(f"namespace {namespace} · {counts} · revision {view.revision}")
    if view.stale_since_s is not None:
        title.append(f" · not proved fresh for {now_s - view.stale_since_s:.0f} s", style="bold yellow")
    return title


def _row(
    info: ReplicaInfo, now_s: float, *, unlike: bool, troubles: Sequence[SeenTrouble] = ()
) -> tuple[str | Text, ...]:
    status = Text(info.status.value, style=_STYLE[info.status])
    if info.status is ReplicaStatus.STARTING and info.phase:
        status.append(f" {info.progress:.0%} {info.phase}", style="dim")
    for word in dict.fromkeys(seen.word for seen in troubles):
        # The record is right about the process and yet no green light.
        status.stylize("bold red")
        status.append(f", {word}", style="bold red")
    if info.reason:
        status.append(f" {one_line(info.reason)}", style="dim")
    if info.cordoned:
        status.append(" cordoned", style="yellow")
    if info.weight != 1:
        status.append(f" w{info.weight:g}", style="yellow")
    if unlike:
        status.append(" ≠", style="bold red")
    if info.control_error:
        status.append(" !", style="bold red")
    return (
        f"{info.stage_id}/{info.replica_id}",
        status,
        f"{info.queue_length}/{info.capacity}",
        info.model.rstrip("/").rsplit("/", 1)[-1],
        info.input_addr.removeprefix("tcp://"),
        f"{info.host}:{info.pid} {info.device}",
        age(now_s - info.registered_at),
    )


def _note(text: str) -> str:
    """A text of a record as a part of a line below the table."""
    line = one_line(text)
    return line if len(line) <= _MOST_NOTE else f"{line[:_MOST_NOTE]}..."


#: How narrow the address, the process and the id of a hub become, in this order, where the table is too wide.
_LEAST_OF_HUBS: Final = ((2, _LEAST_ADDRESS), (3, 10), (0, 14), (3, 4))


def hub_table(found: Sequence[HubLine], namespace: str, now_s: float, width: int = 80) -> Table:
    """Return the hubs as a table of ``width`` columns; ages are counted to ``now_s``, wall-clock seconds."""
    table = Table(
        title=f"namespace {namespace} · {len(found)} {'hub' if len(found) == 1 else 'hubs'}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    names = ("hub", "status", "address", "process", "beat", "age")
    rows: list[tuple[str | Text, ...]] = []
    for line in found:
        status = Text("live", style="green") if line.registered else Text("not registered", style="dim")
        if line.revoked:
            status = Text("revoked" if line.registered else "revoked, away", style="bold red")
        if line.error:
            status.append(" !", style="bold red")
        rows.append(
            (
                line.hub_id,
                status,
                line.address.removeprefix("http://"),
                f"{line.host}:{line.pid}" if line.pid else line.host,
                "-" if line.beat_age_s is None else age(line.beat_age_s),
                age(now_s - line.started_at) if line.started_at else "-",
            )
        )
    wanted = [max(len(name), *(len(row[at]) for row in rows), 1) for at, name in enumerate(names)]
    _narrow(wanted, _LEAST_OF_HUBS, width)
    for at, name in enumerate(names):
        right = name in ("beat", "age")
        table.add_column(
            name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis", width=wanted[at]
        )
    for row in rows:
        table.add_row(*row)
    wrong = [f"! {line.hub_id}: {_note(line.error)}" for line in found if line.error]
    if not found:
        table.caption = "no hub is registered"
    elif wrong:
        table.caption = Text("\n".join(wrong), style="red", justify="left")
    return table


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def age(seconds: float) -> str:
    """Return a duration in a few characters, such as ``5 min``; "-" for one that no clock can have measured."""
    if not -_YEAR_S < seconds < 100 * _YEAR_S:
        return "-"
    if seconds > 10 * _YEAR_S:
        return "> 10 y"
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
