"""An etcd of three members: one history with revisions, leases, compaction and leaders, and the client of one process.

The answers of ``EtcdModel`` are those of ``FakeKV``, which passes the contract suite of the registry. ``SimKV`` stands
in the place of EtcdKV: each call goes over the network to one member, and may be late, lost, or lost on its way back.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from omni_discovery.errors import CompactedError, RegistryError, RegistryUnavailableError
from omni_discovery.kv import Claim, Held, KeyValue, LeaseGrant, Listing, PutEvent, Summary, WatchBatch, WatchEvent
from omni_discovery.testing import FakeKV
from tests.simulation.virtual_time import PROCESS, Process

if TYPE_CHECKING:
    from tests.simulation.world import World

_Result = TypeVar("_Result")

#: How often etcd looks for leases that have ended.
_EXPIRY_S = 0.5
#: After so long without an answer to its pings a client gives a connection up.
_KEEPALIVE_S = 13.0


class _WorldClock:
    """The clock of etcd itself. ``FakeKV`` asks to be called when it moves: the model has timers for that."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic_s(self) -> float:
        return self._world.now_s

    def wall_s(self) -> float:
        return self._world.now_s

    def on_advance(self, listener: Callable[[], None]) -> None:
        del listener


class EtcdModel(FakeKV):
    """The state that a majority of members agrees on. Calls of clients go through a ``SimKV``."""

    def __init__(self, world: World) -> None:
        super().__init__(_WorldClock(world), min_ttl_s=1.0)  # type: ignore[arg-type]
        self._world = world
        self.hosts = [f"10.9.0.{number}" for number in range(3)]
        #: Members that run, and those that run and hear nothing of the leader.
        self.down: set[int] = set()
        self.behind: set[int] = set()
        #: Until when there is no leader.
        self.leaderless_until_s = 0.0
        #: Answers to writes that get lost.
        self.lost_answers = 0.0
        self.watches: dict[_Watch, None] = {}
        #: Writes so far by the kind of their key.
        self.writes: Counter[str] = Counter()
        #: Called with each key and value that is written.
        self.on_write: list[Callable[[str, bytes], None]] = []
        self._revisions: list[int] = []
        world.after(_EXPIRY_S, self._look_for_ended)

    @property
    def has_leader(self) -> bool:
        return self._world.now_s >= self.leaderless_until_s and len(self.down) < 2

    def keys_now(self) -> list[str]:
        """The keys that are there."""
        return list(self._items)

    @property
    def revision(self) -> int:
        return self._revision

    def change_leader(self, without_s: float) -> None:
        """No leader for a while; the next one gives every lease its whole TTL again."""
        self.leaderless_until_s = max(self.leaderless_until_s, self._world.now_s + without_s)
        self._world.after(self.leaderless_until_s - self._world.now_s, self.renew_all)

    def renew_all(self) -> None:
        for lease in self._leases.values():
            lease.ends_s = self._world.now_s + lease.ttl_s

    def member_down(self, member: int) -> None:
        self.down.add(member)
        for watch in [watch for watch in self.watches if watch.member == member]:
            watch.fail(RegistryUnavailableError("the member is gone"))

    def member_up(self, member: int) -> None:
        self.down.discard(member)
        if self.has_leader:
            self.renew_all()

    def member_behind(self, member: int, *, is_behind: bool) -> None:
        (self.behind.add if is_behind else self.behind.discard)(member)
        self.pass_on()

    def compact(self) -> None:
        super().compact()
        self._revisions.clear()

    def wipe(self) -> None:
        super().wipe()
        self._revisions.clear()
        for watch in list(self.watches):
            watch.fail(CompactedError("another cluster answers here"))

    def events_from(self, revision: int) -> list[WatchEvent]:
        return self._history[bisect_left(self._revisions, revision) :]

    @property
    def compacted(self) -> int:
        return self._compacted

    def pass_on(self) -> None:
        """Send what watches have not had yet."""
        # A watch that has to end leaves the list meanwhile.
        for watch in list(self.watches):
            watch.push()

    def _wake_watches(self) -> None:
        for event in self._history[len(self._revisions) :]:
            is_put = isinstance(event, PutEvent)
            self._revisions.append(event.item.mod_revision if is_put else event.mod_revision)
            if is_put:
                parts = event.item.key.split("/")
                self.writes[parts[4] if len(parts) > 4 else event.item.key] += 1
                for listener in self.on_write:
                    listener(event.item.key, event.item.value)
        self.pass_on()

    def _look_for_ended(self) -> None:
        if self.has_leader:
            self._expire()
        self._world.after(_EXPIRY_S, self._look_for_ended)


