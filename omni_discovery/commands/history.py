"""``omni history``: which replicas were up when, from etcd's revisions and from the logs of this machine's hubs."""

from __future__ import annotations

import argparse
import re
import sys
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from omni_discovery.commands.registry import add_registry_options, tell_if_empty, user_runtime_dir, with_registry

if TYPE_CHECKING:
    from rich.table import Table

    from omni_discovery.commands.history_log import EventReader, Life, Transition
    from omni_discovery.kv import KVStore
    from omni_discovery.records.schema import ReplicaInfo

#: A watch of past revisions that brings nothing for so long has caught up with the present.
_CAUGHT_UP_S: Final = 0.5
_MOST_S: Final = 20.0
_TARGET: Final = re.compile(r"(\d{1,9})(?:/(\d{1,9}))?")


class HistoryCommand:
    """``omni history [STAGE[/REPLICA]]``."""

    summary = "show who was up when"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        parser.add_argument("target", nargs="?", metavar="STAGE[/REPLICA]", type=_target, help="only these")
        add_registry_options(parser)
        parser.add_argument("--limit", type=_limit, default=40, metavar="N", help="the newest N (default: %(default)s)")
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

    import msgspec
    from rich.console import Console

    from omni_discovery.commands.history_log import history_file, lives, read_log

    transitions, present, oldest = await read_registry(kv, arguments.namespace)
    transitions += read_log(history_file(user_runtime_dir(), arguments.namespace))
    stage_id, replica_id = arguments.target or (None, None)
    found = [
        life
        for life in lives(transitions, present)
        if stage_id in (None, life.stage_id) and replica_id in (None, life.replica_id)
    ]
    if arguments.json:
        for life in found:
            sys.stdout.write(msgspec.json.encode({**dataclasses.asdict(life), "end": life.end}).decode() + "\n")
        return 0
    console = Console()
    lives_found = f"{len(found)} {'life' if len(found) == 1 else 'lives'}"
    console.print(
        f"namespace {arguments.namespace} · {lives_found} · etcd remembers from revision {oldest}", style="italic"
    )
    console.print(history_table(found, arguments.limit, time.time()))
    return 0 if transitions or present else await tell_if_empty(kv, arguments.namespace)


async def read_registry(kv: KVStore, namespace: str) -> tuple[list[Transition], list[ReplicaInfo], int]:
    """Return the transitions that etcd has not compacted, the replicas registered now, and the oldest revision left."""
    from omni_discovery.commands.history_log import EventReader
    from omni_discovery.errors import CompactedError
    from omni_discovery.records import keys
    from omni_discovery.view.table import ReplicaTable

    prefix = keys.replicas_prefix(namespace)
    table = ReplicaTable(namespace)
    listing = await kv.list(prefix)
    table.replace(listing, time.time())
    present = list(table.snapshot().replicas.values())
    oldest = 1
    for _ in range(3):
        found: list[Transition] = []
        try:
            await _replay(kv, prefix, oldest, listing.revision, EventReader(namespace), found)
            return found, present, oldest
        except CompactedError as error:
            if not error.compact_revision:
                break
            # Some servers leave a delete out of a watch that begins on the compacted revision itself.
            oldest = error.compact_revision + 1
    return [], present, listing.revision


async def _replay(kv: KVStore, prefix: str, start: int, end: int, reader: EventReader, found: list[Transition]) -> None:
    """Add to ``found`` the transitions between two revisions, and perhaps some later ones.

    Gives up after 20 seconds, or when the watch brings nothing for half a second. Raise CompactedError.
    """
    import asyncio

    if start > end:
        return
    deadline_s = time.monotonic() + _MOST_S
    async with aclosing(kv.watch(prefix, start)) as batches:
        while time.monotonic() < deadline_s:
            try:
                async with asyncio.timeout(_CAUGHT_UP_S):
                    batch = await anext(batches)
            except TimeoutError:
                return
            for event in batch.events:
                found.extend(reader.read_event(event))
            if batch.revision >= end:
                return


def history_table(found: list[Life], limit: int, now_s: float) -> Table:
    """The lives as a table of 80 columns, the newest last."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("replica", justify="right", no_wrap=True)
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column("process", no_wrap=True, overflow="ellipsis", max_width=20)
    table.add_column("up from", no_wrap=True)
    table.add_column("until", no_wrap=True)
    table.add_column("end", no_wrap=True, overflow="ellipsis", max_width=18)
    for life in found[-limit:]:
        up_from = _moment(life.up_at_s, now_s) if life.up_at_s else Text("never", style="dim")
        table.add_row(
            f"{life.stage_id}/{life.replica_id}",
            str(life.epoch),
            f"{life.host}:{life.pid}" if life.pid else life.host,
            up_from,
            _until(life, now_s),
            Text(life.end, style="red" if life.end.startswith(("lost", "failed")) else "dim"),
        )
    if not found:
        table.caption = "no such replica was ever registered here, as far as is known"
    elif len(found) > limit:
        table.caption = f"{len(found) - limit} older ones are not shown; see --limit and --json"
    return table


def _until(life: Life, now_s: float) -> Any:
    from rich.text import Text

    if not life.is_gone:
        return Text(life.last_status, style="green" if life.last_status == "up" else "yellow")
    if life.gone_at_s is not None:
        return _moment(life.gone_at_s, now_s)
    return "?" if life.seen_at_s is None else f"after {_moment(life.seen_at_s, now_s)}"


def _moment(at_s: float, now_s: float) -> str:
    then = time.localtime(at_s)
    return time.strftime("%H:%M:%S" if now_s - at_s < 64_800 else "%b %d %H:%M", then)
