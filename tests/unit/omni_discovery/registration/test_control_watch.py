"""Following one replica's control key, on a registry in memory."""

from __future__ import annotations

import json

import pytest

from omni_discovery.errors import RegistryRefusedError
from omni_discovery.kv import Listing
from omni_discovery.records import keys
from omni_discovery.records.control import AppliedControl
from omni_discovery.registration.control_watch import ControlWatch
from omni_discovery.testing import FakeKV, ManualClock, settle

KEY = keys.replica_control_key("n", 0, 1)


class Followed:
    """A watch, what it told, and its registry."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.kv = FakeKV(self.clock)
        self.told: list[AppliedControl] = []
        self.watch = ControlWatch(self.kv, "n", 0, self.told.append, clock=self.clock, jitter=lambda: 1.0)

    async def put(self, value: str, key: str = KEY) -> int:
        revision = await self.kv.put(key, value.encode())
        await settle()
        return revision

    async def stands(self, key: str = KEY) -> object:
        found = await self.kv.get(key)
        return None if found is None else json.loads(found.value)


@pytest.fixture
def followed() -> Followed:
    return Followed()


async def test_what_is_known_is_told_once_also_if_it_is_nothing(followed: Followed) -> None:
    followed.watch.watch_control(1, 7)
    assert not followed.watch.known
    await settle()
    assert followed.watch.known
    assert followed.told == [AppliedControl()]
    await followed.watch.close(1.0)


async def test_replica_1_does_not_obey_the_key_of_replica_10(followed: Followed) -> None:
    await followed.put('{"cordon": true}', keys.replica_control_key("n", 0, 10))
    followed.watch.watch_control(1, 7)
    await followed.put('{"cordon": true}', keys.replica_control_key("n", 0, 11))
    assert followed.told == [AppliedControl()]
    await followed.watch.close(1.0)


async def test_a_drain_is_bound_before_it_is_told_and_removed_at_the_close(followed: Followed) -> None:
    followed.watch.watch_control(1, 7)
    await settle()
    revision = await followed.put('{"drain": true}')
    assert followed.told[1:] == [AppliedControl(draining=True, revision=revision + 1)]
    assert await followed.stands() == {"drain": True, "epoch": 7}
    await followed.watch.close(1.0)
    assert await followed.stands() is None


async def test_what_was_written_while_a_drain_went_on_stays_when_it_is_done(followed: Followed) -> None:
    """1. drain; 2. meanwhile the operator adds a cordon for whoever comes next; 3. only the drain goes."""
    followed.watch.watch_control(1, 7)
    await followed.put('{"drain": true}')
    await followed.put('{"drain": true, "cordon": true}')
    await followed.watch.close(1.0)
    assert await followed.stands() == {"cordon": True}


async def test_a_drain_that_is_for_another_life_is_left_where_it_is(followed: Followed) -> None:
    followed.watch.watch_control(1, 7)
    await followed.put('{"drain": true, "epoch": 6}')
    assert not any(told.draining for told in followed.told)
    await followed.watch.close(1.0)
    assert await followed.stands() == {"drain": True, "epoch": 6}


async def test_a_lost_registration_keeps_what_holds_and_another_id_begins_anew(followed: Followed) -> None:
    """1. cordoned as 0/1; the same id again in another life: known at once
    2. then as 0/2: unknown until that key is read, and not cordoned
    """
    await followed.put('{"cordon": true}')
    followed.watch.watch_control(1, 7)
    await settle()
    followed.watch.watch_control(1, 9)
    assert followed.watch.known
    followed.watch.watch_control(2, 12)
    assert not followed.watch.known
    await settle()
    assert [told.cordoned for told in followed.told] == [True, False]
    await followed.watch.close(1.0)


async def test_a_process_that_drains_and_registers_anew_drains_on_and_cleans_up(followed: Followed) -> None:
    followed.watch.watch_control(1, 7)
    await followed.put('{"drain": true}')
    followed.watch.watch_control(1, 9)
    await settle()
    assert followed.told[-1].draining
    assert followed.told[-1].error == ""
    await followed.watch.close(1.0)
    assert await followed.stands() is None


async def test_an_outage_and_a_compaction_lose_nothing(followed: Followed) -> None:
    """1. etcd is away; 2. it comes back, the key was written meanwhile, the history is gone: told all the same."""
    followed.watch.watch_control(1, 7)
    await settle()
    followed.kv.is_out = True
    await followed.clock.advance(3.0)
    followed.kv.is_out = False
    revision = await followed.put('{"weight": 2}')
    followed.kv.compact()
    await followed.clock.advance(3.0)
    assert followed.told[-1] == AppliedControl(weight=2.0, revision=revision)
    await followed.watch.close(1.0)


async def test_a_drain_that_can_not_be_removed_in_time_holds_nobody_up(followed: Followed) -> None:
    followed.watch.watch_control(1, 7)
    await followed.put('{"drain": true}')
    followed.kv.is_out = True
    await followed.watch.close(0.1)
    await followed.watch.close(0.1)


# ---- a key that was read by the claim


async def test_a_key_that_was_read_is_applied_at_once_and_watched_from_there(followed: Followed) -> None:
    """1. no round trip before it is known; 2. what is written behind the listing is seen, and nothing is listed"""
    revision = await followed.put('{"cordon": true}')
    listing = await followed.kv.list_key(KEY)
    later = await followed.kv.put(KEY, b'{"weight": 2}')
    lists: list[str] = []

    async def list_key(key: str) -> Listing:
        lists.append(key)
        return listing

    followed.kv.list_key = list_key  # type: ignore[method-assign]
    followed.watch.watch_control(1, 7, listing)
    assert followed.watch.known
    assert followed.told == [AppliedControl(cordoned=True, revision=revision)]
    await settle()
    assert followed.told[1:] == [AppliedControl(weight=2.0, revision=later)]
    assert lists == []
    await followed.watch.close(1.0)


async def test_a_drain_that_was_read_is_bound_before_it_is_known(followed: Followed) -> None:
    revision = await followed.put('{"drain": true}')
    followed.watch.watch_control(1, 7, await followed.kv.list_key(KEY))
    assert (followed.watch.known, followed.told) == (False, [])
    await settle()
    assert followed.told == [AppliedControl(draining=True, revision=revision + 1)]
    assert await followed.stands() == {"drain": True, "epoch": 7}
    assert followed.watch.has_drain
    await followed.watch.close(1.0)
    assert not followed.watch.has_drain


# ---- a registry that has lost its keys


async def cordoned(followed: Followed, value: str = '{"cordon": true}') -> None:
    followed.watch.watch_control(1, 7)
    await followed.put(value)
    assert followed.told[-1].cordoned


async def wiped(followed: Followed) -> None:
    """Another, empty cluster takes the registry's place; the watch has noticed."""
    followed.kv.wipe()
    await followed.clock.advance(3.0)


