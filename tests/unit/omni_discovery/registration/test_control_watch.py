"""Following one replica's control key, on a registry in memory."""

from __future__ import annotations

import json

import pytest

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
