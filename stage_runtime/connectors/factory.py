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


def _tcp(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.tcp import TcpConnector

    return TcpConnector(extra)


def _auto(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.auto import AutoConnector

    return AutoConnector(extra)


def _mooncake_transfer(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.mooncake_transfer import MooncakeTransferEngineConnector

    return MooncakeTransferEngineConnector(extra)


def _yuanrong(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.yuanrong import YuanrongConnector

    return YuanrongConnector(extra)


def _yuanrong_transfer(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.yuanrong_transfer import YuanrongTransferEngineConnector

    return YuanrongTransferEngineConnector(extra)


def _mooncake_store(extra: dict[str, Any]) -> OmniConnectorBase:
    from stage_runtime.connectors.mooncake_store import MooncakeStoreConnector

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
