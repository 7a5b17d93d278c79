"""Deterministic stages over real sockets and connectors: whoever is killed, the client reads one answer, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hub.async_omni import AsyncOmni
from hub.request.outputs import OmniOutput
from hub.request.state import RequestState
from omni_discovery.errors import ReplicaLostError
from omni_discovery.records.schema import ReplicaInfo
from tests.integration.hub.test_async_chunk import Replicas, chain, serving
from tests.support.child_replica import ChildReplica
from tests.support.hub_fakes import text_of
from tests.support.local_replica import LocalReplica

TEXT = " ".join(f"w{number}" for number in range(30))
#: Nobody hears the first two stages, and every word of them has a drawn number.
DICE = {"random": True, "delay_s": 0.02}
SPEECH = chain(DICE, DICE, {"delay_s": 0.02}, finals=("none", "none", "text"))


def replicas_for(lost: Sequence[int]) -> list[tuple[int, type[LocalReplica] | type[ChildReplica]]]:
    """Two replicas, in processes of their own, of each stage of which one is to be killed; one of each other."""
    kinds: list[tuple[int, type[LocalReplica] | type[ChildReplica]]] = []
    for stage in SPEECH.stages:
        kinds += [(stage.stage_id, ChildReplica)] * 2 if stage.stage_id in lost else [(stage.stage_id, LocalReplica)]
    return kinds


def declared(info: ReplicaInfo) -> ReplicaInfo:
    return replace(info, deterministic=True)


def state_of(omni: AsyncOmni) -> RequestState:
    """The state of the only request under way."""
    assert omni._orchestrator is not None
    (active,) = omni._orchestrator._requests.active.values()
    return active.machine.state


def kill(omni: AsyncOmni, replicas: Replicas, stages: Sequence[int]) -> None:
    """Kill the replicas that have the request's work of these stages."""
    for stage_id in stages:
        ref = state_of(omni).runs[stage_id].replica
        assert ref is not None
        found = next(each for each in replicas if each.info.input_addr == ref.input_addr)
        assert isinstance(found, ChildReplica)
        found.kill()


async def read(
    omni: AsyncOmni,
    at_word: Callable[[], Any] = lambda: None,
    params: dict[int, dict[str, Any]] | None = None,
    outputs: list[OmniOutput] | None = None,
) -> str:
    """An answer; ``at_word`` is called once, when six words were shown. ``outputs`` gets what was shown."""
    outputs = [] if outputs is None else outputs
    is_called = False
    async for output in omni.generate({"prompt": TEXT}, params=params or {}):
        outputs.append(output)
        if not is_called and len(text_of(outputs).split()) == 6:
            is_called = True
            at_word()
    return text_of(outputs)


@pytest.mark.parametrize("lost", [(0,), (1,), (1, 2), (0, 1, 2)])
async def test_whichever_replicas_are_killed_the_answer_is_the_undisturbed_one(lost: tuple[int, ...]) -> None:
    """1. an undisturbed answer with a seed; 2. the same, and replicas are killed when six words were shown"""
    seeded = {0: {"seed": 5}, 1: {"seed": 6}}
    async with serving(SPEECH, *replicas_for(lost), way=declared) as (omni, replicas):
        expected = await read(omni, params=seeded)
        assert expected.count("~") == 2 * expected.count("w")
        assert await read(omni, lambda: kill(omni, replicas, lost), seeded) == expected


async def test_without_a_seed_the_hub_names_one_for_all_attempts() -> None:
    """1. the words have drawn numbers, and the client gives no seed: two answers differ
    2. the first stage is killed: what was shown comes again, and the state of the request says which seed it has
    """
    async with serving(SPEECH, *replicas_for([0]), way=declared) as (omni, replicas):
        first = await read(omni)
        seeds: list[Any] = []

        def lose_first() -> None:
            seeds.append([params.get("seed") for params in state_of(omni).public.sampling_params_list])
            kill(omni, replicas, (0,))

        second = await read(omni, lose_first)
        assert first != second
        assert [word.split("~")[0] for word in second.split()] == TEXT.split()
        ((one, two, three),) = seeds
        assert one == two == three
        assert isinstance(one, int)


async def test_what_comes_out_otherwise_ends_the_request_and_says_so() -> None:
    deploy = chain(DICE, {"delay_s": 0.02}, finals=("none", "text"))
    async with serving(deploy, *replicas_for([0])[:3], way=declared) as (omni, replicas):
        shown: list[OmniOutput] = []

        def lose_first() -> None:
            # As if the second replica drew otherwise.
            state_of(omni).seed += 1
            kill(omni, replicas, (0,))

        with pytest.raises(ReplicaLostError, match="another than the one that had been shown") as caught:
            await read(omni, lose_first, outputs=shown)
        assert "deterministic" in str(caught.value)
        assert 6 <= len(text_of(shown).split()) < len(TEXT.split())


async def test_replicas_of_the_release_before_declare_nothing_and_the_request_ends_as_ever() -> None:
    async with serving(SPEECH, *replicas_for([0])) as (omni, replicas):
        with pytest.raises(ReplicaLostError, match="stage 0 is not declared deterministic"):
            await read(omni, lambda: kill(omni, replicas, (0,)))
