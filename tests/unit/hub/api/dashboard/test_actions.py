"""Actions: what each writes into the control key, on a registry in memory, and what a demo is asked for."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hub.api.dashboard.actions import ActionBody, ActionName, DemoKiller, NotSureError, ReplicaActions
from omni_discovery.commands.operate import OperationFailedError
from omni_discovery.errors import ConfigError, InvalidRequestError, RegistryDeniedError
from omni_discovery.kv import Claim
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaInfo, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.testing import FakeKV, ManualClock

INFO = ReplicaInfo("tcp://h:1", "tcp://h:2", 0, ReplicaStatus.UP, 0, 0.0, 0.0, 1, epoch=5, pid=77)


def record(replica_id: int, **fields: Any) -> bytes:
    return encode_record(
        ReplicaRecord(
            stage_id=0, replica_id=replica_id, input_addr="tcp://h:1", output_addr="tcp://h:2", status="up", **fields
        )
    )


async def registered(kv: FakeKV, *replica_ids: int) -> int:
    """Register replicas; return the epoch of the first."""
    for replica_id in replica_ids:
        await kv.put(keys.replica_key("test", 0, replica_id), record(replica_id))
    item = await kv.get(keys.replica_key("test", 0, replica_ids[0]))
    assert item is not None
    return item.create_revision


async def answering(kv: FakeKV, replica_id: int) -> None:
    """What a replica does: it answers each revision of its control key."""
    seen = -1
    while True:
        item = await kv.get(keys.replica_control_key("test", 0, replica_id))
        revision = 0 if item is None else item.mod_revision
        if revision != seen:
            seen = revision
            await kv.put(keys.replica_key("test", 0, replica_id), record(replica_id, control_revision=revision))
        await asyncio.sleep(0.01)


async def control(kv: FakeKV) -> Any:
    item = await kv.get(keys.replica_control_key("test", 0, 1))
    return None if item is None else msgspec.json.decode(item.value)


async def test_each_action_writes_what_its_command_writes() -> None:
    kv = FakeKV(ManualClock())
    epoch = await registered(kv, 1, 2)
    actions = ReplicaActions(lambda: kv, "test")
    replica = asyncio.create_task(answering(kv, 1))

    async def act(name: ActionName, **body: Any) -> str:
        return await actions.carry_out(0, 1, name, ActionBody(epoch=epoch, **body))

    try:
        assert "is cordoned" in await act(ActionName.CORDON)
        assert await control(kv) == {"cordon": True}
        assert await act(ActionName.WEIGHT, weight=0.5) == "replica 0/1 weighs 0.5"
        assert await control(kv) == {"cordon": True, "weight": 0.5}
        assert await act(ActionName.UNCORDON) == "replica 0/1 takes work again"
        assert await act(ActionName.WEIGHT) == "replica 0/1 has its own weight again"
        assert await control(kv) is None
        assert "drains" in await act(ActionName.DRAIN)
        assert await control(kv) == {"drain": True, "epoch": epoch}
        with pytest.raises(InvalidRequestError, match="omni demo --keep"):
            await act(ActionName.KILL)
    finally:
        replica.cancel()


@pytest.mark.parametrize(
    ("name", "weight"), [(ActionName.CORDON, None), (ActionName.DRAIN, None), (ActionName.WEIGHT, 0.0)]
)
async def test_the_last_of_a_stage_is_taken_away_only_when_asked_twice(name: ActionName, weight: float | None) -> None:
    kv = FakeKV(ManualClock())
    epoch = await registered(kv, 1)
    actions = ReplicaActions(lambda: kv, "test")
    with pytest.raises(NotSureError, match="no other replica of stage 0"):
        await actions.carry_out(0, 1, name, ActionBody(epoch=epoch, weight=weight))
    assert await control(kv) is None
    replica = asyncio.create_task(answering(kv, 1))
    try:
        await actions.carry_out(0, 1, name, ActionBody(epoch=epoch, weight=weight, sure=True))
    finally:
        replica.cancel()
    assert await control(kv) is not None


async def test_another_life_and_a_stranger_are_refused() -> None:
    kv = FakeKV(ManualClock())
    epoch = await registered(kv, 1, 2)
    actions = ReplicaActions(lambda: kv, "test")
    with pytest.raises(InvalidRequestError, match="another process by now") as caught:
        await actions.carry_out(0, 1, ActionName.DRAIN, ActionBody(epoch=epoch - 1))
    assert caught.value.status == 409
    with pytest.raises(InvalidRequestError, match="there are: 0/1, 0/2") as caught:
        await actions.carry_out(0, 9, ActionName.DRAIN, ActionBody(epoch=epoch))
    assert caught.value.status == 404
    assert await control(kv) is None


class Reader(FakeKV):
    """The registry as a hub's own etcd user may use it, where users have roles."""

    async def create(self, key: str, value: bytes, lease_id: int = 0) -> Claim:
        if "/control/" in key:
            raise RegistryDeniedError("permission denied")
        return await super().create(key, value, lease_id)


async def test_a_hub_whose_role_may_not_write_control_keys_says_what_to_do() -> None:
    kv = Reader(ManualClock())
    epoch = await registered(kv, 1, 2)
    with pytest.raises(OperationFailedError, match=r"as an operator, omni cordon 0/1"):
        await ReplicaActions(lambda: kv, "test").carry_out(0, 1, ActionName.CORDON, ActionBody(epoch=epoch))


async def killed(answer: Callable[[dict[str, Any]], bytes]) -> str:
    """What a killer says whose demo answers so."""
    mine, theirs = socket.socketpair()
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()

    async def demo() -> None:
        line = await loop.sock_recv(theirs, 4096)
        await loop.sock_sendall(theirs, answer(msgspec.json.decode(line)))
        theirs.close()

    task = asyncio.create_task(demo())
    try:
        killer = DemoKiller(mine.detach())
        try:
            return await killer.kill(INFO)
        finally:
            killer.close()
    finally:
        await task


async def test_the_demo_is_asked_by_name_and_process() -> None:
    seen: list[dict[str, Any]] = []

    def obey(line: dict[str, Any]) -> bytes:
        seen.append(line)
        return b'{"error": ""}\n'

    assert await killed(obey) == "killed replica 0/1 (process 77) with SIGKILL"
    assert seen == [{"stage_id": 0, "replica_id": 1, "pid": 77}]
    for answer, said in ((b'{"error": "it is none of mine"}\n', "none of mine"), (b"", "the demo is gone")):
        with pytest.raises(OperationFailedError, match=said):
            await killed(lambda _line, answer=answer: answer)


def test_what_is_no_socket_is_refused() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(ConfigError, match="only omni demo gives it"):
            DemoKiller(reader)
    finally:
        os.close(reader)
        os.close(writer)
