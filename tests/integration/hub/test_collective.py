"""Collective calls over real sockets: a hub, and real replicas with the echo engine, or scripted ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from hub.async_omni import AsyncOmni
from hub.orchestrator.collective import ReplicaResult
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.errors import InvalidRequestError, OverloadedError, RequestError, StageUnavailableError
from omni_discovery.records.schema import ReplicaStatus
from tests.support.hub_fakes import PAIR, QUICK, FakeReplica, deploy_of, running_hub, show, until
from tests.support.local_replica import LocalReplica
from tests.support.replica_hub import eventually

#: Machines under test may be slow; what is to come at once comes long before.
LONG_S = 30.0


class Scene:
    """A hub with real replicas, by ``stage/replica``."""

    def __init__(self, omni: AsyncOmni, replicas: dict[str, LocalReplica]) -> None:
        self.omni, self.replicas = omni, replicas


@asynccontextmanager
async def scene_of(*names: str, **engine_args: dict[str, Any]) -> AsyncIterator[Scene]:
    """``0/1`` is replica 1 of stage 0; its engine's arguments go by ``r01``."""
    keys = KeyPair.generate()
    async with AsyncExitStack() as stack:
        replicas: dict[str, LocalReplica] = {}
        for number, name in enumerate(names):
            stage_id, replica_id = map(int, name.split("/"))
            replica = LocalReplica(
                {keys.public: "hub-1"},
                stage_id=stage_id,
                replica_id=replica_id,
                epoch=70 + number,
                **{"allow_rpc": ["say", "pid"], **engine_args.get("r" + name.replace("/", ""), {})},
            )
            replicas[name] = stack.enter_context(replica)
        omni = AsyncOmni(deploy_of(PAIR), "hub-1", keys, QUICK)
        await omni.start()
        stack.push_async_callback(omni.close)
        show(omni, *(replica.info for replica in replicas.values()))
        await until(lambda: sum(stage.pickable for stage in omni.stage_status()) == len(names), 20.0)
        yield Scene(omni, replicas)


def places(results: Sequence[ReplicaResult], *, ok: bool) -> list[str]:
    return [f"{result.stage_id}/{result.replica_id}" for result in results if result.ok is ok]


def late(omni: AsyncOmni) -> float:
    return omni.hub_metrics.dropped.labels("late")._value.get()


async def test_every_replica_of_every_stage_answers_in_order() -> None:
    async with scene_of("1/0", "0/1", "0/0", "1/1") as scene:
        results = await scene.omni.collective_rpc("say", [1, b"\0"], {"a": None}, timeout=LONG_S)
        assert results == [
            ReplicaResult(stage_id, replica_id, ok=True, result=[[1, b"\0"], {"a": None}])
            for stage_id, replica_id in [(0, 0), (0, 1), (1, 0), (1, 1)]
        ]
        assert places(await scene.omni.list_loras(stage_ids=[1]), ok=True) == ["1/0", "1/1"]
        assert await scene.omni.list_loras(stage_ids=[]) == []


async def test_what_was_added_to_all_is_there_until_it_is_removed() -> None:
    async with scene_of("0/0", "0/1") as scene:
        omni = scene.omni
        assert [result.result for result in await omni.add_lora("mine", 3, "/l", stage_ids=[0])] == [True, True]
        assert [result.result for result in await omni.list_loras()] == [[3], [3]]
        assert [result.result for result in await omni.remove_lora(3)] == [True, True]
        assert [result.result for result in await omni.list_loras()] == [[], []]
        assert places(await omni.start_profile(), ok=True) == ["0/0", "0/1"]
        assert [result.error for result in await omni.start_profile()] == [
            "RuntimeError: a profile is being made already"
        ] * 2
        assert places(await omni.stop_profile(), ok=True) == ["0/0", "0/1"]
        assert "no control method 'pin_lora'" in (await omni.pin_lora(3))[0].error
        assert "no control method 'reset_prefix_cache'" in (await omni.reset_prefix_cache())[0].error


