"""What needs an operator: the findings of ``omni doctor`` that call for a hand, the causes first. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from omni_discovery.commands.findings.checks import Evidence, Finding, Grade
from omni_discovery.commands.status.overview import StageLine
from omni_discovery.records.health import TroubleKind
from omni_discovery.records.waits import WaitEntry, WaitKind, WaitRecord
from omni_discovery.text import one_line
from omni_discovery.view.hub_reports import read_reports

#: A hub beats at least every half minute; one whose last beat is older stands still, or does not reach etcd.
_STILL_S: Final = 45.0
#: Waiting for less is part of a start.
_SHORT_WAIT_S: Final = 5.0
#: The order of topics: what stops a whole stage, then causes, then the rest.
_ORDER: Final = (
    *("etcd", "namespace", "stage", "host", "crash loop", "settings", "no room", "waiting", "ended", "pipeline"),
    *("record", "lease", "hub", "view", "replica", "slots", "load", "client", "requests", "too few", "control"),
    *("hand-off", "encryption", "version"),
)
#: Topics of findings that are judged here from more than doctor has.
#: A stage with one of these lacks replicas for a reason that is said already.
_EXPLAIN_COUNTS: Final = frozenset({"stage", "ended", "crash loop", "settings", "no room"})
_OWN_TOPICS: Final = frozenset({"waiting", "ended"})
_WHY_BELOW: Final = "why is said below"
_SAME_RELEASE: Final = "finish the upgrade: drain the older ones, and start their supervisors again with the newer one"
_SILENT: Final = "requests"


@dataclass(frozen=True, slots=True)
class Needs:
    """What needs an operator, and what could not be found out.

    ``found`` has those that differ in their replica alone as one. ``each`` has them one by one, and notes of waits that
    are too short to be a need.
    """

    found: tuple[Finding, ...]
    unknown: tuple[str, ...]
    each: tuple[Finding, ...] = field(default=(), compare=False)


def judge(
    evidence: Evidence,
    findings: Sequence[Finding],
    waits: Sequence[WaitRecord],
    stages: Sequence[StageLine],
) -> Needs:
    """Choose among the ``findings`` about the keys of a namespace, and add what they don't say.

    ``waits`` are those of processes that wait now, wherever they say so.
    """
    hosts = list(_absent_hosts(evidence))
    waiting = list(_waiting(waits, evidence.now_s))
    short = [finding for finding in waiting if finding.grade is Grade.NOTE]
    waiting = [finding for finding in waiting if finding.grade is Grade.PROBLEM]
    covered = {name for _, names in hosts for name in names}
    covered |= {finding.replica for finding in waiting if finding.topic == "crash loop"}
    needs = [finding for finding, _ in hosts] + waiting
    needs += [finding for finding in findings if finding.topic == "ended"]
    coming = {stage.stage_id for stage in stages if any(not each.is_again for each in stage.loading)}
    explained = {finding.stage_id for finding in needs} | {int(name.partition("/")[0]) for name in covered if name}
    lost_slots = {finding.stage_id for finding in findings if finding.topic == "slots"}
    for finding in findings:
        # What hides a record is no matter of the host that wrote it.
        is_covered = finding.replica in covered and finding.topic != "record"
        if finding.topic in _OWN_TOPICS or (finding.replica and is_covered):
            continue
        if finding.topic == "stage" and finding.stage_id in coming:
            # A first start asks for nothing but patience.
            continue
        if finding.topic == "load" and finding.stage_id in lost_slots:
            # More replicas are no answer where slots of those that are there are lost.
            continue
        if finding.grade is Grade.PROBLEM:
            # What starts another replica does not help where the cause is known.
            is_explained = finding.topic == "stage" and finding.stage_id in explained
            needs.append(replace(finding, advice=_WHY_BELOW, command=()) if is_explained else finding)
        elif finding.topic == "version":
            needs.append(_as_upgrade(evidence, finding))
    needs += _still_hubs(evidence)
    needs += _missing(stages, needs)
    needs = sorted(needs, key=_rank)
    unknown = [finding.text for finding in findings if finding.grade is Grade.NOTE and finding.topic == _SILENT]
    unknown = [text for text in unknown if "unknown" in text]
    return Needs(tuple(_merged(needs)), tuple(unknown), (*needs, *short))


def _merged(needs: Sequence[Finding]) -> list[Finding]:
    """The needs with those as one that differ in their replica alone: of many, one command is shown."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for number, need in enumerate(needs):
        # Without its name and its host, which stand at the beginning.
        same = (need.topic, need.advice, need.text.partition(": ")[2]) if need.replica else (str(number),)
        groups.setdefault(same, []).append(need)
    merged = []
    for group in groups.values():
        others = ", ".join(need.replica for need in group[1:])
        merged.append(replace(group[0], text=f"{group[0].text}; so with {others}") if others else group[0])
    return merged


def _rank(finding: Finding) -> int:
    return _ORDER.index(finding.topic) if finding.topic in _ORDER else len(_ORDER)


def _absent_hosts(evidence: Evidence) -> Iterator[tuple[Finding, Collection[str]]]:
    """Find hosts none of whose replicas, two or more, answers a hub: they are down or cut off, all at once."""
    reports = read_reports(evidence.view, evidence.beats())
    silent: defaultdict[str, set[str]] = defaultdict(set)
    for each in (*reports.lost, *(seen for troubles in reports.troubles.values() for seen in troubles)):
        if each.trouble.kind in (TroubleKind.NO_SESSION, TroubleKind.LOST) and each.trouble.host:
            silent[each.trouble.host].add(each.trouble.name)
    there: defaultdict[str, set[str]] = defaultdict(set)
    for info in evidence.view.replicas.values():
        there[info.host].add(info.name)
    for host, names in sorted(silent.items()):
        if len(names) > 1 and there[host] <= names:
            listed = ", ".join(sorted(names))
            text = f"host {one_line(host)} is down or cut off: none of its replicas answers the hubs ({listed})"
            advice = "see to that host and its network; its replicas come back by themselves"
            yield Finding(Grade.PROBLEM, "host", text, advice, ("omni", "history"), also=tuple(sorted(names))), names


