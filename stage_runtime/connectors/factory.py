"""Connectors by name, and which connector joins which stages.

Names are those of built-in connectors, of entry points of the group ``stage_runtime.connectors``, and of
``OmniConnectorFactory.register_connector``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import yaml

from omni_discovery.deploy.dialect import declare_connectors
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import BUILT_IN_CONNECTORS, CONNECTOR_ALIASES, CONNECTOR_GROUPS, find_plugins
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
        """Return the edge's connector, else the default, else None."""
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
    declare_connectors(config_dict, find_plugins(CONNECTOR_GROUPS))
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


def _create_built_in(name: str, extra: dict[str, Any]) -> OmniConnectorBase:
    # Lazy: the connector's module, and the library it may need, are imported only here.
    connector: OmniConnectorBase = getattr(import_module("stage_runtime.connectors"), name)(extra)
    return connector


class OmniConnectorFactory:
    """Makes connectors by name. Packages add connectors by an entry point, programs by ``register_connector``."""

    #: Built-in and registered connectors; those of entry points are looked up when one is named.
    _registry: ClassVar[dict[str, Constructor]] = {
        name: partial(_create_built_in, name) for name in BUILT_IN_CONNECTORS
    }
    #: Old names.
    _aliases: ClassVar[dict[str, str]] = CONNECTOR_ALIASES
    #: The connectors that take the settings of ``place``.
    _ours: ClassVar[frozenset[str]] = frozenset(BUILT_IN_CONNECTORS)

    @classmethod
    def register_connector(cls, name: str, constructor: Constructor) -> None:
        """Add a connector in this process. Raise ValueError if the name is taken."""
        if name in cls._registry or name in cls._aliases:
            raise ValueError(f"connector {name!r} is already registered")
        cls._registry[name] = constructor

    @classmethod
    def create_connector(cls, spec: ConnectorSpec) -> OmniConnectorBase:
        """Make the connector that a spec names; its constructor gets a copy of ``extra``.

        Raise ConfigError, a ValueError, for an unknown name and for an installed connector that is broken. What the
        constructor raises is passed on: ConfigError for a setting that is wrong.
        """
        name = cls._aliases.get(spec.name, spec.name)
        return (cls._registry.get(name) or cls._load_plugin(spec.name))(dict(spec.extra))

    @classmethod
    def list_registered_connectors(cls) -> list[str]:
        """Return all names that can be made, those of installed packages included, sorted."""
        return sorted({*cls._registry, *find_plugins(CONNECTOR_GROUPS)})

    @classmethod
    def place(
        cls, name: str, *, namespace: str, stage_id: int, bind_host: str = "", advertise_host: str = ""
    ) -> dict[str, Any]:
        """Return what a replica adds to a connector's ``extra``; nothing for connectors of other packages."""
        name = cls._aliases.get(name, name)
        if name not in cls._ours:
            return {}
        place: dict[str, Any] = {"namespace": namespace, "stage_id": stage_id}
        if name != "SharedMemoryConnector":
            place |= {"bind_host": bind_host, "advertise_host": advertise_host}
        return place

    @classmethod
    def _load_plugin(cls, name: str) -> Constructor:
        point = find_plugins(CONNECTOR_GROUPS).get(name)
        if point is None:
            known = ", ".join(cls.list_registered_connectors())
            raise ConfigError(
                f"connector {name!r} is not known; there are: {known}; if a package adds it (entry-point group "
                f"{CONNECTOR_GROUPS[0]!r}), install that on this host"
            )
        try:
            constructor: Constructor = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"connector {name!r} ({point.value}) can't be loaded: {error}") from error
        return constructor