async def test_one_dies_one_is_slow_and_the_others_are_not_held_up_by_the_first() -> None:
    """1. of two stages with two replicas each, one takes too long, one dies in the middle of the call
    2. the results come at the deadline: two are right, the dead one's says why, the slow one's is a deadline
    3. the slow one's answer comes later: dropped and counted; all that is left answers the next call
    """
    slow = {"control_delay_s": 3.0}
    async with scene_of("0/0", "0/1", "1/0", "1/1", r01=slow, r10={"control_delay_s": 5.0}) as scene:
        asking = asyncio.create_task(scene.omni.collective("is_sleeping", timeout=LONG_S))
        assert places(await asking, ok=True) == ["0/0", "0/1", "1/0", "1/1"]
        asking = asyncio.create_task(scene.omni.list_loras(timeout=1.5))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(scene.replicas["1/0"].server.close)
        results = await asking
        assert places(results, ok=True) == ["0/0", "1/1"]
        errors = {f"{result.stage_id}/{result.replica_id}": result.error for result in results if not result.ok}
        assert errors["1/0"].startswith("ReplicaLostError: ")
        assert errors["0/1"] == "DeadlineExceededError: no answer within 1.5 s"
        await until(lambda: late(scene.omni) == 1, LONG_S)
        results = await scene.omni.list_loras(timeout=LONG_S)
        assert places(results, ok=True) == ["0/0", "0/1", "1/1"]
        assert [result.error for result in results if not result.ok] == [
            "NotConnectedError: this hub has no session with the replica"
        ]


async def test_a_replica_that_is_lost_ends_its_entry_at_once() -> None:
    """And so does one that the registry lists no more: nobody waits for the deadline."""
    silent, gone = FakeReplica(replica_id=0), FakeReplica(replica_id=1)
    async with running_hub(silent, gone) as omni:
        began_s = time.monotonic()
        asking = asyncio.create_task(omni.list_loras(timeout=LONG_S))
        await until(lambda: bool(silent.of(wire.Control)) and bool(gone.of(wire.Control)))
        silent.kill()
        show(omni, silent.info)
        results = await asking
        assert time.monotonic() - began_s < LONG_S / 2
        assert [result.error.partition(":")[0] for result in results] == ["ReplicaLostError"] * 2
        assert "does not list it" in results[1].error


async def test_a_replica_without_a_session_has_an_entry_too() -> None:
    here, deaf = FakeReplica(), FakeReplica(replica_id=1)
    deaf.greets = False
    async with running_hub(here, deaf, wait=False) as omni:
        await until(lambda: omni.stage_status()[0].pickable == 1)
        asking = asyncio.create_task(omni.list_loras(timeout=LONG_S))
        await until(lambda: bool(here.of(wire.Control)))
        (control,) = here.of(wire.Control)
        about = {"epoch": control.epoch, "call_id": control.call_id, "queue_length": 0}
        here.say(wire.ControlResult(**about, ok=True, result=[]))
        here.say(wire.ControlResult(**about, ok=True, result=["twice"]))
        assert [(result.ok, result.result) for result in await asking] == [(True, []), (False, None)]
        await until(lambda: late(omni) == 1)
        assert deaf.of(wire.Control) == []


async def test_a_second_call_with_the_id_of_an_open_one_is_an_error() -> None:
    silent = FakeReplica()
    async with running_hub(silent) as omni:
        first = asyncio.create_task(omni.collective("list_loras", timeout=0.5, call_id="mine"))
        await until(lambda: bool(silent.of(wire.Control)))
        with pytest.raises(RuntimeError, match="'mine' is already open"):
            await omni.collective("list_loras", call_id="mine")
        assert (await first)[0].error.startswith("DeadlineExceededError")
        again = await omni.collective("list_loras", timeout=0.1, call_id="mine")
        assert len(again) == 1
        ids = [control.call_id for control in silent.of(wire.Control)]
        assert len(set(ids)) == 2


async def test_what_cannot_be_asked_is_refused_before_anything_is_sent() -> None:
    silent = FakeReplica()
    async with running_hub(silent) as omni:
        refused: list[dict[str, Any]] = [
            {"method": ""},
            {"method": "x" * 300},
            {"method": "m", "stage_ids": [5]},
            {"method": "m", "timeout": 0},
            {"method": "m", "timeout": float("nan")},
            {"method": "m", "args": [object()]},
            {"method": "m", "args": [1 << 70]},
            {"method": "m", "args": ["\ud800"]},
            {"method": "m", "args": ["x" * (1 << 20)]},
            {"method": "m", "call_id": "x" * 300},
        ]
        for fields in refused:
            with pytest.raises(InvalidRequestError):
                await omni.collective(**fields)
        asking = [asyncio.create_task(omni.list_loras(timeout=5.0)) for _ in range(32)]
        await until(lambda: len(silent.of(wire.Control)) == 32)
        with pytest.raises(OverloadedError, match="32 collective calls are open"):
            await omni.list_loras()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_a_stage_that_is_not_there_is_named_and_the_others_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with scene_of("0/0", "1/0") as scene:
        results = await scene.omni.collective("is_sleeping", stage_ids=[99, 1], timeout=LONG_S)
        assert places(results, ok=True) == ["1/0"]
        warning = "collective.unknown_stage method='is_sleeping': the pipeline has no stage 99; it has 0, 1"
        assert [each.getMessage() for each in caplog.records if "99" in each.getMessage()] == [warning]
        with pytest.raises(InvalidRequestError, match="the pipeline has no stage 99, 98; it has 0, 1"):
            await scene.omni.collective("is_sleeping", stage_ids=[99, 98, 99], timeout=LONG_S)


