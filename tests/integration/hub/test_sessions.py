"""The session between a hub and one replica: who is let in, which frames count, what comes back."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from hub.async_omni import AsyncOmni
from hub.replicas.stage_client import StageClient
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.errors import ReplicaLostError
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.table import Delta
from tests.support.hub_fakes import (
    ONE_STAGE,
    PAIR,
    QUICK,
    FakeReplica,
    accept_only,
    collect,
    deploy_of,
    picture,
    running_hub,
    show,
    text_of,
    until,
    view_of,
)
from tests.support.proxy import TcpProxy


def dropped(omni: AsyncOmni, reason: str) -> float:
    return omni.metrics.get_sample_value("omni_hub_dropped_frames_total", {"reason": reason}) or 0.0


async def test_a_hub_greets_both_sockets_and_picks_only_after_both_have_welcomed_it() -> None:
    replica = FakeReplica()
    replica.greets = False
    async with running_hub(replica, wait=False) as omni:
        await until(lambda: len(replica.of(wire.Hello)) >= 4)
        assert (omni.stage_status()[0].registered, omni.stage_status()[0].pickable) == (1, 0)
        replica.greets = True
        await until(lambda: omni.stage_status()[0].pickable == 1)
        assert {hello.hub_id for hello in replica.of(wire.Hello)} == {"hub-1"}


async def test_a_hub_that_is_refused_at_first_gets_in_once_its_key_is_known() -> None:
    """1. the replica knows no hub: every handshake is denied for good, as libzmq sees it
    2. the hub's record appears: its key is allowed
    3. the hub has a session without anybody's help
    """
    replica = FakeReplica(zap=True)
    gate = AsyncioAuthenticator(replica.context)
    gate.start()
    gate.configure_curve_callback("replica", credentials_provider=_Nobody())
    try:
        async with running_hub(replica, wait=False) as omni:
            await asyncio.sleep(0.3)
            assert omni.stage_status()[0].pickable == 0
            gate.configure_curve(domain="replica", location=zmq.auth.CURVE_ALLOW_ANY)
            await until(lambda: omni.stage_status()[0].pickable == 1)
            assert text_of(await collect(omni.generate({"prompt": "at last"}))) == "at last "
            gate.stop()
    finally:
        gate.stop()


class _Nobody:
    def callback(self, _domain: str, _key: bytes) -> bool:
        return False


@pytest.mark.attack("C1")
async def test_a_replica_with_another_key_than_its_record_says_is_never_picked() -> None:
    replica = FakeReplica()
    async with running_hub(wait=False) as omni:
        show(omni, replace(replica.info, curve_public_key=KeyPair.generate().public))
        await asyncio.sleep(0.2)
        assert omni.stage_status()[0].pickable == 0
        assert replica.received == []
    replica.kill()


async def test_a_record_without_a_key_or_with_nonsense_harms_nobody_else() -> None:
    good = FakeReplica(replica_id=5)
    bad = [
        ReplicaInfo("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id=1, epoch=1),
        ReplicaInfo("nonsense", "\0", 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id=2, curve_public_key="x" * 40),
        replace(good.info, replica_id=3, input_addr="tcp://:", output_addr="udp://1", epoch=3),
        replace(good.info, replica_id=4, stage_id=77),
    ]
    async with running_hub(good) as omni:
        show(omni, good.info, *bad)
        await until(lambda: omni.stage_status()[0].registered == 4)
        assert omni.stage_status()[0].pickable == 1
        assert text_of(await collect(omni.generate({"prompt": "fine"}))) == "fine "


async def test_frames_of_another_life_and_nonsense_are_counted_and_dropped() -> None:
    """1. a replica has accepted a request
    2. frames with another epoch, for unknown requests, on the wrong socket, and garbage arrive
    3. none shows; the right frames still do
    """
    replica = FakeReplica(accept_only)
    async with running_hub(replica) as omni:
        outputs = omni.generate({"prompt": "x"})
        first = asyncio.ensure_future(anext(outputs))
        await until(lambda: len(replica.of(wire.Submit)) == 1)
        (submit,) = replica.of(wire.Submit)
        replica.chunk(wire.Submit(epoch=submit.epoch + 1, request_id=submit.request_id), 0, text="wrong life")
        replica.chunk(wire.Submit(epoch=submit.epoch, request_id="nobody"), 0, text="nobody")
        replica.chunk(wire.Submit(epoch=submit.epoch, request_id=submit.request_id, attempt=5), 0, text="old")
        replica.say(wire.Accepted(epoch=submit.epoch, request_id="x", queue_length=0), replica._output)
        replica._output.send([replica._hub, b"\x01garbage"])
        replica.chunk(submit, 0, text="right")
        assert (await first).text == "right"
        assert (dropped(omni, "epoch"), dropped(omni, "malformed"), dropped(omni, "misplaced")) == (1, 1, 1)
        assert dropped(omni, "stale") == 2
        await outputs.aclose()


async def test_a_lost_connection_that_comes_back_is_a_session_again_and_old_work_is_aborted() -> None:
    """1. a holds a request; its sockets die and are bound again on the same ports by the same life
    2. the request was lost to b; when a answers again it is told to stop what it may still run
    """
    keys = KeyPair.generate()
    a, b = FakeReplica(accept_only, keys=keys), FakeReplica(replica_id=1)
    async with running_hub(a, b) as omni:
        outputs = omni.generate({"prompt": "moved"})
        first = asyncio.ensure_future(anext(outputs))
        await until(lambda: len(a.of(wire.Submit)) == 1)
        a.kill()
        assert (await first).replica == "0/1"
        again = FakeReplica(keys=keys, epoch=a.info.epoch, bind=(a.info.input_addr, a.info.output_addr))
        await until(lambda: omni.stage_status()[0].pickable == 2)
        # It may be said again before its answer comes.
        await until(lambda: bool(again.of(wire.Abort)))
        await outputs.aclose()
        again.kill()


async def test_a_lease_renewed_under_another_epoch_keeps_the_work_in_flight() -> None:
    """1. a replica works on a request; its lease is lost and taken anew: same process, another epoch
    2. the hub greets the new life on the same sockets
    3. what was sent to the old life is still answered under the old epoch, and counts
    """
    replica = FakeReplica(accept_only)
    async with running_hub(replica) as omni:
        outputs = omni.generate({"prompt": "x"})
        first = asyncio.ensure_future(anext(outputs))
        await until(lambda: len(replica.of(wire.Submit)) == 1)
        replica.info = replace(replica.info, epoch=replica.info.epoch + 1000)
        show(omni, replica.info)
        await until(lambda: replica.of(wire.Hello)[-1].epoch == replica.info.epoch)
        await until(lambda: omni.stage_status()[0].pickable == 1)
        (submit,) = replica.of(wire.Submit)
        replica.chunk(submit, 0, text="still here")
        assert (await first).text == "still here"
        assert omni.metrics.get_sample_value("omni_hub_session_losses_total", {"stage": "0"}) == 0.0
        replica.kill()
        await until(lambda: omni.metrics.get_sample_value("omni_hub_session_losses_total", {"stage": "0"}) == 1.0)
        await outputs.aclose()


async def test_an_error_in_one_look_at_a_session_does_not_end_the_watch_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. a replica that does not greet back yet; the first look at that fails
    2. it is greeted again all the same, and picked as soon as it answers; after the close nobody looks any more
    """
    replica = FakeReplica()
    replica.greets = False
    failing, look = [ZeroDivisionError("once")], StageClient._try_again

    def try_again(client: StageClient) -> None:
        if failing:
            raise failing.pop()
        look(client)

    monkeypatch.setattr(StageClient, "_try_again", try_again)
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context.get("exception")))
    async with running_hub(replica, wait=False) as omni:
        await until(lambda: bool(told))
        replica.greets = True
        await until(lambda: omni.stage_status()[0].pickable == 1)
        assert [type(error) for error in told] == [ZeroDivisionError]
        assert omni._orchestrator is not None
        (client,) = omni._orchestrator._membership.clients.values()
    assert client._ticker is None


