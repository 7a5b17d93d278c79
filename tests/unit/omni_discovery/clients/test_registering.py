"""How a replica's client registers: in three round trips, and never up before it has obeyed its control key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from omni_discovery.clients import OmniCoordClientForStage
from omni_discovery.kv import Claim, Held, LeaseGrant, Listing, PutEvent, Summary
from omni_discovery.records import keys
from omni_discovery.testing import FakeKV, ManualClock, settle

NS = "n"


class RoundsKV(FakeKV):
    """Answers nothing but in ``round_trip``, which answers every call that is under way, and those only."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self._under_way: list[asyncio.Future[None]] = []

    async def round_trip(self) -> None:
        await settle()
        answered, self._under_way = self._under_way, []
        for call in answered:
            call.set_result(None)
        await settle()

    async def _travel(self) -> None:
        call = asyncio.get_running_loop().create_future()
        self._under_way.append(call)
        await call

    async def grant(self, ttl_s: float) -> LeaseGrant:
        await self._travel()
        return await super().grant(ttl_s)

    async def create(self, key: str, value: bytes, lease_id: int = 0, *, also_read: str | None = None) -> Claim:
        await self._travel()
        return await super().create(key, value, lease_id, also_read=also_read)

    async def compare_and_put(
        self, key: str, value: bytes, mod_revision: int, lease_id: int = 0, *, held: Held | None = None
    ) -> Claim:
        await self._travel()
        return await super().compare_and_put(key, value, mod_revision, lease_id, held=held)

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        await self._travel()
        return await super().list(prefix, keys_only=keys_only)

    async def list_key(self, key: str) -> Listing:
        await self._travel()
        return await super().list_key(key)

    async def summary(self, prefix: str) -> Summary:
        await self._travel()
        return await super().summary(prefix)


class Scene:
    """One client, and the registry that it registers in."""

    def __init__(self, control: str = "", **options: Any) -> None:
        self.drains: list[str] = []
        kv = self.kv = RoundsKV()

        class Client(OmniCoordClientForStage):
            def _connect(self) -> Any:
                return kv

        if control:
            asyncio.run(kv.put(keys.replica_control_key(NS, 0, options.get("replica_id") or 0), control.encode()))
        addresses = ("tcp://h:1", "tcp://h:2", 0)
        on_drain = partial(self.drains.append, "asked")
        self.client = Client("127.0.0.1:9", *addresses, namespace=NS, on_drain=on_drain, **options)

    def round_trips(self, count: int) -> None:
        for _ in range(count):
            self.client._thread.run(self.kv.round_trip(), 30.0)

    def written(self) -> list[dict[str, Any]]:
        """Each value that the record has had."""
        puts = [event.item for event in self.kv._history if isinstance(event, PutEvent)]
        return [json.loads(item.value) for item in puts if item.key.startswith(keys.replicas_prefix(NS))]


@contextmanager
def scene(control: str = "", **options: Any) -> Iterator[Scene]:
    made = Scene(control, **options)
    try:
        yield made
    finally:
        made.kv.is_out = True
        for call in made.kv._under_way:
            made.client._thread.call(call.cancel)
        made.client.close()


@pytest.mark.parametrize("wanted_id", [None, 5])
def test_a_replica_is_up_after_three_round_trips_and_two_writes(wanted_id: int | None) -> None:
    with scene(replica_id=wanted_id) as it:
        it.round_trips(2)
        assert [(record["status"], record["epoch"]) for record in it.written()] == [("starting", 0)]
        it.round_trips(1)
        replica_id, epoch = it.client.wait_registered(0.0)
        assert replica_id == (wanted_id or 0)
        assert [(record["status"], record["epoch"]) for record in it.written()][1:] == [("up", epoch)]


def test_a_cordoned_id_is_taken_as_fast_and_is_never_up_without_its_cordon() -> None:
    with scene('{"cordon": true, "weight": 0.5}') as it:
        it.round_trips(3)
        it.client.wait_registered(0.0)
        first, last = it.written()
        assert first["status"] == "starting"
        assert (last["status"], last["cordoned"], last["weight"], last["control_revision"]) == ("up", True, 0.5, 2)


def test_changes_of_other_threads_do_not_bring_back_a_record_without_the_cordon() -> None:
    """1. a change of another thread is on its way to the loop; 2. meanwhile the id turns out to be cordoned"""
    with scene('{"cordon": true}') as it:
        calls: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(it.client._thread, "call", calls.append)
            it.client.describe(reason="another thread")
        it.round_trips(3)
        it.client._thread.call(calls[0])
        it.round_trips(3)
        assert it.written()[-1]["reason"] == "another thread"
        assert all(record["cordoned"] for record in it.written() if record["status"] == "up")


def test_a_drain_without_an_epoch_is_bound_before_the_record_is_up() -> None:
    """1. somebody has asked for a drain of an id that nobody has: whoever takes the id obeys it, once
    2. until the drain is bound to this life, the record says starting
    """
    key = keys.replica_control_key(NS, 0, 0)
    with scene('{"drain": true}') as it:
        it.round_trips(3)
        assert [record["status"] for record in it.written()] == ["starting", "starting"]
        it.round_trips(3)
        assert json.loads(it.kv._items[key].value) == {"drain": True, "epoch": it.written()[-1]["epoch"]}
        assert it.drains == ["asked"]


def test_another_id_is_not_up_before_its_own_key_was_obeyed() -> None:
    """1. up as 0, whose key is deleted and then belongs to another
    2. id 1 is taken, which somebody has asked to drain: the record says starting until that is bound to this life
    """
    with scene() as it:
        it.round_trips(4)
        it.client._thread.run(_give_id_0_away(it.kv), 30.0)
        it.round_trips(4)
        ours = [record["status"] for record in it.written() if record.get("replica_id") == 1]
        assert ours[:2] == ["starting", "starting"]
        assert it.drains == ["asked"]


async def _give_id_0_away(kv: RoundsKV) -> None:
    await kv.put(keys.replica_control_key(NS, 0, 1), b'{"drain": true}')
    await kv.delete(keys.replica_key(NS, 0, 0))
    await kv.put(keys.replica_key(NS, 0, 0), b"{}")
