"""An etcd of three members: one history with revisions, leases, compaction and leaders, and the client of one process.

The answers of ``EtcdModel`` are those of ``FakeKV``, which passes the contract suite of the registry. ``SimKV`` is
EtcdKV without gRPC: each call goes over the network to one member, and may be late, lost, or lost on its way back.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence, Set
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from omni_discovery.errors import CompactedError, RegistryError, RegistryUnavailableError
from omni_discovery.etcd._rpc import rpc
from omni_discovery.etcd.channel import Outage
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.etcd.watch import prefix_end
from omni_discovery.kv import Held, KeyValue, PutEvent, WatchBatch, WatchEvent
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
        # Watches have had what was here for them, as far as it reached them.
        self.pass_on()
        super().compact()
        self._revisions.clear()

    def wipe(self) -> None:
        super().wipe()
        self._revisions.clear()
        for watch in list(self.watches):
            watch.fail(CompactedError("another cluster answers here"))

    def serve(self, name: str, request: Any) -> Any:
        """Answer one of the requests that EtcdKV sends, by the name of its method."""
        match name:
            case "Put":
                return self._reply(run_now(self.put(request.key.decode(), request.value, request.lease)))
            case "LeaseGrant":
                grant = run_now(self.grant(float(request.TTL)))
                return SimpleNamespace(ID=grant.lease_id, TTL=grant.ttl_s)
            case "LeaseRevoke":
                return run_now(self.revoke(request.ID))
            case "DeleteRange":
                return self._reply(deleted=int(run_now(self.delete(request.key.decode()))))
            case "Txn":
                return self._transact(request)
        assert name == "Range", name
        return self._read(request)

    def _reply(self, revision: int = 0, **more: Any) -> SimpleNamespace:
        return _reply(revision or self._revision, self._cluster_id, **more)

    def _read(self, request: Any) -> Any:
        """A read of one key, or of all that begin with it; never in pages."""
        key = request.key.decode()
        if not request.range_end:
            item = self._items.get(key) if not request.revision else self._item_at(key, request.revision)
            return self._reply(kvs=_shown([] if item is None else [item]))
        assert request.range_end == prefix_end(request.key), "ranges are prefixes here"
        items = run_now(self.list(key, keys_only=request.keys_only)).items
        count = len(items)
        if request.sort_target == rpc.RangeRequest.MOD:
            items = tuple(sorted(items, key=lambda item: -item.mod_revision)[: request.limit])
        return self._reply(kvs=_shown(items), count=count, more=False)

    def _item_at(self, key: str, revision: int) -> KeyValue | None:
        """A key as it was. Raise CompactedError."""
        changes = [(_place_of(event)[1], event) for event in self._history if _place_of(event)[0] == key]
        if not changes:
            return self._items.get(key)
        earlier = [event for changed_at, event in changes if changed_at <= revision]
        if not earlier and self._compacted:
            raise CompactedError(f"compacted at {self._compacted}", self._compacted)
        return earlier[-1].item if earlier and isinstance(earlier[-1], PutEvent) else None

    def _transact(self, request: Any) -> Any:
        """A write or a delete that has conditions on revisions, and on the lease of another key."""
        first, *held = request.compare
        key, then = first.key.decode(), request.success[0]
        if then.request_delete_range.key:
            return self._reply(succeeded=run_now(self.delete(key, first.mod_revision)))
        put = then.request_put
        owner = Held(held[1].key.decode(), held[1].lease) if held else None
        # A key that is not there has neither revision.
        claim = run_now(self.compare_and_put(key, put.value, first.mod_revision, put.lease, held=owner))
        ranges = [self._read(operation.request_range) for operation in request.failure]
        return self._reply(succeeded=claim.won, responses=[SimpleNamespace(response_range=each) for each in ranges])

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

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
        keys = set()
        for event in self._history[len(self._revisions) :]:
            key, revision = _place_of(event)
            self._revisions.append(revision)
            keys.add(key)
            if isinstance(event, PutEvent):
                parts = event.item.key.split("/")
                self.writes[parts[4] if len(parts) > 4 else event.item.key] += 1
                for listener in self.on_write:
                    listener(event.item.key, event.item.value)
        for watch in [watch for watch in self.watches if watch.is_about(keys)]:
            watch.push()

    def _look_for_ended(self) -> None:
        if self.has_leader:
            self._expire()
        self._world.after(_EXPIRY_S, self._look_for_ended)


def _place_of(event: WatchEvent) -> tuple[str, int]:
    """The key of an event, and its revision."""
    changed = event.item if isinstance(event, PutEvent) else event
    return changed.key, changed.mod_revision


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

    def is_about(self, keys: Set[str]) -> bool:
        """Whether one of these keys is watched."""
        name = self._name
        return any(key.startswith(name) for key in keys) if self._is_prefix else name in keys

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
            key, at = _place_of(event)
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


#: In the place of a channel's stubs: what a method of them is called.
_METHODS: Final = SimpleNamespace(
    kv=SimpleNamespace(Put="Put", Txn="Txn", DeleteRange="DeleteRange", Range="Range"),
    lease=SimpleNamespace(LeaseGrant="LeaseGrant", LeaseRevoke="LeaseRevoke"),
)


class SimKV(EtcdKV):
    """The EtcdKV of one process, with its shipped requests, retries and doubts; below it are the model and network."""

    def __init__(self, world: World, try_timeout_s: float = 2.0, call_timeout_s: float = 6.0) -> None:
        process = PROCESS.get()
        assert process is not None, "a client belongs to a process"
        self._loop = asyncio.get_running_loop()
        self._try_timeout_s, self._call_timeout_s = try_timeout_s, call_timeout_s
        self._world, self._process = world, process
        self._member = world.chance.randrange(3)
        self._outage = Outage(world.etcd.hosts)
        self._cluster_id = 0
        self._closed = False

    async def keep_alive(self, lease_id: int) -> float:
        self._check_usable()
        left_s: float = await self._attempt(lambda model: run_now(model.keep_alive(lease_id)))
        return left_s

    def move_on(self) -> None:
        self._member = (self._member + 1) % 3

    async def close(self) -> None:
        self._closed = True

    async def _try_once(self, method: Callable[[Any], str], request: Any) -> Any:
        name = method(_METHODS)
        answer = await self._attempt(lambda model: model.serve(name, request))
        self._outage.call_answered()
        self._seen_revision = self._world.etcd.revision
        return answer

    async def _attempt(self, operation: Callable[[EtcdModel], Any]) -> Any:
        """One call to one member: past its time-out nobody knows whether it ran."""
        world, model, member = self._world, self._world.etcd, self._member
        began_s = world.now_s
        await asyncio.sleep(world.network.delay_s())
        if member in model.down:
            self.move_on()
            raise RegistryUnavailableError("the member refuses connections")
        if not self._is_answered(member):
            return await self._time_out(began_s)
        try:
            result = operation(model)
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
        self._check_usable()
        world, model, member = self._world, self._world.etcd, self._member
        began_s = world.now_s
        await asyncio.sleep(world.network.delay_s())
        if member in model.down:
            self.move_on()
            raise RegistryUnavailableError("the member refuses connections")
        if not world.kv_reaches(member, self._process, both_ways=True):
            await self._time_out(began_s)
        if self._cluster_id not in (0, model.cluster_id):
            raise CompactedError("another etcd answers")
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
        except RegistryUnavailableError:
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


def _reply(revision: int, cluster_id: int, **more: Any) -> SimpleNamespace:
    """An answer of etcd, as far as EtcdKV reads it."""
    return SimpleNamespace(header=SimpleNamespace(revision=revision, cluster_id=cluster_id), **more)


def _shown(items: Sequence[KeyValue]) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            key=item.key.encode(),
            value=item.value,
            create_revision=item.create_revision,
            mod_revision=item.mod_revision,
            lease=item.lease_id,
        )
        for item in items
    ]


def run_now(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    raise AssertionError("the model of etcd waits for nothing")
