"""What is there beside what is asked for: a line for each stage and each hub. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from omni_discovery.commands.findings.checks import Evidence
from omni_discovery.deploy.document import DeployConfig, decode_deploy
from omni_discovery.errors import ConfigError
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.hub_reports import read_reports


@dataclass(frozen=True, slots=True)
class Loading:
    """One replica on its way up. ``progress`` is from 0 to 1; 0 is also that of engines that can't tell.

    ``is_again``: the process before it has failed.
    """

    name: str
    phase: str
    progress: float
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class StageLine:
    """One stage. What is None is not known."""

    stage_id: int
    engine: str
    #: ``num_replicas`` of the document in force.
    asked: int | None
    #: Replicas that take new work, are on their way up, and are registered all the same.
    up: int
    starting: int
    other: int
    busy: int
    slots: int
    #: Requests that wait in the hubs, and those that failed and were refused within the last minutes.
    waiting: int | None
    failed: int | None
    refused: int | None
    loading: tuple[Loading, ...] = ()


@dataclass(frozen=True, slots=True)
class HubSummary:
    """One hub. ``beat_age_s`` and ``requests``, those of the last ``window_s``, are None where they are not known."""

    hub_id: str
    host: str
    revoked: bool
    beat_age_s: float | None
    requests: int | None
    failed: int | None
    window_s: float


def stage_lines(evidence: Evidence) -> list[StageLine]:
    """A line for each stage of the document in force, and for those that only replicas have."""
    deploy = _deploy_in_force(evidence)
    asked = {stage.stage_id: stage for stage in deploy.stages} if deploy else {}
    by_stage: defaultdict[int, list[ReplicaInfo]] = defaultdict(list)
    for _, info in sorted(evidence.view.replicas.items()):
        by_stage[info.stage_id].append(info)
    reports = read_reports(evidence.view, evidence.beats())
    lines = []
    for stage_id in sorted({*asked, *by_stage}):
        infos = by_stage[stage_id]
        up = [info for info in infos if info.takes_new_work]
        loading = [info for info in infos if info.status is ReplicaStatus.STARTING]
        waiting, refused = (None, None) if reports.loads is None else reports.loads.get(stage_id, (0, 0))
        lines.append(
            StageLine(
                stage_id,
                engine=asked[stage_id].engine if stage_id in asked else "",
                asked=asked[stage_id].runtime.num_replicas if stage_id in asked else None,
                up=len(up),
                starting=len(loading),
                other=len(infos) - len(up) - len(loading),
                busy=sum(min(info.queue_length, info.capacity) for info in up),
                slots=sum(info.capacity for info in up),
                waiting=waiting,
                failed=None if reports.failed is None else reports.failed.get(stage_id, 0),
                refused=refused,
                loading=tuple(
                    Loading(info.name, info.phase, info.progress, is_again=bool(info.reason)) for info in loading
                ),
            )
        )
    return lines


def hub_lines(evidence: Evidence) -> list[HubSummary]:
    """A line for each registered hub."""
    view, beats = evidence.view, evidence.beats()
    health = read_reports(view, beats).health
    lines = []
    for hub_id, hub in sorted(view.hubs.items()):
        beat, report = beats.get(hub_id), health.get(hub_id)
        lines.append(
            HubSummary(
                hub_id,
                hub.host,
                revoked=hub_id in view.revoked,
                beat_age_s=None if beat is None else max(0.0, evidence.now_s - beat.written_at),
                requests=None if report is None else report.requests,
                failed=None if report is None else report.failed,
                window_s=0.0 if report is None else report.window_s,
            )
        )
    return lines


def _deploy_in_force(evidence: Evidence) -> DeployConfig | None:
    if evidence.view.pipeline is None:
        return None
    try:
        return decode_deploy(evidence.view.pipeline, keys.pipeline_key(evidence.namespace))
    except ConfigError:
        # A finding says so.
        return None
