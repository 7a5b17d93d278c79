"""Hand-offs that nobody can read: the replica that leaves them is left out, and not those that can't read them."""

from __future__ import annotations

import msgspec
import pytest

from hub.async_omni import AsyncOmni
from omni_discovery import wire
from tests.support.hub_fakes import FakeReplica, Script, collect, picture, running_hub

DEPLOY = """
stages:
  - {stage_id: 0, engine: echo}
  - {stage_id: 1, engine: echo, input_sources: [0], final_output: image}
"""
IN_PIECES = DEPLOY + "async_chunk: true\n"


def leaves(mark: str) -> Script:
    """Hand over at once, with a mark in the reference."""

    def script(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        refs = tuple(
            msgspec.structs.replace(replica.payload(submit, stage), metadata={"mark": mark})
            for stage in submit.next_stages
        )
        about = replica._about(submit)
        if submit.stream_to:
            replica.say(wire.HandOffPiece(**about, number=0, payloads=refs))
            if mark == "well":
                replica.say(wire.StageDone(**about, seq=0, finish_reason="stop", pieces=1))
        else:
            replica.say(wire.StageDone(**about, seq=0, finish_reason="stop", payloads=refs))

    return script


def cant_read(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    about = replica._about(submit)
    replica.say(wire.StageFailed(**about, kind=wire.FailureKind.PAYLOAD, reason="it came too late", from_stage=0))


def reads_what_is_well(replica: FakeReplica, submit: wire.Submit) -> None:
    is_bad = any(ref.metadata.get("mark") == "bad" for ref in submit.payloads)
    (cant_read if is_bad else picture)(replica, submit)


def ejected(omni: AsyncOmni, stage: int) -> float | None:
    return omni.metrics.get_sample_value("omni_hub_replicas_ejected", {"stage": str(stage)})


async def ask(omni: AsyncOmni) -> None:
    assert [output.mime for output in await collect(omni.generate({"prompt": "a"})) if output.mime] == ["image/png"]


@pytest.mark.attack("K1")
async def test_a_producer_of_bad_hand_offs_is_left_out_and_no_consumer(caplog: pytest.LogCaptureFixture) -> None:
    """Each request that meets it is served by another one, and counts against it although it was done there."""
    bad = FakeReplica(leaves("bad"))
    producers = [bad, *(FakeReplica(leaves("well"), replica_id=number) for number in (1, 2))]
    consumers = [FakeReplica(reads_what_is_well, stage_id=1, replica_id=number) for number in (0, 1)]
    async with running_hub(*producers, *consumers, deploy=DEPLOY) as omni:
        for _ in range(60):
            await ask(omni)
            if ejected(omni, 0):
                break
        assert (ejected(omni, 0), ejected(omni, 1)) == (1, 0)
        met = len(bad.of(wire.Submit))
        for _ in range(5):
            await ask(omni)
        assert len(bad.of(wire.Submit)) <= met + 1
    assert "replica.ejected replica=0/0" in caplog.text
    assert "stage 1 can't read its hand-off: it came too late" in caplog.text


@pytest.mark.attack("K1")
async def test_a_consumer_that_says_it_of_every_hand_off_is_left_out_and_no_producer() -> None:
    producers = [FakeReplica(leaves("well"), replica_id=number) for number in range(3)]
    consumers = [FakeReplica(cant_read, stage_id=1), FakeReplica(picture, stage_id=1, replica_id=1)]
    async with running_hub(*producers, *consumers, deploy=DEPLOY) as omni:
        for _ in range(60):
            await ask(omni)
            if ejected(omni, 1):
                break
        assert (ejected(omni, 0), ejected(omni, 1)) == (0, 1)


@pytest.mark.attack("K1")
async def test_the_only_producer_is_asked_again() -> None:
    """A hand-off may be gone by accident, and nobody else could make it."""
    failed: list[str] = []

    def fails_once(replica: FakeReplica, submit: wire.Submit) -> None:
        if submit.request_id in failed:
            picture(replica, submit)
        else:
            failed.append(submit.request_id)
            cant_read(replica, submit)

    replicas = [FakeReplica(leaves("well")), FakeReplica(fails_once, stage_id=1)]
    async with running_hub(*replicas, deploy=DEPLOY) as omni:
        for _ in range(3):
            await ask(omni)
    assert len(failed) == 3


@pytest.mark.attack("K1")
async def test_many_hand_offs_in_one_message_are_the_replicas_failure() -> None:
    def many(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        refs = (replica.payload(submit, 1),) * 60
        replica.say(wire.StageDone(**replica._about(submit), seq=0, finish_reason="stop", payloads=refs))

    hostile, well = FakeReplica(many), FakeReplica(leaves("well"), replica_id=1)
    painter = FakeReplica(picture, stage_id=1)
    async with running_hub(hostile, well, painter, deploy=DEPLOY) as omni:
        for _ in range(4):
            await ask(omni)
    assert hostile.of(wire.Submit)
    assert all(len(submit.payloads) == 1 for submit in painter.of(wire.Submit))


@pytest.mark.attack("K1")
async def test_a_producer_of_bad_pieces_is_left_out() -> None:
    """It is still at work when its piece can't be read."""

    def fails_bad_pieces(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)

    def on_feed(replica: FakeReplica, feed: wire.Feed) -> None:
        submit = next(each for each in reversed(replica.of(wire.Submit)) if each.request_id == feed.request_id)
        if feed.attempt == submit.attempt and feed.payload is not None:
            (cant_read if feed.payload.metadata["mark"] == "bad" else picture)(replica, submit)

    producers = [FakeReplica(leaves("bad")), *(FakeReplica(leaves("well"), replica_id=number) for number in (1, 2))]
    consumer = FakeReplica(fails_bad_pieces, stage_id=1)
    consumer.on_feed = on_feed
    async with running_hub(*producers, consumer, deploy=IN_PIECES) as omni:
        for _ in range(60):
            await ask(omni)
            if ejected(omni, 0):
                break
        assert (ejected(omni, 0), ejected(omni, 1)) == (1, 0)
