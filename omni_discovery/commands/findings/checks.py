"""The checks of ``omni doctor``: findings about the keys of one namespace, each with what to do. Pure."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Final

import msgspec

from omni_discovery.deploy.document import DeployConfig, decode_deploy
from omni_discovery.deploy.fingerprint import OTHER_DOCUMENT, document_fingerprint, mismatches, stage_fingerprints
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.releases.advisories import SAFE_RELEASES, advisories_text, open_advisories
from omni_discovery.etcd.releases.versions import known_bugs, parse_version
from omni_discovery.kv import KeyValue
from omni_discovery.records import keys
from omni_discovery.records.addresses import is_loopback
from omni_discovery.records.beat import BeatRecord, read_beats
from omni_discovery.records.control import ControlError, answered_revision, parse
from omni_discovery.records.health import HubHealth, TroubleKind
from omni_discovery.records.schema import FORMER_END, WAITING_PHASE, HubRecord, ReplicaInfo, ReplicaStatus
from omni_discovery.records.sizes import begin_of_cut
from omni_discovery.text import is_shown, one_line
from omni_discovery.view.hub_reports import read_reports
from omni_discovery.view.record_bounds import MOST_HUBS, MOST_REPLICAS, Most, too_many
from omni_discovery.view.table import View

__all__ = [
    "Evidence",
    "Finding",
    "Grade",
    "count_namespaces",
    "examine",
    "judge_version",
]


class Grade(StrEnum):
    """How serious a finding is; a PROBLEM makes ``omni doctor`` exit with 1."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; ``advice`` is what the operator can do, empty where nothing has to be done.

    ``command`` is what to type for that, as words without the flags that say where etcd is; empty: no command does it.
    ``replica`` is the replica that it is about, as ``0/1``, and ``stage_id`` the stage; empty and None for none.
    ``more`` is a command that tells more of it, where it is typed on ``more_host``. ``also`` are further replicas that
    it is about, and ``hub`` is the id of the hub that it keeps from serving.
    """

    grade: Grade
    topic: str
    text: str
    advice: str = ""
    command: tuple[str, ...] = ()
    replica: str = ""
    stage_id: int | None = None
    more: tuple[str, ...] = ()
    more_host: str = ""
    also: tuple[str, ...] = ()
    hub: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of the checks: the view and the raw keys of one namespace, and this machine's wall clock in seconds."""

    namespace: str
    view: View
    items: Sequence[KeyValue]
    now_s: float
    #: The number of replicas of each namespace of this etcd; None if this user may not list them.
    namespaces: Mapping[str, int] | None = None
    #: The beats once they were read: there may be a thousand, and several checks go by them.
    _beats: list[dict[str, BeatRecord]] = field(default_factory=list, init=False, repr=False, compare=False)

    def beats(self) -> dict[str, BeatRecord]:
        """The beats of the view's hubs, by hub id."""
        if not self._beats:
            self._beats.append(read_beats(self.items, self.namespace, self.view.hubs))
        return self._beats[0]


_RESTART: Final = (
    "restart it: it comes back with the document in force; until then hubs which have served its document go on"
    " with that while it is rolled out, and all others refuse it. Drain it, then start its supervisor again"
)
_SAME_FILES: Final = "make the model's files the same on every host, then restart it; until then no hub picks it"
_COUNT_ANEW: Final = (
    "replica and hub disagree on who has them, and a new process of either counts them anew: restart that hub, or drain"
    " the replica and start its supervisor again"
)
#: Fields that are usually equal for all replicas of one stage and one document, as messages name them.
_ALIKE: Final = {"revision": "revision of the model", "dtype": "dtype", "tokenizer": "tokenizer", "code": "code"}


