"""For tests of code that uses the registry or adds to it: an etcd in memory, a clock that moves by hand, a contract.

``FakeKV`` passes the same contract suite as the client of a real etcd. ``BalancerContract`` has the tests that every
load balancing policy passes.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from omni_discovery.balancing.base import LoadBalancer, Member, Task, index_of
from omni_discovery.errors import CompactedError, LeaseNotFoundError, RegistryUnavailableError
from omni_discovery.kv import (
    Claim,
    DeleteEvent,
    FirstKeys,
    Held,
    KeyValue,
    LeaseGrant,
    LeaseTime,
    Listing,
    PutEvent,
    Summary,
    WatchBatch,
    WatchEvent,
)
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.records.sizes import cut_value

#: Rounds of the event loop after which everything that could run has run.
_SETTLE_ROUNDS = 50


async def settle() -> None:
    """Let all tasks run until they wait for something that only time or the test can bring."""
    for _ in range(_SETTLE_ROUNDS):
        await asyncio.sleep(0)


class ManualClock:
    """A Clock that stands still until ``advance``."""

    def __init__(self, wall_s: float = 1_000_000.0) -> None:
        self._now_s = 0.0
        self._wall_start_s = wall_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._listeners: list[Callable[[], None]] = []

    def monotonic_s(self) -> float:
        """See Clock. Begins at 0."""
        return self._now_s

    def wall_s(self) -> float:
        """See Clock."""
        return self._wall_start_s + self._now_s

    async def sleep(self, delay_s: float) -> None:
        """See Clock."""
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + delay_s, next(self._order), future))
        await future

    async def wait(self, event: asyncio.Event, delay_s: float) -> None:
        """See Clock."""
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self.sleep(delay_s))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            # A cancellation that comes just now is the caller's, and must reach it.
            await asyncio.gather(*waits, return_exceptions=True)

    def on_advance(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` each time the clock has moved."""
        self._listeners.append(listener)

    async def advance(self, delay_s: float) -> None:
        """Move the clock, waking each sleeper at its own moment, and let everything run that can."""
        end_s = self._now_s + delay_s
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            moment_s, _, future = heapq.heappop(self._sleepers)
            self._move(max(moment_s, self._now_s))
            if not future.done():
                future.set_result(None)
                await settle()
        self._move(end_s)
        await settle()

    def _move(self, now_s: float) -> None:
        self._now_s = now_s
        for listener in self._listeners:
            listener()


@dataclass(slots=True)
class _FakeLease:
    ttl_s: float
    ends_s: float
    keys: set[str] = field(default_factory=set)