class _Watch:
    """One watch of one client at one member."""

    def __init__(self, world: World, process: Process, member: int, name: str, start: int, *, is_prefix: bool) -> None:
        self._world, self._process, self.member = world, process, member
        self._name, self._is_prefix = name, is_prefix
        self._next_revision = start
        self._arrives_s = 0.0
        #: Batches, or the error that ends the watch, as they arrived.
        self.arrived: deque[WatchBatch | RegistryError] = deque()
        self.has_news = asyncio.Event()

    def push(self) -> None:
        """Send everything new, as far as the member knows it and reaches the client."""
        model = self._world.etcd
        if self.member in model.behind or not self._world.kv_reaches(self.member, self._process):
            return
        if self._next_revision <= model.compacted and self._next_revision <= model.revision:
            self.fail(CompactedError("this part of the history is gone", model.compacted))
            return
        found: dict[int, list[WatchEvent]] = {}
        for event in model.events_from(self._next_revision):
            is_put = isinstance(event, PutEvent)
            key = event.item.key if is_put else event.key
            at = event.item.mod_revision if is_put else event.mod_revision
            if key.startswith(self._name) if self._is_prefix else key == self._name:
                found.setdefault(at, []).append(event)
        self._next_revision = model.revision + 1
        for at, events in found.items():
            self._deliver(WatchBatch(at, tuple(events)))

    def fail(self, error: RegistryError) -> None:
        self._world.etcd.watches.pop(self, None)
        self._deliver(error)

    def _deliver(self, what: WatchBatch | RegistryError) -> None:
        world = self._world
        self._arrives_s = max(self._arrives_s, world.now_s + world.network.delay_s())

        def arrive() -> None:
            self.arrived.append(what)
            self.has_news.set()

        world.run_in(self._process, arrive, at_s=self._arrives_s)


