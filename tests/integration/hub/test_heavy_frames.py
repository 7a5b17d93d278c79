"""Frames that cost a hub far more than their bytes, from replicas that are registered, over real sockets."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from hub.config import HubConfig
from hub.replicas.events import FrameDropped
from hub.replicas.long_turns import LongTurns
from hub.replicas.resolver import Resolver
from hub.replicas.sockets import DealerConnection, LoopSocket
from hub.request.kept_references import KeptReferences
from hub.request.outputs import OmniOutput
from omni_discovery import wire
from omni_discovery.errors import OverloadedError
from tests.support.hub import Hub
from tests.support.hub_fakes import FakeReplica, collect, running_hub, text_of, until
from tests.support.processes import most_mib, wait_for

SOCKETS, MESSAGES, BURN_S, SECONDS = 6, 60, 0.04, 2.0
IN_PIECES = """
async_chunk: true
stages:
  - {stage_id: 0, engine: e}
  - {stage_id: 1, engine: e, final_output: text}
"""


@pytest.mark.attack("K3")
async def test_floods_of_many_replicas_leave_the_loop_half_of_its_time() -> None:
    """Each message takes long; what all sockets use together is measured in processor time, of real time."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    turns, used_s, heard = LongTurns(), 0.0, set[int]()
    # So long that it fills a turn.
    head = bytes(2 << 20)
    pairs: list[tuple[zmq.Socket[bytes], LoopSocket]] = []

    def burn(number: int) -> None:
        nonlocal used_s
        heard.add(number)
        began_s = time.thread_time()
        while time.thread_time() - began_s < BURN_S:
            pass
        used_s += time.thread_time() - began_s

    try:
        for number in range(SOCKETS):
            near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
            near.bind(f"inproc://flood-{number}")
            far.connect(f"inproc://flood-{number}")
            for _ in range(MESSAGES):
                far.send(head, zmq.NOBLOCK, copy=False)
            pairs.append((far, LoopSocket(near, lambda _frames, number=number: burn(number), turns)))
        began_s, processor_s = time.monotonic(), time.thread_time()
        while time.monotonic() - began_s < SECONDS or len(heard) < SOCKETS:
            assert time.monotonic() - began_s < 30.0, heard
            await asyncio.sleep(0.001)
        took_s = time.monotonic() - began_s
        assert time.thread_time() - processor_s >= used_s > 0
        # The first turn of each comes before any of them has rested.
        assert used_s <= 0.6 * took_s + SOCKETS * BURN_S
    finally:
        for far, socket in pairs:
            socket.close()
            far.close(linger=0)
        context.term()