def examine_versions(evidence: Evidence, deploy: DeployConfig) -> Iterator[Finding]:
    """Check which replicas and hubs run another document, model or release than the pipeline in force asks for."""
    expected = stage_fingerprints(deploy)
    infos = [evidence.view.replicas[key] for key in sorted(evidence.view.replicas)]
    wrong: list[Finding] = []
    for info in infos:
        if info.stage_id not in expected:
            text = f"replica {_name(info)} serves a stage that the pipeline has not"
            advice = "stop it, or serve the other document in its own namespace"
            wrong.append(Finding(Grade.PROBLEM, "pipeline", text, advice, _drain(info), _name(info), info.stage_id))
    ours = [info for info in infos if info.stage_id in expected]
    for info, why in mismatches(ours, lambda info: info.fingerprint in ("", expected[info.stage_id])):
        text, advice = f"replica {_name(info)} on {info.host} does not match: {why}", _SAME_FILES
        if why == OTHER_DOCUMENT:
            text, advice = f"{text} ({info.fingerprint} instead of {expected[info.stage_id]})", _RESTART
        wrong.append(Finding(Grade.PROBLEM, "pipeline", text, advice, _drain(info), _name(info), info.stage_id))
    yield from wrong[:_MOST_MISMATCHED]
    if len(wrong) > _MOST_MISMATCHED:
        text = f"{len(wrong) - _MOST_MISMATCHED} more replicas do not match the pipeline in force"
        advice = "more than a rollout leaves behind may be somebody who writes records: omni replicas marks them"
        yield Finding(Grade.PROBLEM, "pipeline", text, advice, ("omni", "replicas"))
    if not wrong:
        count = len(deploy.stages)
        stages = f"{count} stage{'' if count == 1 else 's'}"
        yield Finding(Grade.OK, "pipeline", f"{stages} in force, all replicas run that")
    yield from _unlike(ours)
    yield from _hubs_behind(evidence)


