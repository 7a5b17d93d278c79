"""Whether the hand-offs that a replica names lead to that replica, and are one for each next stage. Pure.

A consumer connects to the address in a reference, so a replica may name none but the one in its own record. It fetches
each that is named, so one message may name one for each stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_discovery import wire
from omni_discovery.records.handoff_addresses import is_at, named_addresses, registered_address, shown
from omni_discovery.records.schema import ReplicaInfo

#: Values, at all depths, that the metadata of one hand-off may hold: the hub keeps them until the request ends. Those
#: of a connector are a dozen; vLLM names each block of a KV cache.
_MOST_VALUES: Final = 1 << 17
_WITH_HAND_OFFS: Final = (wire.StageDone, wire.SegmentDone, wire.HandOffPiece)


def flaw_of_references(info: ReplicaInfo, message: wire.FromReplica) -> str:
    """What is wrong with the hand-offs that a replica names in a message, by its record; empty if nothing is."""
    if not isinstance(message, _WITH_HAND_OFFS):
        return ""
    if flaw := next((flaw for ref in message.payloads if (flaw := _flaw(info, ref))), ""):
        return flaw
    if len({ref.to_stage for ref in message.payloads}) < len(message.payloads):
        return "it named several hand-offs for one stage"
    return ""


def _flaw(info: ReplicaInfo, ref: wire.PayloadRef) -> str:
    if ref.from_stage != info.stage_id:
        return f"it named a hand-off of stage {ref.from_stage}, which is not its own"
    if ref.role:
        return "it named a hand-off of a companion, which only a hub can tell"
    if _is_too_full(ref.metadata):
        return f"its hand-off came with metadata of more than {_MOST_VALUES} values"
    registered = registered_address(info, ref.to_stage)
    for named in named_addresses(ref.metadata):
        if not is_at(named, registered):
            return f"its hand-off names {shown(named)}, its record {shown(registered)}"
    return ""


def _is_too_full(metadata: Mapping[str, Any]) -> bool:
    found, waiting = 0, list[Any]([metadata])
    while waiting and found <= _MOST_VALUES:
        each = waiting.pop()
        found += len(each)
        values = each.values() if isinstance(each, Mapping) else each
        waiting += [value for value in values if isinstance(value, (dict, list, tuple))]
    return found > _MOST_VALUES
