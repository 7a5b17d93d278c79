"""Input in segments, from the Python API to real replicas over real sockets: two stages, and all that goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any

import pytest

from hub.request.outputs import OmniOutput
from omni_discovery import wire
from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import InvalidRequestError, ReplicaLostError
from stage_runtime.engine_loop.jobs import Cancel
from tests.support.child_replica import ChildReplica
from tests.support.hub_fakes import FakeReplica, collect, deploy_of, running_hub, text_of, until
from tests.support.local_replica import CountingEcho, LocalReplica
from tests.support.quiet import soon_s
from tests.support.serving import CONFIG, HUBS, KEYS, hub_of

TALK = """
stages:
  - {stage_id: 0, engine: echo, final_output: text}
  - {stage_id: 1, engine: echo, engine_args: {modality: image}, final_output: image}
edges:
  - {from: 0, to: 1, connector: shm}
connectors:
  shm: {name: SharedMemoryConnector}
"""
TEXTS = """
stages:
  - {stage_id: 0, engine: echo, final_output: text}
  - {stage_id: 1, engine: echo, final_output: text}
edges:
  - {from: 0, to: 1, connector: shm}
connectors:
  shm: {name: SharedMemoryConnector}
"""
ONE = "stages: [{stage_id: 0, engine: echo, final_output: text}]"


async def segments(*prompts: str) -> AsyncIterator[Mapping[str, Any]]:
    for prompt in prompts:
        yield {"prompt": prompt}


def pair(stack: ExitStack, deploy: str = TEXTS, replicas: int = 2, **engine_args: Any) -> list[LocalReplica]:
    document = deploy_of(deploy)
    return [
        stack.enter_context(
            LocalReplica(HUBS, stage_id=stage, replica_id=number, epoch=70 + number, deploy=document, **engine_args)
        )
        for stage in range(2)
        for number in range(replicas)
    ]


def by_segment(outputs: list[OmniOutput], stage_id: int) -> list[str]:
    mine = [output for output in outputs if output.stage_id == stage_id]
    return [text_of([output for output in mine if output.segment == number]) for number in range(mine[-1].segment + 1)]


async def test_segments_go_through_both_stages_and_stay_on_their_replicas(stack: ExitStack) -> None:
    """1. two replicas of each stage; three requests of four segments each, at the same time
    2. every segment comes out of both stages, in order, with an end of its own; then each stage ends, then the summary
    3. all outputs of a stage come from one replica; in the end nothing of it is left anywhere
    """
    replicas = pair(stack)
    async with hub_of(TEXTS, *replicas) as omni:
        prompts = [[f"r{request} s{segment} end" for segment in range(4)] for request in range(3)]
        answers = await asyncio.gather(*(collect(omni.generate(segments(*each))) for each in prompts))
        for asked, outputs in zip(prompts, answers, strict=True):
            for stage_id in (0, 1):
                assert by_segment(outputs, stage_id) == asked
                mine = [output for output in outputs if output.stage_id == stage_id]
                assert [o.segment for o in mine if o.segment_end] == [0, 1, 2, 3]
                assert {output.segment_end for output in mine} == {None, "stop"}
                assert [output.finish_reason for output in mine if output.finish_reason] == ["stop"]
                assert mine[-1].finish_reason == "stop"
                assert mine[-1].usage == {"prompt_tokens": 12, "completion_tokens": 12}
                assert len({output.replica for output in mine}) == 1
            assert [output.is_summary for output in outputs].index(True) == len(outputs) - 1
        assert omni._orchestrator is not None
        assert not omni._orchestrator.request_states
        await until(lambda: not any(replica.payloads._kept for replica in replicas))
        assert not any(len(replica.loop) for replica in replicas)


async def test_a_stage_that_gets_nothing_for_a_segment_leaves_that_one_out(stack: ExitStack) -> None:
    """Only what holds "draw" is handed over: the second stage draws the second and the fourth."""
    document = deploy_of(TALK)
    first = stack.enter_context(LocalReplica(HUBS, deploy=document, handoff_on="draw"))
    second = stack.enter_context(LocalReplica(HUBS, stage_id=1, deploy=document, modality="image"))
    async with hub_of(TALK, first, second) as omni:
        outputs = await collect(omni.generate(segments("hi", "draw a", "no", "draw b", "bye")))
        assert [output.segment for output in outputs if output.data] == [1, 3]
        assert [output.stage_id for output in outputs if output.finish_reason] == [0, 1, -1]
        assert [o.segment for o in await collect(omni.generate(segments("hi", "no"))) if o.stage_id == 1] == []


async def test_the_iterator_is_asked_only_when_there_is_room(stack: ExitStack) -> None:
    """A slow stage holds the client's iterator back: never more than one segment waits in front of it."""
    replica = stack.enter_context(LocalReplica(HUBS, delay_s=0.05))
    given: list[int] = []
    ended: list[int] = []

    async def eager() -> AsyncIterator[Mapping[str, Any]]:
        for number in range(5):
            given.append(number)
            yield {"prompt": f"a b {number}"}

    async with hub_of(ONE, replica) as omni:
        async for output in omni.generate(eager()):
            if output.segment_end:
                ended.append(output.segment)
                assert len(given) <= len(ended) + 2
    assert ended == given == [0, 1, 2, 3, 4]


