"""What is wrong with the versions that a namespace runs: of documents, models and code. Pure; part of doctor.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from omni_discovery import keys
from omni_discovery.beats import decode_beat
from omni_discovery.deploy import DeployConfig
from omni_discovery.errors import RecordError
from omni_discovery.findings import Evidence, Finding, Grade
from omni_discovery.fingerprint import document_fingerprint, stage_fingerprints
from omni_discovery.messages import ReplicaInfo
from omni_discovery.mismatches import OTHER_DOCUMENT, mismatches

_SHOWN: Final = 8
_RESTART: Final = (
    "restart it: it comes back with the document in force; until then hubs which have served its document go on"
    " with that while it is rolled out, and all others refuse it"
)
_SAME_FILES: Final = "make the model's files the same on every host, then restart it; until then no hub picks it"
#: What replicas of one stage and one document usually have in common.
_ALIKE: Final = {"revision": "revision of the model", "dtype": "dtype", "tokenizer": "tokenizer", "code": "code"}


def examine_versions(evidence: Evidence, deploy: DeployConfig) -> Iterator[Finding]:
    """Who runs something else than the pipeline in force."""
    expected = stage_fingerprints(deploy)
    infos = [evidence.view.replicas[key] for key in sorted(evidence.view.replicas)]
    wrong = 0
    for info in infos:
        if info.stage_id not in expected:
            wrong += 1
            text = f"replica {_name(info)} serves a stage that the pipeline has not"
            advice = "stop it, or serve the other document in its own namespace"
            yield Finding(Grade.PROBLEM, "pipeline", text, advice)
    ours = [info for info in infos if info.stage_id in expected]
    for info, why in mismatches(ours, lambda info: info.fingerprint in ("", expected[info.stage_id])):
        wrong += 1
        text = f"replica {_name(info)} on {info.host} does not match: {why}"
        if why != OTHER_DOCUMENT:
            yield Finding(Grade.PROBLEM, "pipeline", text, _SAME_FILES)
            continue
        text += f" ({info.fingerprint} instead of {expected[info.stage_id]})"
        yield Finding(Grade.PROBLEM, "pipeline", text, _RESTART)
    if not wrong:
        count = len(deploy.stages)
        stages = f"{count} stage{'' if count == 1 else 's'}"
        yield Finding(Grade.OK, "pipeline", f"{stages} in force, all replicas run that")
    yield from _unlike(ours)
    yield from _hubs_behind(evidence)


def _unlike(infos: list[ReplicaInfo]) -> Iterator[Finding]:
    """Replicas of one stage and one document that differ in something that may be as it is meant."""
    for field, word in _ALIKE.items():
        found: dict[tuple[int, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for info in infos:
            if value := getattr(info, field):
                found[info.stage_id, info.fingerprint][value].append(_name(info))
        for (stage_id, _), by_value in sorted(found.items()):
            if len(by_value) > 1:
                shown = "; ".join(f"{value}: {', '.join(names[:_SHOWN])}" for value, names in sorted(by_value.items()))
                yield Finding(Grade.NOTE, "version", f"replicas of stage {stage_id} differ in their {word}: {shown}")


def _hubs_behind(evidence: Evidence) -> Iterator[Finding]:
    """Hubs that have seen the pipeline in force and serve another."""
    pipeline_key = keys.pipeline_key(evidence.namespace)
    in_force = next((item for item in evidence.items if item.key == pipeline_key), None)
    for item in evidence.items if in_force is not None else ():
        parsed = keys.parse_key(evidence.namespace, item.key)
        if not isinstance(parsed, keys.BeatKey) or parsed.hub_id not in evidence.view.hubs or in_force is None:
            continue
        try:
            beat = decode_beat(item.key, item.value)
        except RecordError:
            continue
        has_seen = beat.pipeline and beat.revision >= in_force.mod_revision
        if has_seen and beat.pipeline != document_fingerprint(in_force.value):
            hub = evidence.view.hubs[parsed.hub_id]
            text = f"hub {parsed.hub_id} on {hub.host} serves another document than the one in force"
            advice = "restart it with that: omni pipeline show > pipeline.yaml writes it; the hub's log says why"
            yield Finding(Grade.PROBLEM, "pipeline", text, advice)


def _name(info: ReplicaInfo) -> str:
    return f"{info.stage_id}/{info.replica_id}"
