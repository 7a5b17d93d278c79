"""Connectors that an edge names by themselves, or describes on the spot, declared under ``connectors``. Pure."""

from __future__ import annotations

from typing import Any, Final

#: What every replica can build; those of other packages are declared in the document.
CONNECTORS: Final = (
    "AutoConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "MooncakeTransferEngineConnector",
    "SharedMemoryConnector",
    "TcpConnector",
    "YuanrongConnector",
    "YuanrongTransferEngineConnector",
)


def declare_connectors(document: dict[str, Any]) -> None:
    """Have ``connectors`` hold what edges name. Names that nobody knows are left to be told."""
    edges, given = document.get("edges"), document.get("connectors")
    if not isinstance(edges, list) or not isinstance(given, dict | None):
        return
    connectors = dict(given or {})
    declared = [_declared(edge, connectors) for edge in edges]
    if connectors != (given or {}):
        document |= {"edges": declared, "connectors": connectors}


def named(connector: Any, ends: tuple[Any, Any], connectors: dict[str, Any]) -> Any:
    """The name of a connector that is one, or that is described on the spot and gets one in ``connectors``."""
    if not isinstance(connector, dict):
        return connector
    name = f"from {ends[0]} to {ends[1]}"
    connectors[name] = connector
    return name


def _declared(edge: Any, connectors: dict[str, Any]) -> Any:
    if not isinstance(edge, dict) or "connector" not in edge:
        return edge
    name = named(edge["connector"], (edge.get("from"), edge.get("to")), connectors)
    if name in CONNECTORS:
        connectors.setdefault(name, {"name": name})
    return {**edge, "connector": name}