async def test_another_process_on_the_same_ports_is_another_replica() -> None:
    """1. a works on a request and dies; a new process with its own key binds the same ports before the hub notices
    2. the record changes: the old work is lost and moves to the new process
    """
    a = FakeReplica(accept_only)
    async with running_hub(a) as omni:
        outputs = omni.generate({"prompt": "moved"})
        first = asyncio.ensure_future(anext(outputs))
        await until(lambda: len(a.of(wire.Submit)) == 1)
        a.kill()
        again = FakeReplica(bind=(a.info.input_addr, a.info.output_addr))
        show(omni, again.info)
        assert (await first).text == "moved "
        await outputs.aclose()
        again.kill()


@pytest.mark.attack("A23")
async def test_a_record_with_the_address_of_another_replica_takes_nothing_from_it() -> None:
    """1. a record of stage 0, with a key of its own, names the sockets of 1/0, which came first
    2. stage 1 goes on, and stage 0 with the replica that it has
    """
    a, b = FakeReplica(), FakeReplica(picture, stage_id=1)
    async with running_hub(a, b, deploy=PAIR) as omni:
        key = KeyPair.generate().public
        bad = replace(b.info, stage_id=0, replica_id=8, epoch=b.info.epoch + 1000, curve_public_key=key)
        show(omni, a.info, bad, b.info)
        for number in range(5):
            show(omni, a.info, b.info, replace(bad, queue_length=number))
            assert (await collect(omni.generate({"prompt": "one"})))[-1].is_summary


