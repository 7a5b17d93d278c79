"""The registrar against a registry in memory, on a clock moved by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from omni_discovery.errors import ConfigError, RegistryUnavailableError
from omni_discovery.kv import Claim, DeleteEvent, KeyValue, Listing, PutEvent, WatchBatch
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus
from omni_discovery.registration.leased_key import Listener, _OwnKeySink
from omni_discovery.registration.registrars import HubRegistrar, ReplicaRegistrar, changed_record, replica_id_of
from omni_discovery.testing import FakeKV, ManualClock, settle

NS = "default"
RECORD = ReplicaRecord(
    stage_id=0, replica_id=0, input_addr="tcp://h:1", output_addr="tcp://h:2", status=ReplicaStatus.UP
)


class SlowKV(FakeKV):
    """Answers the first create only when ``release_create`` is set; afterwards one write and one read of it fail."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.release_create: asyncio.Event | None = None
        self.failing_writes = self.failing_reads = 0
        #: So many creates take effect, and their answers are lost.
        self.lost_creates = 0
        #: How often a prefix was listed.
        self.lists = 0

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        self.lists += 1
        return await super().list(prefix, keys_only=keys_only)

    async def create(self, key: str, value: bytes, lease_id: int = 0, *, also_read: str | None = None) -> Claim:
        claim = await super().create(key, value, lease_id, also_read=also_read)
        if claim.won and self.lost_creates:
            self.lost_creates -= 1
            raise RegistryUnavailableError("the answer was lost", may_have_run=True)
        release, self.release_create = self.release_create, None
        if release is not None:
            await release.wait()
        return claim

    async def compare_and_put(self, key: str, value: bytes, mod_revision: int, lease_id: int = 0) -> Claim:
        if self.failing_writes:
            self.failing_writes -= 1
            raise RegistryUnavailableError("away")
        return await super().compare_and_put(key, value, mod_revision, lease_id)

    async def list_key(self, key: str) -> Listing:
        if self.failing_reads:
            self.failing_reads -= 1
            raise RegistryUnavailableError("away")
        return await super().list_key(key)


