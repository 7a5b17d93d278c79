"""``omni status``: one screen that begins with what needs an operator; etcd alone is asked, for three seconds."""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
import time
from typing import TYPE_CHECKING, Final

from omni_discovery.commands.output import quiet_logging
from omni_discovery.commands.registry import (
    add_registry_options,
    find_endpoints,
    read_security,
    registry_flags,
    user_runtime_dir,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_discovery.commands.findings.checks import Finding
    from omni_discovery.commands.status.screen import Status
    from omni_discovery.etcd.config import RegistrySecurity
    from omni_discovery.etcd.members import EtcdMember
    from omni_discovery.kv import Listing
    from omni_discovery.records.waits import WaitRecord

#: How long etcd may take for all that is asked, and for one try.
_ANSWER_S: Final = 2.5
_TRY_S: Final = 1.0
#: The screen is drawn anew so often.
_TURN_S: Final = 2.0
#: Waits that only this machine knows of are shown from so many seconds on.
_SHORT_S: Final = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
    """What etcd shows, for the screen and for ``omni why``.

    ``each`` are the needs of the status one by one, and notes that need nobody. ``registered`` are the names of the
    replicas that there are; None where etcd did not say.
    """

    status: Status
    each: tuple[Finding, ...]
    registered: frozenset[str] | None

    @property
    def needs_and_notes(self) -> tuple[Finding, ...]:
        """The needs as the screen has them, those of many replicas as one, and the notes."""
        return (*self.status.needs, *(finding for finding in self.each if finding.grade == "note"))


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    """What etcd has said: the namespace, None with an error if that did not come; and each member."""

    listing: Listing | None
    members: tuple[EtcdMember, ...]
    error: str = ""
    #: All keys of this etcd, where the namespace is empty; None if they are not known.
    every: Listing | None = None


class StatusCommand:
    """``omni status``."""

    summary = "show what needs you, and what is there beside what is asked for"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add_registry_options(parser)
        parser.add_argument("--watch", action="store_true", help="keep showing it until Ctrl-C")
        parser.add_argument("--json", action="store_true", help="print it as one line of JSON instead")

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command. Return 0 if nothing needs an operator, 1 if something does, 2 if that can't be found out."""
        quiet_logging(silent=True)
        endpoints, security = find_endpoints(arguments), read_security(arguments)
        if arguments.watch:
            return _watch(arguments, endpoints, security)
        status = find_status(arguments.namespace, endpoints, security)
        _print(status, arguments)
        return status.code


def _print(status: Status, arguments: argparse.Namespace) -> None:
    from omni_discovery.commands.status.screen import Flags, status_text
    from omni_discovery.commands.terminal import TextConsole, print_json

    if arguments.json:
        print_json({"code": status.code, **dataclasses.asdict(status)})
        sys.stdout.flush()
        return
    console = TextConsole()
    flags = Flags(tuple(registry_flags(arguments)), status.endpoints)
    console.print(status_text(status, flags, console.width), soft_wrap=True)


def _watch(arguments: argparse.Namespace, endpoints: str, security: RegistrySecurity) -> int:
    from rich.live import Live

    from omni_discovery.commands.status.screen import Flags, status_text
    from omni_discovery.commands.terminal import TextConsole

    console = TextConsole()
    if arguments.json or not console.is_terminal:
        while True:
            _print(find_status(arguments.namespace, endpoints, security), arguments)
            time.sleep(_TURN_S)
    flags = Flags(tuple(registry_flags(arguments)), endpoints)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status = find_status(arguments.namespace, endpoints, security)
            live.update(status_text(status, flags, console.width), refresh=True)
            time.sleep(_TURN_S)


def find_status(namespace: str, endpoints: str, security: RegistrySecurity) -> Status:
    """Return what the screen shows; as ``look``."""
    return look(namespace, endpoints, security).status


def look(namespace: str, endpoints: str, security: RegistrySecurity) -> Sight:
    """Return what can be found out in three seconds; never raises RegistryError."""
    import asyncio

    from omni_discovery.commands.findings.checks import Evidence, Grade, examine
    from omni_discovery.commands.findings.processes import ended_findings
    from omni_discovery.commands.status.needs import judge
    from omni_discovery.commands.status.overview import hub_lines, stage_lines
    from omni_discovery.commands.status.screen import Status
    from omni_discovery.etcd.check import empty_namespace_text, namespaces_in
    from omni_discovery.records.keys import check_namespace
    from omni_discovery.records.waits import last_words_among, waits_among
    from omni_discovery.view.table import ReplicaTable

    check_namespace(namespace)
    answer = asyncio.run(_ask(endpoints, security, namespace))
    clock, now_s = time.strftime("%H:%M:%S"), time.time()
    etcd = _judge_members(answer)
    if answer.listing is None:
        alone = _local_waits(namespace, endpoints, (), now_s)
        unknown = (
            f"stages, replicas and hubs of namespace {namespace!r}: etcd does not say",
            *(f"on this machine, {entry.who} waits: {entry.reason}" for one in alone for entry in one.waits),
        )
        return Sight(Status(namespace, endpoints, clock, tuple(etcd), unknown, None, None), tuple(etcd), None)
    table = ReplicaTable(namespace)
    table.replace(answer.listing, now_s)
    evidence = Evidence(namespace, table.snapshot(), answer.listing.items, now_s)
    shown = waits_among(answer.listing.items, namespace)
    waits = (*shown, *_local_waits(namespace, endpoints, shown, now_s))
    stages = stage_lines(evidence)
    findings = [
        *examine(evidence),
        *ended_findings(last_words_among(answer.listing.items, namespace), table.snapshot(), now_s),
    ]
    needs = judge(evidence, findings, waits, stages)
    unknown = needs.unknown
    if not answer.listing.items:
        names = None if answer.every is None else namespaces_in(item.key for item in answer.every.items)
        unknown = (*unknown, empty_namespace_text(namespace, names))
    found, hubs = (*etcd, *needs.found), tuple(hub_lines(evidence))
    status = Status(namespace, endpoints, clock, found, unknown, tuple(stages), hubs, platform.node())
    notes = [finding for finding in findings if finding.grade is Grade.NOTE]
    registered = frozenset(info.name for info in evidence.view.replicas.values())
    return Sight(status, (*etcd, *needs.each, *notes), registered)


async def _ask(endpoints: str, security: RegistrySecurity, namespace: str) -> _Answer:
    import asyncio

    from omni_discovery.errors import RegistryError
    from omni_discovery.etcd.members import ask_members
    from omni_discovery.records.keys import ROOT, namespace_prefix
    from omni_discovery.view.families import NamespaceReader

    asked = asyncio.create_task(ask_members(endpoints, security, _TRY_S))
    kv = NamespaceReader(namespace, endpoints, security=security, try_timeout_s=_TRY_S, call_timeout_s=_TRY_S)
    listing, every, error = None, None, ""
    try:
        async with asyncio.timeout(_ANSWER_S):
            listing = await kv.list(namespace_prefix(namespace))
            if not listing.items:
                every = await kv.list(ROOT, keys_only=True)
    except TimeoutError:
        error = f"etcd has not answered within {_ANSWER_S:g} s"
    except RegistryError as failed:
        error = str(failed)
    finally:
        await kv.close()
    return _Answer(listing, await asked, error, every)


def _judge_members(answer: _Answer) -> list[Finding]:
    """What is wrong with etcd itself: members that don't answer, or none of which leads."""
    from omni_discovery.commands.findings.checks import Finding, Grade

    status = ("etcdctl", "endpoint", "status", "-w", "table")
    silent = [member for member in answer.members if member.error]
    leaderless = [member for member in answer.members if member.has_leader is False]
    goes_on = "requests go on by the hubs' last view, replicas that start can't join"
    if answer.listing is None and leaderless:
        names = ", ".join(member.endpoint for member in leaderless)
        text = f"etcd has lost its quorum: {names} can't find a leader"
        away = ", ".join(member.endpoint for member in silent)
        advice = f"start {away or 'its other members'} again; until then {goes_on}"
        return [Finding(Grade.PROBLEM, "etcd", text, advice, status)]
    if answer.listing is None and len(silent) == len(answer.members):
        text = "; ".join(f"{member.endpoint} does not answer: {member.error}" for member in silent)
        advice = f"start it, continue it if it is stopped, or correct --etcd-endpoints; until then {goes_on}"
        return [Finding(Grade.PROBLEM, "etcd", text, advice, status)]
    if answer.listing is None:
        advice = "correct --etcd-user and its password, or see what slows etcd down"
        return [Finding(Grade.PROBLEM, "etcd", answer.error, advice, status)]
    advice = "start it again: the others serve meanwhile, and may be too few for the next loss"
    return [
        Finding(Grade.PROBLEM, "etcd", f"member {member.endpoint} does not answer: {member.error}", advice, status)
        for member in silent
    ]


def _local_waits(namespace: str, endpoints: str, shown: Sequence[WaitRecord], now_s: float) -> list[WaitRecord]:
    """What processes of this machine wait for that say so only here, since they don't reach etcd."""
    from omni_discovery.records.waits import WaitEntry, WaitRecord
    from omni_discovery.stories import read_waits, share_endpoint

    host = platform.node()
    known = {record.pid for record in shown if record.host == host}
    return [
        WaitRecord(
            host=host,
            pid=wait.pid,
            waits=[
                WaitEntry(who=wait.who, reason=wait.reason, since=wait.since_s, kind=wait.kind, stage_id=wait.stage_id)
            ],
        )
        for wait in read_waits(user_runtime_dir(), namespace)
        if wait.pid not in known and now_s - wait.since_s >= _SHORT_S and share_endpoint(wait.endpoints, endpoints)
    ]
