"""The hand-offs that a producer keeps for its next stages, in memory blocks, by edge and key.

Each stays until ``cleanup``, ``close``, the end of its time to live, or a reader that consumes it.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stage_runtime.connectors.errors import EdgeFullError
from stage_runtime.connectors.serialization import Buffer
from stage_runtime.connectors.store.layout import (
    GENERATION_BYTES,
    SWEEP_EVERY_S,
    TAKEN,
    TOKEN_BYTES,
    Sweeper,
    key_digest,
    payload_path,
)
from stage_runtime.connectors.store.memory import BlockPool, MemoryBlock
from stage_runtime.connectors.store.shm_blocks import ShmBlockPool

logger = logging.getLogger(__name__)

#: A pool with one of these errors counts as full: a hand-off goes into the next pool, if there is one.
_FULL: Final = TAKEN | {errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EDQUOT}
#: How many of the oldest hand-offs each ``put`` checks for having been consumed; without room, it checks all.
_LOOKED_AT: Final = 4
#: How long the sweep of the folder may take at the start, and between two hand-offs; and when it goes on with the rest.
_FIRST_SWEEP_S: Final = 1.0
_SWEEP_S: Final = 0.005
_GO_ON_AFTER_S: Final = 1.0
#: How long a free block lies there unused until it is released: so long at least, twice as long at most.
_SHRINK_EVERY_S: Final = 60.0
#: What a file takes beside its hand-off: its header, and the rest of its last page.
_HEADROOM_BYTES: Final = 8192
_KIB: Final = 1024

Edge = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one edge at one producer; None is no bound.

    ``window_size`` bounds the hand-offs that were not fetched yet, ``max_inflight`` those that were not dropped yet.
    """

    max_inflight_bytes: int
    pool_bytes: int
    ttl_s: float
    window_size: int | None = None
    max_inflight: int | None = None


@dataclass(slots=True)
class Kept:
    """One stored hand-off. ``generation`` is unique to it; a peer with its ``token`` may fetch it over the network."""

    edge: Edge
    pool: BlockPool
    block: MemoryBlock
    size_bytes: int
    generation: bytes
    token: bytes
    put_at_s: float
    #: The hash of namespace, edge and key.
    digest: bytes
    #: Whether a consuming fetch of it is under way.
    claimed: bool = False


