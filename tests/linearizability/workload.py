"""Shipped clients that share the state of one namespace, all at once, and what each saw: histories to be checked.

Replicas come and go on the ids of one stage, operators replace the pipeline, cordon a replica and revoke hubs, and a
replica drains under hubs that pick. Half of the clients reach each member of etcd by one proxy, half by another.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from omni_discovery.commands.hubs import allow_hub, read_hubs, revoke_hub
from omni_discovery.commands.operate import OperationFailedError, Target, read_replica, steer, undo
from omni_discovery.commands.pipeline import apply_pipeline
from omni_discovery.errors import ConfigError, RegistryError
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.kv import KeyValue
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus
from omni_discovery.registration.leased_key import Listener
from omni_discovery.registration.registrars import ReplicaRegistrar, replica_id_of
from tests.linearizability.models import CLAIM, DRAIN, FLAG, KEY, MEMBERS, REGISTER
from tests.linearizability.recorder import KeyLog, RecordedKV, Recorder
from tests.linearizability.search import Model, Operation, Verdict, check

#: Short, so that leases end within a fault.
_TTL_S: Final = 2.0
_SEATS: Final = 3
#: How long one call of an operator may wait for the replica's answer.
_ANSWER_S: Final = 2.0
_CLOSE_S: Final = 1.0
#: How much later than the others a client may end: all its calls have ends.
_LATE_S: Final = 30.0


class Workload:
    """One namespace, its clients, and the histories of one run. ``ways`` are endpoints of the same members, twice."""

    def __init__(self, ways: Sequence[str], namespace: str, seed: int) -> None:
        self._ways = ways
        self.namespace = namespace
        self._chance = random.Random(seed)
        self._until_s = 0.0
        self._values = 0
        self._kvs: list[EtcdKV] = []
        self.keys = KeyLog()
        self.claims, self.pipelines, self.flags = Recorder(), Recorder(), Recorder()
        self.drains, self.revocations = Recorder(), Recorder()

    async def run(self, for_s: float) -> None:
        """Have all clients work for so long."""
        self._until_s = time.monotonic() + for_s
        works: list[Awaitable[None]] = [asyncio.to_thread(self._serve_one), asyncio.to_thread(self._drain)]
        works += [self._take_seats(f"seat-{number}") for number in range(_SEATS)]
        for number in range(2):
            works.append(self._again(f"looker-{number}", self._look))
            works.append(self._again(f"publisher-{number}", self._publish))
            works.append(self._again(f"warden-{number}", self._revoke))
            works.append(self._again(f"operator-{number}", self._cordon, target=Target(self.namespace, 1, 0)))
        tasks = [asyncio.ensure_future(work) for work in works]
        _, late = await asyncio.wait(tasks, timeout=for_s + _LATE_S)
        assert not late, "calls that do not end:\n" + "\n".join(" < ".join(_awaited_by(each)) for each in late)
        for task in tasks:
            task.result()
        for kv in self._kvs:
            await kv.close()

    def verdicts(self, *, are_leases_kept: bool = True) -> dict[str, Verdict]:
        """One for each history, by its subject. ``are_leases_kept``: no lease ended while etcd had promised it."""
        found: dict[str, Verdict] = {}
        for kind, model, histories in self.histories(are_leases_kept=are_leases_kept):
            for subject, history in histories.items():
                found[f"{kind} {subject}"] = check(model, history)
        return found

    def counts(self) -> dict[str, int]:
        """How many operations there are of each kind."""
        return {kind: sum(map(len, histories.values())) for kind, _, histories in self.histories()}

    def histories(self, *, are_leases_kept: bool = True) -> list[tuple[str, Model[Any], dict[str, list[Operation]]]]:
        """What was recorded: the kind, its model, and a history for each subject."""
        claims = {name: with_unanswered(each) for name, each in self.claims.histories().items()}
        if not are_leases_kept:
            claims = {name: without_promises(each) for name, each in claims.items()}
        return [
            ("key", KEY, self.keys.histories(are_leases_kept=are_leases_kept)),
            ("claim", CLAIM, claims),
            ("pipeline", REGISTER, self.pipelines.histories()),
            ("cordon", FLAG, self.flags.histories()),
            # A hub whose lease ended too early is not waited for.
            ("drain", DRAIN, self.drains.histories() if are_leases_kept else {}),
            ("revoked", MEMBERS, self.revocations.histories()),
        ]

    # ---- clients

    def way(self, client: str) -> str:
        """The endpoints for a client, by the number at the end of its name."""
        return self._ways[int(client.rpartition("-")[2]) % len(self._ways)]

    def _connect(self, client: str) -> RecordedKV:
        kv = EtcdKV(self.way(client), try_timeout_s=1.0, call_timeout_s=3.0)
        self._kvs.append(kv)
        return RecordedKV(kv, client, self.keys)

    def noted(self, client: str) -> Callable[[EtcdKV], Any]:
        """What makes a client's connection one that is noted."""
        return lambda kv: RecordedKV(kv, client, self.keys)

    @property
    def _goes_on(self) -> bool:
        return time.monotonic() < self._until_s

    async def _again(self, client: str, work: Callable[..., Awaitable[None]], **options: Any) -> None:
        """Do something again and again, with a short random pause behind each time."""
        kv = self._connect(client)
        while self._goes_on:
            with contextlib.suppress(RegistryError, ConfigError, TimeoutError):
                await work(client, kv, **options)
            await asyncio.sleep(self._chance.uniform(0.0, 0.1))

    # ---- claims of an id

    async def _take_seats(self, client: str) -> None:
        """Register as a replica of stage 0, stay for a while, leave; again and again, each time as somebody new."""
        kv = self._connect(client)
        life = 0
        while self._goes_on:
            life += 1
            seat = _Seat(f"{client}.{life}", kv, self.namespace, self.claims)
            await seat.live(min(self._until_s, time.monotonic() + self._chance.choice((0.3, 1.0, 2.0, 6.0))))

    async def _look(self, client: str, kv: RecordedKV) -> None:
        """Read who is registered for stage 0."""
        called_s = time.monotonic()
        listing = await kv.list(keys.replicas_prefix(self.namespace, 0))
        epochs = {item.key.rpartition("/")[2]: item.create_revision for item in listing.items}
        for replica_id in map(str, range(_SEATS)):
            epoch = epochs.get(replica_id, 0)
            self.claims.add(f"0/{replica_id}", Operation(client, "read", None, called_s, time.monotonic(), epoch))

    # ---- the pipeline in force

    async def _publish(self, client: str, kv: RecordedKV) -> None:
        """As hubs that start, `omni pipeline apply`, and whoever reads it."""
        self._values += 1
        value, key = f'{{"number": {self._values}}}'.encode(), keys.pipeline_key(self.namespace)
        record = self.pipelines.record
        match self._chance.randrange(4):
            case 0:
                await record("in force", client, "first", value, _in_force(kv, key, value))
            case 1:
                # Who is told that somebody else was faster has changed nothing.
                with contextlib.suppress(ConfigError):
                    await record("in force", client, "replace", value, _applied(kv, self.namespace, value))
            case _:
                await record("in force", client, "read", None, _value(kv, key))

    # ---- cordon

    def _serve_one(self) -> None:
        """One replica of stage 1, which obeys its control key."""
        with _StageClient(self, "served-0", 1):
            while self._goes_on:
                time.sleep(0.05)

    async def _cordon(self, client: str, kv: RecordedKV, target: Target) -> None:
        """`omni cordon` and its undoing, by one of two operators, and what the replica's record says before."""
        subject, called_s = str(target), time.monotonic()
        before = await read_replica(kv, target)
        if before is None or before.status is not ReplicaStatus.UP:
            # Another life of it, which has not read its control key.
            return
        self.flags.add(subject, Operation(client, "read", None, called_s, time.monotonic(), before.cordoned))
        if self._chance.random() < 0.5:
            return
        wanted = self._chance.random() < 0.5
        called_s = time.monotonic()
        try:
            if wanted:
                await steer(kv, target, before, {"cordon": True}, _ANSWER_S)
            else:
                await undo(kv, target, before, {"cordon": None}, _ANSWER_S)
        except (OperationFailedError, RegistryError, TimeoutError):
            # It may hold, and may have been taken back: what was there before may hold again.
            for each in (wanted, not wanted):
                self.flags.add(subject, Operation(client, "replace", each, called_s))
        else:
            self.flags.add(subject, Operation(client, "replace", wanted, called_s, time.monotonic()))

    # ---- drains

    def _drain(self) -> None:
        """Replicas of stage 2 drain one after the other; hubs that hold their lease pick until they are told."""
        with _HubClient(self, "hub-0") as first, _HubClient(self, "hub-1") as second:
            while self._goes_on:
                with contextlib.suppress(TimeoutError), _StageClient(self, "draining-1", 2) as replica:
                    replica_id, epoch = replica.wait_registered(max(0.1, self._until_s - time.monotonic()))
                    self._drain_one(replica, f"2/{replica_id} epoch {epoch}", (replica_id, epoch), (first, second))

    def _drain_one(
        self, replica: _StageClient, subject: str, life: tuple[int, int], hubs: tuple[_HubClient, _HubClient]
    ) -> None:
        for _ in range(8):
            self._pick(subject, life, hubs)
        called_s = time.monotonic()
        replica.update_info(status=ReplicaStatus.DRAINING)
        while self._goes_on and not replica.acknowledged_s:
            self._pick(subject, life, hubs)
        for _ in range(10):
            self._pick(subject, life, hubs)
        self.drains.add(subject, Operation("replica", "acknowledge", None, called_s, replica.acknowledged_s or None))

    def _pick(self, subject: str, life: tuple[int, int], hubs: tuple[_HubClient, _HubClient]) -> None:
        """Whom each hub would pick now. One whose lease may have ended is not waited for."""
        time.sleep(0.05)
        for hub in hubs:
            now_s, left_s = time.monotonic(), hub.lease_left_s
            picked = {(each.replica_id, each.epoch) for each in hub.get_replicas_for_stage(2).replicas}
            if life in picked and left_s > 0.0 and hub.lease_left_s > 0.0:
                self.drains.add(subject, Operation(hub.name, "pick", True, now_s, now_s))

    # ---- revoked hubs

    async def _revoke(self, client: str, kv: RecordedKV) -> None:
        """`omni hub revoke`, `omni hub allow` and `omni hubs`."""
        store: Any = kv
        hub_id, record = self._chance.choice(("a", "b")), self.revocations.record
        match self._chance.randrange(4):
            case 0:
                await record("hubs", client, "add", hub_id, revoke_hub(store, self.namespace, hub_id, force=True))
            case 1:
                await record("hubs", client, "remove", hub_id, allow_hub(store, self.namespace, hub_id))
            case _:
                await record("hubs", client, "read", None, _revoked(store, self.namespace))