async def test_a_cordon_outlives_a_wiped_registry_and_stands_there_again(followed: Followed) -> None:
    """1. cordoned; the registry is wiped: the replica puts the key back and goes on to obey it
    2. the operator deletes it: the cordon ends
    """
    await cordoned(followed, '{"cordon": true, "weight": 2}')
    await wiped(followed)
    assert await followed.stands() == {"cordon": True, "weight": 2}
    assert all(told.cordoned for told in followed.told[1:])
    found = await followed.kv.get(KEY)
    assert found is not None
    assert followed.told[-1] == AppliedControl(cordoned=True, weight=2.0, revision=found.mod_revision)
    await followed.kv.delete(KEY)
    await settle()
    assert followed.told[-1] == AppliedControl()
    await followed.watch.close(1.0)


async def test_it_is_put_back_also_where_the_replica_registers_before_its_watch_breaks(followed: Followed) -> None:
    await cordoned(followed)
    followed.kv.wipe()
    followed.watch.watch_control(1, 3)
    await settle()
    assert await followed.stands() == {"cordon": True}
    assert all(told.cordoned for told in followed.told[1:])
    await followed.watch.close(1.0)


async def test_a_wiped_registry_in_which_the_claim_has_read_no_key_gets_it_back(followed: Followed) -> None:
    await cordoned(followed)
    followed.kv.wipe()
    followed.watch.watch_control(1, 3, await followed.kv.list_key(KEY))
    assert all(told.cordoned for told in followed.told[1:])
    await settle()
    assert await followed.stands() == {"cordon": True}
    assert all(told.cordoned for told in followed.told[1:])
    await followed.watch.close(1.0)


