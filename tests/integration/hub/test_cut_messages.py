"""Long messages travel in frames of 64 KiB, so that no handshake brings more; sides of the release before take part.

That release sends each head and each attachment in one frame. The former side is made of today's, without what it does
to long messages and without what it says of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import zmq
from msgspec import UNSET, structs

from hub.async_omni import AsyncOmni
from hub.config import HubConfig
from hub.orchestrator.orchestrator import Orchestrator
from hub.replicas import sockets
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.records.schema import HubRecord
from omni_discovery.wire import session
from stage_runtime.engines.echo import engine as echo
from tests.support.curve_handshake import CurveHandshake, properties
from tests.support.hub_fakes import ONE_STAGE, QUICK, ask, collect, deploy_of, started_hub, text_of, until
from tests.support.local_replica import LocalReplica
from tests.support.proxy import behind_proxies

#: The usual one; those of other tests are open to the fake replicas there, which are as those of the release before.
CONFIG = replace(QUICK, former_replicas=False)
KEYS = KeyPair.generate()
PICTURES = "stages: [{stage_id: 0, engine: echo, final_output: image}]"
#: One word: the echo says it in one message, as long as the prompt.
LONG = "ä" * (wire.MAX_FRAME_BYTES * 5)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * (3 << 12)


def former_hub(monkeypatch: pytest.MonkeyPatch, replica: LocalReplica) -> HubConfig:
    """Its record shows the replica what it is; it opens all to every replica, as that release did."""
    usual = session.Hello
    monkeypatch.setattr(session, "Hello", lambda **fields: usual(**fields | {"wire_version": UNSET}))
    monkeypatch.setattr(sockets, "cuts_messages", lambda _info: False)
    replica.server.take_long_frames("hub-old")
    return replace(CONFIG, former_replicas=True)


def former_replica(monkeypatch: pytest.MonkeyPatch, replica: LocalReplica) -> HubConfig:
    replica.info = replace(replica.info, wire_version=1)
    for router in (replica.server._input, replica.server._output):
        monkeypatch.setattr(router, "takes_cut", lambda _name: False)
    replica.server.take_long_frames("hub-old")
    return replace(CONFIG, former_replicas=True)


def nobody_former(_monkeypatch: pytest.MonkeyPatch, _replica: LocalReplica) -> HubConfig:
    return CONFIG


def losses_of(omni: AsyncOmni) -> float:
    return omni.metrics.get_sample_value("omni_hub_session_losses_total", {"stage": "0"}) or 0.0


def inside(omni: AsyncOmni) -> Orchestrator:
    assert omni._orchestrator is not None
    return omni._orchestrator


@pytest.mark.parametrize("pipeline", [ONE_STAGE, PICTURES])
@pytest.mark.parametrize("make_former", [former_hub, former_replica, nobody_former])
async def test_a_long_prompt_and_a_large_picture_pass(
    make_former: Callable[[pytest.MonkeyPatch, LocalReplica], HubConfig],
    pipeline: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt of 640 KB comes back as one piece, a picture of 3 MiB as it was made, and no session is lost by that."""
    monkeypatch.setattr(echo, "draw_png", lambda _text: PNG)
    is_text = pipeline is ONE_STAGE
    with LocalReplica({KEYS.public: "hub-1"}, modality="text" if is_text else "image") as replica:
        config = make_former(monkeypatch, replica)
        omni = AsyncOmni(deploy_of(pipeline), "hub-1", KEYS, config)
        async with started_hub(omni, replica.info, timeout_s=10.0):
            outputs = await collect(omni.generate({"prompt": LONG if is_text else "a cat"}))
            if is_text:
                assert text_of(outputs) == LONG
            else:
                assert [output.data for output in outputs if output.data] == [PNG]
            assert not losses_of(omni)