def _awaited_by(task: asyncio.Future[None]) -> list[str]:
    """Where a task waits: the innermost place first."""
    places: list[str] = []
    waits: Any = task.get_coro() if isinstance(task, asyncio.Task) else None
    while waits is not None:
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None) or getattr(waits, "ag_frame", None)
        places.insert(0, repr(waits)[:200] if frame is None else f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        waits = (
            getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None) or getattr(waits, "ag_await", None)
        )
    return places


async def _in_force(kv: RecordedKV, key: str, value: bytes) -> bytes | None:
    claim = await kv.create(key, value)
    return None if claim.current is None else claim.current.value


async def _applied(kv: Any, namespace: str, value: bytes) -> None:
    await apply_pipeline(kv, namespace, value)


async def _value(kv: RecordedKV, key: str) -> bytes | None:
    item = await kv.get(key)
    return None if item is None else item.value


async def _revoked(kv: Any, namespace: str) -> frozenset[str]:
    return frozenset(each.hub_id for each in (await read_hubs(kv, namespace, 0.0))[0] if each.revoked)


class _Seat:
    """One registrar of a replica, from its first claim to its close, and what it believes to own."""

    def __init__(self, client: str, kv: Any, namespace: str, claims: Recorder) -> None:
        self._client, self._claims = client, claims
        self._called_s = 0.0
        #: The id and epoch that are owned; None while none is.
        self._owned: tuple[str, int] | None = None
        #: Until when the lease of that can't have ended.
        self._until_s = 0.0
        listener = Listener(on_registered=self._on_registered, on_lost=self._on_lost)
        self._record = ReplicaRecord(
            stage_id=0,
            replica_id=0,
            input_addr="tcp://h:1",
            output_addr="tcp://h:2",
            status=ReplicaStatus.UP,
            host=client,
        )
        self._registrar = ReplicaRegistrar(
            kv, namespace, self._record, ttl_s=_TTL_S, load_interval_s=0.1, listener=listener
        )

    async def live(self, until_s: float) -> None:
        """Register, say every moment what is owned and that it has changed, and leave."""
        self._called_s = time.monotonic()
        self._registrar.start()
        load = 0
        while time.monotonic() < until_s:
            await asyncio.sleep(0.05)
            self._note_owned()
            load += 1
            self._registrar.update(msgspec.structs.replace(self._record, queue_length=load))
        # Whoever reaches nobody still holds its id by then, and its lease may have ended long before.
        self._note_end(min(time.monotonic(), self._until_s))
        await self._registrar.close(_CLOSE_S)

    def _on_registered(self, key: KeyValue) -> None:
        self._owned = (str(replica_id_of(key)), key.create_revision)
        self._until_s = 0.0
        self._note("claim", self._called_s, time.monotonic())

    def _on_lost(self, _reason: str) -> None:
        self._note_end(self._until_s)
        self._called_s = time.monotonic()

    def _note_owned(self) -> None:
        left_s, now_s = self._registrar.lease_left_s, time.monotonic()
        if self._owned is not None and left_s > 0.0:
            self._until_s = max(self._until_s, now_s + left_s)
            self._note("own", now_s, now_s)

    def _note_end(self, from_s: float) -> None:
        """It may end from then on; whether it has, and when, the registrar is not told."""
        if self._owned is not None:
            self._note("end", from_s, None)
            self._owned = None

    def _note(self, name: str, called_s: float, returned_s: float | None) -> None:
        assert self._owned is not None
        replica_id, epoch = self._owned
        self._claims.add(f"0/{replica_id}", Operation(self._client, name, epoch, called_s, returned_s))


