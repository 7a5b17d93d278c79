"""A client that leaves, at whichever stage its request is: every stage is idle for it within a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from hub.async_omni import AsyncOmni
from omni_discovery.curve import KeyPair
from tests.support.hub_fakes import QUICK, collect, deploy_of, show, until
from tests.support.local_replica import LocalReplica
from tests.support.quiet import soon_s

SPEAK_AND_REPEAT = deploy_of("""
stages:
  - {stage_id: 0, engine: echo, final_output: text}
  - {stage_id: 1, engine: echo, final_output: text}
""")
#: Said by the first stage within a moment, or for longer than any test takes; the second takes long over both.
SHORT, LONG = "word " * 20, "word " * 20_000


@asynccontextmanager
async def two_stages() -> AsyncIterator[tuple[AsyncOmni, list[LocalReplica]]]:
    keys = KeyPair.generate()
    hubs, shared = {keys.public: "hub-1"}, {"deploy": SPEAK_AND_REPEAT, "capacity": 4}
    with (
        LocalReplica(hubs, stage_id=0, delay_s=0.001, **shared) as first,
        LocalReplica(hubs, stage_id=1, delay_s=1.0, **shared) as second,
    ):
        omni = AsyncOmni(SPEAK_AND_REPEAT, "hub-1", keys, QUICK)
        await omni.start()
        show(omni, first.info, second.info)
        try:
            await until(lambda: all(stage.pickable for stage in omni.stage_status()))
            yield omni, [first, second]
        finally:
            await omni.close()


def is_idle(replica: LocalReplica) -> bool:
    is_running = len(replica.loop) or replica.engine._speeches or replica.server.queue_length
    return not is_running and not replica.payloads._kept


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("how", ["leaves", "aborts"])
async def test_wherever_the_request_is_all_stages_are_idle_within_a_second(at: int, how: str) -> None:
    """1. six requests are at the first or at the second stage, which runs four at a time
    2. their clients leave, or abort them by name: within a second no engine, no queue and no hand-off is theirs
    3. an abort by name ends the outputs with a last one that says so
    """
    async with two_stages() as (omni, replicas):
        prompt = SHORT if at else LONG
        names = [f"r{number}" for number in range(6)]
        readers = [asyncio.create_task(collect(omni.generate({"prompt": prompt}, request_id=name))) for name in names]
        await until(lambda: replicas[at].server.queue_length == 4 and not replicas[1 - at].server.queue_length, 10.0)
        assert bool(replicas[0].payloads._kept) == bool(at), "the first keeps what the second may need again"
        left_s = time.monotonic()
        if how == "leaves":
            for reader in readers:
                reader.cancel()
        else:
            await asyncio.gather(*map(omni.abort, names))
        await until(lambda: all(map(is_idle, replicas)))
        assert time.monotonic() - left_s < soon_s(1.0)
        ends = await asyncio.gather(*readers, return_exceptions=True)
        if how == "aborts":
            assert [outputs[-1].finish_reason for outputs in ends if isinstance(outputs, list)] == ["abort"] * 6
