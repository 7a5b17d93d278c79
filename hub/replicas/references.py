"""Whether the hand-offs that a replica names lead to that replica, and are one for each next stage. Pure.

A consumer connects to the address in a reference, so a replica may name none but the one in its own record. It fetches
each that is named, so one message may name one for each stage.
"""

from __future__ import annotations

from omni_discovery import wire
from omni_discovery.records.handoff_addresses import is_at, named_addresses, registered_address, shown
from omni_discovery.records.schema import ReplicaInfo


def flaw_of_references(info: ReplicaInfo, message: wire.FromReplica) -> str:
    """What is wrong with the hand-offs that a replica names in a message, by its record; empty if nothing is."""
    if not isinstance(message, wire.StageDone | wire.SegmentDone | wire.HandOffPiece):
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
    registered = registered_address(info, ref.to_stage)
    for named in named_addresses(ref.metadata):
        if not is_at(named, registered):
            return f"its hand-off names {shown(named)}, its record {shown(registered)}"
    return ""