def with_unanswered(history: list[Operation]) -> list[Operation]:
    """A history of claims, with those whose owner never had an answer: others have read their epochs."""
    known = {each.argument for each in history if each.name == "claim"}
    begun_s = min((each.called_s for each in history), default=0.0)
    ghosts = {each.result for each in history if each.name == "read"} - known - {0}
    unanswered = [
        Operation(f"unanswered {epoch}", name, epoch, begun_s) for epoch in sorted(ghosts) for name in ("claim", "end")
    ]
    return [*unanswered, *history]


def without_promises(history: list[Operation]) -> list[Operation]:
    """A history of claims, where a lease may end at any time: then nobody knows that an id is still its own."""
    begun_s = min((each.called_s for each in history), default=0.0)
    kept = [each for each in history if each.name != "own"]
    return [replace(each, called_s=begun_s) if each.name == "end" else each for each in kept]


class _StageClient(OmniCoordClientForStage):
    """A replica's client whose calls are noted."""

    def __init__(self, workload: Workload, name: str, stage_id: int) -> None:
        self._noted = workload.noted(name)
        self.acknowledged_s = 0.0
        super().__init__(
            workload.way(name),
            "tcp://h:1",
            "tcp://h:2",
            stage_id,
            namespace=workload.namespace,
            ttl_s=_TTL_S,
            on_acknowledged=self._on_drained,
        )

    def _connect(self) -> EtcdKV:
        noted: EtcdKV = self._noted(super()._connect())
        return noted

    def _on_drained(self) -> None:
        self.acknowledged_s = time.monotonic()


class _HubClient(OmniCoordClientForHub):
    """A hub's client whose calls are noted."""

    def __init__(self, workload: Workload, name: str) -> None:
        self._noted = workload.noted(name)
        self.name = name
        super().__init__(workload.way(name), namespace=workload.namespace, ttl_s=_TTL_S, hub=HubRecord(hub_id=name))

    def _connect(self) -> EtcdKV:
        noted: EtcdKV = self._noted(super()._connect())
        return noted