async def test_a_key_that_is_deleted_while_etcd_is_away_is_not_put_back(followed: Followed) -> None:
    await cordoned(followed)
    followed.kv.is_out = True
    await followed.clock.advance(3.0)
    followed.kv.is_out = False
    await followed.kv.delete(KEY)
    followed.kv.compact()
    await followed.clock.advance(3.0)
    assert followed.told[-1] == AppliedControl()
    assert await followed.stands() is None
    await followed.watch.close(1.0)


async def test_a_copy_that_others_have_written_to_is_told_from_the_registry_by_the_key_itself(
    followed: Followed,
) -> None:
    """The registry is restored from an older copy, and has passed its former revision when the watch lists again."""
    followed.watch.watch_control(1, 7)
    await followed.put('{"weight": 2}')
    older = await followed.kv.get(KEY)
    assert older is not None
    await followed.put('{"weight": 2, "cordon": true}')
    followed.kv.is_out = True
    await followed.clock.advance(3.0)
    followed.kv.is_out = False
    followed.kv._items[KEY] = older
    for _ in range(5):
        await followed.kv.put("/elsewhere", b"")
    followed.kv.compact()
    await followed.clock.advance(3.0)
    assert await followed.stands() == {"weight": 2, "cordon": True}
    assert (followed.told[-1].cordoned, followed.told[-1].weight) == (True, 2.0)
    await followed.watch.close(1.0)


async def test_what_an_operator_has_written_since_the_wipe_holds(followed: Followed) -> None:
    await cordoned(followed)
    followed.kv.wipe()
    await followed.put('{"weight": 0.5}')
    await followed.clock.advance(3.0)
    assert await followed.stands() == {"weight": 0.5}
    assert (followed.told[-1].cordoned, followed.told[-1].weight) == (False, 0.5)
    await followed.watch.close(1.0)


async def test_a_drain_is_not_put_back_for_those_who_come_after(followed: Followed) -> None:
    await cordoned(followed, '{"drain": true, "cordon": true}')
    await wiped(followed)
    assert await followed.stands() == {"cordon": True}
    assert followed.told[-1].draining
    await followed.watch.close(1.0)
    assert await followed.stands() == {"cordon": True}


async def test_with_another_id_after_a_wipe_the_cordon_goes_with_the_process(followed: Followed) -> None:
    """1. wiped: the key is put back under the old id; 2. that is taken, this process becomes 0/4
    3. it is cordoned as 0/4, and whoever is 0/1 now is not
    """
    await cordoned(followed)
    await wiped(followed)
    followed.watch.watch_control(4, 12)
    await settle()
    assert await followed.stands(keys.replica_control_key("n", 0, 4)) == {"cordon": True}
    assert await followed.stands() is None
    assert all(told.cordoned for told in followed.told[1:])
    await followed.watch.close(1.0)


async def test_where_it_can_not_be_put_back_it_holds_all_the_same_and_the_record_says_why(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. the registry refuses the write; 2. an operator writes that it is not cordoned: that holds"""

    async def refuse(*_args: object) -> None:
        raise RegistryRefusedError("permission denied")

    await cordoned(followed)
    with monkeypatch.context() as patch:
        patch.setattr(followed.kv, "create", refuse)
        await wiped(followed)
    assert followed.told[-1].cordoned
    assert followed.told[-1].revision == 0
    assert "the registry has lost the control key" in followed.told[-1].error
    revision = await followed.put('{"cordon": false}')
    assert followed.told[-1] == AppliedControl(revision=revision)
    await followed.watch.close(1.0)


async def test_a_key_that_may_not_be_read_any_more_takes_nothing_back(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_args: object) -> None:
        raise RegistryRefusedError("permission denied")

    await cordoned(followed)
    monkeypatch.setattr(followed.kv, "list_key", refuse)
    followed.kv.is_out = True
    await followed.clock.advance(0.1)
    followed.kv.is_out = False
    await followed.clock.advance(3.0)
    assert followed.told[-1].cordoned
    assert "can't be read" in followed.told[-1].error
    await followed.watch.close(1.0)
