"""The rows of ``omni top``: what each says, in which order, which are shown, and which columns fit. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final

from omni_discovery.commands.tables import age
from omni_discovery.commands.top.traffic import Pace, Traffic
from omni_discovery.deploy.document import decode_deploy
from omni_discovery.deploy.fingerprint import OTHER_DOCUMENT, mismatches_in_force
from omni_discovery.errors import ConfigError
from omni_discovery.kv import LeaseTime
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.text import harmless, one_line
from omni_discovery.view.hub_reports import HubReports
from omni_discovery.view.recent_events import ShownEvent, Tone
from omni_discovery.view.replica_map import ReplicaId
from omni_discovery.view.table import View

#: What is not known.
UNKNOWN: Final = "-"
#: A lease is renewed each third of its time: with less than this part left, two renewals or more are missing.
_LEAST_LEFT: Final = 1 / 3
_ELLIPSIS: Final = "…"
_OTHER_DOCUMENT: Final = "other document"
_TEXT_CHARS: Final = 200
#: Replicas that are shown, all stages together: a thousand are drawn in a quarter of a second, twice in each.
MOST_ROWS: Final = 1000


class Order(StrEnum):
    """What the replicas of each stage are sorted by."""

    NAME = "name"
    STATE = "state"
    BUSY = "busy"
    RATE = "rate"
    P99 = "p99"
    AGE = "age"

    def next(self) -> Order:
        """The one after it, and the first after the last."""
        every = list(Order)
        return every[(every.index(self) + 1) % len(every)]


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica. What is None is not known."""

    info: ReplicaInfo
    tone: Tone
    state: str
    pace: Pace
    written_s: float | None
    last_end: str
    #: What its lease has left.
    lease: LeaseTime | None = None

    @property
    def name(self) -> str:
        """As everywhere: ``0/1``."""
        return self.info.name

    @property
    def waiting(self) -> int:
        """Work at the replica for which it has no slot."""
        return max(0, self.info.queue_length - self.info.capacity)

    @property
    def busy(self) -> int:
        """Slots that are taken."""
        return min(self.info.queue_length, self.info.capacity)