async def test_hand_offs_go_when_the_next_stage_has_taken_them(stack: ExitStack) -> None:
    """Thirty segments through two stages: the first stage never keeps more than a few of its hand-offs."""
    first, second = pair(stack, replicas=1)
    kept: list[int] = []
    async with hub_of(TEXTS, first, second) as omni:
        async for output in omni.generate(segments(*(f"s {number}" for number in range(30)))):
            if output.segment_end:
                kept.append(max((len(each) for each in list(first.payloads._kept.values())), default=0))  # noqa: PERF401
        await until(lambda: not first.payloads._kept)
    assert len(kept) == 60
    assert max(kept) <= 6


async def test_updates_of_unknown_and_ended_requests_are_refused_and_begin_nothing(stack: ExitStack) -> None:
    """Statement 83: they are dropped, and nothing comes to life by them.

    1. of a request that never was; 2. of one without segments; 3. of one whose last segment came; 4. of one that ended
    """
    replica = stack.enter_context(LocalReplica(HUBS, delay_s=0.05))
    async with hub_of(ONE, replica) as omni:
        with pytest.raises(InvalidRequestError, match="never was"):
            await omni.update("ghost", {"prompt": "boo"})
        plain = asyncio.create_task(collect(omni.generate({"prompt": "a b c d"}, request_id="plain")))
        await until(lambda: len(replica.loop) == 1)
        with pytest.raises(InvalidRequestError, match="segments"):
            await omni.update("plain", {"prompt": "more"})
        assert text_of(await plain) == "a b c d"
        talk = asyncio.create_task(collect(omni.generate({"prompt": "one"}, request_id="talk", segmented=True)))
        await until(lambda: len(replica.loop) == 1)
        await omni.update("talk", {"prompt": "two"}, is_last=True)
        with pytest.raises(InvalidRequestError, match=r"no more segments|ended|never was"):
            await omni.update("talk", {"prompt": "three"})
        assert by_segment(await talk, 0) == ["one", "two"]
        with pytest.raises(InvalidRequestError, match="never was"):
            await omni.update("talk", {"prompt": "three"})
        assert len(replica.loop) == 0
        assert len(replica.engine.begun) == 3


async def test_a_replica_refuses_updates_it_knows_nothing_of(stack: ExitStack) -> None:
    """On the wire: an unknown one, one out of order, one too early; each is rejected, and nothing runs."""
    replica = stack.enter_context(LocalReplica(HUBS, delay_s=0.2))
    hub = replica.raw_hub("hub-1", KEYS)
    try:
        hub.hello()
        update = wire.Update(epoch=hub.epoch, request_id="ghost", attempt=0, segment=1, inputs={"prompt": "boo"})
        hub.send(update)
        assert isinstance(hub.acknowledged(), wire.Rejected)
        hub.submit("r", "a b", segmented=True)
        assert isinstance(hub.acknowledged(), wire.Accepted)
        for segment, why in ((2, "behind"), (1, "not ended")):
            hub.send(wire.Update(epoch=hub.epoch, request_id="r", attempt=0, segment=segment))
            rejected = hub.acknowledged()
            assert isinstance(rejected, wire.Rejected)
            assert why in rejected.reason
        chunks = [hub.receive(hub.output, wire.Chunk) for _ in range(2)]
        done = hub.receive(hub.output, wire.SegmentDone)
        assert ([chunk.seq for chunk in chunks], done.seq, done.segment) == ([0, 1], 2, 0)
        hub.send(wire.Update(epoch=hub.epoch, request_id="r", attempt=0, segment=0))
        assert isinstance(hub.acknowledged(), wire.Accepted), "what came before is only acknowledged"
        hub.send(wire.Update(epoch=hub.epoch, request_id="r", attempt=0, segment=1, is_last=True))
        assert isinstance(hub.acknowledged(), wire.Accepted)
        end = hub.receive(hub.output, wire.StageDone)
        assert (end.seq, end.finish_reason, end.usage["completion_tokens"]) == (3, "stop", 2)
        assert replica.engine.begun == ["hub-1/r/0"]
    finally:
        hub.close()


