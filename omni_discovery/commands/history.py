"""``omni history``: which replicas and hubs were up when, from etcd's revisions and the log of this machine's hubs."""

from __future__ import annotations

import argparse
import re
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from omni_discovery.commands.registry import add_registry_options, tell_if_empty, user_runtime_dir, with_registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console
    from rich.table import Table

    from omni_discovery.commands.history_log import AnyTransition, HubLife, Life
    from omni_discovery.kv import KVStore, WatchEvent
    from omni_discovery.records.schema import HubRecord, ReplicaInfo

#: A watch of past revisions that brings nothing for so long has caught up with the present.
_CAUGHT_UP_S: Final = 0.5
#: What is read of the past at most. If there is more, the newest.
_MOST_S: Final = 20.0
_MOST_CHANGES: Final = 20_000
#: So many revisions are looked back at first if not all can be read; then twice as many further back, and so on.
_LOOK_BACK: Final = 128
_LAST_YEAR: Final = 9999
_AnyLife = TypeVar("_AnyLife", "Life", "HubLife")
_TARGET: Final = re.compile(r"(\d{1,9})(?:/(\d{1,9}))?")


class HistoryCommand:
    """``omni history [STAGE[/REPLICA]]``."""

    summary = "show who was up when"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        parser.add_argument("target", nargs="?", metavar="STAGE[/REPLICA]", type=_target, help="only these")
        add_registry_options(parser)
        parser.add_argument("--limit", type=_limit, default=40, metavar="N", help="the newest N (default: %(default)s)")
        parser.add_argument(
            "--all-registries",
            action="store_true",
            help="also what hubs on this machine saw in other etcds, such as embedded ones that have ended",
        )
        parser.add_argument("--json", action="store_true", help="print all of it as JSON lines instead")

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        return with_registry(arguments, lambda kv: _show(kv, arguments))