class Scene:
    """One clock, one registry, and registrars that are closed at the end."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.kv = SlowKV(self.clock)
        self.story: list[str] = []
        self.may_renew = True
        self.registrars: list[ReplicaRegistrar | HubRegistrar] = []

    async def replica(self, record: ReplicaRecord = RECORD, **options: Any) -> ReplicaRegistrar:
        registrar = ReplicaRegistrar(
            self.kv,
            NS,
            record,
            ttl_s=9.0,
            clock=self.clock,
            may_renew=lambda: self.may_renew,
            jitter=lambda: 0.0,
            listener=Listener(
                lambda key: self.story.append(f"registered {replica_id_of(key)} epoch {key.create_revision}"),
                lambda key: self.story.append("published"),
                lambda reason: self.story.append(f"lost: {reason}"),
            ),
            **options,
        )
        await self.started(registrar)
        return registrar

    async def hub(self, hub_id: str = "h1") -> HubRegistrar:
        registrar = HubRegistrar(self.kv, NS, HubRecord(hub_id=hub_id), ttl_s=9.0, clock=self.clock, jitter=lambda: 0.0)
        await self.started(registrar)
        return registrar

    async def started(self, registrar: ReplicaRegistrar | HubRegistrar) -> None:
        self.registrars.append(registrar)
        registrar.start()
        await settle()

    async def key(self, replica_id: int = 0) -> KeyValue:
        found = await self.kv.get(keys.replica_key(NS, 0, replica_id))
        assert found is not None
        return found

    async def record(self, replica_id: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((await self.key(replica_id)).value)
        return found

    async def ids(self) -> list[str]:
        return [item.key.rpartition("/")[2] for item in (await self.kv.list(keys.replicas_prefix(NS))).items]


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    await scene.kv.close()
    for registrar in scene.registrars:
        await registrar.close(0.01)


async def test_a_replica_takes_id_0_and_its_record_names_its_epoch(scene: Scene) -> None:
    await scene.replica()
    key, record = await scene.key(), await scene.record()
    assert (record["epoch"], record["status"], record["replica_id"]) == (key.create_revision, "up", 0)
    assert key.lease_id != 0
    assert scene.story == [f"registered 0 epoch {key.create_revision}", "published"]


async def test_it_is_not_up_before_it_can_know_its_epoch(scene: Scene) -> None:
    """1. the answer to the claim is lost: the key stands, its owner does not know
    2. what hubs see meanwhile must not be picked
    """
    batches = scene.kv.watch(keys.replicas_prefix(NS), 2)
    await scene.replica()
    seen = [json.loads(event.item.value)["status"] async for batch in _first(batches, 3) for event in batch.events]
    assert seen == ["starting", "up"]


async def _first(batches: Any, count: int) -> AsyncIterator[Any]:
    for _ in range(count):
        yield await anext(batches)
    await batches.aclose()


async def test_the_lowest_free_id_is_taken(scene: Scene) -> None:
    for taken in (0, 1, 3):
        await scene.kv.put(keys.replica_key(NS, 0, taken), b"{}")
    await scene.replica()
    assert await scene.ids() == ["0", "1", "2", "3"]


async def test_a_wanted_id_is_taken_if_it_is_free_and_else_the_lowest(scene: Scene) -> None:
    await scene.replica(wanted_id=5)
    await scene.replica(wanted_id=5)
    assert await scene.ids() == ["0", "5"]


async def test_an_id_that_is_wanted_is_claimed_without_a_list(scene: Scene) -> None:
    """1. the id is free: nothing is listed; 2. the lease is lost, and the former id claimed under the next: the same
    3. another wants the id, too: one list finds it a free one
    """
    first = await scene.replica(wanted_id=5)
    scene.kv.is_out = True
    await scene.clock.advance(10.0)
    scene.kv.is_out = False
    scene.kv.wipe()
    await scene.clock.advance(5.0)
    assert first.lease_id
    assert scene.kv.lists == 0
    assert await scene.ids() == ["5"]
    before = scene.kv.lists
    await scene.replica(wanted_id=5)
    assert scene.kv.lists == before + 1
    assert await scene.ids() == ["0", "5"]


async def test_ids_that_were_listed_with_the_grant_are_only_a_hint(scene: Scene) -> None:
    """1. the lease is not granted yet, and the ids were listed: 0 is free; 2. another takes 0: ours becomes 1"""
    scene.may_renew = False
    await scene.replica()
    await scene.kv.put(keys.replica_key(NS, 0, 0), b"{}")
    scene.may_renew = True
    await scene.clock.advance(1.6)
    assert scene.kv.lists == 1
    assert await scene.ids() == ["0", "1"]


async def test_ids_that_were_listed_long_ago_are_listed_again(scene: Scene) -> None:
    """1. id 0 is taken, and the lease is not granted for long; 2. id 0 becomes free meanwhile, and is ours"""
    await scene.kv.put(keys.replica_key(NS, 0, 0), b"{}")
    scene.may_renew = False
    await scene.replica()
    await scene.clock.advance(30.0)
    await scene.kv.delete(keys.replica_key(NS, 0, 0))
    scene.may_renew = True
    await scene.clock.advance(2.0)
    assert scene.kv.lists == 2
    assert await scene.ids() == ["0"]


async def test_a_list_that_failed_beside_the_grant_is_made_again(scene: Scene) -> None:
    await scene.kv.put(keys.replica_key(NS, 0, 0), b"{}")
    scene.kv.is_out = True
    await scene.replica()
    scene.kv.is_out = False
    await scene.clock.advance(1.0)
    assert await scene.ids() == ["0", "1"]


async def test_nothing_is_published_behind_the_withdrawal(scene: Scene) -> None:
    """A change that another thread has made meanwhile must not say `up` again."""
    registrar = await scene.replica()
    assert registrar._set_withdrawn()
    registrar.update(changed_record(RECORD, {"reason": "late"}))
    await settle()
    assert (await scene.record())["status"] == "down"


@pytest.mark.parametrize("wanted_id", [None, 5])
async def test_a_claim_whose_answer_was_lost_is_recognised(scene: Scene, wanted_id: int | None) -> None:
    scene.kv.lost_creates = 1
    await scene.replica(wanted_id=wanted_id)
    assert scene.story == []
    await scene.clock.advance(5.0)
    assert await scene.ids() == [str(wanted_id or 0)]
    assert [line.split()[0] for line in scene.story[:2]] == ["registered", "published"]


async def test_a_lease_never_has_two_keys(scene: Scene) -> None:
    """1. the wanted id is taken; 0 is claimed, and the answer to that is lost; 2. the wanted id becomes free
    3. the next attempt finds that its lease has 0 already
    """
    await scene.kv.put(keys.replica_key(NS, 0, 5), b"{}")
    scene.kv.lost_creates = 1
    await scene.replica(wanted_id=5)
    await scene.kv.delete(keys.replica_key(NS, 0, 5))
    await scene.clock.advance(5.0)
    assert await scene.ids() == ["0"]
    assert (await scene.record())["status"] == "up"


async def test_the_lease_is_renewed_for_hours(scene: Scene) -> None:
    await scene.replica()
    before = await scene.key()
    for _ in range(200):
        await scene.clock.advance(9.0)
    assert (await scene.key()).create_revision == before.create_revision


async def test_a_deleted_key_is_put_back_with_the_same_id_and_a_new_epoch(scene: Scene) -> None:
    await scene.replica()
    before = await scene.key()
    await scene.kv.delete(before.key)
    await scene.clock.advance(0.1)
    after = await scene.key()
    assert after.create_revision > before.create_revision
    assert (await scene.record())["epoch"] == after.create_revision
    assert scene.story[2] == "lost: the key was deleted"


async def test_a_revoked_lease_is_replaced_and_the_key_comes_back(scene: Scene) -> None:
    await scene.replica()
    before = await scene.key()
    scene.kv.end_lease(before.lease_id)
    await scene.clock.advance(1.0)
    after = await scene.key()
    assert after.lease_id not in (0, before.lease_id)
    assert after.create_revision > before.create_revision


async def test_a_former_id_that_was_taken_meanwhile_is_not_fought_for(scene: Scene) -> None:
    """1. the registry is out for so long that the lease ends; it comes back without our key
    2. another replica is there first and holds id 0
    3. ours becomes 1
    """
    await scene.replica()
    scene.kv.wipe()
    await scene.kv.put(keys.replica_key(NS, 0, 0), b"{}")
    await scene.clock.advance(9.0)
    assert await scene.ids() == ["0", "1"]
    assert (await scene.record(1))["replica_id"] == 1


async def test_an_outage_longer_than_the_ttl_loses_nothing(scene: Scene) -> None:
    """A stopped etcd counts no leases down, and a suspect lease is renewed, not replaced."""
    await scene.replica()
    before = await scene.key()
    scene.kv.is_out = True
    await scene.clock.advance(60.0)
    scene.kv.is_out = False
    await scene.clock.advance(20.0)
    assert (await scene.key()).create_revision == before.create_revision
    assert len(scene.story) == 2


async def test_a_wiped_registry_is_healed(scene: Scene) -> None:
    await scene.replica()
    for _ in range(20):
        await scene.kv.put("/elsewhere", b"")
    scene.kv.wipe()
    await scene.clock.advance(4.0)
    assert await scene.ids() == ["0"]
    assert (await scene.record())["status"] == "up"


async def test_a_record_written_over_by_hand_is_restored_under_the_lease(scene: Scene) -> None:
    """A put by hand takes the key off its lease: without this it would stay for ever after we are gone."""
    await scene.replica()
    before = await scene.key()
    await scene.kv.put(before.key, b"nonsense")
    await scene.clock.advance(1.0)
    after = await scene.key()
    assert (after.create_revision, after.lease_id) == (before.create_revision, before.lease_id)
    assert (await scene.record())["status"] == "up"


async def test_a_record_written_over_under_its_own_lease_is_restored_too(scene: Scene) -> None:
    await scene.replica()
    before = await scene.key()
    await scene.kv.put(before.key, b"nonsense", lease_id=before.lease_id)
    await scene.clock.advance(1.0)
    assert (await scene.record())["status"] == "up"


async def test_two_that_write_one_key_do_not_chase_each_other(scene: Scene) -> None:
    """Two hubs were given the same id: each restores its record, ever more slowly."""
    await scene.hub()
    await scene.hub()
    start = (await scene.kv.list("")).revision
    await scene.clock.advance(60.0)
    assert (await scene.kv.list("")).revision - start < 50


async def test_a_status_goes_out_at_once_and_a_load_at_most_each_interval(scene: Scene) -> None:
    registrar = await scene.replica(load_interval_s=0.5)
    record, before = RECORD, (await scene.key()).mod_revision
    for length in range(1, 41):
        record = msgspec.structs.replace(record, queue_length=length)
        registrar.update(record)
        await scene.clock.advance(0.05)
    assert (await scene.key()).mod_revision - before <= 5
    await scene.clock.advance(0.5)
    assert (await scene.record())["queue_length"] == 40
    registrar.update(msgspec.structs.replace(record, queue_length=41, status=ReplicaStatus.DRAINING))
    await settle()
    assert ((await scene.record())["status"], (await scene.record())["queue_length"]) == ("draining", 41)


async def test_an_update_that_changes_nothing_writes_nothing(scene: Scene) -> None:
    registrar = await scene.replica()
    before = (await scene.key()).mod_revision
    registrar.update(RECORD)
    await scene.clock.advance(2.0)
    assert (await scene.key()).mod_revision == before


async def test_updates_during_an_outage_leave_one_write_with_the_latest(scene: Scene) -> None:
    registrar = await scene.replica()
    before = (await scene.key()).mod_revision
    scene.kv.is_out = True
    for length in range(20):
        registrar.update(msgspec.structs.replace(RECORD, queue_length=length, phase=f"phase {length}"))
        await scene.clock.advance(0.3)
    scene.kv.is_out = False
    await scene.clock.advance(3.0)
    assert ((await scene.record())["phase"], (await scene.key()).mod_revision - before) == ("phase 19", 1)


async def test_an_engine_without_progress_loses_its_lease_and_gets_one_when_it_moves(scene: Scene) -> None:
    await scene.replica()
    scene.may_renew = False
    await scene.clock.advance(60.0)
    assert await scene.ids() == []
    scene.may_renew = True
    await scene.clock.advance(5.0)
    assert await scene.ids() == ["0"]


async def test_a_gate_that_raises_is_taken_for_open(scene: Scene) -> None:
    def broken() -> bool:
        raise ZeroDivisionError

    registrar = ReplicaRegistrar(scene.kv, NS, RECORD, ttl_s=9.0, clock=scene.clock, may_renew=broken)
    await scene.started(registrar)
    await scene.clock.advance(30.0)
    assert await scene.ids() == ["0"]


async def test_close_says_down_and_then_the_key_is_gone(scene: Scene) -> None:
    registrar = await scene.replica()
    start = (await scene.key()).mod_revision + 1
    await registrar.close()
    await registrar.close()
    batches = scene.kv.watch(keys.replicas_prefix(NS), start)
    _, farewell, gone = [batch async for batch in _first(batches, 3)]
    assert json.loads(farewell.events[0].item.value)["status"] == "down"
    assert await scene.ids() == []
    assert gone.events[0].key == keys.replica_key(NS, 0, 0)


async def test_close_in_an_outage_ends_within_its_bound(scene: Scene) -> None:
    registrar = await scene.replica()
    scene.kv.is_out = True
    await registrar.close(timeout_s=0.05)


async def test_a_hub_takes_over_the_key_of_its_former_life(scene: Scene) -> None:
    key = keys.hub_key(NS, "h1")
    old = await scene.kv.grant(30.0)
    await scene.kv.put(key, b"{}", old.lease_id)
    await scene.hub()
    taken = await scene.kv.get(key)
    assert taken is not None
    assert taken.lease_id != old.lease_id
    assert json.loads(taken.value)["started_at"] == scene.clock.wall_s()


async def test_a_listener_that_raises_changes_nothing(scene: Scene) -> None:
    def raises(key: KeyValue) -> None:
        raise ZeroDivisionError

    registrar = ReplicaRegistrar(
        scene.kv, NS, RECORD, clock=scene.clock, listener=Listener(on_registered=raises, on_published=raises)
    )
    await scene.started(registrar)
    assert (await scene.record())["status"] == "up"


@pytest.mark.parametrize("wrong", [{"queue_length": -1}, {"capacity": 0}, {"no_such_field": 1}, {"status": "fine"}])
def test_a_value_that_no_reader_would_take_is_refused_at_the_door(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        changed_record(RECORD, wrong)


async def test_a_registry_restored_from_a_backup_is_written_to_again_and_not_without_end(scene: Scene) -> None:
    """1. a replica has published a few times
    2. the registry is restored from before that: the key and its lease stand, at an earlier revision
    3. the next change is written after a try or two, and not tried in a tight loop for ever
    """
    registrar = await scene.replica()
    backup = await scene.key()
    registrar.update(changed_record(RECORD, {"queue_length": 1}))
    await scene.clock.advance(1.0)
    scene.kv._items[backup.key], scene.kv._revision = backup, backup.mod_revision
    tries: list[int] = []
    write = scene.kv.compare_and_put

    async def counted(key: str, value: bytes, mod_revision: int, lease_id: int = 0) -> Claim:
        tries.append(mod_revision)
        assert len(tries) < 10, "a tight loop"
        return await write(key, value, mod_revision, lease_id)

    scene.kv.compare_and_put = counted  # type: ignore[method-assign]
    registrar.update(changed_record(RECORD, {"queue_length": 2}))
    await scene.clock.advance(2.0)
    assert (await scene.record())["queue_length"] == 2
    assert len(tries) == 2


def own_key_watches() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "own-key-watch"]


async def _claim_is_answered_after_its_lease_ended(scene: Scene) -> KeyValue:
    """Claim id 0, end its lease, let another replica have id 0; then the answer to the claim comes. Return that key."""
    scene.kv.release_create = release = asyncio.Event()
    registrar = await scene.replica()
    scene.kv.end_lease(registrar.lease_id)
    other = await scene.kv.grant(10_000.0)
    claim = await scene.kv.create(keys.replica_key(NS, 0, 0), b"{}", other.lease_id)
    # A renewal is told that the lease is gone, and another lease is granted.
    await scene.clock.advance(3.5)
    release.set()
    await scene.clock.advance(2.0)
    assert claim.won
    assert claim.current is not None
    return claim.current


async def test_the_watch_of_a_life_that_ended_does_not_end_the_next_one(scene: Scene) -> None:
    """1. a claim of id 0 is answered after its lease was lost and another granted; one write and one read fail then
    2. id 0 belongs to another replica; ours claims id 1
    3. the other replica publishes its load again and again: ours keeps its registration, with one watch
    """
    scene.kv.failing_writes = scene.kv.failing_reads = 1
    taken = await _claim_is_answered_after_its_lease_ended(scene)
    mine = await scene.key(1)
    for number in range(5):
        await scene.kv.put(taken.key, b"%d" % number, taken.lease_id)
        await scene.clock.advance(1.0)
    assert not [line for line in scene.story if line.startswith("lost")]
    assert (await scene.key(1)).create_revision == mine.create_revision
    watches = own_key_watches()
    assert len(watches) == 1
    await scene.registrars[0].close()
    assert watches[0].done()


async def test_a_claim_answered_after_its_lease_was_lost_is_abandoned(scene: Scene) -> None:
    """The key of that claim is gone with its lease: only the claim under the next lease is a registration."""
    await _claim_is_answered_after_its_lease_ended(scene)
    mine = await scene.key(1)
    assert scene.story == [f"registered 1 epoch {mine.create_revision}", "published"]
    assert await scene.ids() == ["0", "1"]


async def test_a_hub_abandons_a_claim_answered_after_its_lease_was_lost(scene: Scene) -> None:
    scene.kv.release_create = release = asyncio.Event()
    hub = await scene.hub()
    lost = hub.lease_id
    scene.kv.end_lease(lost)
    await scene.clock.advance(3.5)
    assert hub.lease_id not in (0, lost)
    release.set()
    await scene.clock.advance(0.0)
    key = await scene.kv.get(keys.hub_key(NS, "h1"))
    assert key is not None
    assert key.lease_id == hub.lease_id


async def test_a_watch_that_begins_ends_the_former_one(scene: Scene) -> None:
    registrar = await scene.replica()
    former = own_key_watches()
    registrar._watch_own_key(await scene.key())
    await settle()
    assert (len(former), len(own_key_watches())) == (1, 1)
    assert former[0].cancelled()


async def test_a_watch_is_not_heard_about_a_life_that_is_over(caplog: pytest.LogCaptureFixture) -> None:
    """While its life stands, deletions and writes after the last acknowledged one are observed; afterwards nothing."""
    life = KeyValue("k", b"", 5, 5, 1)
    others = KeyValue("k", b"theirs", 9, 9, 2)
    observed: list[KeyValue | None] = []
    standing: KeyValue | None = KeyValue("k", b"", 5, 7, 1)
    sink = _OwnKeySink(life, lambda: standing, observed.append)

    async def hear_everything() -> None:
        await sink.replace(Listing(9, 1, (others,)), 0.0)
        await sink.apply(WatchBatch(7, (PutEvent(KeyValue("k", b"", 5, 7, 1)),)))
        await sink.apply(WatchBatch(8, (DeleteEvent("k", 8),)))
        sink.on_watch_failed(RegistryUnavailableError("away"), 30)

    await hear_everything()
    assert observed == [others, None]
    assert [record.message for record in caplog.records] == ["registrar.guard_retrying key=k reason=away"]
    for standing in (None, KeyValue("k", b"", 6, 6, 1), KeyValue("j", b"", 5, 5, 1)):  # noqa: B007 - read by the sink
        await hear_everything()
    assert observed == [others, None]
    assert len(caplog.records) == 1
