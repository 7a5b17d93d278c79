"""Connectors by name.

Which connector joins which stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from omni_discovery.deploy.dialect import declare_connectors
from omni_discovery.errors import ConfigError
from stage_runtime.connectors.base import OmniConnectorBase


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


Constructor = Callable[[dict[str, Any]], OmniConnectorBase]


def _shared_memory(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.shm.connector import SharedMemoryConnector

    return SharedMemoryConnector(extra)


def _tcp(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.tcp.connector import TcpConnector

    return TcpConnector(extra)


def _auto(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.auto import AutoConnector

    return AutoConnector(extra)


def _mooncake_transfer(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.mooncake.transfer import MooncakeTransferEngineConnector

    return MooncakeTransferEngineConnector(extra)


def _yuanrong(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.yuanrong.store import YuanrongConnector

    return YuanrongConnector(extra)


def _yuanrong_transfer(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.yuanrong.transfer import YuanrongTransferEngineConnector

    return YuanrongTransferEngineConnector(extra)


def _mooncake_store(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.mooncake.store import MooncakeStoreConnector

    return MooncakeStoreConnector(extra)


class OmniConnectorFactory:
    """The registry of connector classes; third parties add theirs."""

    _registry: ClassVar[dict[str, Constructor]] = {
        "AutoConnector": _auto,
        "MooncakeStoreConnector": _mooncake_store,
        "MooncakeTransferEngineConnector": _mooncake_transfer,
        "SharedMemoryConnector": _shared_memory,
        "TcpConnector": _tcp,
        "YuanrongConnector": _yuanrong,
        "YuanrongTransferEngineConnector": _yuanrong_transfer,
    }
    #: Old names.
    _aliases: ClassVar[dict[str, str]] = {"MooncakeConnector": "MooncakeStoreConnector"}
    #: Connectors of ours, which take the settings of ``place``.
    _ours: ClassVar[frozenset[str]] = frozenset(_registry)

    @classmethod
    def register_connector(cls, name: str, constructor: Constructor) -> None:
        """Add a connector. Raise ValueError if the name is taken."""
        if name in cls._registry or name in cls._aliases:
            raise ValueError(f"connector {name!r} is already registered")
        cls._registry[name] = constructor

    @classmethod
    def create_connector(cls, spec: ConnectorSpec) -> OmniConnectorBase:
        """Build the connector that a spec names. Raise ValueError for a name that nobody registered."""
        name = cls._aliases.get(spec.name, spec.name)
        if name not in cls._registry:
            known = ", ".join(cls.list_registered_connectors())
            raise ValueError(f"connector {spec.name!r} is not known; there are: {known}")
        return cls._registry[name](dict(spec.extra))

    @classmethod
    def list_registered_connectors(cls) -> list[str]:
        """All names that can be built, sorted."""
        return sorted(cls._registry)

    @classmethod
    def place(
        cls, name: str, *, namespace: str, stage_id: int, bind_host: str = "", advertise_host: str = ""
    ) -> dict[str, Any]:
        """What a replica's place adds to a connector's ``extra``; nothing for connectors of third parties."""
        name = cls._aliases.get(name, name)
        if name not in cls._ours:
            return {}
        place: dict[str, Any] = {"namespace": namespace, "stage_id": stage_id}
        if name != "SharedMemoryConnector":
            place |= {"bind_host": bind_host, "advertise_host": advertise_host}
        return place