def _target(text: str) -> tuple[int, int | None]:
    found = _TARGET.fullmatch(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is none; right would be STAGE or STAGE/REPLICA, for example 1/3")
    return int(found[1]), int(found[2]) if found[2] else None


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text[:9]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is none; right would be how many to show, 1 or more")
    return int(text[:9])


async def _show(kv: KVStore, arguments: argparse.Namespace) -> int:
    import dataclasses

    from omni_discovery.commands.history_log import history_file, read_log
    from omni_discovery.commands.output import say
    from omni_discovery.commands.terminal import TextConsole, print_json

    past = await read_registry(kv, arguments.namespace)
    log = read_log(history_file(user_runtime_dir(), arguments.namespace))
    replicas, hubs, others = merge(past, log, every=arguments.all_registries)
    if arguments.target:
        stage_id, replica_id = arguments.target
        replicas = [life for life in replicas if life.stage_id == stage_id and replica_id in (None, life.replica_id)]
        hubs = []
    every: list[Life | HubLife] = [*replicas, *hubs]
    if arguments.json:
        if not past.is_whole:
            say(_since(past), error=True)
        for life in every:
            print_json({**dataclasses.asdict(life), "end": life.end})
        return 0
    console, now_s = TextConsole(), time.time()
    count = sum(life.registry == past.registry for life in replicas)
    console.print(heading(arguments.namespace, past, count, console.width), style="italic")
    # In the order of their first lives; that of the etcd which is asked comes last, next to the prompt.
    registries = dict.fromkeys([*(life.registry for life in every), past.registry])
    for registry in sorted(registries, key=lambda each: each == past.registry):
        if registry != past.registry:
            console.print(f"registry {registry or 'not known'}", style="italic")
        _print_lives(
            console,
            [life for life in replicas if life.registry == registry],
            [life for life in hubs if life.registry == registry],
            arguments.limit,
            now_s,
        )
    if others:
        console.print(
            f"not shown: {others} more that hubs of this machine saw in other registries; see --all-registries",
            style="dim",
        )
    return 0 if every else await tell_if_empty(kv, arguments.namespace)


def _print_lives(console: Console, replicas: list[Life], hubs: list[HubLife], limit: int, now_s: float) -> None:
    console.print(history_table(replicas, limit, now_s, console.width))
    for line in reasons(newest(replicas, limit)):
        console.print(line, style="red")
    if hubs:
        console.print(hub_history_table(hubs, limit, now_s, console.width))


@dataclass(frozen=True, slots=True)
class RegistryPast:
    """What a registry tells of its past: the transitions that are not compacted, and what is registered now.

    ``oldest`` is the oldest revision left, ``read_from`` the one from which on all was read.
    """

    registry: str
    transitions: Sequence[AnyTransition]
    replicas: Sequence[ReplicaInfo]
    hubs: Sequence[HubRecord]
    oldest: int
    read_from: int

    @property
    def is_whole(self) -> bool:
        """Whether all that is left was read."""
        return self.read_from <= self.oldest


def merge(
    past: RegistryPast, log: Iterable[AnyTransition], *, every: bool = False
) -> tuple[list[Life], list[HubLife], int]:
    """The lives of replicas and of hubs in a registry, by etcd and by the hubs' log, oldest first.

    With ``every`` also those that the log has of other registries; else return how many of these are left out.
    """
    from omni_discovery.commands.history_log import HubTransition, Transition, hub_lives, lives, of_registry

    logged, others = (list(log), 0) if every else of_registry(log, past.registry, past.transitions)
    found = [*past.transitions, *logged]
    replicas = lives((each for each in found if isinstance(each, Transition)), past.replicas, past.registry)
    hubs = hub_lives((each for each in found if isinstance(each, HubTransition)), past.hubs, past.registry)
    return replicas, hubs, others


async def read_registry(kv: KVStore, namespace: str) -> RegistryPast:
    """Read what a registry tells of a namespace's past, or the newest of it. Raise RegistryError."""
    import asyncio

    from omni_discovery.commands.history_log import EventReader
    from omni_discovery.records import keys
    from omni_discovery.stories import registry_name
    from omni_discovery.view.table import ReplicaTable

    table = ReplicaTable(namespace)
    listing = await kv.list(keys.namespace_prefix(namespace))
    table.replace(listing, time.time())
    view, registry = table.snapshot(), registry_name(listing.cluster_id)
    # Not the whole namespace: it has a beat of each hub in each second.
    past = _Past(kv, (keys.hubs_prefix(namespace), keys.replicas_prefix(namespace)), listing.revision)
    await past.read()
    reader = EventReader(namespace, registry)
    found = await asyncio.to_thread(lambda: [each for event in past.events() for each in reader.read_event(event)])
    replicas, hubs = list(view.replicas.values()), list(view.hubs.values())
    return RegistryPast(registry, found, replicas, hubs, past.oldest, past.read_from)


class _Past:
    """The changes of some keys up to a revision, as far as they can be read.

    ``oldest`` is the oldest revision that is not compacted, ``read_from`` the one from which on all was read.
    """

    def __init__(self, kv: KVStore, prefixes: Sequence[str], end: int) -> None:
        self._kv, self._prefixes = kv, prefixes
        # Half of the time is for a look at all of it.
        self._deadline_s = time.monotonic() + _MOST_S / 2
        self._room = _MOST_CHANGES
        self._looks: list[list[WatchEvent]] = []
        self.oldest, self.read_from = 1, end + 1

    def events(self) -> Iterator[WatchEvent]:
        """The changes that were read; those of each key in their order."""
        for look in reversed(self._looks):
            yield from look

    async def read(self) -> None:
        """Read all of it, or else the newest. Raise RegistryError."""
        from omni_discovery.errors import CompactedError

        size = self.read_from
        while self.read_from > self.oldest:
            start = max(self.oldest, self.read_from - size)
            try:
                look = await self._changes(start, self.read_from - 1)
            except CompactedError as error:
                # Some servers leave a delete out of a watch that begins on the compacted revision itself.
                oldest = error.compact_revision + 1
                if oldest <= self.oldest:
                    self.oldest = self.read_from
                    return
                self.oldest = oldest
                continue
            if look is not None:
                self._looks.append(look)
                self._room -= len(look)
                self.read_from = start
                size *= 2
            elif size > _LOOK_BACK and not self._looks:
                size = _LOOK_BACK
                self._deadline_s += _MOST_S / 2
            else:
                return

    async def _changes(self, start: int, end: int) -> list[WatchEvent] | None:
        """The changes between two revisions; None if there is no more room for them, or no time."""
        found: list[WatchEvent] = []
        for prefix in self._prefixes:
            if not await self._replay(prefix, start, end, found):
                return None
        return found

    async def _replay(self, prefix: str, start: int, end: int, found: list[WatchEvent]) -> bool:
        """Add to ``found`` the changes between two revisions; whether these are all.

        A watch that brings nothing for half a second has none left. Raise CompactedError.
        """
        import asyncio

        async with aclosing(self._kv.watch(prefix, start)) as batches:
            while len(found) <= self._room and time.monotonic() < self._deadline_s:
                try:
                    async with asyncio.timeout(_CAUGHT_UP_S):
                        batch = await anext(batches)
                except TimeoutError:
                    return True
                found += [event for event in batch.events if _revision_of(event) <= end]
                if batch.revision >= end:
                    return len(found) <= self._room
        return False


def _revision_of(event: WatchEvent) -> int:
    from omni_discovery.kv import PutEvent

    return event.item.mod_revision if isinstance(event, PutEvent) else event.mod_revision


def newest(found: list[_AnyLife], limit: int) -> list[_AnyLife]:
    """The newest ``limit`` of lives, which are the oldest first; none that has ended in place of one that goes on."""
    order = sorted(range(len(found)), key=lambda at: (not found[at].is_gone, at))
    return [found[at] for at in sorted(order[-limit:])]


def heading(namespace: str, past: RegistryPast, count: int, width: int = 80) -> str:
    """What the tables are about: one line, or two where it is wider than ``width``."""
    whose = f"namespace {namespace} · registry {past.registry} · {count} {'life' if count == 1 else 'lives'}"
    since = _since(past)
    return f"{whose} · {since}" if len(f"{whose} · {since}") <= width else f"{whose}\n{since}"


def _since(past: RegistryPast) -> str:
    if past.is_whole:
        return f"etcd remembers from revision {past.oldest}"
    return f"read from revision {past.read_from} on; the older ones, from {past.oldest} on, are too many"


def history_table(found: list[Life], limit: int, now_s: float, width: int = 80) -> Table:
    """The lives of replicas as a table, the newest last. ``reasons`` has what does not fit into it."""
    from rich.text import Text

    rows: list[tuple[Any, ...]] = []
    for life in newest(found, limit):
        up_from = _moment(life.up_at_s, now_s) if life.up_at_s else Text("never", style="dim")
        style = "red" if life.end.startswith(("lost", "failed")) else "dim"
        end = Text(life.short_end, style=style)
        process = f"{life.host}:{life.pid}" if life.pid else life.host
        rows.append((f"{life.stage_id}/{life.replica_id}", str(life.epoch), process, up_from, _until(life, now_s), end))
    table = _table(("replica", "epoch", "process", "up from", "until", "end"), rows, width)
    if not found:
        table.caption = "no such replica was ever registered here, as far as is known"
    elif len(found) > limit:
        table.caption = f"{len(found) - limit} older ones that ended are not shown; see --limit and --json"
    return table


def reasons(found: Iterable[Life]) -> Iterator[str]:
    """Why lives failed, whole, one text for each."""
    for life in found:
        if life.end != life.short_end:
            yield f"{life.stage_id}/{life.replica_id} of epoch {life.epoch} {life.end}"


def hub_history_table(found: list[HubLife], limit: int, now_s: float, width: int = 80) -> Table:
    """The lives of hubs as a table, the newest last."""
    from rich.text import Text

    rows: list[tuple[Any, ...]] = []
    for life in newest(found, limit):
        until: Any = Text("live", style="green")
        if life.is_gone:
            until = "?" if life.gone_at_s is None else _moment(life.gone_at_s, now_s)
        process = f"{life.host}:{life.pid}" if life.pid else life.host
        began = _moment(life.started_at_s, now_s) if life.started_at_s else "?"
        rows.append((life.hub_id, process, began, until, Text(life.end, style="dim")))
    return _table(("hub", "process", "from", "until", "end"), rows, width)


#: How narrow columns become, in this order, where the table is too wide. Their texts go on in the next line.
_LEAST: Final = (
    ("until", 15),
    ("hub", 20),
    ("end", 12),
    ("process", 14),
    ("hub", 14),
    ("end", 10),
    ("process", 8),
)


def _table(names: tuple[str, ...], rows: list[tuple[Any, ...]], width: int) -> Table:
    """A table of at most ``width`` columns, from 80 on: nothing is cut, but long cells have several lines."""
    from rich import box
    from rich.table import Table

    wanted = {name: max(len(name), *(len(row[at]) for row in rows), 1) for at, name in enumerate(names)}
    for name, least in _LEAST:
        too_wide = sum(wanted.values()) + 2 * len(names) - width
        if name in wanted:
            wanted[name] = max(min(wanted[name], least), wanted[name] - max(0, too_wide))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        right = name in ("replica", "epoch")
        table.add_column(name, justify="right" if right else "left", overflow="fold", width=wanted[name])
    for row in rows:
        table.add_row(*row)
    return table


def _until(life: Life, now_s: float) -> Any:
    from rich.text import Text

    if not life.is_gone:
        return Text(life.last_status, style="green" if life.last_status == "up" else "yellow")
    if life.gone_at_s is not None:
        return _moment(life.gone_at_s, now_s)
    seen = "?" if life.seen_at_s is None else _moment(life.seen_at_s, now_s, seconds=False)
    return seen if seen == "?" else f"after {seen}"


def _moment(at_s: float, now_s: float, *, seconds: bool = True) -> str:
    """The date and the time, of former years only the date; "?" for what no calendar has: a record may say anything."""
    try:
        then, now = time.localtime(at_s), time.localtime(now_s)
    except (OSError, OverflowError, ValueError):
        return "?"
    if not 1970 <= then.tm_year <= _LAST_YEAR:
        return "?"
    of_this_year = "%b %d %H:%M:%S" if seconds else "%b %d %H:%M"
    return time.strftime(of_this_year if then.tm_year == now.tm_year else "%Y-%m-%d", then)
