"""One real replica, spoken to frame by frame over CURVE."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.wire import FailureKind
from tests.support.quiet import soon_s
from tests.support.replica_hub import RawHub, eventually
from tests.support.replica_stage import Deployment, echo_stages


@pytest.fixture(scope="module")
def deployment(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deploy = echo_stages({"delay_s": 0.01, "payload_bytes": 100_000, "fail_on": "FAIL"}, {"modality": "image"})
    folder = tmp_path_factory.mktemp("talk")
    with Deployment(endpoint, "replica-talk", deploy, folder) as running:
        running.start(0)
        running.start(1)
        running.wait_up(0)
        running.wait_up(1)
        yield running


@pytest.fixture
def hub(deployment: Deployment) -> RawHub:
    return deployment.session(deployment.replicas(0)[0])


def words(count: int) -> str:
    return " ".join(str(number) for number in range(count))


def test_a_request_is_accepted_streamed_and_done(hub: RawHub) -> None:
    hub.submit("r1", "to be or not")
    assert hub.acknowledged() == wire.Accepted(epoch=hub.epoch, request_id="r1", queue_length=1)
    chunks, done, _ = hub.collect("r1")
    assert [chunk.text for chunk in chunks] == ["to ", "be ", "or ", "not"]
    assert all(chunk.modality == "text" and len(chunk.token_ids) == 1 for chunk in chunks)
    assert isinstance(done, wire.StageDone)
    assert (done.seq, done.finish_reason, done.queue_length) == (4, "stop", 0)
    assert done.usage == {"prompt_tokens": 4, "completion_tokens": 4}
    assert done.timings_s.keys() == {"queue", "first_output", "generate", "transfer"}
    assert 0 <= done.timings_s["first_output"] <= done.timings_s["queue"] + done.timings_s["generate"] < 5


def test_a_hand_off_goes_from_replica_to_replica_and_not_through_the_hub(deployment: Deployment, hub: RawHub) -> None:
    """1. stage 0 hands 100 kB over: what the hub sees of it is a name
    2. stage 1 draws it; 3. it may do so again; 4. once released, it is gone
    """
    hub.submit("r1", "seven", next_stages=(1,))
    hub.acknowledged()
    _, done, _ = hub.collect("r1")
    assert done.payloads[0].size_bytes > 100_000
    assert len(wire.encode(done)) < 1000
    painter = deployment.session(deployment.replicas(1)[0])
    for attempt in range(2):
        painter.submit("r1", attempt=attempt, payloads=done.payloads)
        painter.acknowledged()
        (chunk,), drawn, attachments = painter.collect("r1")
        assert (chunk.modality, chunk.mime, drawn.finish_reason) == ("image", "image/png", "stop")
        assert attachments[0].startswith(b"\x89PNG")
    hub.send(wire.ReleasePayloads(epoch=hub.epoch, request_id="r1"))
    path = Path("/dev/shm") / done.payloads[0].metadata["shm"]
    assert eventually(lambda: not path.exists())
    painter.submit("r1", attempt=2, payloads=done.payloads)
    painter.acknowledged()
    _, failed, _ = painter.collect("r1")
    assert (type(failed), failed.kind) == (wire.StageFailed, FailureKind.PAYLOAD)


def test_many_requests_at_once_keep_apart(hub: RawHub) -> None:
    for number in range(30):
        hub.submit(f"r{number}", f"{number} " * 5)
    texts: dict[str, str] = {}
    ended = 0
    while ended < 30:
        message = hub.receive(hub.output, (wire.Chunk, wire.StageDone), 10.0)
        if isinstance(message, wire.Chunk):
            texts[message.request_id] = texts.get(message.request_id, "") + message.text
        else:
            ended += 1
    assert texts == {f"r{number}": f"{number} " * 5 for number in range(30)}


def test_an_abort_is_answered_within_a_moment(hub: RawHub) -> None:
    hub.submit("r1", words(1000))
    hub.acknowledged()
    hub.receive(hub.output, wire.Chunk)
    asked_s = time.monotonic()
    hub.send(wire.Abort(epoch=hub.epoch, request_id="r1"))
    while isinstance(message := hub.receive(hub.output, (wire.Chunk, wire.StageDone)), wire.Chunk):
        continue
    assert (message.finish_reason, message.queue_length) == ("abort", 0)
    assert time.monotonic() - asked_s < soon_s(1.0)


def test_a_deadline_that_passes_ends_the_request(hub: RawHub) -> None:
    hub.submit("r1", words(1000), remaining_s=0.2)
    hub.acknowledged()
    chunks, failed, _ = hub.collect("r1")
    assert chunks
    assert (type(failed), failed.kind) == (wire.StageFailed, FailureKind.DEADLINE)


def test_a_request_that_can_not_be_served_is_said_to_be_invalid_and_harms_no_other(hub: RawHub) -> None:
    hub.submit("good", "a b c")
    hub.submit("empty", "", inputs={})
    ends = {}
    while len(ends) < 2:
        message = hub.receive(hub.output, (wire.Chunk, wire.StageDone, wire.StageFailed))
        if not isinstance(message, wire.Chunk):
            ends[message.request_id] = message
    assert ends["empty"].kind is FailureKind.INVALID
    assert "prompt is empty" in ends["empty"].reason
    assert ends["good"].finish_reason == "stop"


def test_a_frame_for_another_life_gets_no_answer(deployment: Deployment) -> None:
    """1. a hub that read an old record greets the old life: silence; 2. with the present epoch it is welcomed."""
    hub = deployment.hub(deployment.replicas(0)[0])
    epoch, hub.epoch = hub.epoch, hub.epoch - 1
    hub.submit("r1", "x")
    hub.input.send(wire.encode(wire.Hello(hub_id="hub-1", epoch=hub.epoch)))
    assert hub.hears_nothing(0.5)
    hub.epoch = epoch
    hub.hello()
    assert "server.wrong_epoch" in deployment.log(0).read_text()


def test_a_stranger_gets_nothing_and_disturbs_nobody(deployment: Deployment, hub: RawHub) -> None:
    """1. somebody with a key that no hub has published talks to the replica, also in a hub's name: silence
    2. the hub goes on
    """
    replica = deployment.replicas(0)[0]
    for hub_id in ("stranger", "hub-1"):
        stranger = deployment.hub(replica, KeyPair.generate(), hub_id)
        stranger.input.send(wire.encode(wire.Hello(hub_id=hub_id, epoch=replica.epoch)))
        stranger.submit("r1", "let me in")
        assert stranger.hears_nothing(0.7)
    hub.submit("r2", "still here")
    hub.acknowledged()
    assert hub.collect("r2")[1].finish_reason == "stop"


def test_garbage_is_dropped_and_counted_and_service_goes_on(deployment: Deployment, hub: RawHub) -> None:
    good = wire.encode(wire.Submit(epoch=hub.epoch, request_id="x"))
    garbage = [b"", b"\x00", b"\xff" * 100, b"\x02" + good[1:], good[:-3], b"\x01" + b"\x91" * 5000, b"\x01\xc1"]
    for frame in garbage:
        hub.input.send(frame)
        hub.output.send(frame)
    hub.input.send_multipart([good, b"more"])
    hub.output.send(good)
    hub.submit("r1", "fine")
    hub.acknowledged()
    assert hub.collect("r1")[1].finish_reason == "stop"
    assert "server.bad_frame" in deployment.log(0).read_text()


def test_a_frame_of_monstrous_size_costs_its_sender_the_connection_and_nobody_else(
    deployment: Deployment, hub: RawHub
) -> None:
    other = deployment.session(deployment.replicas(1)[0])
    hub.input.send(bytes(wire.MAX_HEAD_BYTES + 1))
    other.submit("r2", "fine")
    assert isinstance(other.acknowledged(), wire.Accepted)
    assert eventually(lambda: _is_served(hub), 10.0)


def _is_served(hub: RawHub) -> bool:
    """A hub whose connection was cut is connected anew by ZMQ and may greet again."""
    try:
        hub.hello(timeout_s=1.0)
    except TimeoutError:
        return False
    return True
