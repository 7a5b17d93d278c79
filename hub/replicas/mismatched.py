"""MismatchedReplicas: keeps replicas out of picks that run another document, model or code than they should."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from omni_discovery.deploy.fingerprint import mismatches

if TYPE_CHECKING:
    from hub.pool.stage_pool import StagePool
    from hub.pool.versions import Pools
    from omni_discovery.records.schema import ReplicaInfo

logger = logging.getLogger(__name__)


class MismatchedReplicas:
    """The mismatched replicas of all pools, for Membership.

    ``knows`` returns whether a replica runs a deploy document that this hub serves, ``has_answered`` whether this life
    of it has ever had a session here: a record that nobody is behind says nothing of what the others should run.
    """

    def __init__(
        self, pools: Pools, knows: Callable[[ReplicaInfo], bool], has_answered: Callable[[ReplicaInfo], bool]
    ) -> None:
        self._pools = pools
        self._knows, self._has_answered = knows, has_answered
        #: Mismatched replicas with the reason, by input address.
        self._mismatched: dict[str, tuple[ReplicaInfo, str]] = {}

    def check_mismatches(self, listed: Mapping[str, ReplicaInfo]) -> None:
        """Compare the listed replicas, by input address; log and apply what has changed."""
        found = mismatches(listed.values(), self._knows, self._has_answered)
        before, self._mismatched = self._mismatched, {info.input_addr: (info, why) for info, why in found}
        for addr in before.keys() - self._mismatched.keys():
            for pool in self._pools.of_stage(before[addr][0].stage_id):
                pool.core.refuse(addr, "", pool.now())
            if addr in listed:
                info = listed[addr]
                logger.info("replica.not_refused replica=%s", info.name)
        for addr, (info, why) in self._mismatched.items():
            pool = self._pools.of(info)
            pool.core.refuse(addr, why, pool.now())
            if addr not in before or before[addr][1] != why:
                text = "replica.refused replica=%s host=%s fingerprint=%s: %s; see omni doctor"
                logger.warning(text, info.name, info.host, info.fingerprint or "-", why)

    @property
    def is_disputed(self) -> bool:
        """Whether any replica is refused: the next that answers may change who is."""
        return bool(self._mismatched)

    def may_concern(self, info: ReplicaInfo) -> bool:
        """Whether a record that comes, changes or goes may change who is mismatched."""
        return bool(info.content) or not self._knows(info) or info.input_addr in self._mismatched

    def replica_entered(self, pool: StagePool, addr: str) -> None:
        """A replica was added to ``pool``: refuse it there if it is mismatched."""
        if addr in self._mismatched:
            pool.core.refuse(addr, self._mismatched[addr][1], pool.now())

    def count(self, stage_id: int) -> int:
        """How many replicas of a stage are refused."""
        return sum(info.stage_id == stage_id for info, _ in self._mismatched.values())