@dataclass(frozen=True, slots=True)
class StageGroup:
    """One stage with the replicas that are shown. What is None is not known."""

    stage_id: int
    engine: str
    #: ``num_replicas`` of the document in force; replicas that take work; all.
    wanted: int | None
    able: int
    registered: int
    busy: int
    slots: int
    #: Requests that wait in the hubs for a slot of it.
    waiting: int | None
    pace: Pace
    rows: tuple[ReplicaRow, ...]
    #: How many more match.
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """All that the rows are made of. ``reports`` is None while the beats can't be read."""

    view: View
    now_s: float
    reports: HubReports | None = None
    traffic: Traffic = field(default_factory=Traffic)
    #: How the last process of each id ended, as ``omni history`` says it.
    ends: Mapping[ReplicaId, str] = field(default_factory=dict)
    #: What leases have left, by their id: of rows on the screen, as etcd has said it last.
    leases: Mapping[int, LeaseTime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user wants to see. ``needle`` has to be in what a row says, or in its stage's name."""

    order: Order = Order.NAME
    reverse: bool = False
    needle: str = ""


def groups(moment: Moment, choice: Choice) -> list[StageGroup]:
    """The stages, those of the document and those that only replicas have, with the replicas that match."""
    asked, unlike = _stages(moment.view), _unlike(moment.view)
    by_stage: defaultdict[int, list[ReplicaInfo]] = defaultdict(list)
    for _, info in sorted(moment.view.replicas.items()):
        by_stage[info.stage_id].append(info)
    found = []
    for stage_id in sorted({*asked, *by_stage}):
        infos = by_stage[stage_id]
        engine, wanted = asked.get(stage_id, ("", None))
        able = [info for info in infos if info.takes_new_work]
        rows = [_row(info, moment, unlike) for info in infos]
        shown = [row for row in rows if matches(row, engine, choice.needle)]
        if choice.needle.strip() and not shown:
            continue
        found.append(
            StageGroup(
                stage_id,
                one_line(engine),
                wanted,
                len(able),
                len(infos),
                sum(min(info.queue_length, info.capacity) for info in able),
                sum(info.capacity for info in able),
                _waiting(moment.reports, stage_id),
                moment.traffic.of_stage(stage_id),
                tuple(in_order(shown, choice)),
            )
        )
    share = MOST_ROWS // max(1, len(found))
    return [replace(each, rows=each.rows[:share], left_out=max(0, len(each.rows) - share)) for each in found]


def _stages(view: View) -> dict[int, tuple[str, int]]:
    """The engine and the number of replicas of each stage of the document in force."""
    return {} if view.pipeline is None else _asked_in(view.pipeline)


#: Decoded once: a long one takes half a second, which keys would wait for at each drawing.
@lru_cache(maxsize=2)
def _asked_in(pipeline: bytes) -> dict[int, tuple[str, int]]:
    try:
        deploy = decode_deploy(pipeline, "pipeline")
    except ConfigError:
        # 'omni doctor' reports that.
        return {}
    return {stage.stage_id: (stage.engine, stage.runtime.num_replicas) for stage in deploy.stages}


def _unlike(view: View) -> dict[ReplicaId, str]:
    """What tells a replica from what is in force, in two words; nothing of those that are alike."""
    found = mismatches_in_force(view.replicas.values(), view.pipeline)
    return {
        (info.stage_id, info.replica_id): _OTHER_DOCUMENT if why == OTHER_DOCUMENT else "other files"
        for info, why in found
    }


def _waiting(reports: HubReports | None, stage_id: int) -> int | None:
    """What waits for a stage in all hubs; None where one of them does not say that."""
    return None if reports is None or reports.loads is None else reports.loads.get(stage_id, (0, 0))[0]


def _row(info: ReplicaInfo, moment: Moment, unlike: Mapping[ReplicaId, str]) -> ReplicaRow:
    lease = moment.leases.get(info.lease_id)
    tone, state = _state(info, moment.reports, lease, unlike.get((info.stage_id, info.replica_id), ""))
    written_s = moment.now_s - info.last_heartbeat
    return ReplicaRow(
        info,
        tone,
        state,
        moment.traffic.of_replica(info.name),
        written_s if info.last_heartbeat > 0 else None,
        moment.ends.get((info.stage_id, info.replica_id), ""),
        lease,
    )


_TONES: Final = {
    ReplicaStatus.UP: Tone.GOOD,
    ReplicaStatus.STARTING: Tone.QUIET,
    ReplicaStatus.DRAINING: Tone.QUIET,
    ReplicaStatus.DOWN: Tone.QUIET,
    ReplicaStatus.ERROR: Tone.BAD,
}


def _state(info: ReplicaInfo, reports: HubReports | None, lease: LeaseTime | None, unlike: str) -> tuple[Tone, str]:
    """How a replica is drawn, and its state in words: the record's, what hubs see, what an operator wants of it."""
    tone, words = _TONES[info.status], [info.status.value]
    if info.status is ReplicaStatus.STARTING and info.phase:
        words[0] += f" {info.progress:.0%} {one_line(info.phase)}" if info.progress else f" {one_line(info.phase)}"
    troubles = () if reports is None else reports.troubles.get((info.stage_id, info.replica_id), ())
    if troubles:
        tone = Tone.BAD
        words += dict.fromkeys(seen.word for seen in troubles)
    if info.control_error:
        tone = Tone.BAD
        words.append("control refused")
    if not info.leased:
        tone = Tone.BAD
        words.append("no lease")
    if lease is not None and lease.left_s < _LEAST_LEFT * lease.ttl_s:
        tone = Tone.BAD
        words.append("not renewed")
    if info.cordoned:
        words.append("cordoned")
    if unlike:
        tone = Tone.WARN if tone is Tone.GOOD else tone
        words.append(unlike)
    if info.weight != 1:
        words.append(f"weight {info.weight:g}")
    if tone is Tone.GOOD and not info.takes_new_work:
        tone = Tone.WARN
    said = ", ".join(words)
    return tone, f"{said}: {one_line(info.reason[:_TEXT_CHARS])}" if info.reason else said


# ---- order and choice


_RANKS: Final = {Tone.BAD: 0, Tone.WARN: 1, Tone.QUIET: 2, Tone.GOOD: 3}


def in_order(rows: Iterable[ReplicaRow], choice: Choice) -> list[ReplicaRow]:
    """The rows of one stage in the order that is wanted: the worst, busiest and oldest first; unknown always last."""
    named = sorted(rows, key=lambda row: row.info.replica_id, reverse=choice.order is Order.NAME and choice.reverse)
    if choice.order is Order.NAME:
        return named
    keyed = [(_key(row, choice.order), row) for row in named]
    known = [(key, row) for key, row in keyed if key is not None]
    known.sort(key=lambda each: each[0], reverse=not choice.reverse)
    return [row for _, row in known] + [row for key, row in keyed if key is None]


def _key(row: ReplicaRow, order: Order) -> float | None:
    match order:
        case Order.NAME:
            return -row.info.replica_id
        case Order.STATE:
            return -_RANKS[row.tone]
        case Order.BUSY:
            return row.info.queue_length / row.info.capacity
        case Order.RATE:
            return row.pace.per_s
        case Order.P99:
            return row.pace.p99_s
        case Order.AGE:
            return row.written_s


def matches(row: ReplicaRow, engine: str, needle: str) -> bool:
    """Whether the needle is in what a row says, in whatever case."""
    info = row.info
    about = (row.name, row.state, info.host, info.device, info.version, info.model, row.last_end)
    said = " ".join((*about, f"stage {info.stage_id} {engine}")).casefold()
    return needle.strip().casefold() in said


# ---- cells


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, its width, and whether its cells stand at the right."""

    title: str
    width: int
    right: bool
    of_replica: Callable[[ReplicaRow], str]
    of_stage: Callable[[StageGroup], str]


def _stage_state(group: StageGroup) -> str:
    wanted = "" if group.wanted is None else f" of {group.wanted}"
    if not group.registered:
        return f"nobody{wanted}: requests wait"
    engine = f", {group.engine}" if group.engine else ""
    return f"{group.able}{wanted} take work{engine}"


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def rate(per_s: float | None) -> str:
    """A rate in at most six characters."""
    if per_s is None:
        return UNKNOWN
    return f"{per_s:.0f}/s" if per_s >= 10 or not per_s else f"{per_s:.1f}/s" if per_s >= 0.1 else "<0.1/s"


def length(seconds: float | None) -> str:
    """A length of time in at most six characters."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    return f"{min(seconds, 9999):.0f} s"


def _age(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else age(seconds)


def _lease(row: ReplicaRow) -> str:
    if not row.info.leased:
        return "none"
    return UNKNOWN if row.lease is None else age(row.lease.left_s)


_NONE: Final = ""
_COLUMNS: Final = (
    Column("replica", 9, False, lambda row: f"  {row.name}", lambda group: f"stage {group.stage_id}"),
    Column("state", 20, False, lambda row: row.state, _stage_state),
    Column("busy", 7, True, lambda row: f"{row.busy}/{row.info.capacity}", lambda group: f"{group.busy}/{group.slots}"),
    Column("waits", 5, True, lambda row: _number(row.waiting), lambda group: _number(group.waiting)),
    Column("rate", 6, True, lambda row: rate(row.pace.per_s), lambda group: rate(group.pace.per_s)),
    Column("p50", 6, True, lambda row: length(row.pace.p50_s), lambda group: length(group.pace.p50_s)),
    Column("p99", 6, True, lambda row: length(row.pace.p99_s), lambda group: length(group.pace.p99_s)),
    Column("lease", 5, True, _lease, lambda _: _NONE),
    Column("wrote", 6, True, lambda row: _age(row.written_s), lambda _: _NONE),
    # These only where there is room.
    Column("last end", 12, False, lambda row: row.last_end or UNKNOWN, lambda _: _NONE),
    Column("version", 10, False, lambda row: row.info.version or UNKNOWN, lambda _: _NONE),
    Column("host", 14, False, lambda row: row.info.host or UNKNOWN, lambda _: _NONE),
    Column("device", 8, False, lambda row: row.info.device or UNKNOWN, lambda _: _NONE),
)
#: How many of them are shown on every terminal.
_ALWAYS: Final = 8
#: What has more to say takes what is left, in this order, up to so much.
_GROW: Final = (("state", 34), ("last end", 24), ("host", 24), ("state", 60))


def columns(width: int) -> list[Column]:
    """The columns for a terminal of this width, one space between them; the state is cut before any column goes."""
    chosen: list[Column] = []
    for number, column in enumerate(_COLUMNS):
        used = sum(each.width + 1 for each in chosen)
        if number >= _ALWAYS and used + column.width > width:
            break
        chosen.append(column)
    widths = {column.title: column.width for column in chosen}
    left = width - sum(widths.values()) - len(widths) + 1
    if left < 0:
        widths["state"] = max(8, widths["state"] + left)
    for title, most in _GROW:
        if title in widths and left > 0:
            more = min(left, max(0, most - widths[title]))
            widths[title] += more
            left -= more
    return [Column(each.title, widths[each.title], each.right, each.of_replica, each.of_stage) for each in chosen]


def fitted(text: str, column: Column) -> str:
    """A cell as wide as its column; what does not fit ends in an ellipsis."""
    text = harmless(text)
    text = text if len(text) <= column.width else text[: column.width - 1] + _ELLIPSIS
    return text.rjust(column.width) if column.right else text.ljust(column.width)


# ---- the lines around the table


def headline(moment: Moment, choice: Choice, namespace: str, problem: str = "", left_out: int = 0) -> str:
    """What is shown: how fresh it is, of how many, and in which order."""
    view, traffic = moment.view, moment.traffic
    fresh = "view fresh"
    if not view.revision:
        fresh = "waiting for etcd"
    elif view.stale_since_s is not None:
        fresh = f"view {age(moment.now_s - view.stale_since_s)} old"
    parts = [
        f"{namespace}: {_count(len(view.replicas), 'replica')}, {_count(len(view.hubs), 'hub')}",
        fresh,
        f"by {choice.order}{' reversed' if choice.reverse else ''}",
    ]
    left = sum(word == _OTHER_DOCUMENT for word in _unlike(view).values())
    if left:
        parts.append(f"rollout: {left} of {len(view.replicas)} left")
    if traffic.hubs < traffic.known:
        parts.append(f"rates of {traffic.hubs} of {traffic.known} hubs")
    if left_out:
        parts.append(f"{_count(left_out, 'row')} left out: / filters")
    if choice.needle.strip():
        parts.append(f"filter {one_line(choice.needle)}")
    if problem:
        parts.append(problem)
    return " · ".join(parts)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def event_line(event: ShownEvent, clock: str, width: int) -> str:
    """One event, with the time of the day; a bad one also has a mark."""
    mark = "!" if event.tone in (Tone.BAD, Tone.WARN) else " "
    line = f"{clock} {mark} {one_line(event.about)} {one_line(event.text)}"
    return line if len(line) <= width else line[: width - 1] + _ELLIPSIS


def shown_names(found: Sequence[StageGroup]) -> list[str]:
    """The name of each line, from above: of stages as ``stage 0``."""
    return [name for group in found for name in (f"stage {group.stage_id}", *(row.name for row in group.rows))]
