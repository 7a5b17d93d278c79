"""Short hashes by which versions are told apart: of one stage's part of a deploy document, and of a whole one. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from omni_discovery.deploy import DeployConfig, StageConfig


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
