"""Short hashes by which versions are told apart: of one stage's part of a deploy document, and of a whole one. Pure.

Which replicas must not be picked for what they run, and why. Pure; hubs and the operator's commands go by it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from omni_discovery.deploy.document import DeployConfig, StageConfig, decode_deploy
from omni_discovery.errors import ConfigError
from omni_discovery.records.schema import ReplicaInfo


def stage_fingerprint(deploy: DeployConfig, stage_id: int) -> str:
    """What must be equal between replicas of one stage: all that the document says of it and of its edges.

    Where its replicas run does not count. Nor does what the document leaves out, so that a release which knows more
    keys makes the same of it. Raise ConfigError for a stage that is not there.
    """
    stage = deploy.stage(stage_id)
    said: dict[str, Any] = {
        name: value
        for name, value, usual in _fields(stage, StageConfig(stage_id=stage_id, engine=stage.engine))
        if name != "runtime" and (value != usual or name in ("stage_id", "engine"))
    }
    said["input_from"] = deploy.inputs_of(stage_id)
    edges = [edge for edge in deploy.edges if stage_id in (edge.from_, edge.to)]
    if edges:
        named = [deploy.connectors.get(edge.connector) for edge in edges]
        said["edges"] = edges
        said["connectors"] = [each and (each.name, each.extra) for each in named]
    return _hash(msgspec.json.encode(said, order="sorted"))


def stage_fingerprints(deploy: DeployConfig) -> dict[int, str]:
    """The fingerprint of each stage."""
    return {stage.stage_id: stage_fingerprint(deploy, stage.stage_id) for stage in deploy.stages}


def document_fingerprint(document: bytes) -> str:
    """Of a deploy document as it stands in the registry: who has read the same bytes has the same."""
    return _hash(document)


def _fields(stage: StageConfig, usual: StageConfig) -> list[tuple[str, Any, Any]]:
    return [(name, getattr(stage, name), getattr(usual, name)) for name in stage.__struct_fields__]


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


#: Why a replica is refused that was started with a document which is not served.
OTHER_DOCUMENT: Final = "it runs another deploy document than the one in force"


def mismatches(listed: Iterable[ReplicaInfo], knows: Callable[[ReplicaInfo], bool]) -> list[tuple[ReplicaInfo, str]]:
    """Who is refused, with the reason. ``knows``: whether a replica runs a document that is served.

    Of one document, those whose model's files differ from what most of them have loaded: where as many have loaded the
    one as the other, who registered first is right. Everybody who sees the same records says the same.
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
            right = max(by_content, key=lambda content: _claim(by_content[content]))
            for content, infos in by_content.items():
                if content != right:
                    why = f"it has loaded other files of its model ({content}) than most of its stage ({right})"
                    found += [(info, why) for info in infos]
    return found


def mismatches_in_force(listed: Iterable[ReplicaInfo], pipeline: bytes | None) -> list[tuple[ReplicaInfo, str]]:
    """Who does not match the pipeline in force, as it stands in the registry; nobody if that can't be read."""
    try:
        expected = stage_fingerprints(decode_deploy(pipeline, "")) if pipeline is not None else {}
    except ConfigError:
        return []
    return mismatches(listed, lambda info: not expected or info.fingerprint in ("", expected.get(info.stage_id)))


def _claim(infos: list[ReplicaInfo]) -> tuple[int, float, str]:
    able = [info for info in infos if info.takes_new_work]
    first_s = min((info.registered_at for info in able), default=float("inf"))
    return len(able), -first_s, infos[0].content
