"""What two records of one address or one key say of each other. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_discovery.records.schema import ReplicaInfo


def role(info: ReplicaInfo) -> tuple[object, ...]:
    """What a record must keep for the others not to be looked at again."""
    return info.stage_id, info.input_addr, info.epoch, info.takes_new_work, info.fingerprint, info.content


def is_same_process(ours: ReplicaInfo, info: ReplicaInfo) -> bool:
    """Whether a client that was made for the one record serves the other."""
    mine = (ours.input_addr, ours.output_addr, ours.curve_public_key, ours.stage_id)
    return mine == (info.input_addr, info.output_addr, info.curve_public_key, info.stage_id)