async def test_views_may_come_before_the_start_and_older_ones_are_ignored() -> None:
    a, b = FakeReplica(), FakeReplica(replica_id=1)
    omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", KeyPair.generate(), QUICK, "random")
    assert [(stage.registered, stage.pickable) for stage in omni.stage_status()] == [(0, 0)]
    show(omni, a.info)
    await omni.start()
    try:
        await until(lambda: omni.stage_status()[0].pickable == 1)
        older, newer = view_of([a.info]), view_of([a.info, b.info])
        omni.apply_view(newer, Delta())
        omni.apply_view(older, Delta())
        await until(lambda: omni.stage_status()[0].pickable == 2)
    finally:
        await omni.close()
        a.kill()
        b.kill()


def talk(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.chunk(submit, 0, text="one ")


async def test_a_connection_that_is_cut_and_back_within_the_grace_costs_no_output() -> None:
    """1. a piece has been shown, so the work can't be moved; the connection is cut
    2. the same life of the replica answers again and goes on: the client notices nothing
    """
    keys = KeyPair.generate()
    a = FakeReplica(talk, keys=keys)
    async with running_hub(a) as omni:
        outputs = omni.generate({"prompt": "x"})
        assert (await anext(outputs)).text == "one "
        (submit,) = a.of(wire.Submit)
        a.kill()
        again = FakeReplica(keys=keys, epoch=a.info.epoch, bind=(a.info.input_addr, a.info.output_addr))
        await until(lambda: len(again.of(wire.Hello)) >= 2)
        await until(lambda: omni.stage_status()[0].pickable == 1)
        again.chunk(submit, 1, text="two")
        again.done(submit, 2)
        assert text_of(await collect(outputs)) == "two"
        assert again.of(wire.Abort) == []
        again.kill()


async def test_work_that_is_never_spoken_of_again_ends_after_the_grace() -> None:
    """1. the connection is cut while a piece was shown; the replica is back but has forgotten the request
    2. after the grace the request ends, and the replica is told to stop it
    """
    keys = KeyPair.generate()
    a = FakeReplica(talk, keys=keys)
    async with running_hub(a, config=replace(QUICK, silence_grace_s=0.4)) as omni:
        outputs = omni.generate({"prompt": "x"})
        await anext(outputs)
        a.kill()
        again = FakeReplica(keys=keys, epoch=a.info.epoch, bind=(a.info.input_addr, a.info.output_addr))
        await until(lambda: omni.stage_status()[0].pickable == 1)
        with pytest.raises(ReplicaLostError, match=r"said nothing for 0\.4 s"):
            await collect(outputs)
        # It may be said again before its answer comes.
        await until(lambda: bool(again.of(wire.Abort)))
        again.kill()


async def test_an_abort_waits_until_the_replica_knows_its_new_epoch() -> None:
    """1. the hub hears of a new epoch before the replica itself does
    2. the client leaves: an abort sent now would name an epoch that the replica does not know
    3. the replica welcomes the hub under that epoch, and then gets it
    """
    replica = FakeReplica(accept_only)
    async with running_hub(replica) as omni:
        reading = asyncio.create_task(collect(omni.generate({"prompt": "long"}, request_id="r1")))
        await until(lambda: len(replica.of(wire.Submit)) == 1)
        renewed = replace(replica.info, epoch=replica.info.epoch + 1000)
        show(omni, renewed)
        await until(lambda: renewed.epoch in [hello.epoch for hello in replica.of(wire.Hello)])
        with pytest.raises(TimeoutError, match="'r1': replica 0/0 has not acknowledged the abort"):
            await omni.abort("r1")
        assert not replica.of(wire.Abort)
        replica.info = renewed
        await until(lambda: {abort.epoch for abort in replica.of(wire.Abort)} == {renewed.epoch})
        await reading


def one_word(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.chunk(submit, 0, text="one ")


async def test_work_of_a_replica_that_falls_silent_right_after_its_epoch_changed_is_given_up() -> None:
    """1. a request has shown output; the replica's epoch changes, and it has not welcomed the hub under it
    2. the network to it goes silent: nobody hears that it is gone
    3. the request ends after the grace, long before its deadline
    """
    replica = FakeReplica(one_word)
    short = replace(QUICK, zmq_heartbeat_interval_s=0.1, zmq_heartbeat_timeout_s=0.3, silence_grace_s=0.2)
    ways = [TcpProxy(addr.removeprefix("tcp://")) for addr in (replica.info.input_addr, replica.info.output_addr)]
    with ways[0], ways[1]:
        input_addr, output_addr = (f"tcp://{way.endpoint}" for way in ways)
        replica.info = replace(replica.info, input_addr=input_addr, output_addr=output_addr)
        async with running_hub(replica, config=short) as omni:
            outputs = omni.generate({"prompt": "long"})
            assert (await anext(outputs)).text == "one "
            replica.greets = False
            show(omni, replace(replica.info, epoch=replica.info.epoch + 1000))
            await until(lambda: not omni.stage_status()[0].pickable)
            for way in ways:
                way.freeze()
            with pytest.raises(ReplicaLostError):
                async with asyncio.timeout(5.0):
                    await anext(outputs)


async def test_a_replica_without_a_session_is_warned_about_once_with_the_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. one replica has another key than its record says, one's process is gone, one does not greet back
    2. after a moment each gets one line with its address and why; nothing more comes while that stays so
    """
    strange, gone, mute = FakeReplica(), FakeReplica(replica_id=1), FakeReplica(replica_id=2)
    mute.greets = False
    infos = [replace(strange.info, curve_public_key=KeyPair.generate().public), gone.info, mute.info]
    gone.kill()

    def lines() -> list[str]:
        return [line for line in map(logging.LogRecord.getMessage, caplog.records) if "replica.no_session" in line]

    async with running_hub(wait=False, config=replace(QUICK, unmet_after_s=0.5)) as omni:
        show(omni, *infos)
        await until(lambda: len(lines()) >= 3)
        await asyncio.sleep(1.0)
    strange.kill()
    mute.kill()
    assert len(lines()) == 3
    for info, cause in zip(infos, ("the handshake fails", "nobody answers there", "does not greet back"), strict=True):
        assert any(f"addr={info.input_addr}" in line and cause in line for line in lines())
