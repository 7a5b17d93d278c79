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
from typing import Any, ClassVar, Final

from omni_discovery.deploy.document import DEFAULT_CONNECTOR, join_problems, parse_mapping
from omni_discovery.deploy.edges import BASE, overlaid, read_edges
from omni_discovery.deploy.lines import Problem
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import BUILT_IN_CONNECTORS, CONNECTOR_ALIASES, CONNECTOR_GROUPS, find_plugins
from stage_runtime.connectors.base import OmniConnectorBase

#: How many files may stand below one another by ``base_config``.
_MOST_BASES: Final = 8


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

    The connectors and their ``extra`` are those that replicas build from the same document, also from one written for
    vLLM-Omni. An edge that names no connector gets the default one, with ``default_shm_threshold``. Raise ConfigError
    with the place that is wrong, and its line if it is in a file.
    """
    if config_dict is None and config_path is None:
        return None
    installed = find_plugins(CONNECTOR_GROUPS)
    if config_dict is not None:
        deploy = read_edges(config_dict, "the transfer config", installed)
    else:
        path = Path(str(config_path))
        document, problems = _read(path)
        deploy = read_edges(document, str(path), installed, problems)
    default = {"shm_threshold_bytes": default_shm_threshold}
    named = {(edge.from_, edge.to) for edge in deploy.edges if edge.connector}
    edges: dict[tuple[str, str], ConnectorSpec] = {}
    for stage in deploy.stages:
        for before in deploy.inputs_of(stage.stage_id):
            pair = (before, stage.stage_id)
            found = deploy.connector_of(*pair)
            extra = found.extra if pair in named else default | found.extra
            edges[str(pair[0]), str(pair[1])] = ConnectorSpec(found.name, dict(extra))
    return OmniTransferConfig(edges, ConnectorSpec(DEFAULT_CONNECTOR, default))


def _read(path: Path, depth: int = 0) -> tuple[dict[str, Any], list[Problem]]:
    """The document of a file, on top of the one that its ``base_config`` names; and what is wrong with its text."""
    try:
        document, problems = parse_mapping(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    base = document.get(BASE)
    if base is None:
        return document, problems
    if depth == _MOST_BASES or not isinstance(base, str):
        raise ConfigError(f"{path}: {BASE} is {base!r}; a file is wanted, on at most {_MOST_BASES} others")
    below, of_base = _read(path.parent / base, depth + 1)
    if wrong := [problem for problem in of_base if not problem.variable]:
        raise ConfigError(join_problems(wrong, str(path.parent / base)))
    return overlaid(below, document), problems


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
        # The hub passes the metadata of each hand-off on, so nobody looks for one by its key alone.
        place: dict[str, Any] = {"namespace": namespace, "stage_id": stage_id, "by_key": False}
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
