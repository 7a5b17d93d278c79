"""Stages that work on each other's pieces, over real sockets and connectors: order, back-pressure, switches, losses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from hub.api.routes import build_app
from hub.async_omni import AsyncOmni
from hub.request.outputs import OmniOutput
from omni_discovery.curve import KeyPair
from omni_discovery.deploy.document import DeployConfig, decode_deploy, encode_deploy
from omni_discovery.errors import InvalidRequestError, ReplicaLostError
from omni_discovery.records.schema import ReplicaInfo
from tests.support.child_replica import ChildReplica
from tests.support.hub_fakes import QUICK, collect, show, text_of, until
from tests.support.local_replica import LocalReplica
from tests.support.proxy import TcpProxy, behind_proxies
from tests.support.quiet import soon_s

WORDS = 40
TEXT = " ".join(f"w{number}" for number in range(WORDS))
Replicas = list[LocalReplica | ChildReplica]


def chain(*engine_args: dict[str, Any], finals: tuple[str, ...] = ("text", "text"), **more: Any) -> DeployConfig:
    """A chain of echo stages."""
    stages = [
        {"stage_id": number, "engine": "echo", "engine_args": args, "final_output": final}
        for number, (args, final) in enumerate(zip(engine_args, finals, strict=True))
    ]
    return decode_deploy(msgspec.json.encode({"stages": stages, "async_chunk": True, **more}), "test")


@asynccontextmanager
async def serving(
    deploy: DeployConfig,
    *where: tuple[int, type[LocalReplica] | type[ChildReplica]],
    way: Callable[[ReplicaInfo], ReplicaInfo] = lambda info: info,
) -> AsyncIterator[tuple[AsyncOmni, Replicas]]:
    """A hub and replicas: for each its stage and whether it is a process of its own; None: one here for each stage."""
    keys = KeyPair.generate()
    kinds = where or tuple((stage.stage_id, LocalReplica) for stage in deploy.stages)
    omni = AsyncOmni(deploy, "hub-1", keys, QUICK, "round-robin")
    with ExitStack() as stack:
        replicas: Replicas = []
        for number, (stage_id, kind) in enumerate(kinds):
            engine_args = dict(deploy.stage(stage_id).engine_args)
            if kind is ChildReplica:
                engine_args["deploy"] = encode_deploy(deploy).decode()
                made: Any = ChildReplica({keys.public: "hub-1"}, number, 70 + number, stage_id=stage_id, **engine_args)
            else:
                made = LocalReplica(
                    {keys.public: "hub-1"},
                    replica_id=number,
                    epoch=70 + number,
                    stage_id=stage_id,
                    deploy=deploy,
                    **engine_args,
                )
            replicas.append(stack.enter_context(made))
        async with AsyncExitStack() as closing:
            await omni.start()
            closing.push_async_callback(omni.close)
            show(omni, *(way(replica.info) for replica in replicas))
            await until(lambda: sum(stage.pickable for stage in omni.stage_status()) == len(replicas), 20.0)
            yield omni, replicas


def of_stage(outputs: list[OmniOutput], stage_id: int) -> list[OmniOutput]:
    return [output for output in outputs if output.stage_id == stage_id]


def begins_early(outputs: list[OmniOutput]) -> bool:
    """Whether the last stage said something before the first had ended."""
    first_end = next(i for i, output in enumerate(outputs) if output.stage_id == 0 and output.finish_reason)
    return any(output.stage_id == 1 and output.text for output in outputs[:first_end])


async def test_the_next_stage_speaks_before_the_one_before_has_ended() -> None:
    """Also where the hand-off is large; what is said is the same, word for word, as with whole hand-offs."""
    deploy = chain({"delay_s": 0.005, "payload_bytes": 100_000}, {})
    async with serving(deploy) as (omni, (thinker, _)):
        in_pieces = await collect(omni.generate({"prompt": TEXT}))
        assert begins_early(in_pieces)
        assert text_of(of_stage(in_pieces, 1)) == TEXT
        whole = await collect(omni.generate({"prompt": TEXT}, async_chunk=False))
        assert not begins_early(whole)
        for stage_id in (0, 1):
            said = [[(each.text, each.usage) for each in of_stage(one, stage_id)] for one in (in_pieces, whole)]
            assert said[0] == said[1]
        assert isinstance(thinker, LocalReplica)
        await until(lambda: not thinker.payloads._kept)


async def test_pieces_go_down_a_chain_of_three_and_into_a_picture() -> None:
    deploy = chain({"delay_s": 0.002}, {}, {"modality": "image"}, finals=("text", "text", "image"))
    async with serving(deploy) as (omni, _):
        outputs = await collect(omni.generate({"prompt": TEXT}))
        whole = await collect(omni.generate({"prompt": TEXT}, async_chunk=False))
        assert begins_early(outputs)
        assert text_of(of_stage(outputs, 1)) == TEXT
        pictures = [[each.data for each in one if each.data] for one in (outputs, whole)]
        assert pictures[0] == pictures[1] != []


async def test_a_stage_that_wants_two_others_begins_when_both_have_begun() -> None:
    """Stage 2 takes from 0 and 1, and 1 from 0: what 2 does not take yet must not hold up what 1 needs."""
    stages = [
        {"stage_id": 0, "engine": "echo", "engine_args": {}, "final_output": "text"},
        # Draws when it has everything, so that stage 2 has to wait for the last word of stage 0.
        {"stage_id": 1, "engine": "echo", "engine_args": {"modality": "image"}, "final_output": "none"},
        {"stage_id": 2, "engine": "echo", "engine_args": {}, "input_from": [0, 1], "final_output": "text"},
    ]
    document = {"stages": stages, "async_chunk": True, "edges": [{"from": 0, "to": 2, "window_size": 2}]}
    async with serving(decode_deploy(msgspec.json.encode(document), "test")) as (omni, _):
        async with asyncio.timeout(10.0):
            outputs = await collect(omni.generate({"prompt": TEXT}))
        said = text_of(of_stage(outputs, 2))
        assert sorted(said) == sorted(TEXT * 2)


@pytest.mark.parametrize(
    ("pipeline", "edge", "request_", "in_pieces"),
    [
        (False, None, None, False),
        (True, None, None, True),
        (True, False, None, False),
        (False, True, None, True),
        (False, None, True, True),
        (True, None, False, False),
        (True, False, True, False),
        (False, True, False, False),
    ],
)
async def test_it_is_switched_per_pipeline_per_edge_and_per_request(
    pipeline: bool, edge: bool | None, request_: bool | None, in_pieces: bool
) -> None:
    edges = [] if edge is None else [{"from": 0, "to": 1, "async_chunk": edge}]
    deploy = chain({"delay_s": 0.002}, {}, async_chunk=pipeline, edges=edges)
    async with serving(deploy) as (omni, _):
        outputs = await collect(omni.generate({"prompt": TEXT}, async_chunk=request_))
        assert begins_early(outputs) == in_pieces
        assert text_of(of_stage(outputs, 1)) == TEXT


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_it_is_switched_in_the_body_of_a_request(in_pieces: bool) -> None:
    deploy = chain({"delay_s": 0.002}, {}, async_chunk=not in_pieces)
    async with serving(deploy) as (omni, (_, talker)):
        transport = httpx.ASGITransport(build_app(omni, deploy, 0))
        async with httpx.AsyncClient(transport=transport, base_url="http://hub") as http:
            messages = [{"role": "user", "content": TEXT}]
            body = {"messages": messages, "stream": True, "async_chunk": in_pieces, "include_timings": True}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert isinstance(talker, LocalReplica)
            assert [bool(request.stream_from) for request in talker.engine.requests] == [in_pieces]
            refused = await http.post("/v1/chat/completions", json={**body, "async_chunk": "yes"})
            assert refused.status_code == 400


async def test_a_slow_stage_holds_up_the_one_that_feeds_it() -> None:
    """1. stage 0 could say all at once, stage 1 takes its time
    2. stage 0 is never further ahead than the window and what stage 1 holds
    """
    window = 3
    deploy = chain({}, {"delay_s": 0.01}, edges=[{"from": 0, "to": 1, "window_size": window}])
    async with serving(deploy) as (omni, (thinker, _)):
        ahead, said = [], {0: 0, 1: 0}
        async for output in omni.generate({"prompt": TEXT}):
            if output.text:
                said[output.stage_id] += 1
                ahead.append(said[0] - said[1])
        assert said == {0: WORDS, 1: WORDS}
        # The window, what the second engine holds, one word that is being said, and answers on their way.
        assert max(ahead) <= window + 8
        assert isinstance(thinker, LocalReplica)
        assert not thinker.loop._pieces.queued


async def test_an_engine_that_can_not_be_paused_keeps_its_pieces_until_they_are_wanted() -> None:
    deploy = chain({}, {"delay_s": 0.005}, edges=[{"from": 0, "to": 1, "window_size": 2}])
    async with serving(deploy) as (omni, (thinker, _)):
        assert isinstance(thinker, LocalReplica)
        thinker.loop._pauses._pause = None
        queued = [thinker.loop._pieces.queued async for _ in omni.generate({"prompt": TEXT})]
        assert WORDS / 2 < max(queued) <= WORDS
        assert not thinker.loop._pieces.queued
        assert text_of(of_stage(await collect(omni.generate({"prompt": TEXT})), 1)) == TEXT


async def test_a_stage_may_end_before_the_one_that_feeds_it() -> None:
    """It has said what it was to say; the other goes on, and is not held up by pieces that nobody takes."""
    deploy = chain({"delay_s": 0.002}, {}, edges=[{"from": 0, "to": 1, "window_size": 2}])
    async with serving(deploy) as (omni, _):
        outputs = await collect(omni.generate({"prompt": TEXT}, params={1: {"max_tokens": 3}}))
        assert text_of(of_stage(outputs, 1)).split() == TEXT.split()[:3]
        assert text_of(of_stage(outputs, 0)) == TEXT
        ends = [output.stage_id for output in outputs if output.finish_reason and not output.is_summary]
        assert ends == [1, 0]


async def test_a_stage_that_hands_nothing_over_is_followed_by_nothing() -> None:
    async with serving(chain({"handoff_on": "never"}, {})) as (omni, (_, talker)):
        outputs = await collect(omni.generate({"prompt": TEXT}))
        assert text_of(of_stage(outputs, 0)) == TEXT
        assert not of_stage(outputs, 1)
        assert isinstance(talker, LocalReplica)
        assert not talker.engine.begun


async def test_a_client_that_leaves_stops_both_stages_within_a_second() -> None:
    async with serving(chain({"delay_s": 0.02}, {})) as (omni, replicas):
        outputs = omni.generate({"prompt": TEXT})
        while (await anext(outputs)).stage_id != 1:
            pass
        await outputs.aclose()
        await until(
            lambda: all(r.server.queue_length == 0 for r in replicas if isinstance(r, LocalReplica)), soon_s(1.0)
        )
        await until(lambda: not any(r.payloads._kept for r in replicas if isinstance(r, LocalReplica)), 2.0)


async def test_a_stage_that_fails_in_mid_stream_ends_the_one_that_feeds_it_with_the_reason() -> None:
    deploy = chain({"delay_s": 0.01}, {"fail_on": "w5"})
    async with serving(deploy) as (omni, replicas):
        with pytest.raises(Exception, match="told to fail on 'w5'"):
            await collect(omni.generate({"prompt": TEXT}))
        await until(
            lambda: all(r.server.queue_length == 0 for r in replicas if isinstance(r, LocalReplica)), soon_s(1.0)
        )


@pytest.mark.parametrize("finals", [("text", "text"), ("none", "text")])
async def test_a_producer_that_is_killed_ends_the_stage_it_fed_at_once(finals: tuple[str, str]) -> None:
    """1. a thinker in a process of its own is killed in mid-stream
    2. a second one goes on where the client has seen the thinker's words: the answer is whole, nothing comes twice
    3. where it has seen only what was made of them, the request ends at once with the reason
    In either case the stage that was fed is free within a second.
    """
    deploy = chain({"delay_s": 0.02}, {}, finals=finals)
    kinds = ((0, ChildReplica), (0, ChildReplica), (1, LocalReplica))
    async with serving(deploy, *kinds) as (omni, (first, second, talker)):
        outputs: list[OmniOutput] = []
        killed_s = 0.0

        async def follow() -> None:
            nonlocal killed_s
            async for output in omni.generate({"prompt": TEXT}, params={}):
                outputs.append(output)
                if not killed_s and len(text_of(of_stage(outputs, 1)).split()) == 8:
                    killed_s = time.monotonic()
                    thinker = next((o.replica for o in outputs if o.stage_id == 0), "0/0")
                    for number, child in enumerate((first, second)):
                        assert isinstance(child, ChildReplica)
                        if thinker == f"0/{number}":
                            child.kill()

        if finals[0] == "text":
            await follow()
            assert text_of(of_stage(outputs, 0)) == text_of(of_stage(outputs, 1)) == TEXT
            assert {output.replica for output in of_stage(outputs, 0) if output.text} == {"0/0", "0/1"}
        else:
            with pytest.raises(ReplicaLostError, match="not sure to be made again"):
                await follow()
            assert time.monotonic() - killed_s < soon_s(1.0)
        assert isinstance(talker, LocalReplica)
        await until(lambda: talker.server.queue_length == 0 and not talker.engine.has_unfinished(), 2.0)


async def test_a_consumer_that_is_killed_is_fed_from_the_first_piece_elsewhere() -> None:
    """Its producer works on undisturbed, and the client sees every word once."""
    deploy = chain({"delay_s": 0.02}, {})
    kinds = ((0, LocalReplica), (1, ChildReplica), (1, ChildReplica))
    async with serving(deploy, *kinds) as (omni, (thinker, first, second)):
        outputs: list[OmniOutput] = []
        is_killed = False
        async for output in omni.generate({"prompt": TEXT}):
            outputs.append(output)
            if not is_killed and len(text_of(of_stage(outputs, 1)).split()) == 8:
                is_killed = True
                talker = {"1/1": first, "1/2": second}[of_stage(outputs, 1)[0].replica]
                assert isinstance(talker, ChildReplica)
                talker.kill()
        assert text_of(of_stage(outputs, 0)) == text_of(of_stage(outputs, 1)) == TEXT
        assert {output.replica for output in of_stage(outputs, 1) if output.text} == {"1/1", "1/2"}
        assert isinstance(thinker, LocalReplica)
        assert len(thinker.engine.begun) == 1


async def test_connections_that_break_cost_no_word_of_either_stage() -> None:
    """Both sockets to both replicas are reset again and again; what was on its way, pieces among it, is said again or
    made again elsewhere.
    """
    deploy = chain({"delay_s": 0.01}, {}, edges=[{"from": 0, "to": 1, "window_size": 2}])
    kinds = ((0, LocalReplica), (0, LocalReplica), (1, LocalReplica), (1, LocalReplica))
    with ExitStack() as stack:
        proxies: list[TcpProxy] = []

        def behind_proxy(info: ReplicaInfo) -> ReplicaInfo:
            info, ways = stack.enter_context(behind_proxies(info))
            proxies.extend(ways)
            return info

        async with serving(deploy, *kinds, way=behind_proxy) as (omni, _):
            for turn in range(6):
                outputs: list[OmniOutput] = []
                async for output in omni.generate({"prompt": TEXT}):
                    outputs.append(output)
                    if len(outputs) == 12:
                        for proxy in proxies[turn % 2 :: 2] if turn < 4 else proxies:
                            proxy.cut()
                assert text_of(of_stage(outputs, 0)) == text_of(of_stage(outputs, 1)) == TEXT
                await until(lambda: all(stage.pickable == 2 for stage in omni.stage_status()))


async def test_replicas_that_register_anew_in_mid_stream_begin_nothing_again() -> None:
    """As they do where etcd has lost their leases: each session is opened anew, under another epoch."""
    deploy = chain({"delay_s": 0.01}, {"delay_s": 0.01})
    async with serving(deploy) as (omni, replicas):
        infos = [replica.info for replica in replicas]
        outputs: list[OmniOutput] = []
        async for output in omni.generate({"prompt": TEXT}):
            outputs.append(output)
            if len(outputs) in {12, 24, 36}:
                infos = [replace(info, epoch=info.epoch + 100) for info in infos]
                for replica, info in zip(replicas, infos, strict=True):
                    assert isinstance(replica, LocalReplica)
                    replica.server.set_epoch(info.epoch)
                show(omni, *infos)
        assert text_of(of_stage(outputs, 0)) == text_of(of_stage(outputs, 1)) == TEXT
        assert all(len(replica.engine.begun) == 1 for replica in replicas if isinstance(replica, LocalReplica))


async def test_many_streams_at_once_keep_their_pieces_apart() -> None:
    deploy = chain({"delay_s": 0.001, "capacity": 4}, {"capacity": 4})
    async with serving(deploy) as (omni, _):
        texts = [" ".join(f"r{request}.{number}" for number in range(12)) for request in range(24)]
        answers = await asyncio.gather(*(collect(omni.generate({"prompt": text})) for text in texts))
        for text, outputs in zip(texts, answers, strict=True):
            assert text_of(of_stage(outputs, 0)) == text_of(of_stage(outputs, 1)) == text


async def test_wrong_pieces_hurt_one_request_only() -> None:
    """Stage 1 gets a hand-off that no echo engine has made."""
    async with serving(chain({"delay_s": 0.001}, {})) as (omni, (thinker, _)):
        assert isinstance(thinker, LocalReplica)
        good = thinker.engine._piece
        thinker.engine._piece = lambda *_args, **_more: {"nonsense": 1}  # type: ignore[assignment]
        with pytest.raises(InvalidRequestError, match="not an echo engine's"):
            await collect(omni.generate({"prompt": TEXT}))
        thinker.engine._piece = good  # type: ignore[method-assign]
        assert text_of(of_stage(await collect(omni.generate({"prompt": TEXT})), 1)) == TEXT