async def test_short_messages_of_a_former_replica_pass_by_default_and_the_log_says_what_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalReplica({KEYS.public: "hub-1"}) as replica:
        former_replica(monkeypatch, replica)
        with caplog.at_level(logging.WARNING):
            omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", KEYS, CONFIG)
            async with started_hub(omni, replica.info, timeout_s=10.0):
                words = " ".join(["word"] * 2000)
                assert await ask(omni, words) == words
                assert not losses_of(omni)
    (line,) = [record.getMessage() for record in caplog.records if "replica.former" in record.getMessage()]
    assert "--former-replicas" in line
    assert "replica=0/0" in line


async def test_a_replica_opens_to_hubs_of_the_release_before_once_one_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. a hub that cuts is served
    2. one that does not is registered: the connections of the first are made anew, and it is served on
    3. the second is served, with a prompt of 640 KB in one frame
    """
    others = KeyPair.generate()
    with LocalReplica({KEYS.public: "hub-1", others.public: "hub-2"}) as replica:
        first = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", KEYS, replace(CONFIG, pick_timeout_s=9.0))
        async with started_hub(first, replica.info, timeout_s=10.0):
            assert await ask(first, LONG) == LONG
            config = former_hub(monkeypatch, replica)
            second = AsyncOmni(deploy_of(ONE_STAGE), "hub-2", others, config)
            async with started_hub(second, replica.info, timeout_s=10.0):
                assert await ask(second, LONG) == LONG
                monkeypatch.undo()
                await until(lambda: first.stage_status()[0].pickable == 1)
                assert await ask(first, LONG) == LONG


def test_a_record_of_the_release_before_says_nothing_of_it() -> None:
    assert HubRecord(hub_id="h").wire_version is UNSET
    assert structs.asdict(HubRecord(hub_id="h", wire_version=wire.VERSION_CUT))["wire_version"] == wire.VERSION_CUT


#: What ZMTP begins with, for CURVE.
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE" + bytes(15) + b"\0" + bytes(31)
#: The beginning of a command of so many bytes.
COMMAND = b"\x06" + (wire.MAX_FRAME_BYTES * 2).to_bytes(8, "big")


@pytest.mark.attack("Z1")
def test_a_stranger_who_announces_more_than_a_frame_is_shut_out_at_once() -> None:
    """Without the bound it is kept until its handshake is due, after 3 s."""
    with LocalReplica({KEYS.public: "hub-1"}) as replica:
        for port in replica.ports:
            with socket.create_connection(("127.0.0.1", port), timeout=10.0) as stranger:
                stranger.sendall(GREETING + COMMAND)
                began_s = time.monotonic()
                while stranger.recv(1024):
                    pass
                assert time.monotonic() - began_s < 2.0


@pytest.mark.attack("Z1")
async def test_handshakes_with_as_many_properties_as_they_may_have_take_nobody_the_replica() -> None:
    """1. one with more than a frame of properties is ended at once
    2. for two seconds, four others make one handshake after another with 60 KB of them: a hub is served all the while
    """
    with LocalReplica({KEYS.public: "hub-1"}) as replica:
        where = "127.0.0.1", replica.server.input_port, replica.info.curve_public_key
        with CurveHandshake(*where) as stranger:
            stranger.initiate(properties(wire.MAX_FRAME_BYTES + 1000))
            assert await asyncio.to_thread(stranger.is_ended, 2.0)
        until_s = time.monotonic() + 2.0
        metadata = properties(60_000)

        def attack() -> int:
            made = 0
            while time.monotonic() < until_s:
                with contextlib.suppress(OSError), CurveHandshake(*where) as stranger:
                    stranger.initiate(metadata)
                    made += 1
            return made

        omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", KEYS, CONFIG)
        async with started_hub(omni, replica.info, timeout_s=10.0):
            attacks = [asyncio.create_task(asyncio.to_thread(attack)) for _ in range(4)]
            asked = 0
            while time.monotonic() < until_s:
                assert await ask(omni) == "hello there"
                asked += 1
            made = sum(await asyncio.gather(*attacks))
            assert asked > 3
            assert made > 20
            assert not losses_of(omni)


@pytest.mark.attack("Z2")
@pytest.mark.parametrize(
    ("config", "cuts", "most"),
    [
        (CONFIG, True, wire.MAX_FRAME_BYTES + 64),
        (CONFIG, False, 320 << 10),
        (replace(CONFIG, former_replicas=True), True, wire.MAX_FRAME_BYTES + 64),
        (replace(CONFIG, former_replicas=True), False, wire.MAX_ATTACHMENT_BYTES),
    ],
)
async def test_what_a_replica_may_send_a_hub_in_one_frame(config: HubConfig, cuts: bool, most: int) -> None:
    with LocalReplica({KEYS.public: "hub-1"}) as replica:
        replica.info = replace(replica.info, wire_version=wire.VERSION_CUT if cuts else 1)
        omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", KEYS, config)
        bounds: list[int] = []
        usual = zmq.Socket.setsockopt

        def watched(self: zmq.Socket[bytes], option: int, value: object) -> None:
            usual(self, option, value)  # type: ignore[arg-type]
            if option == zmq.MAXMSGSIZE:
                bounds.append(int(value))  # type: ignore[call-overload]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zmq.Socket, "setsockopt", watched)
            async with started_hub(omni, replica.info, timeout_s=10.0):
                pass
        # Of the connection for heartbeats, of requests and of output.
        assert sorted(bounds) == sorted([4096, most, most])


@pytest.mark.attack("Z3")
async def test_a_process_that_lets_in_and_ends_each_connection_is_tried_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of its handshakes takes the hub's I/O thread some time, and ZMQ itself would begin the next at once.

    1. each connection is cut as soon as it is made, for 4 s: there are few
    2. it is cut no more: the replica is served again
    """
    made: list[float] = []
    usual = sockets.DealerConnection._lose

    def counted(connection: sockets.DealerConnection) -> None:
        made.append(time.monotonic())
        usual(connection)

    with LocalReplica({KEYS.public: "hub-1"}) as replica, behind_proxies(replica.info) as (info, ways):
        omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", KEYS, replace(CONFIG, reconnect_max_s=0.05))
        async with started_hub(omni, info, timeout_s=10.0):
            monkeypatch.setattr(sockets.DealerConnection, "_lose", counted)
            (client,) = inside(omni)._membership.clients.values()
            began_s = time.monotonic()
            while time.monotonic() - began_s < 4.0:
                if any(connection.connected for connection in client._connections.values()):
                    for way in ways:
                        way.cut()
                await asyncio.sleep(0.005)
            # Without pauses that grow, a hundred and more.
            assert 10 < len(made) < 50
            await until(lambda: omni.stage_status()[0].pickable == 1)
            assert await ask(omni) == "hello there"