async def test_abort_between_two_segments_frees_the_slot_at_once(stack: ExitStack) -> None:
    replica = stack.enter_context(LocalReplica(HUBS, capacity=1))
    never = asyncio.Event()

    async def waits() -> AsyncIterator[Mapping[str, Any]]:
        yield {"prompt": "one"}
        await never.wait()

    async with hub_of(ONE, replica) as omni:
        outputs: list[OmniOutput] = []

        async def read() -> None:
            async for output in omni.generate(waits(), request_id="talk"):
                outputs.append(output)  # noqa: PERF401 - what has come is looked at meanwhile

        reading = asyncio.create_task(read())
        await until(lambda: text_of(outputs) == "one" and not replica.engine.has_unfinished())
        assert replica.server.queue_length == 1
        async with asyncio.timeout(soon_s(1.0)):
            await omni.abort("talk")
            await reading
        assert (text_of(outputs), outputs[-1].finish_reason) == ("one", "abort")
        assert text_of(await collect(omni.generate({"prompt": "next one"}))) == "next one"


async def test_a_client_that_leaves_between_segments_leaves_nothing_behind(stack: ExitStack) -> None:
    replica = stack.enter_context(LocalReplica(HUBS))
    async with hub_of(ONE, replica) as omni:
        async with aclosing(omni.generate({"prompt": "one"}, segmented=True)) as outputs:
            async for output in outputs:
                if output.segment_end:
                    break
        await until(lambda: len(replica.loop) == 0)


async def test_the_deadline_ends_a_request_that_waits_for_its_next_segment(stack: ExitStack) -> None:
    from omni_discovery.errors import DeadlineExceededError

    replica = stack.enter_context(LocalReplica(HUBS))
    async with hub_of(ONE, replica) as omni:
        with pytest.raises(DeadlineExceededError):
            await collect(omni.generate({"prompt": "one"}, segmented=True, timeout_s=0.5))
        await until(lambda: len(replica.loop) == 0)


async def test_a_client_whose_iterator_breaks_ends_only_its_own_request(stack: ExitStack) -> None:
    replica = stack.enter_context(LocalReplica(HUBS, delay_s=0.01))

    async def breaks() -> AsyncIterator[Any]:
        yield {"prompt": "one"}
        raise ZeroDivisionError("oops")

    async def no_mapping() -> AsyncIterator[Any]:
        yield {"prompt": "one"}
        yield "two"

    async with hub_of(ONE, replica) as omni:
        asked = [omni.generate(breaks()), omni.generate(no_mapping()), omni.generate(segments())]
        found = await asyncio.gather(*map(collect, asked), return_exceptions=True)
        assert [type(each) for each in found] == [InvalidRequestError] * 3
        assert [word in str(each) for word, each in zip(("oops", "mapping", "first"), found, strict=True)] == [True] * 3
        assert by_segment(await collect(omni.generate(segments("a", "b"))), 0) == ["a", "b"]
        # The engine refuses the second segment: an empty one.
        with pytest.raises(InvalidRequestError, match="empty"):
            await collect(omni.generate(segments("a", " ")))
        await until(lambda: len(replica.loop) == 0)


async def test_an_engine_without_segments_refuses_before_anything_runs(stack: ExitStack) -> None:
    engine = CountingEcho(StageConfig(stage_id=0, engine="echo"))
    # The engine's loop asks what an engine can do once, at its start.
    engine.update = None  # type: ignore[assignment, method-assign]
    replica = stack.enter_context(LocalReplica(HUBS, engine=engine))
    async with hub_of(ONE, replica) as omni:
        with pytest.raises(InvalidRequestError, match="takes no input in segments"):
            await collect(omni.generate(segments("a", "b")))
        assert replica.engine.begun == []


async def test_a_replica_that_dies_between_segments_ends_what_was_shown_with_one_typed_error() -> None:
    with ChildReplica(HUBS, 0, 70) as first, ChildReplica(HUBS, 1, 71) as second:
        alive = [first, second]

        async def kills() -> AsyncIterator[Mapping[str, Any]]:
            yield {"prompt": "one"}
            await asyncio.sleep(0.3)
            first.kill()
            second.kill()
            await asyncio.sleep(0.1)
            yield {"prompt": "two"}

        async with hub_of(ONE, *alive) as omni:
            outputs = omni.generate(kills())
            assert text_of([await anext(outputs), await anext(outputs)]) == "one"
            with pytest.raises(ReplicaLostError, match="part of the output was shown"):
                await collect(outputs)


