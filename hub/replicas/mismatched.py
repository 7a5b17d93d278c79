"""MismatchedReplicas: keeps replicas out of picks that run another document, model or code than they should."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from omni_discovery.deploy.fingerprint import Mismatches

if TYPE_CHECKING:
    from hub.pool.stage_pool import StagePool
    from hub.pool.versions import Pools
    from omni_discovery.records.schema import ReplicaInfo

logger = logging.getLogger(__name__)

#: So many replicas that are refused, or no more, have a line of their own each time.
_MOST_LINES: Final = 32
#: After the replicas with other files were counted the loop has this many times as long for everything else: anybody
#: may write thousands of records.
_REST: Final = 4.0


class MismatchedReplicas:
    """The mismatched replicas of all pools, for Membership, by input address. Moments are monotonic seconds.

    ``knows`` returns whether a replica runs a deploy document that this hub serves, ``has_answered`` whether this life
    of it has ever had a session here: a record that nobody is behind says nothing of what the others should run.
    """

    def __init__(
        self,
        pools: Pools,
        knows: Callable[[ReplicaInfo], bool],
        has_answered: Callable[[ReplicaInfo], bool],
        now: Callable[[], float],
    ) -> None:
        self._pools = pools
        self._has_answered = has_answered
        self._now = now
        self._mismatches: Mismatches[str] = Mismatches(knows)
        #: Those that are refused now, with the reason.
        self._refused: dict[str, tuple[ReplicaInfo, str]] = {}
        #: When the replicas with other files may be counted next, and whether that is waited for.
        self._recount_s, self._is_due = float("-inf"), False

    def __repr__(self) -> str:
        return f"MismatchedReplicas({len(self._refused)} refused, {self._mismatches})"

    @property
    def next_review_s(self) -> float | None:
        """When ``review`` is due without another reason; None if it is not."""
        return self._recount_s if self._is_due else None

    def follow(self, replicas: Mapping[str, ReplicaInfo | None]) -> None:
        """At these addresses are these replicas now, or none; log and apply what has changed."""
        for addr, info in replicas.items():
            if info is None:
                self._mismatches.remove(addr)
            else:
                self._mismatches.put(addr, info)
        self.review()

    def judge_all(self) -> None:
        """Other documents are served than before."""
        self._mismatches.judge_all()
        self.review()

    def review(self) -> None:
        """A replica, or a session, has come or gone: it may have changed who is refused."""
        now_s, self._is_due = self._now(), self._mismatches.is_disputed
        if self._is_due and now_s >= self._recount_s:
            self._is_due = False
            self._mismatches.recount(self._has_answered)
            ended_s = self._now()
            self._recount_s = ended_s + _REST * (ended_s - now_s)
        self._apply_changes()

    def _apply_changes(self) -> None:
        found, changed = self._mismatches.found, self._mismatches.changed
        refused: list[tuple[ReplicaInfo, str]] = []
        let_in: list[ReplicaInfo] = []
        for addr in changed:
            before, after = self._refused.get(addr), found.get(addr)
            if before is not None and (after is None or after[0].stage_id != before[0].stage_id):
                del self._refused[addr]
                for pool in self._pools.of_stage(before[0].stage_id):
                    pool.core.refuse(addr, "", pool.now())
                if after is None and addr in self._mismatches:
                    let_in.append(before[0])
            if after is not None:
                info, why = self._refused[addr] = after
                pool = self._pools.of(info)
                pool.core.refuse(addr, why, pool.now())
                if before is None or before[1] != why:
                    refused.append(after)
        changed.clear()
        _log(refused, let_in)

    def replica_entered(self, pool: StagePool, addr: str) -> None:
        """A replica was added to ``pool``: refuse it there if it is mismatched."""
        if addr in self._refused:
            pool.core.refuse(addr, self._refused[addr][1], pool.now())

    def count(self, stage_id: int) -> int:
        """How many replicas of a stage are refused."""
        return sum(info.stage_id == stage_id for info, _ in list(self._refused.values()))


def _log(refused: Sequence[tuple[ReplicaInfo, str]], let_in: Sequence[ReplicaInfo]) -> None:
    for info in let_in[:_MOST_LINES]:
        logger.info("replica.not_refused replica=%s", info.name)
    for info, why in refused[:_MOST_LINES]:
        text = "replica.refused replica=%s host=%s fingerprint=%s: %s; see omni doctor"
        logger.warning(text, info.name, info.host, info.fingerprint or "-", why)
    more = max(0, len(refused) - _MOST_LINES)
    if more or len(let_in) > _MOST_LINES:
        text = "replica.refused_more count=%d not_refused=%d: omni doctor names those that are"
        logger.warning(text, more, max(0, len(let_in) - _MOST_LINES))