def test_a_message_that_is_not_cut_as_it_says_is_refused_and_the_next_is_read() -> None:
    """1. pieces that are missing, too many or too short; attachments of a hub; a head beyond 4 MiB; no lengths at all
    2. a message that is cut as it says is handled
    """
    pieces = wire.cut([b"\x01" + bytes(2 * wire.MAX_FRAME_BYTES)])
    bad = [
        [pieces[0], *pieces[1:-1]],
        [*pieces, b"more"],
        [*pieces[:-1], b""],
        wire.cut([bytes(wire.MAX_FRAME_BYTES + 1), b"attached"]),
        [b"\x02\x91\xce\x00\x50\x00\x00", b"x"],
        [b"\x02\x90", b"x"],
        [b"\x02", b"x"],
        [b"\x02\xc1", *[b"x"] * 100],
    ]
    with LocalReplica({KEYS.public: "hub-1"}) as replica:
        hub = replica.raw_hub("hub-1", KEYS)
        try:
            hub.hello()
            for frames in bad:
                hub.input.send_multipart(frames)
            hub.submit("r", LONG)
            chunks, _, _ = hub.collect("r")
            assert "".join(chunk.text for chunk in chunks) == LONG
            assert replica.server.counters["bad_frames"] == len(bad)
        finally:
            hub.close()
