"""The same request has the same output wherever and however it is run: in this process, through any hub, over deaths.

The replicas are processes with the echo engine, which always decides alike. For vLLM under greedy decoding
``contract/test_engine_resume`` cuts the answer at every token, and ``e2e/test_demo`` kills replicas under load.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from hub.async_omni import AsyncOmni
from hub.request.outputs import OmniOutput
from omni_discovery.curve import KeyPair
from omni_discovery.deploy.document import StageConfig
from omni_discovery.records.schema import ReplicaInfo
from stage_runtime.engines.base import StageRequest, create_engine
from tests.support.child_replica import ChildReplica
from tests.support.hub_fakes import ONE_STAGE, QUICK, collect, deploy_of, started_hub

KEYS = {"hub-1": KeyPair.generate(), "hub-2": KeyPair.generate()}
HUBS = {pair.public: name for name, pair in KEYS.items()}
CONFIG = replace(QUICK, request_timeout_s=60.0)
PROMPT = " ".join(f"word{number}" for number in range(40))
PARAMS = {"temperature": 0.0, "max_tokens": 36}


@dataclass(frozen=True)
class Said:
    """All that a client can tell of an answer, but for how it was cut into pieces."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    usage: Mapping[str, int]


def in_this_process() -> Said:
    """No hub, no sockets: the engine alone."""
    engine = create_engine(StageConfig(stage_id=0, engine="echo"))
    engine.add(StageRequest("k", "r", inputs={"prompt": PROMPT}, params=PARAMS))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    token_ids = tuple(number for output in outputs for number in output.token_ids)
    return Said("".join(output.text for output in outputs), token_ids, outputs[-1].finish_reason, outputs[-1].usage)


def said(outputs: Iterable[OmniOutput]) -> Said:
    outputs = [output for output in outputs if not output.is_summary]
    token_ids = tuple(number for output in outputs for number in output.token_ids)
    return Said("".join(output.text for output in outputs), token_ids, outputs[-1].finish_reason, outputs[-1].usage)


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[ChildReplica]]:
    with ExitStack() as stack:
        slow = [ChildReplica(HUBS, number, 70 + number, delay_s=0.02, capacity=8) for number in range(3)]
        yield [stack.enter_context(each) for each in slow]


@asynccontextmanager
async def hub(name: str, infos: Iterable[ReplicaInfo]) -> AsyncIterator[AsyncOmni]:
    omni = AsyncOmni(deploy_of(ONE_STAGE), name, KEYS[name], CONFIG, "round-robin")
    async with started_hub(omni, *infos, timeout_s=20.0):
        yield omni


async def test_an_answer_is_the_same_everywhere_and_over_every_death(replicas: list[ChildReplica]) -> None:
    """1. by the engine alone, in this process
    2. through either of two hubs, on each of three replicas
    3. through a hub while two of the three are killed in the middle of it, one after the other
    """
    wanted = in_this_process()
    assert (len(wanted.token_ids), wanted.finish_reason) == (36, "length")
    by_id = {f"0/{each.info.replica_id}": each for each in replicas}
    async with (
        hub("hub-1", (each.info for each in replicas)) as one,
        hub("hub-2", (each.info for each in replicas)) as two,
    ):
        served_by = set()
        for omni in (one, two):
            for _ in replicas:
                outputs = await collect(omni.generate({"prompt": PROMPT}, params={0: PARAMS}))
                assert said(outputs) == wanted
                served_by.add(outputs[0].replica)
        assert served_by == set(by_id)
        outputs, killed = [], []
        async for output in one.generate({"prompt": PROMPT}, params={0: PARAMS}):
            outputs.append(output)
            if (
                len(killed) < 2
                and output.text
                and output.replica not in killed
                and len(outputs) >= 8 * (len(killed) + 1)
            ):
                by_id[output.replica].kill()
                killed.append(output.replica)
        assert len({output.replica for output in outputs if output.text}) == 3
        assert said(outputs) == wanted