async def test_a_call_without_a_timeout_waits_for_all_and_ends_with_its_caller() -> None:
    """1. the caller of 32 calls without a timeout, all that may be open, gives up: as many may be opened again
    2. a real replica answers such a call
    """
    silent = FakeReplica()
    async with running_hub(silent) as omni:
        asking = [asyncio.create_task(omni.list_loras(timeout=None)) for _ in range(32)]
        await until(lambda: len(silent.of(wire.Control)) == 32, LONG_S)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        again = asyncio.create_task(omni.list_loras(timeout=None))
        await until(lambda: len(silent.of(wire.Control)) == 33, LONG_S)
        assert not again.done()
        silent.kill()
        assert [result.error.partition(":")[0] for result in await again] == ["ReplicaLostError"]
    async with scene_of("0/0") as scene:
        assert places(await scene.omni.is_sleeping(timeout=None), ok=True) == ["0/0"]


async def test_a_hub_that_stops_answers_everybody_who_waits() -> None:
    """The call that is open, and the one that the orchestrator had not come to; after that none is taken."""
    silent = FakeReplica()
    async with running_hub(silent) as omni:
        asking = asyncio.create_task(omni.list_loras(timeout=LONG_S))
        await until(lambda: bool(silent.of(wire.Control)))
        await omni.close()
        (result,) = await asyncio.wait_for(asking, 5.0)
        assert (result.ok, result.error) == (False, "RequestError: the hub is stopping")
        with pytest.raises(RequestError, match="not running"):
            await omni.list_loras()


async def test_an_orchestrator_that_dies_wakes_everybody_who_waits() -> None:
    silent = FakeReplica()
    async with running_hub(silent) as omni:
        asking = asyncio.create_task(omni.list_loras(timeout=LONG_S))
        await until(lambda: bool(silent.of(wire.Control)))
        omni._tasks[0].cancel()
        unseen = asyncio.create_task(omni.list_loras(timeout=LONG_S))
        (result,) = await asyncio.wait_for(asking, 5.0)
        assert not result.ok
        with pytest.raises(RequestError):
            await asyncio.wait_for(unseen, 5.0)


async def test_replicas_that_sleep_finish_what_runs_take_nothing_new_and_wake_up_again() -> None:
    """1. one of two replicas is busy; both are put to sleep: the call ends when the busy one has
    2. the answer that ran is whole; a new request finds nobody, as the registry has it, too
    3. they are woken: requests are served
    """
    async with scene_of("0/0", "0/1", r00={"delay_s": 0.1}, r01={"delay_s": 0.1}) as scene:
        omni = scene.omni
        running = asyncio.create_task(said(omni, "word " * 8))
        await until(lambda: sum(replica.server.queue_length for replica in scene.replicas.values()) == 1)
        results = await omni.sleep(1, timeout=LONG_S)
        assert places(results, ok=True) == ["0/0", "0/1"]
        assert await asyncio.wait_for(running, 5.0) == "word " * 8
        assert [result.result for result in await omni.is_sleeping()] == [True, True]
        infos = [replica.info for replica in scene.replicas.values()]
        show(omni, *(replace(info, status=ReplicaStatus.STARTING) for info in infos))
        with pytest.raises(StageUnavailableError):
            await said(omni, "nobody")
        assert {replica.server.life_state.value for replica in scene.replicas.values()} == {"asleep"}
        assert places(await omni.wake_up(), ok=True) == ["0/0", "0/1"]
        show(omni, *infos)
        assert await said(omni, "good morning") == "good morning"
        begun = [key for replica in scene.replicas.values() for key in replica.engine.begun]
        assert len(begun) == 2


async def test_sleep_that_cannot_come_in_time_leaves_the_replica_awake() -> None:
    async with scene_of("0/0", r00={"delay_s": 0.2}) as scene:
        running = asyncio.create_task(said(scene.omni, "word " * 8))
        replica = scene.replicas["0/0"]
        await until(lambda: replica.server.queue_length == 1)
        (result,) = await scene.omni.sleep(timeout=0.3)
        assert result.error.startswith("DeadlineExceededError")
        assert await asyncio.to_thread(eventually, lambda: replica.server.life_state.value == "ready")
        assert await running == "word " * 8
        assert await said(scene.omni, "still here") == "still here"