def _waiting(waits: Sequence[WaitRecord], now_s: float) -> Iterator[Finding]:
    """Find supervisors that can't go on without a hand, or have waited for longer than a start takes.

    A shorter wait is a note.
    """
    for record in waits:
        for entry in record.waits:
            waited_s = max(0.0, now_s - entry.since)
            plain = _plain_wait(record, entry, waited_s)
            plain = plain if waited_s >= _SHORT_WAIT_S else replace(plain, grade=Grade.NOTE)
            yield _judge_wait(record, entry) or plain


def _judge_wait(record: WaitRecord, entry: WaitEntry) -> Finding | None:
    """What a wait of a known kind means; None for one that may be over by itself at once."""
    host, reason = one_line(record.host), one_line(entry.reason)
    who = f"{one_line(entry.who)} on {host}"
    log = f"its log on {host} (process {record.pid}) says more"
    history: tuple[str, ...] = ("omni", "history") + (() if entry.stage_id is None else (str(entry.stage_id),))
    name = _replica_in(reason)
    match entry.kind:
        case WaitKind.CRASH_LOOP:
            text = f"{name or 'a replica'} of {who} ends soon after each start: {reason}"
            return Finding(Grade.PROBLEM, "crash loop", text, log, history, name, entry.stage_id)
        case WaitKind.MISCONFIGURED:
            text = f"{who} can't start a replica as it is told to: {reason}"
            advice = f"correct that on {host}; it is tried again every 30 s"
            return Finding(Grade.PROBLEM, "settings", text, advice, history, name, entry.stage_id)
        case WaitKind.DEVICES | WaitKind.ROOM:
            text = f"{who} has no place for its replicas: {reason}"
            advice = "it goes on once there is one: free what another process holds, or take that replica out"
            return Finding(Grade.PROBLEM, "no room", text, advice, ("omni", "replicas"), stage_id=entry.stage_id)
        case _:
            return None


def _plain_wait(record: WaitRecord, entry: WaitEntry, waited_s: float) -> Finding:
    text = f"{one_line(entry.who)} on {one_line(record.host)} waits for {waited_s:.0f} s: {one_line(entry.reason)}"
    if entry.kind == WaitKind.PIPELINE:
        advice = "it goes on once there is a deploy document: start a hub with one"
        return Finding(Grade.PROBLEM, "waiting", text, advice, ("omni", "pipeline", "apply", "pipeline.yaml"))
    return Finding(Grade.PROBLEM, "waiting", text, "it goes on by itself once that has come", stage_id=entry.stage_id)


def _replica_in(reason: str) -> str:
    """The name of the replica at the beginning of a supervisor's reason; empty if none is there."""
    word, _, rest = reason.partition(" ")
    name = rest.partition(" ")[0]
    return name if word == "replica" and name.replace("/", "", 1).isdigit() and "/" in name else ""


def _as_upgrade(evidence: Evidence, finding: Finding) -> Finding:
    """Replicas of several releases or models as a need, with the command for the first of the fewest."""
    by_version: defaultdict[str, list[str]] = defaultdict(list)
    for _, info in sorted(evidence.view.replicas.items()):
        if info.version:
            by_version[info.version].append(info.name)
    fewest = min(by_version.values(), key=len, default=[])
    command = ("omni", "drain", fewest[0]) if len(by_version) > 1 else ("omni", "replicas")
    return replace(finding, grade=Grade.PROBLEM, advice=_SAME_RELEASE, command=command)


def _still_hubs(evidence: Evidence) -> Iterator[Finding]:
    """Find hubs that hold their lease and do not beat: they go by an old view."""
    for hub_id, beat in sorted(evidence.beats().items()):
        hub, age_s = evidence.view.hubs[hub_id], evidence.now_s - beat.written_at
        if hub_id in evidence.view.revoked or age_s < _STILL_S:
            continue
        text = f"hub {hub_id} on {hub.host} has not beaten for {age_s:.0f} s: its view of the registry is that old"
        advice = f"its process {hub.pid} stands still, or does not reach etcd: see its log, and its /ready"
        yield Finding(Grade.PROBLEM, "view", text, advice, ("omni", "hubs"), hub=hub_id)


def _missing(stages: Sequence[StageLine], needs: Sequence[Finding]) -> Iterator[Finding]:
    """Find stages with fewer replicas than asked for, none of which is on its way."""
    deserted = {finding.stage_id for finding in needs if finding.topic in _EXPLAIN_COUNTS}
    for stage in stages:
        if stage.asked is None or stage.stage_id in deserted:
            continue
        lacking = stage.asked - stage.up - stage.starting
        if lacking > 0:
            text = f"stage {stage.stage_id} has {stage.up} of the {stage.asked} replicas that the document asks for"
            words: tuple[str, ...] = ("omni", "serve", "--headless", "--stage-id", str(stage.stage_id))
            if lacking > 1:
                words += ("--omni-dp-size-local", str(lacking))
            advice = "start more on a host with room, or lower num_replicas and `omni pipeline apply`"
            yield Finding(Grade.PROBLEM, "too few", text, advice, words, stage_id=stage.stage_id)
