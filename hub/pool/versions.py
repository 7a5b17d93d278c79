"""Pools: every pool of a hub, one for each stage and each version of it that replicas run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from hub.pool.stage_pool import StagePool

if TYPE_CHECKING:
    from hub.config import PoolOptions
    from omni_discovery.balancing.base import LoadBalancer
    from omni_discovery.records.schema import ReplicaInfo

#: Once a stage has so many pools, versions that are not served share one more: anybody who may write a record can name
#: a version, and each pool costs with every view.
MOST_POOLS: Final = 8


class Pools:
    """``firsts`` has one pool for each stage, for replicas whose record has no fingerprint.

    All other replicas belong to the pool of their fingerprint, which ``new_pool`` makes when it is first seen, while
    there are few; without ``new_pool`` all versions share the first pool.
    """

    def __init__(self, firsts: Sequence[StagePool], new_pool: Callable[[int], StagePool] | None = None) -> None:
        self._new_pool = new_pool
        self._firsts = {pool.stage_id: pool for pool in firsts}
        #: By stage and fingerprint. A pool may have several fingerprints.
        self._by_version = {(pool.stage_id, ""): pool for pool in firsts}
        self._by_stage: dict[int, tuple[StagePool, ...]] = {pool.stage_id: (pool,) for pool in firsts}
        #: The pools that versions share which came when there were many, by stage; each is in ``_by_stage``, too.
        self._rest: dict[int, StagePool] = {}
        self._live_hubs = 1
        self._watch: Callable[[StagePool], None] = _ignore

    def __repr__(self) -> str:
        return f"Pools({', '.join(f'stage {stage_id}: {len(pools)}' for stage_id, pools in self._by_stage.items())})"

    def __iter__(self) -> Iterator[StagePool]:
        return chain.from_iterable(self._by_stage.values())

    def __contains__(self, stage_id: object) -> bool:
        return stage_id in self._by_stage

    @property
    def stage_ids(self) -> Collection[int]:
        """The stages of the pipeline."""
        return self._by_stage.keys()

    def watch_pools(self, watch: Callable[[StagePool], None]) -> None:
        """Call ``watch`` for every pool, now and whenever one is made."""
        self._watch = watch
        for pool in self:
            watch(pool)

    def begin_with(self, stage_id: int, fingerprint: str) -> StagePool:
        """Return the stage's first pool, and make it the pool of that fingerprint as well."""
        pool = self._by_version[stage_id, fingerprint] = self._firsts[stage_id]
        return pool

    def get(self, stage_id: int, fingerprint: str) -> StagePool:
        """The pool of a version of a stage, made if needed. Raise KeyError for an unknown stage."""
        pool = self._by_version.get((stage_id, fingerprint))
        if pool is not None:
            return pool
        if self._new_pool is None:
            return self._firsts[stage_id]
        # As long as any version is there, all that come go there: where one belongs must not change by itself.
        rest = self._rest.get(stage_id)
        if rest is None and len(self._by_stage[stage_id]) < MOST_POOLS:
            return self.serve(stage_id, fingerprint)
        if rest is None:
            rest = self._rest[stage_id] = self._add_pool(stage_id)
        return rest

    def serve(self, stage_id: int, fingerprint: str) -> StagePool:
        """As ``get``, but the version has a pool of its own from now on.

        Its replicas may be in the pool of the rest: see ``misplaced``.
        """
        pool = self._by_version.get((stage_id, fingerprint))
        if pool is None:
            pool = self._by_version[stage_id, fingerprint] = self._add_pool(stage_id)
        return pool

    def _add_pool(self, stage_id: int) -> StagePool:
        if self._new_pool is None:
            return self._firsts[stage_id]
        pool = self._new_pool(stage_id)
        pool.core.set_live_hubs(self._live_hubs)
        self._by_stage[stage_id] += (pool,)
        self._watch(pool)
        return pool

    def misplaced(self) -> list[tuple[StagePool, ReplicaInfo]]:
        """The replicas that are in the pool of the rest though their version has one of its own, with that pool."""
        entries = [(rest, entry.info) for rest in self._rest.values() for entry in rest.core.members]
        return [(rest, info) for rest, info in entries if self.of(info) is not rest]

    def of(self, info: ReplicaInfo) -> StagePool:
        """The pool that a replica belongs to. Raise KeyError for an unknown stage."""
        pool = self._by_version.get((info.stage_id, info.fingerprint))
        return self.get(info.stage_id, info.fingerprint) if pool is None else pool

    def of_stage(self, stage_id: int) -> tuple[StagePool, ...]:
        """The pools of all versions of a stage."""
        return self._by_stage[stage_id]

    def record(self, stage_id: int, addr: str) -> ReplicaInfo | None:
        """The record of the stage's replica at an address, listed or with work in flight; None for an unknown one."""
        infos = (pool.core.members.get(addr) for pool in self._by_stage[stage_id])
        return next((info for info in infos if info is not None), None)

    def set_live_hubs(self, count: int) -> None:
        """Set how many hubs share the replicas, this one included."""
        self._live_hubs = count
        for pool in self:
            pool.core.set_live_hubs(count)

    def answers(self, stage_id: int, addr: str) -> bool:
        """Whether the stage's replica at an address answers, listed or not."""
        return any(pool.core.members.answers(addr) for pool in self._by_stage[stage_id])

    def forget_unused(self, kept: Collection[StagePool]) -> None:
        """Drop the pools that have neither a replica nor a waiting pick, but for first pools and those in ``kept``."""
        for stage_id, pools in self._by_stage.items():
            first = self._firsts[stage_id]
            self._by_stage[stage_id] = tuple(
                pool for pool in pools if pool is first or pool in kept or not pool.core.is_unused
            )
        left = set(self)
        self._by_version = {name: pool for name, pool in self._by_version.items() if pool in left}
        self._rest = {stage_id: pool for stage_id, pool in self._rest.items() if pool in left}


def _ignore(_pool: StagePool) -> None:
    """No driver watches the pools."""


def make_pools(stage_ids: Sequence[int], new_balancer: Callable[[], LoadBalancer], options: PoolOptions) -> Pools:
    """Make the pools of a hub; each gets a balancer of its own from ``new_balancer``."""

    def new_pool(stage_id: int) -> StagePool:
        return StagePool(stage_id, new_balancer(), options)

    return Pools([new_pool(stage_id) for stage_id in stage_ids], new_pool)