class Store:
    """Stores, pins and drops hand-offs. Used by any thread.

    With a ``directory``, hand-offs are files there; ``in_memory`` allows memory of this process for those that find no
    room. With a ``memory`` they are in that pool instead.
    """

    def __init__(
        self,
        namespace: str,
        directory: Path | None,
        limits: Limits,
        *,
        in_memory: bool,
        clock: Callable[[], float] = time.monotonic,
        memory: BlockPool | None = None,
    ) -> None:
        self._namespace = namespace
        self._directory = directory
        self._folder = str(directory)
        self._limits = limits
        self._clock = clock
        self._pools: list[BlockPool] = []
        if directory is not None:
            self._pools.append(ShmBlockPool(directory, limits.pool_bytes, counted=limits.window_size is not None))
        if memory is not None:
            self._pools.append(memory)
        if in_memory:
            self._pools.append(ShmBlockPool(None, limits.pool_bytes))
        self._lock = threading.Lock()
        #: Oldest first.
        self._kept: dict[Edge, Kept] = {}
        self._by_generation: dict[bytes, Kept] = {}
        #: By each name that ``cleanup`` may be given for them.
        self._by_name: dict[str, dict[Edge, None]] = {}
        #: Count and bytes of what is stored or being written.
        self._count = 0
        self._bytes = 0
        #: The hand-off that found no room last, by its size in bytes and why; None once one has found room.
        self._refused: tuple[int, OSError] | None = None
        self._closed = False
        self._sweeper: Sweeper | None = None
        #: When the folder is swept next, or the rest of it.
        self._sweep_at_s = math.inf
        #: When the pools are shrunk next. A time of its own: a sweep takes minutes where others flood the folder.
        self._shrink_at_s = clock() + _SHRINK_EVERY_S
        if directory is not None:
            self._sweeper = Sweeper(directory, clock)
            self._sweep(self._sweeper, clock(), _FIRST_SWEEP_S)

    def put(self, edge: Edge, parts: Sequence[Buffer], size_bytes: int, filled: MemoryBlock | None = None) -> Kept:
        """Store a hand-off of ``parts``, ``size_bytes`` together; a hand-off under the same edge is dropped.

        ``filled`` is a block of the first pool that holds it already; the store owns the block once this returns. Raise
        EdgeFullError beyond the limits, OSError if there is no memory.
        """
        try:
            kept = self._put(edge, parts, size_bytes, filled)
        except OSError as error:
            if isinstance(error, EdgeFullError) or error.errno in _FULL:
                self._refused = size_bytes, error
            raise
        self._refused = None
        return kept

    def _put(self, edge: Edge, parts: Sequence[Buffer], size_bytes: int, filled: MemoryBlock | None) -> Kept:
        self.tidy()
        try:
            self._reserve(edge, size_bytes)
        except EdgeFullError:
            self.tidy(len(self._kept))
            self._reserve(edge, size_bytes)
        chance = os.urandom(GENERATION_BYTES + TOKEN_BYTES)
        generation, token = chance[:GENERATION_BYTES], chance[GENERATION_BYTES:]
        digest = key_digest(self._namespace, *edge)
        segment = filled
        try:
            pool = self._pools[0]
            if segment is None:
                pool, segment = self._fill(parts, size_bytes, generation, digest)
            kept = Kept(edge, pool, segment, size_bytes, generation, token, self._clock(), digest)
            with self._lock:
                if self._closed:
                    raise EdgeFullError("the connector is closed")
                before = self._pop(edge)
                self._kept[edge] = self._by_generation[generation] = kept
                for name in _names_of(edge[2]):
                    self._by_name.setdefault(name, {})[edge] = None
        except BaseException:
            if segment is not None:
                segment.drop()
            with self._lock:
                self._count -= 1
                self._bytes -= size_bytes
            raise
        self._drop(before)
        return kept

    def cleanup(self, request_id: str) -> None:
        """Drop the hand-offs under a request's id, or under a key that begins or ends with it and an underscore."""
        with self._lock:
            found = [self._pop(edge) for edge in list(self._by_name.get(request_id, ()))]
        self._drop(*found)

    def drop_edge(self, edge: Edge) -> None:
        """Drop the hand-off under exactly that edge and key, if there is one."""
        with self._lock:
            found = self._pop(edge)
        self._drop(found)

    def discard(self, kept: Kept) -> None:
        """Drop a hand-off that was not announced to any consumer."""
        with self._lock:
            found = self._pop(kept.edge) if self._kept.get(kept.edge) is kept else None
        self._drop(found)

    def generation_of(self, digest: bytes) -> bytes | None:
        """The generation of the hand-off under the key with that digest; None if there is none."""
        with self._lock:
            return next((kept.generation for kept in self._kept.values() if kept.digest == digest), None)

    def token_of(self, generation: bytes) -> bytes | None:
        """The token that a consumer of that hand-off must show; None if it was dropped."""
        with self._lock:
            kept = self._by_generation.get(generation)
            return None if kept is None else kept.token

    def pin(self, generation: bytes, *, claim: bool) -> Kept | None:
        """Keep a hand-off in place until ``unpin``, to send it; None if it is gone. A claim keeps others away."""
        with self._lock:
            kept = self._by_generation.get(generation)
            if kept is None or kept.claimed or kept.block.consumed:
                return None
            if claim and not kept.block.hide():
                return None
            kept.claimed = claim
            kept.block.pins += 1
            return kept

    def unpin(self, kept: Kept, *, consumed: bool) -> None:
        """End a ``pin``; drops the hand-off if it was consumed, makes it available again if a claim failed."""
        dropped = None
        with self._lock:
            kept.block.pins -= 1
            if self._by_generation.get(kept.generation) is not kept:
                return
            if consumed:
                dropped = self._pop(kept.edge)
            elif kept.claimed:
                kept.claimed = False
                self._show(kept)
        self._drop(dropped)

    def tidy(self, look_at: int = _LOOKED_AT) -> None:
        """Drop consumed and expired hand-offs among the ``look_at`` oldest, and files of dead processes.

        Once a minute, also free blocks that no hand-off has used for a minute.
        """
        now_s = self._clock()
        sweeps, shrinks = now_s >= self._sweep_at_s, now_s >= self._shrink_at_s
        if not (self._kept or sweeps or shrinks):
            return
        with self._lock:
            oldest = [kept for _, kept in zip(range(look_at), self._kept.values(), strict=False)]
            gone = [self._pop(kept.edge) for kept in oldest if self._is_over(kept, now_s)]
        self._drop(*gone)
        if shrinks:
            self._shrink(now_s)
        if sweeps and self._sweeper is not None:
            self._sweep(self._sweeper, now_s, _SWEEP_S)

    def _sweep(self, sweeper: Sweeper, now_s: float, for_s: float) -> None:
        # Set first, so that other threads do not come here, too.
        self._sweep_at_s = now_s + SWEEP_EVERY_S
        if not sweeper.sweep_for(for_s):
            self._sweep_at_s = self._clock() + _GO_ON_AFTER_S

    def _shrink(self, now_s: float) -> None:
        # Set first, as for the sweep.
        self._shrink_at_s = now_s + _SHRINK_EVERY_S
        for pool in self._pools:
            pool.shrink()

    def close(self) -> None:
        """Drop every hand-off and refuse new ones. Idempotent."""
        with self._lock:
            self._closed = True
            found = [self._pop(edge) for edge in list(self._kept)]
        self._drop(*found)
        if self._sweeper is not None:
            self._sweeper.close()
        for pool in self._pools:
            pool.close()

    def lack_of_room(self) -> str:
        """Why the hand-off that was refused last would be refused now, too; empty if it would find room."""
        refused = self._refused
        if refused is None:
            return ""
        size_bytes, error = refused
        self.tidy(len(self._kept))
        if isinstance(error, EdgeFullError):
            with self._lock:
                return self._beyond(size_bytes, None)
        if self._directory is None:
            return ""
        status = os.statvfs(self._directory)
        free_bytes, total_bytes = status.f_frsize * status.f_bavail, status.f_frsize * status.f_blocks
        if free_bytes >= size_bytes + _HEADROOM_BYTES:
            return ""
        return (
            f"{self._directory} is full: of {_shown(total_bytes)}, {_shown(free_bytes)} are free and a hand-off takes"
            f" {_shown(size_bytes)}; this replica keeps {_shown(self._bytes)} there for its next stages"
        )

    def counts(self) -> dict[str, int]:
        """Counters for ``health``; sizes in bytes."""
        with self._lock:
            pending = sum(not kept.block.consumed for kept in self._kept.values())
            return {
                "pending": pending,
                "inflight_bytes": self._bytes,
                "pool_free_bytes": sum(pool.free_bytes for pool in self._pools),
                "segments_made": sum(pool.made for pool in self._pools),
            }

    def _reserve(self, edge: Edge, size_bytes: int) -> None:
        with self._lock:
            # A hand-off under the same key is replaced.
            before = self._kept.get(edge)
            if refusal := self._beyond(size_bytes, before):
                raise EdgeFullError(refusal)
            self._count += 1
            self._bytes += size_bytes

    def _beyond(self, size_bytes: int, before: Kept | None) -> str:
        """Which limit one more hand-off would be beyond, in place of ``before``; empty: none. Under the lock."""
        limits = self._limits
        count = self._count - (before is not None)
        held = self._bytes - (before.size_bytes if before else 0)
        if limits.max_inflight is not None and count >= limits.max_inflight:
            return f"{count} hand-offs are in flight; max_inflight is {limits.max_inflight}"
        if held + size_bytes > limits.max_inflight_bytes:
            return f"{held} + {size_bytes} bytes in flight; max_inflight_bytes is {limits.max_inflight_bytes}"
        if limits.window_size is not None and count >= limits.window_size:
            writing = self._count - len(self._kept)
            waiting = writing + sum(not kept.block.fetched for kept in self._kept.values() if kept is not before)
            if waiting >= limits.window_size:
                return f"{waiting} hand-offs wait to be fetched; window_size is {limits.window_size}"
        return ""

    def _fill(
        self, parts: Sequence[Buffer], size_bytes: int, generation: bytes, digest: bytes
    ) -> tuple[BlockPool, MemoryBlock]:
        failure = OSError("no pool")
        # Twice each: after a failure the pool's free blocks are released, which may make room.
        for pool in [pool for pool in self._pools for _ in range(2)]:
            segment = None
            try:
                segment = pool.take_block(size_bytes)
                segment.fill(parts, size_bytes, generation, digest)
                if pool is self._pools[0] and self._directory is not None:
                    segment.publish(payload_path(self._folder, digest))
            except BaseException as error:
                if segment is not None:
                    segment.drop()
                if not isinstance(error, OSError) or error.errno not in _FULL:
                    raise
                failure = error
                pool.trim()
            else:
                return pool, segment
        raise failure

    def _is_over(self, kept: Kept, now_s: float) -> bool:
        return kept.block.consumed or (now_s - kept.put_at_s > self._limits.ttl_s and not kept.claimed)

    def _show(self, kept: Kept) -> None:
        if self._directory is not None and kept.pool is self._pools[0]:
            try:
                kept.block.publish(payload_path(self._folder, kept.digest))
            except OSError as error:
                logger.warning("shm.republish_failed reason=%s", error)

    def _pop(self, edge: Edge) -> Kept | None:
        kept = self._kept.pop(edge, None)
        if kept is not None:
            del self._by_generation[kept.generation]
            for name in _names_of(edge[2]):
                edges = self._by_name[name]
                del edges[edge]
                if not edges:
                    del self._by_name[name]
            self._count -= 1
            self._bytes -= kept.size_bytes
        return kept

    @staticmethod
    def _drop(*dropped: Kept | None) -> None:
        for kept in dropped:
            if kept is not None:
                kept.pool.give_back(kept.block)


def _shown(size_bytes: int) -> str:
    unit = "B" if size_bytes < _KIB else "KiB" if size_bytes < _KIB**2 else "MiB" if size_bytes < _KIB**3 else "GiB"
    return f"{size_bytes / _KIB ** ('B', 'KiB', 'MiB', 'GiB').index(unit):.4g} {unit}"


def _names_of(key: str) -> set[str]:
    """A key itself, and each beginning and end of it that an underscore parts from the rest."""
    parted = [at for at, sign in enumerate(key) if sign == "_"]
    return {key, *(key[:at] for at in parted), *(key[at + 1 :] for at in parted)}
