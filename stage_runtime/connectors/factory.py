"""Connectors by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from stage_runtime.connectors.base import OmniConnectorBase
from stage_runtime.connectors.config import ConnectorSpec

Constructor = Callable[[dict[str, Any]], OmniConnectorBase]


def _shared_memory(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.shm import SharedMemoryConnector

    return SharedMemoryConnector(extra)


class OmniConnectorFactory:
    """The registry of connector classes; third parties add theirs."""

    _registry: ClassVar[dict[str, Constructor]] = {"SharedMemoryConnector": _shared_memory}

    @classmethod
    def register_connector(cls, name: str, constructor: Constructor) -> None:
        """Add a connector. Raise ValueError if the name is taken."""
        if name in cls._registry:
            raise ValueError(f"connector {name!r} is already registered")
        cls._registry[name] = constructor

    @classmethod
    def create_connector(cls, spec: ConnectorSpec) -> OmniConnectorBase:
        """Build the connector that a spec names. Raise ValueError for a name that nobody registered."""
        if spec.name not in cls._registry:
            known = ", ".join(cls.list_registered_connectors())
            raise ValueError(f"connector {spec.name!r} is not known; there are: {known}")
        return cls._registry[spec.name](dict(spec.extra))

    @classmethod
    def list_registered_connectors(cls) -> list[str]:
        """All names, sorted."""
        return sorted(cls._registry)