class FakeKV:
    """A KVStore in memory. All users of one instance see one registry; ``close`` ends it for all of them.

    ``is_out`` makes all calls and watches fail as if no etcd answered. ``loses_replies`` makes the next writes take
    effect and then fail, as when the answer got lost.
    """

    def __init__(self, clock: ManualClock, *, min_ttl_s: float = 1.0) -> None:
        self._clock = clock
        self._min_ttl_s = min_ttl_s
        self.loses_replies = 0
        self._is_out = False
        self._is_closed = False
        self._leases: dict[int, _FakeLease] = {}
        self._next_lease_id = itertools.count(1000)
        self._cluster_id = 1
        self._begin_history()
        self._changed = asyncio.Event()
        clock.on_advance(self._expire)

    def _begin_history(self) -> None:
        self._items: dict[str, KeyValue] = {}
        self._history: list[WatchEvent] = []
        self._revision = 1
        self._compacted = 0

    @property
    def is_out(self) -> bool:
        """Whether etcd can't be reached. Leases stand still meanwhile, as those of a stopped etcd do."""
        return self._is_out

    @is_out.setter
    def is_out(self, value: bool) -> None:
        if self._is_out and not value:
            for lease in self._leases.values():
                lease.ends_s = self._clock.monotonic_s() + lease.ttl_s
        self._is_out = value
        self._wake_watches()

    def compact(self) -> None:
        """Forget all history up to now."""
        self._compacted = self._revision
        self._history.clear()
        self._wake_watches()

    def wipe(self) -> None:
        """Become another, empty cluster: a new cluster id, no keys, no leases, no history."""
        self._cluster_id += 1
        self._leases.clear()
        self._begin_history()
        self._wake_watches()

    def end_lease(self, lease_id: int) -> None:
        """End a lease as ``etcdctl lease revoke`` does."""
        self._drop_lease(lease_id)

    async def grant(self, ttl_s: float) -> LeaseGrant:
        """See KVStore."""
        self._check_reachable()
        lease_id, granted_s = next(self._next_lease_id), max(self._min_ttl_s, ttl_s)
        self._leases[lease_id] = _FakeLease(granted_s, self._clock.monotonic_s() + granted_s)
        self._maybe_lose_reply()
        return LeaseGrant(lease_id, granted_s)

    async def keep_alive(self, lease_id: int) -> float:
        """See KVStore."""
        self._check_reachable()
        lease = self._lease(lease_id)
        lease.ends_s = self._clock.monotonic_s() + lease.ttl_s
        return lease.ttl_s

    async def lease_time(self, lease_id: int) -> LeaseTime | None:
        """See KVStore."""
        self._check_reachable()
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        return LeaseTime(float((lease.ends_s - self._clock.monotonic_s()) // 1), lease.ttl_s)

    async def revoke(self, lease_id: int) -> None:
        """See KVStore."""
        self._check_reachable()
        self._drop_lease(lease_id)

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """See KVStore."""
        self._check_reachable()
        self._write(key, value, lease_id)
        self._maybe_lose_reply()
        return self._revision

    async def create(self, key: str, value: bytes, lease_id: int = 0, *, also_read: str | None = None) -> Claim:
        """See KVStore."""
        claim = self._write_if(key not in self._items, key, value, lease_id)
        return claim if also_read is None else replace(claim, also_read=self._listing_of(also_read))

    async def compare_and_put(
        self, key: str, value: bytes, mod_revision: int, lease_id: int = 0, *, held: Held | None = None
    ) -> Claim:
        """See KVStore."""
        item = self._items.get(key)
        holds = held is None or self._holds(held)
        return self._write_if(holds and mod_revision == (item.mod_revision if item else 0), key, value, lease_id)

    def _holds(self, held: Held) -> bool:
        owner = self._items.get(held.key)
        return owner is not None and owner.lease_id == held.lease_id != 0

    async def delete(self, key: str, mod_revision: int = 0) -> bool:
        """See KVStore."""
        self._check_reachable()
        item = self._items.get(key)
        if item is None or mod_revision not in (0, item.mod_revision):
            return False
        self._delete([key])
        return True

    async def get(self, key: str) -> KeyValue | None:
        """See KVStore."""
        self._check_reachable()
        return self._items.get(key)

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        """See KVStore."""
        self._check_reachable()
        found = (item for key, item in sorted(self._items.items()) if key.startswith(prefix))
        if keys_only:
            found = (replace(item, value=b"") for item in found)
        return Listing(self._revision, self._cluster_id, tuple(found))

    async def summary(self, prefix: str) -> Summary:
        """See KVStore."""
        self._check_reachable()
        revisions = [item.mod_revision for key, item in self._items.items() if key.startswith(prefix)]
        return Summary(len(revisions), max(revisions, default=0))

    async def first_keys(self, prefix: str, limit: int) -> FirstKeys:
        """See KVStore."""
        items = (await self.list(prefix, keys_only=True)).items
        return FirstKeys(items[:limit], len(items))

    async def list_key(self, key: str) -> Listing:
        """See KVStore."""
        self._check_reachable()
        return self._listing_of(key)

    def _listing_of(self, key: str) -> Listing:
        item = self._items.get(key)
        return Listing(self._revision, self._cluster_id, () if item is None else (item,))

    def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """See KVStore."""
        return self._batches(lambda key: key.startswith(prefix), start_revision)

    def watch_key(self, key: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """See KVStore."""
        return self._batches(lambda changed: changed == key, start_revision)

    async def _batches(
        self, is_watched: Callable[[str], bool], start_revision: int
    ) -> AsyncGenerator[WatchBatch, None]:
        self._check_reachable()
        if self._revision + 1 < start_revision:
            raise CompactedError(f"the store went back to revision {self._revision}")
        cluster_id, next_revision = self._cluster_id, start_revision
        yield WatchBatch(start_revision - 1, ())
        while True:
            self._check_reachable()
            if cluster_id != self._cluster_id or next_revision < self._compacted:
                raise CompactedError("this part of the history is gone", self._compacted)
            # Taken before the batches go out: the registry may change while their reader works on them.
            changed, seen = self._changed, self._revision
            for revision, events in self._events_since(next_revision, is_watched):
                yield WatchBatch(revision, events)
            next_revision = max(next_revision, seen + 1)
            await changed.wait()

    def move_on(self) -> None:
        """See KVStore. There is no other."""

    async def close(self) -> None:
        """See KVStore."""
        self._is_closed = True
        self._wake_watches()

    def _events_since(
        self, revision: int, is_watched: Callable[[str], bool]
    ) -> Iterable[tuple[int, tuple[WatchEvent, ...]]]:
        """One entry for each revision that changed a watched key."""
        found: dict[int, list[WatchEvent]] = {}
        for event in self._history:
            where = event.item if isinstance(event, PutEvent) else event
            key, at = where.key, where.mod_revision
            if at >= revision and is_watched(key):
                found.setdefault(at, []).append(event)
        return [(at, tuple(events)) for at, events in found.items()]

    def _write_if(self, condition: bool, key: str, value: bytes, lease_id: int) -> Claim:
        self._check_reachable()
        if condition:
            self._write(key, value, lease_id)
            self._maybe_lose_reply()
        return Claim(condition, self._revision, self._items.get(key))

    def _write(self, key: str, value: bytes, lease_id: int) -> None:
        if lease_id:
            self._lease(lease_id).keys.add(key)
        old = self._items.get(key)
        if old is not None and old.lease_id not in (0, lease_id):
            self._leases[old.lease_id].keys.discard(key)
        self._revision += 1
        created = old.create_revision if old is not None else self._revision
        item = KeyValue(key, cut_value(key, value), created, self._revision, lease_id)
        self._items[key] = item
        self._history.append(PutEvent(item))
        self._wake_watches()

    def _delete(self, keys: Iterable[str]) -> None:
        gone = [key for key in keys if self._items.pop(key, None) is not None]
        if gone:
            self._revision += 1
            self._history += [DeleteEvent(key, self._revision) for key in gone]
            self._wake_watches()

    def _drop_lease(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._delete(sorted(lease.keys))

    def _expire(self) -> None:
        if not self._is_out:
            now_s = self._clock.monotonic_s()
            for lease_id in [number for number, lease in self._leases.items() if lease.ends_s <= now_s]:
                self._drop_lease(lease_id)

    def _lease(self, lease_id: int) -> _FakeLease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseNotFoundError(f"lease {lease_id} is gone")
        return lease

    def _check_reachable(self) -> None:
        if self._is_out or self._is_closed:
            raise RegistryUnavailableError("the fake registry is out")

    def _maybe_lose_reply(self) -> None:
        if self.loses_replies > 0:
            self.loses_replies -= 1
            raise RegistryUnavailableError("the answer was lost", may_have_run=True)

    def _wake_watches(self) -> None:
        # Each waiter holds the event that it waits on; the next waiter gets a new event.
        woken, self._changed = self._changed, asyncio.Event()
        woken.set()


def some_replicas(*queue_lengths: int, capacity: int = 4) -> list[ReplicaInfo]:
    """Replicas of stage 0 that are up, one for each queue length, with ids from 0."""
    return [
        ReplicaInfo(
            f"tcp://127.0.0.1:{20_000 + number}",
            f"tcp://127.0.0.1:{40_000 + number}",
            0,
            ReplicaStatus.UP,
            length,
            0.0,
            float(number),
            replica_id=number,
            epoch=number + 1,
            capacity=capacity,
        )
        for number, length in enumerate(queue_lengths)
    ]


class _CountedMember(Member):
    """Counts how often anything of it is read or called."""

    #: Reads of all members together.
    reads: ClassVar[int] = 0

    def __getattribute__(self, name: str) -> Any:
        _CountedMember.reads += 1
        return super().__getattribute__(name)


class BalancerContract:
    """The contract of every load balancing policy, as tests. Derive a class ``Test...`` and define ``make_balancer``.

    Both ways of use are tested: ``select`` on a list, and the index that a pool of replicas keeps and changes.
    """

    #: With an index of your own: how often the members of a pool of 2000 may be read for one pick and what follows it,
    #: on average. None: as often as you like, as ``select`` on a list does.
    most_reads_per_pick: ClassVar[int | None] = None

    def make_balancer(self) -> LoadBalancer:
        """A new balancer, as a hub makes one for each stage."""
        raise NotImplementedError

    def test_no_replica_can_be_chosen_from_an_empty_list(self) -> None:
        try:
            self.make_balancer().select({}, [])
        except ValueError:
            return
        raise AssertionError("select on an empty list raises ValueError")

    def test_select_returns_a_position_and_leaves_the_list_as_it_is(self) -> None:
        balancer = self.make_balancer()
        for listed in (some_replicas(3), some_replicas(0, 0), some_replicas(5, 1, 4, 1, 9)):
            before = [replace(info) for info in listed]
            for number in range(20):
                assert balancer.select({"request_id": f"r{number}"}, listed) in range(len(listed))
            assert listed == before, "select leaves the list as it is"

    def test_any_part_of_the_task_may_be_missing(self) -> None:
        """Inputs of any kind come in, too: texts, tokens, none at all."""
        balancer, listed = self.make_balancer(), some_replicas(1, 1, 1)
        tasks: list[Task] = [
            {},
            {"request_id": "r"},
            {"engine_inputs": {"prompt": "a text"}, "sampling_params": {"temperature": 0.5}},
            {"engine_inputs": {"prompt_token_ids": [1, 2, 3]}, "sampling_params": None},
            {"engine_inputs": None},
        ]
        assert all(balancer.select(task, listed) in range(3) for task in tasks)

    def test_a_replica_that_weighs_nothing_is_not_chosen_beside_one_that_does(self) -> None:
        balancer, listed = self.make_balancer(), some_replicas(1, 1, 1)
        listed = [replace(listed[0], weight=0.0), listed[1], replace(listed[2], weight=0.0)]
        chosen = {balancer.select({"request_id": f"r{number}"}, listed) for number in range(20)}
        assert chosen == {1}, "weight 0 means: nothing at all"

    def test_many_threads_may_select_at_once(self) -> None:
        balancer, listed = self.make_balancer(), some_replicas(*range(8))
        with ThreadPoolExecutor(8) as threads:
            chosen = list(threads.map(lambda number: balancer.select({"request_id": str(number)}, listed), range(800)))
        assert set(chosen) <= set(range(8))

    def test_the_index_picks_members_and_nothing_from_none(self) -> None:
        index = index_of(self.make_balancer())
        assert index.pick({}) is None, "an empty index picks None"
        members = [Member(info) for info in some_replicas(2, 0, 1)]
        for member in members:
            index.add(member)
        assert all(index.pick({"request_id": f"r{number}"}) in members for number in range(20))

    def test_the_index_follows_a_pool_that_changes(self) -> None:
        """Members come, change and go in any order; each pick is of one that is there, and is counted behind it."""
        for seed in range(5):
            chance = random.Random(seed)
            index = index_of(self.make_balancer())
            away = [Member(info) for info in some_replicas(*(0 for _ in range(12)), capacity=3)]
            there: list[Member] = []
            for number in range(600):
                match chance.choice(("add", "remove", "update", "pick", "pick", "pick")):
                    case "add" if away:
                        member = away.pop(chance.randrange(len(away)))
                        there.append(member)
                        index.add(member)
                    case "remove" if there:
                        member = there.pop(chance.randrange(len(there)))
                        away.append(member)
                        index.remove(member)
                    case "update" if there:
                        member = chance.choice(there)
                        self._change(member, chance)
                        index.update(member)
                    case "pick":
                        picked = index.pick({"request_id": f"r{number}"})
                        assert (picked is None) == (not there), "None is picked where nothing is there, and only there"
                        if picked is not None:
                            assert picked in there, "what was removed is not picked"
                            picked.load += 1
                            index.update(picked)

    def test_a_pick_costs_what_was_promised(self) -> None:
        if self.most_reads_per_pick is None:
            return
        index, picks = index_of(self.make_balancer()), 400
        for info in some_replicas(*(number % 7 for number in range(2000))):
            index.add(_CountedMember(info))
        # The first pick may build what later ones use.
        index.pick({})
        before = _CountedMember.reads
        for number in range(picks):
            picked = index.pick({"request_id": f"r{number}"})
            assert picked is not None
            picked.load += 1
            index.update(picked)
        reads = (_CountedMember.reads - before) / picks
        assert reads <= self.most_reads_per_pick, f"{reads:.1f} reads for each pick"

    @staticmethod
    def _change(member: Member, chance: random.Random) -> None:
        member.load = chance.randrange(5)
        member.reported = chance.randrange(5)
        member.weight = chance.choice((0.25, 1.0, 1.0, 3.0))
