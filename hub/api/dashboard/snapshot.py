"""The snapshot of a hub for the dashboard: of its pools and counters, the findings about its keys, and events. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Final

from hub.api.dashboard.model import (
    Checks,
    DashboardSnapshot,
    ShownEdge,
    ShownNeed,
    ShownReplica,
    ShownStage,
    ShownTraffic,
    Spread,
)
from hub.api.dashboard.rates import OK, RateWindow, failed_in
from hub.pool.outliers import OutlierState
from hub.pool.status import ASLEEP_PHASE
from omni_discovery.commands.findings.checks import Finding, Grade
from omni_discovery.records.schema import ReplicaStatus, own_reason
from omni_discovery.text import one_line
from omni_discovery.view.recent_events import Tone

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hub.pool.entry import Entry
    from hub.pool.status import StageStatus
    from omni_discovery.deploy.document import DeployConfig
    from omni_discovery.view.recent_events import ShownEvent

#: Replicas of one stage that are shown, and findings.
MOST_REPLICAS: Final = 100
_MOST_NEEDS: Final = 40
#: Characters of a text from a record.
_TEXT_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class HubState:
    """One moment of a hub. ``at`` is its wall clock, ``now_s`` the same moment, monotonic."""

    at: float
    now_s: float
    hub_id: str
    namespace: str
    version: str
    url: str
    revision: int
    stale_s: float | None
    is_running: bool
    is_revoked: bool
    #: Why the document in force is not served; empty if it is.
    pipeline_problem: str
    deploy: DeployConfig
    stages: Sequence[StageStatus]
    #: The replicas, and the requests that wait for a slot, of each stage.
    entries: Mapping[int, Sequence[Entry]]
    waiting: Mapping[int, int]
    in_flight: int


@dataclass(frozen=True, slots=True)
class Judged:
    """The last findings about the keys of the namespace, and when they were made; None: not yet."""

    findings: Sequence[Finding] = ()
    at: float | None = None
    #: Why they could not be made anew.
    problem: str = ""


def build_snapshot(
    state: HubState, rates: RateWindow, judged: Judged, events: Iterable[ShownEvent]
) -> DashboardSnapshot:
    """All that the page shows of one moment."""
    fine = sum(finding.grade is Grade.OK for finding in judged.findings)
    return DashboardSnapshot(
        at=state.at,
        hub_id=state.hub_id,
        namespace=state.namespace,
        version=state.version,
        url=state.url,
        revision=state.revision,
        stale_s=state.stale_s,
        needs=needs_of(state, judged.findings),
        checks=Checks(fine=fine, at=judged.at, problem=_short(judged.problem)),
        stages=tuple(_stage(state, status, rates) for status in state.stages),
        edges=tuple(_edges(state, rates)),
        traffic=_traffic(state, rates),
        events=tuple(events),
    )


# ---- what needs somebody


def needs_of(state: HubState, findings: Sequence[Finding]) -> tuple[ShownNeed, ...]:
    """What needs the operator, the worst first: what this hub knows by itself, then the findings."""
    own = list(_own_needs(state))
    served = any(need.topic == "stage" for need in own)
    wrong = [each for each in findings if each.grade is not Grade.OK and not (served and each.topic == "stage")]
    found = [
        ShownNeed(
            tone=Tone.BAD if each.grade is Grade.PROBLEM else Tone.WARN,
            topic=each.topic,
            text=_short(each.text),
            advice=_short(each.advice),
            command=_short(shlex.join(each.command)),
        )
        for each in wrong
    ]
    needs = sorted([*own, *found], key=lambda need: need.tone is not Tone.BAD)
    return tuple(needs[:_MOST_NEEDS])


def _own_needs(state: HubState) -> Iterator[ShownNeed]:
    if not state.is_running:
        text = "this hub takes no requests any more"
        yield ShownNeed(tone=Tone.BAD, topic="hub", text=text, advice="its log says why: hub.died; start it again")
    if state.is_revoked:
        text = "this hub is revoked: no replica listens to it"
        yield ShownNeed(tone=Tone.BAD, topic="hub", text=text, advice=f"omni hub allow {state.hub_id}")
    if state.stale_s is not None:
        text = f"the view of the registry is stale for {state.stale_s:.0f} s; serving goes on by it"
        yield ShownNeed(tone=Tone.BAD, topic="view", text=text, advice="see whether etcd is well: omni etcd check")
    if state.pipeline_problem:
        text = f"the pipeline in force is not served by this hub: {state.pipeline_problem}"
        yield ShownNeed(tone=Tone.BAD, topic="pipeline", text=_short(text))
    for stage in state.stages:
        if not stage.pickable:
            text = f"stage {stage.stage_id} has nobody who takes work ({stage.why_absent or 'none is registered'})"
            advice = "start a replica of it; omni doctor looks for what is wrong"
            yield ShownNeed(tone=Tone.BAD, topic="stage", text=_short(text), advice=advice)
        if failing := stage.failures.describe(state.now_s):
            text = f"requests keep failing at stage {stage.stage_id}: {failing}"
            advice = "the log's lines request.failed say why"
            yield ShownNeed(tone=Tone.BAD, topic="requests", text=_short(text), advice=advice)


# ---- stages and replicas


def _stage(state: HubState, status: StageStatus, rates: RateWindow) -> ShownStage:
    stage = state.deploy.stage(status.stage_id)
    entries = sorted(state.entries.get(status.stage_id, ()), key=lambda entry: entry.info.replica_id)
    return ShownStage(
        stage_id=status.stage_id,
        engine=stage.engine,
        model=_short(stage.model.rstrip("/").rpartition("/")[2]),
        output=stage.final_output,
        wanted=stage.runtime.num_replicas,
        registered=status.registered,
        able=0 if state.is_revoked else status.pickable,
        slots=sum(entry.capacity for entry in entries if entry.pickable),
        waiting=state.waiting.get(status.stage_id, 0),
        why_absent=_short(status.why_absent),
        failing=status.failures.describe(state.now_s),
        work=rates.stage(status.stage_id, "generate"),
        queue=rates.stage(status.stage_id, "queue"),
        replicas=tuple(show_replica(entry, state.at) for entry in entries[:MOST_REPLICAS]),
        more=max(0, len(entries) - MOST_REPLICAS),
    )


def show_replica(entry: Entry, at: float) -> ShownReplica:
    """One replica, as its record and this hub see it."""
    info = entry.info
    tone, word, why = _state_of(entry)
    is_starting = info.status is ReplicaStatus.STARTING
    return ShownReplica(
        name=info.name,
        stage_id=info.stage_id,
        replica_id=info.replica_id,
        epoch=info.epoch,
        tone=tone,
        state=word,
        why=_short(why),
        progress=info.progress if is_starting and info.phase != ASLEEP_PHASE else None,
        takes_work=entry.pickable and entry.health.state is OutlierState.FINE,
        cordoned=info.cordoned,
        weight=info.weight,
        load=entry.own_load(),
        capacity=entry.capacity,
        in_flight=len(entry.in_flight),
        credits=entry.credits if entry.uses_credits else None,
        host=_short(info.host),
        pid=info.pid,
        device=_short(info.device),
        version=_short(info.version),
        age_s=_age(at, info.registered_at),
        written_s=_age(at, info.last_heartbeat),
    )


def _state_of(entry: Entry) -> tuple[Tone, str, str]:
    """How a replica is drawn, its state in a word or two, and why."""
    info = entry.info
    reason = own_reason(info.reason)
    if not entry.registered:
        return Tone.WARN, "held" if entry.held else "leaving", "the registry lists it no more"
    if info.status is ReplicaStatus.UP:
        return _seen(entry) or (Tone.GOOD, "up", reason)
    if info.status is ReplicaStatus.ERROR:
        return Tone.BAD, "error", reason or "it gives no reason"
    if info.status is not ReplicaStatus.STARTING:
        return Tone.QUIET, str(info.status), reason
    if info.phase == ASLEEP_PHASE:
        return Tone.QUIET, ASLEEP_PHASE, ""
    return Tone.QUIET, "starting", "; ".join(filter(None, (info.phase, reason)))


def _seen(entry: Entry) -> tuple[Tone, str, str] | None:
    """Why this hub does not use a replica that is up by its record, or not as others; None if it does."""
    info, health = entry.info, entry.health
    if entry.unusable or entry.refused:
        return Tone.BAD, "unusable" if entry.unusable else "refused", entry.unusable or entry.refused
    if not entry.answers:
        return Tone.BAD, "no session", entry.down_reason or "it does not answer this hub yet"
    if health.state is OutlierState.EJECTED:
        return Tone.BAD, "ejected", health.reason
    if health.state is OutlierState.PROBED:
        return Tone.WARN, "on probation", f"its next request decides; it was ejected: {health.reason}"
    if info.cordoned or info.weight <= 0:
        return Tone.QUIET, "cordoned" if info.cordoned else "weight 0", "it takes nothing new"
    return None


# ---- edges and traffic


def _edges(state: HubState, rates: RateWindow) -> Iterator[ShownEdge]:
    """From the client to the first stages, between stages, and from those whose output is shown back to the client."""
    for stage in state.deploy.stages:
        inputs = state.deploy.inputs_of(stage.stage_id)
        done, transfer = rates.stage(stage.stage_id, "generate"), rates.stage(stage.stage_id, "transfer")
        if not inputs:
            submit = rates.stage(stage.stage_id, "submit")
            yield ShownEdge(from_stage=None, to_stage=stage.stage_id, flow=submit)
        for producer in inputs:
            yield ShownEdge(
                from_stage=producer,
                to_stage=stage.stage_id,
                connector=_short(state.deploy.connector_of(producer, stage.stage_id).name),
                in_pieces=state.deploy.async_chunk_of(producer, stage.stage_id),
                flow=Spread(per_s=done.per_s, p50_s=transfer.p50_s, p99_s=transfer.p99_s),
            )
        if stage.final_output != "none":
            first = rates.stage(stage.stage_id, "first_output")
            yield ShownEdge(from_stage=stage.stage_id, to_stage=None, flow=first)


def _traffic(state: HubState, rates: RateWindow) -> ShownTraffic:
    counts = rates.latest
    return ShownTraffic(
        window_s=rates.length_s,
        in_flight=state.in_flight,
        ended=rates.requests(),
        first_output=rates.first_output(),
        failed_per_s=rates.failed_per_s(),
        total_ok=round(counts.outcomes.get(OK, 0.0)),
        total_failed=round(failed_in(counts)),
        total_retries=round(counts.retries),
        total_continued=round(counts.continued),
    )


def _age(at: float, since: float) -> float:
    """Seconds since a moment of another host's clock; 0 for one to come."""
    return max(0.0, at - since) if isfinite(since) and since > 0 else 0.0


def _short(text: str) -> str:
    return one_line(text)[:_TEXT_CHARS]