def _unlike(infos: list[ReplicaInfo]) -> Iterator[Finding]:
    """Note replicas of one stage and one document that differ in a field of ``_ALIKE``, which may be intended."""
    for name, word in _ALIKE.items():
        found: dict[tuple[int, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for info in infos:
            if value := getattr(info, name):
                found[info.stage_id, info.fingerprint][value].append(_name(info))
        for (stage_id, _), by_value in sorted(found.items()):
            if len(by_value) > 1:
                most = sorted(by_value.items())[:_SHOWN]
                shown = "; ".join(f"{value}: {', '.join(names[:_SHOWN])}" for value, names in most)
                yield Finding(Grade.NOTE, "version", f"replicas of stage {stage_id} differ in their {word}: {shown}")


def _hubs_behind(evidence: Evidence) -> Iterator[Finding]:
    """Find hubs that have read the pipeline in force and still serve another document."""
    pipeline_key = keys.pipeline_key(evidence.namespace)
    in_force = next((item for item in evidence.items if item.key == pipeline_key), None)
    for hub_id, beat in evidence.beats().items() if in_force is not None else ():
        if in_force is None:
            continue
        has_seen = beat.pipeline and beat.revision >= in_force.mod_revision
        if has_seen and beat.pipeline != document_fingerprint(in_force.value):
            hub = evidence.view.hubs[hub_id]
            text = f"hub {hub_id} on {hub.host} serves another document than the one in force"
            advice = "restart it with that: omni pipeline show > pipeline.yaml writes it; the hub's log says why"
            yield Finding(Grade.PROBLEM, "pipeline", text, advice, ("omni", "pipeline", "show"), hub=hub_id)


#: Clocks that differ by less, in seconds, are not reported.
_CLOCK_S: Final = 2.0
#: No clock is right that says more, seconds since 1970: it is a record of somebody who makes them up.
_LAST_MOMENT_S: Final = 1e11
#: Digits of a stage's id.
_DIGITS: Final = 9
#: How many names a finding lists at most.
_SHOWN: Final = 8
#: How many replicas that do not match have a finding each.
_MOST_MISMATCHED: Final = 32
_NEWER: Final = f"run etcd {SAFE_RELEASES}"


def examine(evidence: Evidence) -> list[Finding]:
    """Return the findings of all checks of a namespace's keys; a check that finds nothing wrong says so with OK."""
    checks = (
        *(_namespace, _records, _leases, _clocks, _pipeline, _stages, _handoffs),
        *(_control, _hubs, _reports, _encryption, _versions),
    )
    found: list[Finding] = []
    for check in checks:
        found += check(evidence)
    return found


def judge_version(
    endpoint: str, version: str, *, embedded: bool = False, has_users: bool = False, has_tls: bool = False
) -> Finding:
    """Check the release of the etcd at one endpoint for known bugs; those do no harm to an ``embedded`` one.

    Weaknesses that matter only where it asks for users, or speaks TLS, are left out elsewhere.
    """
    parsed = parse_version(version)
    if parsed is None:
        return Finding(Grade.NOTE, "release", f"{endpoint} does not say which release of etcd it is")
    if not embedded and (open_ones := open_advisories(parsed, has_users=has_users, has_tls=has_tls)):
        grade = Grade.PROBLEM if any(each.breaks_roles for each in open_ones) else Grade.NOTE
        text = f"{endpoint} is etcd {version}, with published weaknesses: {advisories_text(open_ones)}"
        return Finding(grade, "release", text, _NEWER)
    bugs = known_bugs(parsed)
    if not bugs:
        return Finding(Grade.OK, "release", f"{endpoint} is etcd {version}, without a known bug that matters here")
    if embedded:
        text = f"{endpoint} is the embedded etcd {version}; what it is known to do wrong does no harm here"
        return Finding(Grade.OK, "release", text)
    harmful = [bug.what for bug in bugs if not bug.workaround]
    harmless = [bug.what for bug in bugs if bug.workaround]
    bugs_named = [*harmful, f"worked around here: {'; '.join(harmless)}"] if harmless else harmful
    # A note only: a record that etcd loses is written again by its owner.
    return Finding(Grade.NOTE, "release", f"{endpoint} is etcd {version}: {'; '.join(bugs_named)}", _NEWER)


def count_namespaces(listed: Iterable[str]) -> dict[str, int]:
    """Count the replica records of each namespace among the keys of an etcd."""
    counts: dict[str, int] = defaultdict(int)
    for key in listed:
        parts = key.removeprefix(keys.ROOT).split("/")
        if key.startswith(keys.ROOT) and len(parts) == 4 and parts[1] == "replicas":
            counts[parts[0]] += 1
    return dict(counts)


def _namespace(evidence: Evidence) -> Iterator[Finding]:
    count = len(evidence.view.replicas)
    others = {name: n for name, n in (evidence.namespaces or {}).items() if name != evidence.namespace}
    if count:
        hubs = len(evidence.view.hubs)
        text = f"{evidence.namespace!r} has {_count(count, 'replica')} and {_count(hubs, 'hub')}"
        yield Finding(Grade.OK, "namespace", text)
        if not hubs:
            text = "no hub is registered: nobody sends requests to these replicas"
            advice = "start one: omni serve --hub-only"
            yield Finding(Grade.PROBLEM, "namespace", text, advice, ("omni", "serve", "--hub-only"))
    elif others:
        named = ", ".join(f"{name} ({n})" for name, n in sorted(others.items())[:_SHOWN])
        text = f"{evidence.namespace!r} has no replica, but other namespaces have: {named}"
        yield Finding(Grade.PROBLEM, "namespace", text, "give --namespace as the replicas do, or start replicas here")
    else:
        text = f"{evidence.namespace!r} has no replica, nor has any other namespace that can be seen on this etcd"
        yield Finding(Grade.NOTE, "namespace", text, "is this the etcd that the replicas use? compare --etcd-endpoints")


def _records(evidence: Evidence) -> Iterator[Finding]:
    bad = evidence.view.bad
    for key in sorted(bad)[:_SHOWN]:
        advice = f"it hides this one key; find who wrote it, or delete it: {_deletes(key)}"
        name, stage_id, hub_id = _meant_by(evidence.namespace, key)
        whose = f"replica {name}" if name else f"hub {hub_id}" if hub_id else ""
        text = f"the record of {whose} is refused: {bad[key]}" if whose else str(bad[key])
        yield Finding(Grade.PROBLEM, "record", text, advice, _delete(key), name, stage_id, hub=hub_id)
    if len(bad) > _SHOWN:
        text = f"{len(bad) - _SHOWN} more keys can't be read, the last of them {one_line(max(bad))}"
        yield Finding(Grade.PROBLEM, "record", text, "delete those above, and the next will be shown here")
    refused = evidence.view.refused_count, evidence.view.refused_hubs
    yield from _refused(refused[0], "replicas", MOST_REPLICAS)
    yield from _refused(refused[1], "hubs", MOST_HUBS)
    if not bad and not any(refused):
        yield Finding(Grade.OK, "record", "every record can be read")


def _refused(count: int, whose: str, most: Most) -> Iterator[Finding]:
    if count:
        text = f"{too_many(count, whose)} (at most {most.records}, and {most.memory_bytes >> 20} MiB of them)"
        advice = "those with a lease are read before those without, the first that came first; find who writes them"
        yield Finding(Grade.PROBLEM, "record", text, advice)


def _meant_by(namespace: str, key: str) -> tuple[str, int | None, str]:
    """The replica, the stage and the hub that a key is about; empty and None where it is about none."""
    match keys.parse_key(namespace, key):
        case keys.ReplicaKey(stage_id, replica_id):
            return f"{stage_id}/{replica_id}", stage_id, ""
        case keys.HubKey(hub_id):
            return "", None, hub_id
        case _:
            # What is no key of a replica may stand where those of a stage do.
            stage = key.removeprefix(keys.replicas_prefix(namespace)).partition("/")[0]
            return "", int(stage) if stage.isascii() and stage.isdigit() and len(stage) <= _DIGITS else None, ""


def _leases(evidence: Evidence) -> Iterator[Finding]:
    found = [
        item.key
        for item in evidence.items
        if not item.lease_id
        and isinstance(keys.parse_key(evidence.namespace, item.key), keys.ReplicaKey | keys.HubKey)
        # Of one that can't be read it is said already that it is to be deleted.
        and item.key not in evidence.view.bad
    ]
    for key in found[:_SHOWN]:
        text = f"{one_line(key)} has no lease: it stays when its process dies"
        advice = f"if nobody is behind it: {_deletes(key)}"
        yield Finding(Grade.PROBLEM, "lease", text, advice, _delete(key))
    if len(found) > _SHOWN:
        text = f"{len(found) - _SHOWN} more keys have no lease, the last of them {found[-1]}"
        yield Finding(Grade.PROBLEM, "lease", text, "delete those above, and the next will be shown here")
    if not found:
        yield Finding(Grade.OK, "lease", "every replica and hub is under a lease")


def _clocks(evidence: Evidence) -> Iterator[Finding]:
    """Find hosts whose clock is ahead of this machine's, or behind that of a host that wrote earlier."""
    apart: dict[str, float] = {}
    by_key = {keys.replica_key(evidence.namespace, *key): info for key, info in evidence.view.replicas.items()}
    latest_s, latest_host = 0.0, ""
    for item in sorted(evidence.items, key=lambda item: item.mod_revision):
        info = by_key.get(item.key)
        if info is None or not 0.0 <= info.last_heartbeat < _LAST_MOMENT_S:
            continue
        ahead_s = info.last_heartbeat - evidence.now_s
        if ahead_s > _CLOCK_S:
            apart[f"{info.host} is {ahead_s:.0f} s ahead of this machine"] = ahead_s
        if latest_s - info.last_heartbeat > _CLOCK_S and info.host != latest_host:
            apart[f"{info.host} is at least {latest_s - info.last_heartbeat:.0f} s behind {latest_host}"] = 0.0
        if info.last_heartbeat > latest_s:
            latest_s, latest_host = info.last_heartbeat, info.host
    for text in apart:
        yield Finding(
            Grade.NOTE, "clock", f"the clock of {text}",
            "ages and history are shown wrongly, nothing else depends on it; see to NTP there",
        )  # fmt: skip
    if not apart:
        yield Finding(Grade.OK, "clock", f"no clock is seen to differ by more than {_CLOCK_S:g} s")


def _pipeline(evidence: Evidence) -> Iterator[Finding]:
    deploy, reason = _deploy_of(evidence)
    if deploy is None:
        grade = Grade.PROBLEM if reason or evidence.view.replicas else Grade.NOTE
        text = f"the pipeline key can't be read: {reason}" if reason else "no pipeline is in force"
        mend = "replace it with omni pipeline apply FILE" if reason else "start a hub with --deploy-config; it puts one"
        command = ("omni", "pipeline", "apply", "pipeline.yaml") if reason else ()
        yield Finding(grade, "pipeline", text, mend, command)
        return
    yield from examine_versions(evidence, deploy)


def _stages(evidence: Evidence) -> Iterator[Finding]:
    deploy, _ = _deploy_of(evidence)
    able: dict[int, int] = defaultdict(int)
    for info in evidence.view.replicas.values():
        able[info.stage_id] += info.takes_new_work
        if info.status is ReplicaStatus.ERROR:
            text = f"replica {info.stage_id}/{info.replica_id} reports an error: {info.reason or 'no reason given'}"
            yield Finding(
                Grade.PROBLEM, "replica", text, f"see its log on {info.host}, process {info.pid}", _history(info),
                replica=_name(info), stage_id=info.stage_id,
            )  # fmt: skip
        elif info.lost_slots and info.status is ReplicaStatus.UP:
            text = f"replica {_name(info)} is up, but {info.reason}"
            yield Finding(
                Grade.PROBLEM, "slots", text, _COUNT_ANEW, _drain(info), _name(info), info.stage_id,
                *_why(evidence, min(evidence.view.hubs, default=""), _name(info)),
            )  # fmt: skip
        elif info.reason and (info.status is ReplicaStatus.UP or info.phase == WAITING_PHASE):
            state = "is up, but" if info.status is ReplicaStatus.UP else "waits:"
            text = f"replica {info.stage_id}/{info.replica_id} {state} {info.reason}"
            advice = "it goes on by itself once that is mended"
            why = _why(evidence, min(evidence.view.hubs, default=""), "--last-failures")
            yield Finding(Grade.PROBLEM, "replica", text, advice, (), _name(info), info.stage_id, *why)
        elif info.status is ReplicaStatus.STARTING and info.reason:
            # Releases before 0.2 don't say whose reason it is.
            reason = info.reason if info.reason.startswith(FORMER_END) else f"{FORMER_END}{info.reason}"
            text = f"replica {_name(info)} starts anew; {reason}"
            advice = f"if that goes on, see the log of its supervisor on {info.host}"
            yield Finding(Grade.NOTE, "replica", text, advice, (), _name(info), info.stage_id)
    for stage in deploy.stages if deploy else ():
        if not able[stage.stage_id]:
            yield _deserted_stage(evidence, stage.stage_id)


def _deserted_stage(evidence: Evidence, stage_id: int) -> Finding:
    text = f"stage {stage_id} has nobody who takes work: its requests get 503"
    infos = [evidence.view.replicas[key] for key in sorted(evidence.view.replicas) if key[0] == stage_id]
    kept = [info for info in infos if info.status is ReplicaStatus.UP]
    if not kept:
        start = ("omni", "serve", "--headless", "--stage-id", str(stage_id))
        advice = "start a replica of it, or see `omni replicas` for why"
        return Finding(Grade.PROBLEM, "stage", text, advice, start, stage_id=stage_id)
    text += f"; up but kept from it: {', '.join(map(_name, kept[:_SHOWN]))}"
    advice = f"let it take work again: {_undo(kept[0])}; or start another replica"
    word = "cordon" if kept[0].cordoned else "weight"
    command = ("omni", word, _name(kept[0]), "--undo")
    return Finding(Grade.PROBLEM, "stage", text, advice, command, stage_id=stage_id)


def _undo(info: ReplicaInfo) -> str:
    """The commands that let a replica take work which an operator keeps from it."""
    words = [word for word, holds in (("cordon", info.cordoned), ("weight", info.weight == 0)) if holds]
    return " and ".join(f"omni {word} {_name(info)} --undo" for word in words)


def _drain(info: ReplicaInfo) -> tuple[str, ...]:
    """The command that takes a replica out, so that its supervisor can be started again."""
    return "omni", "drain", _name(info)


def _history(info: ReplicaInfo) -> tuple[str, ...]:
    """The command that shows how the processes of a replica ended."""
    return "omni", "history", _name(info)


def _delete(key: str) -> tuple[str, ...]:
    """The command that deletes a key; none for one that a terminal would not show as it is."""
    begin = begin_of_cut(key)
    words = ("etcdctl", "del", "--prefix", begin) if begin else ("etcdctl", "del", key)
    return words if is_shown(words[-1]) else ()


def _deletes(key: str) -> str:
    """The same as an operator types it: a shell takes no part of the key for anything else."""
    return shlex.join(_delete(key)) or "etcdctl del, of a key that no terminal shows as it is"


#: Edges of one record that are looked at: a document has at most 256 stages.
_MOST_EDGES: Final = 256


def _handoffs(evidence: Evidence) -> Iterator[Finding]:
    """Check that replicas on other hosts can reach the addresses at which connectors hand over."""
    infos = sorted(evidence.view.replicas.values(), key=lambda info: (info.stage_id, info.replica_id))
    # By stage and host: a record that went through all others for each of its edges would take hours of ten thousand.
    hosts: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for info in infos:
        if info.host:
            hosts[str(info.stage_id)][info.host].append(_name(info))
    count = 0
    for info in infos:
        for edge, where in islice(info.connectors.items(), _MOST_EDGES):
            (begin, _, end), host = edge.partition("-"), where.get("host") if isinstance(where, Mapping) else None
            if begin != str(info.stage_id) or end not in hosts or not isinstance(host, str):
                continue
            apart = _elsewhere(hosts[end], info.host)
            if not apart or not is_loopback(host):
                continue
            count += 1
            if count <= _MOST_MISMATCHED:
                names = ", ".join(apart)
                text = f"replica {_name(info)} on {info.host} hands over at {host}, out of reach of {names} elsewhere"
                advice = "give it an address that others reach, by --omni-replica-address or the connector's 'host'"
                yield Finding(Grade.PROBLEM, "hand-off", text, advice)
    if count > _MOST_MISMATCHED:
        text = f"{count - _MOST_MISMATCHED} more hand over at loopback, out of reach of replicas elsewhere"
        yield Finding(Grade.PROBLEM, "hand-off", text)


def _elsewhere(hosts: Mapping[str, Sequence[str]], own: str) -> list[str]:
    """Some of the replicas that are on other hosts."""
    found: list[str] = []
    for host, names in hosts.items():
        found += names[:_SHOWN] if host != own else ()
        if len(found) >= _SHOWN:
            break
    return found[:_SHOWN]


def _control(evidence: Evidence) -> Iterator[Finding]:
    yield from _kept_cordons(evidence)
    for item in evidence.items:
        parsed = keys.parse_key(evidence.namespace, item.key)
        if not isinstance(parsed, keys.ReplicaControlKey):
            continue
        name = f"{parsed.stage_id}/{parsed.replica_id}"
        info = evidence.view.replicas.get((parsed.stage_id, parsed.replica_id))
        try:
            wish = parse(item.value)
        except ControlError as error:
            advice = f"correct it, or: {_deletes(item.key)}"
            yield Finding(Grade.PROBLEM, "control", f"{item.key}: {error}", advice, _delete(item.key))
            continue
        if info is None:
            text = f"{item.key} is for nobody: no replica {name} is registered; the next one with that id obeys it"
            yield Finding(Grade.NOTE, "control", text, f"if it is not wanted: {_deletes(item.key)}")
        elif wish.drain and wish.epoch not in (None, info.epoch):
            text = f"{item.key} drains epoch {wish.epoch}, which is over; {name} is at {info.epoch} and ignores it"
            yield Finding(Grade.NOTE, "control", text, f"it may go: {_deletes(item.key)}")
        elif (
            answered_revision(info.control_revision, info.control_error) < item.mod_revision
            and evidence.now_s - info.last_heartbeat > _CLOCK_S
        ):
            text = f"replica {name} has not answered revision {item.mod_revision} of its control key"
            advice = f"is its process {info.pid} on {info.host} well?"
            yield Finding(Grade.PROBLEM, "control", text, advice, _history(info))
        elif info.cordoned or info.weight == 0:
            text = f"replica {name} is kept from new work: {one_line(item.value.decode())}"
            advice = f"to let it take work: {_undo(info)}"
            if item.mod_revision < info.epoch:
                text += "; that was written before it registered, or put back by it when etcd had lost it"
                advice = f"if it is not meant for this one: {_undo(info)}"
            yield Finding(Grade.NOTE, "control", text, advice, (), name, info.stage_id)


def _kept_cordons(evidence: Evidence) -> Iterator[Finding]:
    """Find replicas that are cordoned though no control key says so: etcd has lost it."""
    written = {item.key for item in evidence.items}
    for (stage_id, replica_id), info in sorted(evidence.view.replicas.items()):
        if info.cordoned and keys.replica_control_key(evidence.namespace, stage_id, replica_id) not in written:
            name = f"{stage_id}/{replica_id}"
            text = f"replica {name} is kept from new work, and its control key is gone: {info.control_error}"
            advice = f"to let it take work: omni cordon {name} --undo"
            yield Finding(Grade.NOTE, "control", text.rstrip(": "), advice, (), name, stage_id)


def _hubs(evidence: Evidence) -> Iterator[Finding]:
    for hub_id in sorted(evidence.view.revoked):
        hub, key = evidence.view.hubs.get(hub_id), keys.hub_control_key(evidence.namespace, hub_id)
        if hub is None:
            text = f"hub {hub_id} is revoked; it is not registered"
            yield Finding(Grade.NOTE, "hub", text, f"when it is gone for good: {_deletes(key)}", hub=hub_id)
        else:
            text = f"hub {hub_id} is revoked and still registered: its process {hub.pid} on {hub.host} serves nobody"
            advice = f"stop it there, or let it in again: omni hub allow {hub_id}"
            yield Finding(Grade.PROBLEM, "hub", text, advice, ("omni", "hub", "allow", hub_id), hub=hub_id)
    yield from _copied_hubs(evidence.namespace, evidence.view.hubs)


#: How many of the hubs with one key are named.
_NAMED: Final = 5


def _copied_hubs(namespace: str, hubs: Mapping[str, HubRecord]) -> Iterator[Finding]:
    by_key: defaultdict[str, list[str]] = defaultdict(list)
    for hub_id, hub in sorted(hubs.items()):
        if hub.curve_public_key:
            by_key[hub.curve_public_key].append(hub_id)
    for hub_ids in by_key.values():
        if len(hub_ids) > 1:
            more = f" and {len(hub_ids) - _NAMED} more" if len(hub_ids) > _NAMED else ""
            text = f"hubs {', '.join(hub_ids[:_NAMED])}{more} have one public key: all these records but one are copies"
            advice = f"delete them, a hub that runs writes its own again: etcdctl del {keys.hub_key(namespace, 'ID')}"
            yield Finding(Grade.PROBLEM, "hub", text, advice)


#: From this part of its requests on, a hub's failures are wrong; fewer are a note.
_FAILED_PART: Final = 0.01


def _reports(evidence: Evidence) -> Iterator[Finding]:
    """Find what the hubs report: requests that fail, replicas that they can't use or that vanished."""
    reports = read_reports(evidence.view, evidence.beats())
    for seen in (each for troubles in reports.troubles.values() for each in troubles):
        text = f"replica {seen.trouble.name} is {seen.describe(evidence.now_s)}"
        info = evidence.view.replicas[seen.trouble.stage_id, seen.trouble.replica_id]
        advice, command = f"see its log on {info.host}, process {info.pid}", _history(info)
        if seen.trouble.kind == TroubleKind.SLOW:
            advice += "; until it is as fast as the others, give it less"
            command = ("omni", "weight", seen.trouble.name, "0.5")
        # Of one that does not answer, a hub knows no more than that.
        is_told = seen.trouble.kind not in (TroubleKind.NO_SESSION, TroubleKind.UNUSABLE)
        why = _why(evidence, seen.hubs[0], seen.trouble.name) if is_told else ()
        yield Finding(Grade.PROBLEM, "replica", text, advice, command, seen.trouble.name, info.stage_id, *why)
    for seen in reports.lost:
        text = f"replica {seen.trouble.name} was {seen.describe(evidence.now_s)}"
        advice = "its supervisor may be about to start it again; if it is gone for good, this ends within an hour"
        yield Finding(
            Grade.PROBLEM,
            "replica",
            text,
            advice,
            ("omni", "history", seen.trouble.name),
            seen.trouble.name,
            seen.trouble.stage_id,
        )
    if reports.more:
        text = f"{reports.more} more replicas are in trouble than the hubs name"
        yield Finding(Grade.PROBLEM, "replica", text, "see /ready and the logs of the hubs")
    slots: Counter[int] = Counter()
    for info in evidence.view.replicas.values():
        slots[info.stage_id] += info.capacity if info.takes_new_work else 0
    for hub_id, health in reports.health.items():
        yield _judge_requests(evidence, hub_id, health)
        yield from _overloads(evidence, hub_id, health, slots)
        yield from _slow_clients(evidence, hub_id, health)
    for hub_id in reports.silent:
        text = f"hub {hub_id} does not report: whether its requests fail, and whom it ejects, is unknown"
        advice = "it has just started, or is of an older release; its /ready, /metrics and log say more"
        yield Finding(Grade.NOTE, "requests", text, advice)


#: A stage falls behind if so many times its slots wait for it.
_BEHIND: Final = 2.0
#: Requests that were refused longer ago, in seconds, don't count as overload of now.
_LATELY_S: Final = 30.0


def _overloads(evidence: Evidence, hub_id: str, health: HubHealth, slots_of: Mapping[int, int]) -> Iterator[Finding]:
    """Find the stages that get more than they can serve; ``slots_of`` a stage are those that take work."""
    loads = [] if health.loads is msgspec.UNSET else health.loads
    for load in loads:
        is_refusing = evidence.now_s - load.refused_at <= _LATELY_S
        refused = f"{_count(load.refused, 'request')} answered 429 in {health.window_s / 60:g} min"
        if load.stage_id is None:
            if is_refusing:
                text = f"hub {hub_id} has as many requests as it may have: {refused}"
                if health.unread is not msgspec.UNSET:
                    text += f"; {health.unread.count} of them wait for clients that don't read"
                yield Finding(Grade.PROBLEM, "load", text, "add a hub, raise --max-in-flight, or send less")
            continue
        slots = slots_of.get(load.stage_id, 0)
        is_behind = load.waiting >= _BEHIND * slots > 0
        if not (is_refusing or is_behind):
            continue
        text = f"stage {load.stage_id} is overloaded, says hub {hub_id}: {load.waiting} wait for {slots} slots"
        text += f", {refused}" if load.refused else ""
        command = ("omni", "serve", "--headless", "--stage-id", str(load.stage_id))
        advice = "add replicas of that stage, or send less"
        why = _why(evidence, hub_id, "--waiting")
        yield Finding(Grade.PROBLEM, "load", text, advice, command, "", load.stage_id, *why)


_SLOW_CLIENT: Final = (
    "see to that client, or to the network or proxy before it. Only its own request stands still: that gives its slot"
    " to others, and ends once its client takes nothing for --send-timeout, or the hub is full"
)


def _slow_clients(evidence: Evidence, hub_id: str, health: HubHealth) -> Iterator[Finding]:
    """Find hubs with clients that don't read what is there of their answers."""
    if health.unread is msgspec.UNSET or not health.unread.count:
        return
    waited_s = max(0.0, evidence.now_s - health.unread.since)
    has = "has" if health.unread.count == 1 else "have"
    text = f"{_count(health.unread.count, 'request')} of hub {hub_id} {has} a client that reads too slowly: "
    text += f"what is there of the answer has waited for {waited_s:.0f} s"
    why = _why(evidence, hub_id, "--waiting")
    yield Finding(Grade.PROBLEM, "client", text, _SLOW_CLIENT, (), "", None, *why)


def _why(evidence: Evidence, hub_id: str, what: str) -> tuple[tuple[str, ...], str]:
    """``omni why`` for a hub, and the host where it is asked without a token; nothing for a hub that is not there."""
    hub = evidence.view.hubs.get(hub_id)
    return ((), "") if hub is None else (("omni", "why", what), hub.host)


def _judge_requests(evidence: Evidence, hub_id: str, health: HubHealth) -> Finding:
    """Judge how many of a hub's requests failed lately."""
    minutes = f"{health.window_s / 60:g} min"
    if not health.failed:
        text = f"hub {hub_id} had {_count(health.requests, 'request')} in {minutes}, none failed"
        return Finding(Grade.OK, "requests", text)
    stages = "; ".join(
        f"{'no stage' if each.stage_id is None else f'stage {each.stage_id}'}: "
        + ", ".join(f"{count} {one_line(kind)}" for kind, count in each.kinds.items())
        for each in health.failures
    )
    text = f"hub {hub_id}: {health.failed} of {_count(health.requests, 'request')} failed in {minutes} ({stages})"
    grade = Grade.PROBLEM if health.failed >= _FAILED_PART * health.requests else Grade.NOTE
    advice = "its log has a line request.failed for each, with replica and cause"
    return Finding(grade, "requests", text, advice, (), "", None, *_why(evidence, hub_id, "--last-failures"))


def _encryption(evidence: Evidence) -> Iterator[Finding]:
    """Check that all hubs and replicas use encrypted sockets, or none does."""
    view = evidence.view
    secured = {f"replica {_name(info)}": bool(info.curve_public_key) for info in view.replicas.values()}
    secured |= {f"hub {hub_id}": bool(hub.curve_public_key) for hub_id, hub in view.hubs.items()}
    plain = sorted(name for name, is_secured in secured.items() if not is_secured)
    if not plain:
        return
    named = ", ".join(plain[:_SHOWN])
    if len(plain) < len(secured):
        text = f"some encrypt and some don't, and can't talk to each other; without encryption: {named}"
        yield Finding(Grade.PROBLEM, "encryption", text, "start all of them with the same --zmq-security")
    else:
        text = "nobody encrypts: whoever sees the network reads and writes prompts"
        yield Finding(Grade.NOTE, "encryption", text, "leave out --zmq-security none")


def _versions(evidence: Evidence) -> Iterator[Finding]:
    found: dict[str, list[str]] = defaultdict(list)
    for info in evidence.view.replicas.values():
        if info.version:
            found[info.version].append(_name(info))
    if len(found) > 1:
        shown = "; ".join(f"{version}: {', '.join(names[:_SHOWN])}" for version, names in sorted(found.items()))
        yield Finding(Grade.NOTE, "version", f"replicas of several releases: {shown}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _name(info: ReplicaInfo) -> str:
    return f"{info.stage_id}/{info.replica_id}"


def _deploy_of(evidence: Evidence) -> tuple[DeployConfig | None, str]:
    if evidence.view.pipeline is None:
        return None, ""
    try:
        return decode_deploy(evidence.view.pipeline, keys.pipeline_key(evidence.namespace)), ""
    except ConfigError as error:
        return None, str(error)