class SimKV:
    """The KVStore of one process. ``endpoints`` and the rest are not looked at: there is one cluster."""

    def __init__(self, world: World, try_timeout_s: float = 2.0, call_timeout_s: float = 4.0) -> None:
        process = PROCESS.get()
        assert process is not None, "a client belongs to a process"
        self._try_timeout_s, self._call_timeout_s = try_timeout_s, call_timeout_s
        self._world, self._process = world, process
        self._member = world.chance.randrange(3)
        self._is_closed = False
        self.cluster_id = 0

    async def grant(self, ttl_s: float) -> LeaseGrant:
        return await self._call(lambda model: model.grant(float(max(1, -int(-ttl_s // 1)))))

    async def keep_alive(self, lease_id: int) -> float:
        return await self._attempt(lambda model: model.keep_alive(lease_id))

    async def revoke(self, lease_id: int) -> None:
        await self._call(lambda model: model.revoke(lease_id))

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        return await self._call(lambda model: model.put(key, value, lease_id), repeatable=False)

    async def create(self, key: str, value: bytes, lease_id: int = 0) -> Claim:
        return await self._claim(lambda model: model.create(key, value, lease_id), value, lease_id)

    async def compare_and_put(
        self, key: str, value: bytes, mod_revision: int, lease_id: int = 0, *, held: Held | None = None
    ) -> Claim:
        return await self._claim(
            lambda model: model.compare_and_put(key, value, mod_revision, lease_id, held=held), value, lease_id
        )

    async def delete(self, key: str, mod_revision: int = 0) -> bool:
        return await self._call(lambda model: model.delete(key, mod_revision), repeatable=False)

    async def get(self, key: str) -> KeyValue | None:
        return await self._call(lambda model: model.get(key))

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        listing = await self._call(lambda model: model.list(prefix, keys_only=keys_only))
        self.cluster_id = listing.cluster_id
        return listing

    async def summary(self, prefix: str) -> Summary:
        return await self._call(lambda model: model.summary(prefix))

    async def list_key(self, key: str) -> Listing:
        listing = await self._call(lambda model: model.list_key(key))
        self.cluster_id = listing.cluster_id
        return listing

    def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        return self._watch(prefix, start_revision, is_prefix=True)

    def watch_key(self, key: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        return self._watch(key, start_revision, is_prefix=False)

    def move_on(self) -> None:
        self._member = (self._member + 1) % 3

    async def close(self) -> None:
        self._is_closed = True

    async def _claim(
        self, operation: Callable[[EtcdModel], Coroutine[Any, Any, Claim]], value: bytes, lease_id: int
    ) -> Claim:
        unsure: list[bool] = []
        claim = await self._call(operation, unsure=unsure)
        current = claim.current
        if any(unsure) and current is not None and not claim.won:
            is_ours = current.value == value and current.lease_id == lease_id
            return Claim(is_ours, claim.revision, current)
        return claim

    async def _call(
        self,
        operation: Callable[[EtcdModel], Coroutine[Any, Any, _Result]],
        *,
        repeatable: bool = True,
        unsure: list[bool] | None = None,
    ) -> _Result:
        world = self._world
        until_s, pause_s = world.now_s + self._call_timeout_s, 0.05
        while True:
            try:
                return await self._attempt(operation)
            except RegistryUnavailableError as error:
                if unsure is not None:
                    unsure.append(error.may_have_run)
                if not (repeatable or not error.may_have_run) or self._is_closed or world.now_s > until_s:
                    raise
            await asyncio.sleep(world.chance.random() * pause_s)
            pause_s = min(0.5, 2 * pause_s)

    async def _attempt(self, operation: Callable[[EtcdModel], Coroutine[Any, Any, _Result]]) -> _Result:
        """One call to one member, as EtcdKV makes it: past its time-out nobody knows whether it ran."""
        if self._is_closed:
            raise RegistryUnavailableError("this connection is closed")
        world, model, member = self._world, self._world.etcd, self._member
        began_s = world.now_s
        await asyncio.sleep(world.network.delay_s())
        if member in model.down:
            self.move_on()
            raise RegistryUnavailableError("the member refuses connections")
        if not self._is_answered(member):
            return await self._time_out(began_s)
        try:
            result: Any = run_now(operation(model))
        except RegistryUnavailableError:
            raise
        except RegistryError as error:
            result = error
        await asyncio.sleep(world.network.delay_s())
        if not world.kv_reaches(member, self._process):
            return await self._time_out(began_s)
        if model.lost_answers and world.chance.random() < model.lost_answers:
            raise RegistryUnavailableError("the answer was lost", may_have_run=True)
        if isinstance(result, RegistryError):
            raise result
        return result

    def _is_answered(self, member: int) -> bool:
        model = self._world.etcd
        both = self._world.kv_reaches(member, self._process, both_ways=True)
        return both and model.has_leader and member not in model.behind

    async def _time_out(self, began_s: float) -> Any:
        await asyncio.sleep(max(0.0, began_s + self._try_timeout_s - self._world.now_s))
        self.move_on()
        raise RegistryUnavailableError("no answer in time", may_have_run=True)

    async def _watch(self, name: str, start_revision: int, *, is_prefix: bool) -> AsyncGenerator[WatchBatch, None]:
        world, model, member = self._world, self._world.etcd, self._member
        if self._is_closed:
            raise RegistryUnavailableError("this connection is closed")
        began_s = world.now_s
        await asyncio.sleep(world.network.delay_s())
        if member in model.down:
            self.move_on()
            raise RegistryUnavailableError("the member refuses connections")
        if not world.kv_reaches(member, self._process, both_ways=True):
            await self._time_out(began_s)
        if model.revision + 1 < start_revision:
            raise CompactedError(f"the store went back to revision {model.revision}")
        watch = _Watch(world, self._process, member, name, start_revision, is_prefix=is_prefix)
        model.watches[watch] = None
        try:
            yield WatchBatch(start_revision - 1, ())
            watch.push()
            while True:
                while watch.arrived:
                    what = watch.arrived.popleft()
                    if isinstance(what, RegistryError):
                        raise what
                    yield what
                await self._wait_for_news(watch)
        except RegistryError:
            self.move_on()
            raise
        finally:
            model.watches.pop(watch, None)

    async def _wait_for_news(self, watch: _Watch) -> None:
        """Wait for what the watch brings next. Raise RegistryUnavailableError once pings go unanswered for long."""
        watch.has_news.clear()
        silent_s = 0.0
        while silent_s < _KEEPALIVE_S:
            try:
                async with asyncio.timeout(_KEEPALIVE_S / 2):
                    await watch.has_news.wait()
            except TimeoutError:
                is_answered = self._world.kv_reaches(watch.member, self._process, both_ways=True)
                silent_s = 0.0 if is_answered else silent_s + _KEEPALIVE_S / 2
            else:
                return
        raise RegistryUnavailableError("the connection is silent")


def run_now(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    raise AssertionError("the model of etcd waits for nothing")
