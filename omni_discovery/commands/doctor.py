"""``omni doctor``: checks etcd, the records in it, and whether the replicas can be reached; prints what is wrong."""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from omni_discovery.commands.output import quiet_logging
from omni_discovery.commands.registry import add_registry_options, find_endpoints, read_security, user_runtime_dir

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from omni_discovery.commands.findings.checks import Finding
    from omni_discovery.etcd.config import RegistrySecurity
    from omni_discovery.etcd.store import EtcdKV
    from omni_discovery.kv import KVStore
    from omni_discovery.records.addresses import TcpAddress
    from omni_discovery.records.schema import ReplicaInfo
    from omni_discovery.records.waits import WaitRecord
    from omni_discovery.view.table import View

_CALL_S: Final = 3.0
_TCP_S: Final = 2.0
#: How many replicas are looked at at the same time: the addresses are what records say, and there may be many.
_AT_ONCE: Final = 64
#: How long all of that may take.
_ADDRESSES_S: Final = 10.0
#: The first byte that a socket of ZMQ sends.
_GREETING: Final = b"\xff"
_RELEASE_TRIES: Final = 50
#: A granted TTL that exceeds the requested one by so much delays the discovery of dead replicas noticeably.
_LONG_TTL_S: Final = 10.0


class DoctorCommand:
    """``omni doctor``."""

    summary = "say what is wrong with the registry and with what is in it"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add_registry_options(parser)
        parser.add_argument("--json", action="store_true", help="print the findings as JSON lines instead")
        parser.add_argument(
            "--recent", action="store_true", help="show in full what failed lately on this machine, not only its end"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command. Return 0 if nothing is wrong, 1 if something is."""
        import asyncio
        import dataclasses

        from omni_discovery.commands.findings.checks import Grade
        from omni_discovery.commands.findings.processes import recent_findings, waiting_findings
        from omni_discovery.commands.terminal import TextConsole, print_json
        from omni_discovery.etcd.embedded_file import embedded_among
        from omni_discovery.records.keys import check_namespace
        from omni_discovery.stories import read_stories, read_waits

        quiet_logging()
        namespace, folder = check_namespace(arguments.namespace), user_runtime_dir()
        endpoints, security = find_endpoints(arguments), read_security(arguments)
        embedded = embedded_among(folder, namespace, endpoints)
        diagnosis = asyncio.run(diagnose(endpoints, security, namespace, embedded))
        found = diagnosis.findings
        waits = read_waits(folder, namespace)
        found += waiting_findings(waits, diagnosis.waits, platform.node(), endpoints, time.time())
        stories, brief = read_stories(folder, namespace), not (arguments.recent or arguments.json)
        found = recent_findings(stories, diagnosis.registry, endpoints, time.time(), brief=brief) + found
        if arguments.json:
            for finding in found:
                print_json(dataclasses.asdict(finding))
        else:
            TextConsole().print(findings_table(found))
        return 1 if any(finding.grade is Grade.PROBLEM for finding in found) else 0


@dataclass(slots=True)
class Diagnosis:
    """What a registry shows: findings, its name, empty if none answers, and who waits by what it says itself."""

    findings: list[Finding]
    registry: str = ""
    waits: Sequence[WaitRecord] = ()


async def diagnose(endpoints: str, security: RegistrySecurity, namespace: str, embedded: str = "") -> Diagnosis:
    """Return all that can be found out from this machine; never raises RegistryError.

    ``embedded`` is the endpoint of the embedded etcd of this user's hubs, empty where none runs.
    """
    import asyncio

    from omni_discovery.commands.findings.checks import Evidence, Finding, Grade, count_namespaces, examine
    from omni_discovery.commands.findings.processes import ended_findings
    from omni_discovery.errors import RegistryDeniedError, RegistryError
    from omni_discovery.etcd.config import parse_endpoints
    from omni_discovery.records.keys import ROOT, namespace_prefix
    from omni_discovery.records.waits import last_words_among, waits_among
    from omni_discovery.stories import registry_name
    from omni_discovery.view.families import NamespaceReader
    from omni_discovery.view.table import ReplicaTable

    answers = await asyncio.gather(
        *(
            _check_endpoint(endpoint, endpoints, security, namespace, endpoint == embedded)
            for endpoint in parse_endpoints(endpoints)
        )
    )
    found = [finding for each in answers for finding in each]
    diagnosis = Diagnosis(found)
    if not any(each[0].grade is Grade.OK for each in answers):
        return diagnosis
    kv = NamespaceReader(namespace, endpoints, security=security, try_timeout_s=_CALL_S, call_timeout_s=_CALL_S)
    try:
        if security.user:
            found.append(await _role(kv, namespace, security.user))
        listing = await kv.list(namespace_prefix(namespace))
        table = ReplicaTable(namespace)
        table.replace(listing, time.time())
        diagnosis.registry = registry_name(listing.cluster_id)
        diagnosis.waits = waits_among(listing.items, namespace)
        namespaces = None
        try:
            namespaces = count_namespaces([item.key for item in (await kv.list(ROOT, keys_only=True)).items])
        except RegistryDeniedError:
            found.append(Finding(Grade.NOTE, "namespace", "other namespaces can't be seen: this user may not"))
        except RegistryError as error:
            found.append(Finding(Grade.NOTE, "namespace", f"other namespaces can't be seen: {error}"))
        found.append(await _least_ttl(kv))
        found += examine(Evidence(namespace, table.snapshot(), listing.items, time.time(), namespaces))
        found += ended_findings(last_words_among(listing.items, namespace), table.snapshot(), time.time())
        found += await _check_addresses(table.snapshot())
    except RegistryError as error:
        found.append(Finding(Grade.PROBLEM, "etcd", f"it answered once and then no more: {error}"))
    finally:
        await kv.close()
    return diagnosis


async def _check_endpoint(
    endpoint: str, endpoints: str, security: RegistrySecurity, namespace: str, embedded: bool
) -> list[Finding]:
    """Check that one endpoint answers, lets us read, and runs a release without known bugs."""
    from omni_discovery.commands.findings.checks import Finding, Grade, judge_version
    from omni_discovery.errors import RegistryError, RegistryRefusedError
    from omni_discovery.etcd.config import scheme_of, url_of
    from omni_discovery.etcd.store import EtcdKV
    from omni_discovery.records.keys import pipeline_key

    address = url_of(endpoint, scheme_of(endpoints))
    kv = EtcdKV(address, security=security, try_timeout_s=_CALL_S, call_timeout_s=0.1)
    began_s = time.monotonic()
    try:
        await kv.get(pipeline_key(namespace))
        took_s = time.monotonic() - began_s
        version = await _release(kv, endpoint)
    except RegistryRefusedError as error:
        advice = (
            "correct --etcd-user and the password, or let an administrator run: omni etcd grant-role"
            f" {namespace} observer (or hub, replica, operator; grant-namespace for all of it)"
        )
        return [Finding(Grade.PROBLEM, "etcd", f"{endpoint} refuses us: {error}", advice)]
    except RegistryError as error:
        advice = "is it running, and is the way to it open? the others serve meanwhile, if there are any"
        return [Finding(Grade.PROBLEM, "etcd", f"{endpoint} does not answer: {error}", advice)]
    finally:
        await kv.close()
    answers = Finding(Grade.OK, "etcd", f"{endpoint} answers in {1000 * took_s:.0f} ms")
    has_tls = security.for_endpoints(endpoints).tls is not None
    return [
        answers,
        judge_version(endpoint, version, embedded=embedded, has_users=bool(security.user), has_tls=has_tls),
    ]


async def _release(kv: EtcdKV, endpoint: str) -> str:
    """Return the release of the etcd at an endpoint; empty if it is not known within a second.

    The connection asks for it by itself when it is first used.
    """
    import asyncio

    for _ in range(_RELEASE_TRIES):
        if version := kv.server_versions.get(endpoint):
            return version
        await asyncio.sleep(0.02)
    return ""


async def _role(kv: KVStore, namespace: str, user: str) -> Finding:
    """What our user of etcd may write, found out without writing."""
    from omni_discovery.commands.findings.checks import Finding, Grade
    from omni_discovery.errors import RegistryDeniedError
    from omni_discovery.records.keys import namespace_prefix
    from omni_discovery.records.roles import API_KEYS, OPEN_FAMILIES, PIPELINE, roles_that_write

    writable = []
    for family in (*OPEN_FAMILIES, API_KEYS):
        key = f"{namespace_prefix(namespace)}{family}" + "-" * (family != PIPELINE)
        try:
            # No key is ever at that revision, and etcd looks at what we may do before it compares.
            await kv.compare_and_put(key, b"", -1)
            writable.append(family)
        except RegistryDeniedError:
            continue
    text = f"user {user} may write " + (", ".join(writable) or "nothing: it looks on")
    roles = roles_that_write(writable)
    return Finding(Grade.OK, "role", text + (f" ({', '.join(roles)})" if roles else ""))


async def _least_ttl(kv: KVStore) -> Finding:
    """Check how short a lease this server grants."""
    from omni_discovery.commands.findings.checks import Finding, Grade
    from omni_discovery.errors import RegistryError

    try:
        grant = await kv.grant(1.0)
        await kv.revoke(grant.lease_id)
    except RegistryError as error:
        return Finding(Grade.PROBLEM, "ttl", f"no lease is granted: {error}", "replicas can't register like this")
    text = f"the shortest lease here is {grant.ttl_s:g} s"
    if grant.ttl_s > _LONG_TTL_S:
        advice = "a shorter --omni-heartbeat-timeout has no effect; etcd's --election-timeout sets this bound"
        return Finding(Grade.NOTE, "ttl", f"{text}: a dead replica stays listed for at least that", advice)
    return Finding(Grade.OK, "ttl", text)


async def _check_addresses(view: View) -> list[Finding]:
    """Check that the sockets of all replicas can be reached from this machine."""
    import asyncio

    from omni_discovery.commands.findings.checks import Finding, Grade

    infos = [view.replicas[key] for key in sorted(view.replicas)]
    places = asyncio.Semaphore(_AT_ONCE)

    async def look(info: ReplicaInfo) -> Finding | None:
        async with places:
            return await _address_finding(info)

    looks = [asyncio.create_task(look(info)) for info in infos]
    left = (await asyncio.wait(looks, timeout=_ADDRESSES_S))[1] if looks else set()
    for each in left:
        each.cancel()
    results = await asyncio.gather(*looks, return_exceptions=True)
    found = []
    for info, each, result in zip(infos, looks, results, strict=True):
        if each in left:
            continue
        if isinstance(result, BaseException):
            text = f"replica {info.name} on {info.host} could not be checked: {type(result).__name__}: {result}"
            found.append(Finding(Grade.PROBLEM, "address", text))
        elif result is not None:
            found.append(result)
    if left:
        text = f"{len(left)} of {len(infos)} replicas were not checked: the others took {_ADDRESSES_S:g} s"
        found.append(Finding(Grade.NOTE, "address", text, "see to those that can't be reached, then run it again"))
    elif infos and not found:
        found.append(Finding(Grade.OK, "address", f"all {len(infos)} replicas can be reached from here"))
    return found


async def _address_finding(info: ReplicaInfo) -> Finding | None:
    """What is wrong with the addresses of a replica; None if both are well. A hub's rules say what an address is."""
    from omni_discovery.commands.findings.checks import Finding, Grade
    from omni_discovery.errors import ConfigError
    from omni_discovery.records.addresses import parse_address

    who = f"replica {info.name} on {info.host}"
    try:
        sockets = {text: parse_address(text) for text in (info.input_addr, info.output_addr)}
    except ConfigError as error:
        advice = "no hub connects to it: see who wrote the record, and restart the replica"
        return Finding(Grade.PROBLEM, "address", f"{who}: {error}", advice)
    if not (unreachable := await _unreachable(sockets)):
        return None
    return Finding(
        Grade.PROBLEM,
        "address",
        f"{who} can't be reached at {unreachable}",
        f"if process {info.pid} is dead, the record goes with its lease; if it is stopped, continue or kill it; if "
        "it is well, see to the firewall, or to its --omni-replica-address: a hub here could not reach it, either",
    )


async def _unreachable(sockets: Mapping[str, TcpAddress]) -> str:
    """Return those of a replica's addresses at which nobody answers, each with the reason; empty if all are well.

    A socket of ZMQ greets at once. One of a stopped process is connected by the kernel and stays silent.
    """
    import asyncio

    wrong = []
    for address, socket in sockets.items():
        try:
            async with asyncio.timeout(_TCP_S):
                reader, writer = await asyncio.open_connection(socket.host, socket.port)
        except TimeoutError:
            wrong.append(f"{address} (no answer in {_TCP_S:g} s)")
            continue
        except OSError as error:
            wrong.append(f"{address} ({os.strerror(error.errno) if error.errno and error.errno > 0 else error})")
            continue
        except UnicodeError:
            wrong.append(f"{address} (its name is none that can be resolved)")
            continue
        try:
            if why := await _why_no_greeting(reader):
                wrong.append(f"{address} ({why})")
        finally:
            writer.close()
    return ", ".join(wrong)


async def _why_no_greeting(reader: asyncio.StreamReader) -> str:
    """Why the other end of a fresh connection does not greet as ZMQ does; empty if it does."""
    import asyncio

    try:
        async with asyncio.timeout(_TCP_S):
            first = await reader.read(1)
    except TimeoutError:
        return f"connected, but silent for {_TCP_S:g} s: the process is stopped or hangs"
    except OSError as error:
        return f"the connection broke: {error}"
    return "" if first == _GREETING else "something else listens there"


#: Findings of one topic and grade that the table has. A row takes some milliseconds, and records may be anybody's.
_MOST_ALIKE: Final = 64


def _some_of_each(found: Sequence[Finding]) -> list[Finding]:
    """The findings; of those of one topic and grade the first, and one that says how many more there are."""
    from omni_discovery.commands.findings.checks import Finding

    shown: list[Finding] = []
    counts: dict[tuple[Any, str], int] = {}
    for finding in found:
        kind = finding.grade, finding.topic
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= _MOST_ALIKE:
            shown.append(finding)
    for (grade, topic), count in counts.items():
        if count > _MOST_ALIKE:
            text = f"{count - _MOST_ALIKE} more like these: omni doctor --json names them"
            shown.append(Finding(grade, topic, text))
    return shown


def findings_table(found: list[Finding]) -> Table:
    """The findings as a table of 80 columns, problems last, next to the prompt: a terminal may show only the end."""
    from rich.table import Table
    from rich.text import Text

    from omni_discovery.commands.findings.checks import Grade

    looks: dict[Grade, tuple[str, str]] = {
        Grade.OK: ("ok", "green"),
        Grade.NOTE: ("note", "yellow"),
        Grade.PROBLEM: ("wrong", "bold red"),
    }
    order = list(looks)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in sorted(_some_of_each(found), key=lambda finding: order.index(finding.grade)):
        mark, style = looks[finding.grade]
        text: Any = Text(finding.text)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style="dim")
        table.add_row(Text(mark, style=style), Text(finding.topic, style="bold"), text)
    count = sum(finding.grade is Grade.PROBLEM for finding in found)
    table.add_row("", "", Text(f"{count} wrong" if count else "nothing is wrong", style="bold"))
    return table
