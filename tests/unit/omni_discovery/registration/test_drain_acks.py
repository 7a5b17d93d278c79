"""Whom a drain waits for, in memory, on a clock moved by hand."""

from __future__ import annotations

import pytest

from omni_discovery.errors import RegistryUnavailableError
from omni_discovery.kv import Listing
from omni_discovery.records import keys
from omni_discovery.records.beat import BeatRecord
from omni_discovery.records.schema import HubRecord, encode_record
from omni_discovery.registration.drain_acks import DrainAcks, awaited_hubs, without_copies
from omni_discovery.testing import FakeKV, ManualClock, settle

NS = "default"


class FlakyKV(FakeKV):
    """Its lists may fail."""

    is_away = False

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        if self.is_away:
            raise RegistryUnavailableError("nobody answers")
        return await super().list(prefix, keys_only=keys_only)


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.kv = FlakyKV(self.clock)
        self.revoked: set[str] = set()
        self.told = 0
        self.acks = DrainAcks(self.kv, NS, lambda: self.revoked, self._tell, clock=self.clock, jitter=lambda: 1.0)

    def _tell(self) -> None:
        self.told += 1

    async def hub(self, hub_id: str, public_key: str = "") -> None:
        record = HubRecord(hub_id=hub_id, curve_public_key=public_key)
        await self.kv.put(keys.hub_key(NS, hub_id), encode_record(record))

    async def beat(self, hub_id: str, revision: int) -> None:
        await self.kv.put(keys.beat_key(NS, hub_id), b'{"revision": %d}' % revision)

    async def pass_time(self) -> None:
        await self.clock.advance(1.0)
        await settle()


@pytest.mark.parametrize(
    ("beats", "awaited"),
    [({}, {"a", "b"}), ({"a": 7}, {"b"}), ({"a": 7, "b": 6}, {"b"}), ({"a": 7, "b": 8, "c": 1}, set())],
)
def test_every_hub_must_have_applied_the_revision(beats: dict[str, int], awaited: set[str]) -> None:
    found = {hub_id: BeatRecord(revision=revision) for hub_id, revision in beats.items()}
    assert awaited_hubs(7, ["a", "b"], found) == awaited


@pytest.mark.attack("H4")
@pytest.mark.parametrize(
    ("awaited", "left"),
    [({"copy"}, set()), ({"copy", "b"}, {"b"}), ({"copy", "a"}, {"copy", "a"}), ({"copy", "plain"}, {"plain"})],
)
def test_a_record_with_the_key_of_a_hub_that_has_answered_is_not_waited_for(awaited: set[str], left: set[str]) -> None:
    public_keys = {"a": "A", "copy": "A", "b": "B", "plain": "", "also-plain": ""}
    assert without_copies(awaited, public_keys) == left


@pytest.mark.attack("H4")
async def test_a_drain_ends_when_all_hubs_but_copies_of_them_have_answered() -> None:
    """1. hubs a and b, and a copy of a's record; a answers: b is waited for; 2. b answers: acknowledged"""
    scene = Scene()
    for hub_id, public_key in (("a", "A"), ("b", "B"), ("zz", "A")):
        await scene.hub(hub_id, public_key)
    await scene.kv.put(keys.hub_key(NS, "broken"), b"{")
    await scene.beat("broken", 40)
    await scene.beat("a", 40)
    scene.acks.await_revision(40)
    await scene.pass_time()
    assert (scene.acks.awaited, scene.told) == ({"b"}, 0)
    await scene.beat("b", 40)
    await scene.pass_time()
    assert scene.told == 1
    await scene.acks.close()


async def test_it_is_told_once_when_the_last_hub_has_answered_or_gone() -> None:
    """1. three hubs: one answers, one is revoked, one is silent; 2. a later drain of this life is no news
    3. the silent one's key expires: acknowledged, once
    """
    scene = Scene()
    for hub_id in ("a", "b", "c"):
        await scene.hub(hub_id)
    scene.revoked = {"b"}
    await scene.beat("a", 50)
    scene.acks.await_revision(40)
    await scene.pass_time()
    assert (scene.acks.awaited, scene.told) == ({"c"}, 0)
    scene.acks.await_revision(60)
    await scene.kv.delete(keys.hub_key(NS, "c"))
    await scene.pass_time()
    assert (scene.acks.awaited, scene.told) == (set(), 1)
    await scene.pass_time()
    assert scene.told == 1
    await scene.acks.close()


async def test_no_hub_at_all_is_nobody_to_wait_for() -> None:
    scene = Scene()
    scene.acks.await_revision(1)
    await scene.pass_time()
    assert scene.told == 1
    await scene.acks.close()


async def test_a_record_that_was_lost_asks_again_with_its_next_revision() -> None:
    scene = Scene()
    await scene.hub("a")
    await scene.beat("a", 10)
    scene.acks.await_revision(40)
    await scene.pass_time()
    scene.acks.stop_waiting()
    assert scene.acks.awaited is None
    scene.acks.await_revision(5)
    await scene.pass_time()
    assert scene.told == 1
    await scene.acks.close()


async def test_while_etcd_is_away_nothing_is_known_and_then_it_goes_on() -> None:
    scene = Scene()
    scene.kv.is_away = True
    scene.acks.await_revision(1)
    await scene.pass_time()
    assert (scene.acks.awaited, scene.told) == (None, 0)
    scene.kv.is_away = False
    await scene.pass_time()
    assert scene.told == 1
    await scene.acks.close()


async def test_nonsense_among_the_beats_is_a_hub_that_says_nothing() -> None:
    scene = Scene()
    await scene.hub("a")
    await scene.kv.put(keys.beat_key(NS, "a"), b"{revision}")
    await scene.kv.put(f"{keys.hubs_prefix(NS)}not/a/hub", b"{}")
    scene.acks.await_revision(1)
    await scene.pass_time()
    assert scene.acks.awaited == {"a"}
    await scene.beat("a", 1)
    await scene.pass_time()
    assert scene.told == 1
    await scene.acks.close()
