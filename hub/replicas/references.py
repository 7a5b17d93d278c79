"""Whether the hand-offs that a replica names lead to that replica. Pure.

A consumer connects to the address in a reference, so a replica may name none but the one in its own record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from omni_discovery import wire
from omni_discovery.records.schema import ReplicaInfo

#: Names of the port in a record: of most connectors, and of transfer engines.
_PORTS: Final = ("port", "zmq_port")


def flaw_of_references(info: ReplicaInfo, message: wire.FromReplica) -> str:
    """What is wrong with the hand-offs that a replica names in a message, by its record; empty if nothing is.

    Addresses are only compared where the record has that of the edge: replicas before 0.2 registered none for TCP.
    """
    if not isinstance(message, wire.StageDone | wire.SegmentDone | wire.HandOffPiece):
        return ""
    return next((flaw for ref in message.payloads if (flaw := _flaw(info, ref))), "")


def _flaw(info: ReplicaInfo, ref: wire.PayloadRef) -> str:
    if ref.from_stage != info.stage_id:
        return f"it named a hand-off of stage {ref.from_stage}, which is not its own"
    registered = _registered_address(info, ref)
    if registered is not None:
        for named in _named_addresses(ref.metadata):
            if named != registered:
                return f"its hand-off names {_shown(named)}, its record {_shown(registered)}"
    return ""


def _registered_address(info: ReplicaInfo, ref: wire.PayloadRef) -> tuple[Any, Any] | None:
    where = info.connectors.get(f"{ref.from_stage}-{ref.to_stage}")
    if not isinstance(where, Mapping) or "host" not in where:
        return None
    return where["host"], next((where[name] for name in _PORTS if name in where), None)


def _named_addresses(metadata: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    # Connectors also take a mapping from keys to the metadata of each.
    for each in _mappings(metadata):
        if "source_host" in each or "source_port" in each:
            yield each.get("source_host"), each.get("source_port")


def _mappings(metadata: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return (metadata, *(each for each in metadata.values() if isinstance(each, Mapping)))


def _shown(address: tuple[Any, Any]) -> str:
    return f"{str(address[0])[:255]!r} port {str(address[1])[:20]}"