async def test_what_showed_nothing_begins_anew_elsewhere_with_all_segments() -> None:
    """1. the thinker is no final stage; the only one that shows anything is the second
    2. the second stage says nothing yet; the thinker dies after two segments: both go to another thinker
    3. the client sees each segment once
    """
    document = "stages: [{stage_id: 0, engine: echo}, {stage_id: 1, engine: echo, final_output: text}]"
    held: list[wire.Submit] = []

    def thinker(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.segment_done(submit, 0, 0)

    def talker(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        held.append(submit)

    thinkers = [FakeReplica(thinker, replica_id=number) for number in range(2)]
    painter = FakeReplica(talker, stage_id=1)
    async with running_hub(*thinkers, painter, deploy=document) as omni:
        reading = asyncio.create_task(collect(omni.generate(segments("one", "two"))))
        await until(lambda: any(each.of(wire.Update) for each in thinkers) and len(held) == 1)
        first = next(each for each in thinkers if each.of(wire.Update))
        other = next(each for each in thinkers if each is not first)
        assert first.of(wire.Update)[0].inputs == {"prompt": "two"}
        first.kill()
        await until(lambda: bool(other.of(wire.Update)) and len(held) == 2)
        assert other.of(wire.Submit)[0].inputs == {"prompt": "one"}
        assert other.of(wire.Update)[0].inputs == {"prompt": "two"}
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_an_update_that_was_lost_with_its_connection_is_said_again() -> None:
    """1. a first segment is done; 2. the connection is lost, and the next segment comes meanwhile
    3. when the session is back, the replica hears of it, and the answer goes on as if nothing had been
    """
    submits: list[wire.Submit] = []

    def first(replica: FakeReplica, submit: wire.Submit) -> None:
        submits.append(submit)
        replica.accept(submit)
        replica.chunk(submit, 0, text="one")
        replica.segment_done(submit, 1, 0)

    replica = FakeReplica(first)
    async with running_hub(replica, config=replace(CONFIG, silence_grace_s=5.0)) as omni:
        outputs = omni.generate({"prompt": "one"}, request_id="talk", segmented=True)
        assert (await anext(outputs)).text == "one"
        assert (await anext(outputs)).segment_end == "stop"
        assert omni._orchestrator is not None
        client = next(iter(omni._orchestrator._membership.clients.values()))
        replica.greets = False
        client.connection_lost("input")
        client.connection_made("input")
        await asyncio.sleep(0.05)
        await omni.update("talk", {"prompt": "two"})
        assert replica.of(wire.Update) == []
        replica.greets = True
        await until(lambda: bool(replica.of(wire.Update)))
        assert replica.of(wire.Update)[-1].inputs == {"prompt": "two"}
        replica.accept(submits[0])
        replica.chunk(submits[0], 2, text="two")
        replica.segment_done(submits[0], 3, 1)
        assert ((await anext(outputs)).text, (await anext(outputs)).segment) == ("two", 1)
        await outputs.aclose()


async def test_a_slow_client_is_waited_for_and_others_are_not_held_up(stack: ExitStack) -> None:
    """One reads nothing of a talk with long segments, which stands still; another talks on beside it."""
    replica = stack.enter_context(LocalReplica(HUBS, capacity=4))
    async with hub_of(ONE, replica, config=replace(CONFIG, max_queued_outputs=8)) as omni:
        prompts = ["word " * 50] * 20
        slow = omni.generate(segments(*prompts))
        first = await anext(slow)
        await until(lambda: bool(replica.engine._speeches) and not replica.engine.has_unfinished())
        assert len(replica.engine.begun) < len(prompts)
        assert by_segment(await collect(omni.generate(segments("a", "b", "c"))), 0) == ["a", "b", "c"]
        assert len(replica.engine._speeches) == 1
        assert by_segment([first, *await collect(slow)], 0) == prompts


async def test_a_cancel_of_a_running_segment_ends_it_once(stack: ExitStack) -> None:
    """The replica's engine loop: a cancel in the middle of the second segment, and another one that comes late."""
    replica = stack.enter_context(LocalReplica(HUBS, delay_s=0.05))
    async with hub_of(ONE, replica) as omni:
        outputs = omni.generate(segments("one", "two " * 50), request_id="talk")
        async for output in outputs:
            if output.segment == 1:
                break
        key = next(iter(replica.loop._running))
        await omni.abort("talk")
        replica.loop.jobs.put(Cancel(key))
        rest = [output async for output in outputs]
        assert rest[-1].finish_reason == "abort"
        await until(lambda: len(replica.loop) == 0)