@pytest.mark.attack("K3")
async def test_pieces_beyond_the_window_fail_their_replica_and_another_does_the_work() -> None:
    """1. a replica announces a thousand pieces, though none was taken: a window of them is passed on, and no more
    2. the request goes to another replica, which keeps to the window, and is answered
    """

    def announce(replica: FakeReplica, submit: wire.Submit, numbers: range) -> None:
        for number in numbers:
            ref = replica.payload(submit, 1)
            replica.say(wire.HandOffPiece(**replica._about(submit), number=number, payloads=(ref,)))

    def produce(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        if submit.attempt == 0:
            announce(replica, submit, range(1000))
            return
        announce(replica, submit, range(2))
        replica.say(wire.StageDone(**replica._about(submit), seq=0, finish_reason="stop", pieces=2))

    def speak(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        if submit.attempt:
            replica.chunk(submit, 0, text="spoken")
            replica.done(submit, 1)

    producers = [FakeReplica(produce, replica_id=number) for number in range(2)]
    speaker = FakeReplica(speak, stage_id=1)
    async with running_hub(*producers, speaker, deploy=IN_PIECES) as omni:
        assert text_of(await collect(omni.generate({"prompt": "p"}))) == "spoken"
        assert [len(each.of(wire.Submit)) for each in producers] == [1, 1]
        assert omni.metrics.get_sample_value("omni_hub_dropped_frames_total", {"reason": "window"}) == 1
        fed: list[wire.Feed] = speaker.of(wire.Feed)
        assert max(each.number for each in fed if each.attempt == 0) < 16


@pytest.mark.attack("Z14")
async def test_padded_references_of_one_replica_cost_it_its_work_before_they_fill_the_hub() -> None:
    """1. the hub keeps 1 MB of references; a replica of stage 0 pads those of its pieces, and another is honest
    2. with the piece that makes it too much its attempt is lost; the honest one does the work, and all are answered
    """

    def produce(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        pad = bytes(300_000 if replica is hostile else 1000)
        for number in range(5):
            ref = msgspec.structs.replace(replica.payload(submit, 1), metadata={"pad": pad})
            replica.say(wire.HandOffPiece(**replica._about(submit), number=number, payloads=(ref,)))
        replica.say(wire.StageDone(**replica._about(submit), seq=0, finish_reason="stop", pieces=5))

    def speak(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)

    def end(replica: FakeReplica, feed: wire.Feed) -> None:
        if feed.payload is None:
            submits: list[wire.Submit] = replica.of(wire.Submit)
            (submit,) = [each for each in submits if (each.request_id, each.attempt) == (feed.request_id, feed.attempt)]
            replica.chunk(submit, 0, text="spoken")
            replica.done(submit, 1)

    hostile, honest, speaker = FakeReplica(produce), FakeReplica(produce, replica_id=1), FakeReplica(speak, stage_id=1)
    speaker.on_feed = end
    async with running_hub(hostile, honest, speaker, deploy=IN_PIECES) as omni:
        kept = KeptReferences(1_000_000)
        omni._orchestrator._requests._references = kept
        answers = [collect(omni.generate({"prompt": "p"})) for _ in range(4)]
        assert [text_of(each) for each in await asyncio.gather(*answers)] == ["spoken"] * 4
        assert hostile.of(wire.Submit)
        dropped = {"reason": "reference_memory"}
        assert omni.metrics.get_sample_value("omni_hub_dropped_frames_total", dropped) == len(hostile.of(wire.Submit))
        assert kept.kept_bytes == 0


@pytest.mark.attack("Z14")
async def test_padded_hand_offs_that_wait_for_the_next_stage_end_with_their_own_requests() -> None:
    """1. the hub keeps 1 MB of references; a whole hand-off with 700 kB of them waits for a replica of stage 1
    2. another comes with as much, and two with little: the largest ends, which no replica runs any more
    """

    def produce(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        pad = bytes(700_000 if submit.inputs["prompt"] == "large" else 1000)
        ref = msgspec.structs.replace(replica.payload(submit, 1), metadata={"pad": pad})
        about = replica._about(submit)
        replica.say(wire.StageDone(**about, seq=0, finish_reason="stop", payloads=(ref,)))

    def speak(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        waiting.append(submit)

    waiting: list[wire.Submit] = []
    producer, speaker = FakeReplica(produce), FakeReplica(speak, stage_id=1)
    document = IN_PIECES.replace("async_chunk: true", "")
    async with running_hub(producer, speaker, deploy=document) as omni:
        kept = omni._orchestrator._requests._references = KeptReferences(1_000_000)

        def ask(prompt: str) -> asyncio.Task[list[OmniOutput]]:
            return asyncio.create_task(collect(omni.generate({"prompt": prompt})))

        first = ask("large")
        await until(lambda: len(waiting) == 1)
        others = [ask(prompt) for prompt in ("small", "large", "small")]
        with pytest.raises(OverloadedError, match="its references to hand-offs take the most"):
            await first
        await until(lambda: len(waiting) == 4)
        for submit in waiting[1:]:
            speaker.chunk(submit, 0, text="spoken")
            speaker.done(submit, 1)
        assert [text_of(each) for each in await asyncio.gather(*others)] == ["spoken"] * 3
        assert kept.kept_bytes == 0


@pytest.mark.attack("K3")
def test_heads_of_millions_of_maps_cost_a_hub_neither_memory_nor_its_time(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. a replica sends heads of 4 MB that would be four million maps each; 2. the hub drops them one by one
    3. requests that another replica answers are answered meanwhile, and memory stays
    """
    document = tmp_path / "deploy.yaml"
    document.write_text("stages: [{stage_id: 0, engine: echo, final_output: image}]")
    hub = Hub(tmp_path, ["--deploy-config", str(document), "--hub-only", "--etcd-endpoints", endpoint], namespace)
    command = [sys.executable, "-m", "tests.support.flooding_replica", endpoint, namespace]
    honest = subprocess.Popen([*command, "1"], stdin=subprocess.PIPE)
    hostile = subprocess.Popen([*command, "0"], stdin=subprocess.PIPE)
    try:
        hub.wait_ready()
        wait_for("both", lambda: hub.metric("omni_hub_replicas_registered") == 2)
        assert hub.ask("hello")[0] == 200
        before_mib = most_mib(hub.process.pid)
        assert hostile.stdin is not None
        hostile.stdin.write(b"maps\n")
        hostile.stdin.flush()
        malformed = 'omni_hub_dropped_frames_total{reason="malformed"}'
        wait_for("the flood", lambda: hub.metric(malformed) > 3)
        assert hub.ask("hello")[0] == 200
        wait_for("more of it", lambda: hub.metric(malformed) > 10)
        assert most_mib(hub.process.pid) - before_mib < 250
    finally:
        hub.stop()
        honest.communicate()
        hostile.communicate()


@pytest.mark.attack("N3")
async def test_frames_without_number_that_each_cost_little_leave_the_loop_to_others() -> None:
    """Half a million refused frames wait for the hub: nobody waits long for the loop, and a chat is served."""
    async with running_hub(FakeReplica()) as omni:
        orchestrator = omni._orchestrator
        assert orchestrator is not None
        (client,) = orchestrator._membership.clients.values()
        for _ in range(500_000):
            orchestrator._post(FrameDropped(client, "session"))
        longest_s = 0.0
        while orchestrator._inbox:
            began_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - began_s)
        assert longest_s < 0.2
        assert text_of(await collect(omni.generate({"prompt": "still here"}))) == "still here "
        assert omni.metrics.get_sample_value("omni_hub_dropped_frames_total", {"reason": "session"}) == 500_000


@pytest.mark.attack("N3")
async def test_no_socket_is_read_while_too_much_waits_and_one_that_rests_does_not_spin() -> None:
    """1. too much waits: a message is not read, and the loop looks at its socket a few times, not all the time
    2. less does: it is read
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    turns, heard = LongTurns(), list[bytes]()
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    near.bind("inproc://behind")
    far.connect("inproc://behind")
    socket = LoopSocket(near, heard.extend, turns)
    try:
        turns.note_waiting(30_000)
        far.send(b"one")
        before_s = time.thread_time()
        await asyncio.sleep(0.5)
        assert heard == []
        assert time.thread_time() - before_s < 0.25
        turns.note_waiting(15_000)
        await asyncio.sleep(0.05)
        assert heard == []
        turns.note_waiting(5_000)
        async with asyncio.timeout(10.0):
            while not heard:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert heard == [b"one"]
    finally:
        socket.close()
        far.close(linger=0)
        context.term()


@pytest.mark.attack("N3")
async def test_a_socket_rests_for_the_events_that_it_has_posted() -> None:
    """1. each message posts a thousand events, of which each takes a tenth of a millisecond; reading takes no time
    2. a hundred messages are ten seconds of work: in one second a tenth of them is taken in, not all
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    turns, heard = LongTurns(), 0
    for _ in range(30):
        turns.note_handled(1000, 0.1)

    def post(_: list[bytes]) -> None:
        nonlocal heard
        heard += 1
        turns.posted += 1000

    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    near.bind("inproc://events")
    far.connect("inproc://events")
    socket = LoopSocket(near, post, turns)
    try:
        for _ in range(100):
            far.send(b"many")
        await asyncio.sleep(1.0)
        assert 1 <= heard <= 20
    finally:
        socket.close()
        far.close(linger=0)
        context.term()


FRAMES = 300_000
MANY, MANY_BYTES = 16, 16 << 20


@pytest.mark.attack("Q25")
async def test_a_message_of_very_many_frames_is_read_in_turns_and_what_comes_behind_it_is_heard() -> None:
    """1. a message of 300 000 frames comes, then another: of the first there is one frame more than it may have
    2. the second is heard; between any two looks the loop was free; one of 17 frames is whole
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heard: list[list[bytes]] = []
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    near.bind("inproc://frames")
    far.connect("inproc://frames")
    socket = LoopSocket(near, heard.append)
    try:
        far.send_multipart([b""] * FRAMES)
        far.send_multipart([b"%d" % number for number in range(17)])
        longest_s, end_s = 0.0, time.monotonic() + 60.0
        while len(heard) < 2 and time.monotonic() < end_s:
            began_s = time.thread_time()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.thread_time() - began_s)
        assert heard == [[b""] * 18, [b"%d" % number for number in range(17)]]
        assert longest_s < 0.08
    finally:
        socket.close()
        far.close(linger=0)
        context.term()


@pytest.mark.attack("Z15")
async def test_a_message_of_many_megabytes_is_read_and_put_together_in_turns() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heard: list[list[bytes]] = []
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    near.bind("inproc://megabytes")
    far.connect("inproc://megabytes")
    socket = LoopSocket(near, heard.append)
    message = [b"head", *[bytes(MANY_BYTES)] * MANY]
    try:
        far.send_multipart(wire.cut(message))
        longest_s, end_s = 0.0, time.monotonic() + 60.0
        while not heard and time.monotonic() < end_s:
            began_s = time.thread_time()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.thread_time() - began_s)
        assert heard == [message]
        assert longest_s < 0.12
    finally:
        socket.close()
        far.close(linger=0)
        context.term()


@pytest.mark.attack("Q25")
async def test_a_connection_is_not_given_up_in_the_middle_of_a_message() -> None:
    """1. a replica sends a message of very many frames; 2. while it is being read, the connection is to be made anew
    3. that waits for the end of the message: libzmq would end the process; 4. then it is made anew, and used
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = Listener()
    router = context.socket(zmq.ROUTER)
    router.router_handover = True
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    config = HubConfig(reconnect_min_s=0.01, reconnect_max_s=0.05, connect_timeout_s=0.5)
    connection = DealerConnection(
        context, "output", f"tcp://127.0.0.1:{port}", "h/1", None, config, listener, Resolver(), LongTurns()
    )
    try:
        async with asyncio.timeout(60.0):
            while not listener.made:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            router.send_multipart([b"h/1", *[b""] * FRAMES])
            while not connection._dealer.is_amid_message:  # noqa: ASYNC110
                await asyncio.sleep(0)
            # What was received of the message at once is less than all.
            connection._dealer.drain = lambda: None  # type: ignore[method-assign]
            connection.drop()
            assert listener.lost == 1
            assert connection._dealer.is_amid_message
            connection.reconnect_if_due(time.monotonic() + 100.0)
            assert connection._dealer.is_amid_message
            while listener.made < 2:
                await asyncio.sleep(0.01)
                connection.reconnect_if_due(asyncio.get_running_loop().time())
            connection.send([b"well"])
            assert await asyncio.to_thread(router.poll, 10_000)
            assert router.recv_multipart() == [b"h/1", b"well"]
            assert [len(frames) for frames in listener.heard] == [18]
    finally:
        connection.close()
        router.close()
        context.term()


class Listener:
    """Counts what happens to a connection."""

    def __init__(self) -> None:
        self.made = self.lost = 0
        self.heard: list[list[bytes]] = []

    def frames_received(self, name: str, frames: list[bytes]) -> None:
        self.heard.append(frames)

    def connection_made(self, name: str) -> None:
        self.made += 1

    def connection_lost(self, name: str) -> None:
        self.lost += 1

    def connection_missed(self) -> None:
        """Tried again."""

    def fell_silent(self) -> None:
        """There are no heartbeats."""
