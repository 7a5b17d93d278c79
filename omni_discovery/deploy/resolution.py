"""What a hub asks the Python that has vLLM-Omni, and its answer, which is read like any document from outside. Pure.

``omni serve MODEL --omni`` and deploy files in vLLM-Omni's own dialect say neither engines nor outputs of stages: only
vLLM-Omni's resolver knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omni_discovery.deploy.document import DeployConfig, parse_mapping, read_deploy
from omni_discovery.errors import ConfigError

#: A longer answer is none: a document in etcd may have as much.
MOST_BYTES: Final = 1 << 20
#: Keys of a stage, of which vLLM-Omni's own dialect has none.
_OURS: Final = ("engine", "stage_type", "model")


class ResolveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which pipeline is asked for. ``overrides`` of stages are in our keys, ``engine_args`` hold for every stage."""

    model: str
    #: A path, or the name of a file that vLLM-Omni ships; empty for the one that it ships for the model.
    deploy_file: str = ""
    #: The name that clients see; empty for the model's.
    served_name: str = ""
    async_chunk: bool | None = None
    engine_args: dict[str, Any] = {}
    overrides: dict[int, dict[str, Any]] = {}


class ResolvedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A deploy document in our keys, and what of the deploy file it does not hold, each with the reason."""

    document: dict[str, Any]
    left_out: tuple[str, ...] = ()
    #: The pipeline's name in vLLM-Omni's registry.
    pipeline: str = ""
    #: The platform whose part of the deploy file holds, as ``cuda``.
    platform: str = ""


def is_peers(text: str, source: str) -> bool:
    """Whether a deploy YAML is in vLLM-Omni's own dialect: none of its stages says what runs it, and which model.

    Raise ConfigError for a text that is no document of either.
    """
    document, _ = parse_mapping(text, source)
    if "stage_args" in document:
        return False
    stages = document.get("stages")
    if stages is None:
        return "pipeline" in document or "base_config" in document
    return isinstance(stages, list) and not any(
        key in stage for stage in stages if isinstance(stage, Mapping) for key in _OURS
    )


def read_answer(answer: bytes, request: ResolveRequest, source: str) -> tuple[DeployConfig, ResolvedDocument]:
    """Check the last line of what a resolver has printed. Raise ConfigError for what is no deploy document."""
    lines = answer.strip().splitlines()
    if not lines or len(lines[-1]) > MOST_BYTES:
        raise ConfigError(f"{source}: its answer has {len(lines[-1]) if lines else 0} bytes; right would be a document")
    try:
        resolved = msgspec.json.decode(lines[-1], type=ResolvedDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: its answer is no resolved document: {error}") from error
    return read_deploy(resolved.document, source, request.overrides), resolved
