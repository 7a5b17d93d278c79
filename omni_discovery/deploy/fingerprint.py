"""Fingerprints, short hashes of deploy documents and of one stage's part; which replicas mismatch for theirs. Pure."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from omni_discovery.deploy.document import DeployConfig, StageConfig, decode_deploy
from omni_discovery.errors import ConfigError
from omni_discovery.records.schema import ReplicaInfo


def stage_fingerprint(deploy: DeployConfig, stage_id: int) -> str:
    """Return a hash of the stage's part of the document and of its edges, which its replicas must have in common.

    ``runtime`` is left out, and so are values that are the defaults, so that a release with more keys computes the same
    hash. Raise ConfigError for an unknown stage.
    """
    stage = deploy.stage(stage_id)
    content: dict[str, Any] = {
        name: value
        for name, value, default in _fields(stage, StageConfig(stage_id=stage_id, engine=stage.engine))
        if name != "runtime" and (value != default or name in ("stage_id", "engine"))
    }
    content["input_from"] = deploy.inputs_of(stage_id)
    edges = [edge for edge in deploy.edges if stage_id in (edge.from_, edge.to)]
    if edges:
        named = [deploy.connectors.get(edge.connector) for edge in edges]
        content["edges"] = edges
        content["connectors"] = [connector and (connector.name, connector.extra) for connector in named]
    return _hash(msgspec.json.encode(content, order="sorted"))


def stage_fingerprints(deploy: DeployConfig) -> dict[int, str]:
    """Return the fingerprint of each stage by stage id."""
    return {stage.stage_id: stage_fingerprint(deploy, stage.stage_id) for stage in deploy.stages}


def document_fingerprint(document: bytes) -> str:
    """Return the hash of a deploy document's bytes in the registry."""
    return _hash(document)


def _fields(stage: StageConfig, defaults: StageConfig) -> list[tuple[str, Any, Any]]:
    return [(name, getattr(stage, name), getattr(defaults, name)) for name in stage.__struct_fields__]


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


#: The reason for a replica that was started with a document which this hub does not serve.
OTHER_DOCUMENT: Final = "it runs another deploy document than the one in force"


def mismatches(
    listed: Iterable[ReplicaInfo],
    knows: Callable[[ReplicaInfo], bool],
    counts: Callable[[ReplicaInfo], bool] = lambda _info: True,
) -> list[tuple[ReplicaInfo, str]]:
    """Return the replicas that must not be picked, each with the reason.

    A replica must not be picked if ``knows`` is false for it (its deploy document is not served), or if its model files
    differ from the files that most replicas of the same document have loaded. Only those of which ``counts`` is true
    are counted: anybody may write a record. In a tie, the files of the replica whose record etcd saw first count.
    """
    found: list[tuple[ReplicaInfo, str]] = []
    alike: dict[tuple[int, str], dict[str, list[ReplicaInfo]]] = defaultdict(lambda: defaultdict(list))
    for info in listed:
        if not knows(info):
            found.append((info, OTHER_DOCUMENT))
        elif info.content:
            alike[info.stage_id, info.fingerprint][info.content].append(info)
    for by_content in alike.values():
        if len(by_content) > 1:
            right = max(by_content, key=lambda content: _claim(by_content[content], counts))
            for content, infos in by_content.items():
                if content != right:
                    why = f"it has loaded other files of its model ({content}) than most of its stage ({right})"
                    found += [(info, why) for info in infos]
    return found


def mismatches_in_force(listed: Iterable[ReplicaInfo], pipeline: bytes | None) -> list[tuple[ReplicaInfo, str]]:
    """Return the replicas that mismatch the pipeline in force, given as its bytes; none if it can't be decoded."""
    try:
        expected = stage_fingerprints(decode_deploy(pipeline, "")) if pipeline is not None else {}
    except ConfigError:
        return []
    return mismatches(listed, lambda info: not expected or info.fingerprint in ("", expected.get(info.stage_id)))


def _claim(infos: list[ReplicaInfo], counts: Callable[[ReplicaInfo], bool]) -> tuple[int, float, str]:
    able = [info for info in infos if info.takes_new_work]
    # Not the moment that a record claims for itself.
    first = min((info.epoch for info in able), default=math.inf)
    return sum(map(counts, able)), -first, infos[0].content
