"""Which connector joins which stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from omni_discovery.deploy.dialect import declare_connectors
from omni_discovery.errors import ConfigError


@dataclass
class ConnectorSpec:
    """One connector: the registered name of its class, and what its constructor gets."""

    name: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class OmniTransferConfig:
    """The connectors by edge (from stage, to stage), and the one for edges that are not named."""

    connectors: dict[tuple[str, str], ConnectorSpec] = field(default_factory=dict)
    default_connector: ConnectorSpec | None = None

    def get_connector_for_edge(self, from_stage: str, to_stage: str) -> ConnectorSpec | None:
        """The edge's connector, else the default, else None."""
        return self.connectors.get((from_stage, to_stage), self.default_connector)

    def has_connector_for_edge(self, from_stage: str, to_stage: str) -> bool:
        """Whether the edge has a connector, its own or the default."""
        return self.get_connector_for_edge(from_stage, to_stage) is not None


def load_omni_transfer_config(
    config_path: str | Path | None = None,
    config_dict: dict[str, Any] | None = None,
    default_shm_threshold: int = 65536,
) -> OmniTransferConfig | None:
    """Read the edges of a deploy document, from a file or as a mapping; None if neither is given.

    Edges between a stage and those in its ``input_from`` (or the stage before it) that name no connector get shared
    memory. Raise ConfigError with the place that is wrong.
    """
    if config_dict is None:
        if config_path is None:
            return None
        config_dict = _read(Path(config_path))
    config_dict = dict(config_dict)
    declare_connectors(config_dict)
    specs = {name: _spec(name, entry) for name, entry in (config_dict.get("connectors") or {}).items()}
    edges: dict[tuple[str, str], ConnectorSpec] = {}
    shared_memory = ConnectorSpec("SharedMemoryConnector", {"shm_threshold_bytes": default_shm_threshold})
    for edge in config_dict.get("edges") or ():
        name = edge.get("connector")
        if name and name not in specs:
            raise ConfigError(f"edge {edge.get('from')} to {edge.get('to')}: connector {name!r} is not in 'connectors'")
        spec = specs[name] if name else shared_memory
        bounds = {bound: edge[bound] for bound in ("window_size", "max_inflight") if edge.get(bound) is not None}
        edges[str(edge["from"]), str(edge["to"])] = ConnectorSpec(spec.name, {**spec.extra, **bounds})
    for pair in _implied_edges(config_dict.get("stages") or ()):
        edges.setdefault(pair, shared_memory)
    return OmniTransferConfig(edges, shared_memory)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: a mapping is wanted")
    return document


def _spec(name: str, entry: Any) -> ConnectorSpec:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ConfigError(f"connector {name!r} needs a 'name': the class that carries it")
    return ConnectorSpec(entry["name"], dict(entry.get("extra") or {}))


def _implied_edges(stages: Any) -> list[tuple[str, str]]:
    edges: list[tuple[str, str]] = []
    before: Any = None
    for stage in stages:
        here = stage.get("stage_id")
        sources = stage.get("input_from")
        if sources is None:
            sources = [] if before is None else [before]
        edges.extend((str(source), str(here)) for source in sources)
        before = here
    return edges