async def said(omni: AsyncOmni, prompt: str) -> str:
    return "".join([output.text async for output in omni.generate({"prompt": prompt}, modalities=["text"])])


def test_frames_that_come_again_or_for_another_life_run_nothing(keys: KeyPair) -> None:
    """A result is on the output socket, in the life that was asked; a call on the output socket is misplaced."""
    with LocalReplica({keys.public: "hub-1"}, allow_rpc=["say"]) as replica:
        hub = replica.raw_hub("hub-1", keys)
        hub.hello()
        control = wire.Control(epoch=hub.epoch, call_id="c", method="add_lora", args=("mine", 1, "/l"))
        hub.send(control)
        result = hub.receive(hub.output, wire.ControlResult)
        assert (result.call_id, result.ok, result.result, result.epoch) == ("c", True, True, hub.epoch)
        for frame in (control, *(replaced(control, epoch=epoch) for epoch in (hub.epoch - 1, hub.epoch + 1, 0))):
            hub.send(frame)
        hub.output.send(wire.encode(replaced(control, call_id="d")))
        hub.send(wire.Control(epoch=hub.epoch, call_id="e", method="list_loras"))
        result = hub.receive(hub.output, wire.ControlResult)
        assert (result.call_id, result.result) == ("e", [1])
        counters = replica.server.counters
        counted: Callable[[], bool] = lambda: (  # noqa: E731
            (counters["replayed_calls"], counters["wrong_epoch"], counters["misplaced"]) == (1, 3, 1)
        )
        assert eventually(counted)
        hub.close()


def replaced(control: wire.Control, **fields: Any) -> wire.Control:
    about = {"epoch": control.epoch, "call_id": control.call_id, "method": control.method, "args": control.args}
    return wire.Control(**{**about, **fields})


def test_a_revoked_hubs_calls_are_dropped_and_those_that_wait_never_begin(keys: KeyPair) -> None:
    """1. a request of another hub keeps the engine busy, a hub asks for sleep, and for an adapter behind it
    2. that hub is revoked: nothing of it is carried out, it hears nothing, and the replica takes work again
    """
    other = KeyPair.generate()
    with LocalReplica({keys.public: "hub-1", other.public: "hub-2"}, delay_s=0.05) as replica:
        hub, friend = replica.raw_hub("hub-1", keys), replica.raw_hub("hub-2", other)
        hub.hello()
        friend.hello()
        friend.submit("r", "word " * 40)
        friend.acknowledged()
        hub.send(wire.Control(epoch=hub.epoch, call_id="c", method="sleep"))
        hub.send(wire.Control(epoch=hub.epoch, call_id="d", method="add_lora", args=("mine", 1, "/l")))
        assert eventually(lambda: replica.server.life_state.value == "asleep")
        replica.server.set_revoked_hubs(frozenset({"hub-1"}))
        assert eventually(lambda: replica.server.life_state.value == "ready")
        hub.send(wire.Control(epoch=hub.epoch, call_id="e", method="add_lora", args=("mine", 2, "/l")))
        assert friend.collect("r", 30.0)[1].finish_reason == "stop"
        friend.send(wire.Control(epoch=hub.epoch, call_id="f", method="list_loras"))
        assert friend.receive(friend.output, wire.ControlResult).result == []
        assert replica.server.counters["revoked"] >= 1
        assert hub.hears_nothing(0.2) or not has_result(hub)
        hub.close()
        friend.close()


def has_result(hub: Any) -> bool:
    try:
        hub.receive(hub.output, wire.ControlResult, 0.2)
    except TimeoutError:
        return False
    return True


async def test_a_replica_that_registers_under_a_new_epoch_still_answers_what_it_was_asked() -> None:
    replica = FakeReplica()
    async with running_hub(replica) as omni:
        asking = asyncio.create_task(omni.list_loras(timeout=LONG_S))
        await until(lambda: bool(replica.of(wire.Control)))
        (control,) = replica.of(wire.Control)
        replica.info = replace(replica.info, epoch=replica.info.epoch + 1000)
        show(omni, replica.info)
        await until(lambda: replica.of(wire.Hello)[-1].epoch == replica.info.epoch)
        replica.say(
            wire.ControlResult(epoch=control.epoch, call_id=control.call_id, ok=True, queue_length=0, result=[9])
        )
        assert [result.result for result in await asking] == [[9]]
