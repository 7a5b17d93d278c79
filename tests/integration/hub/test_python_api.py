"""AsyncOmni as programs use it: joined to an etcd, asked in the ways that users of vLLM and vLLM-Omni know."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hub import AsyncOmni, Omni, join
from omni_discovery.errors import ConfigError, InvalidRequestError, StageUnavailableError
from tests.support.hub_fakes import collect, text_of, until

PAIR = """
stages:
  - {stage_id: 0, engine: echo, final_output: text}
  - {stage_id: 1, engine: echo, engine_args: {modality: image}, final_output: image}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, endpoint: str) -> Iterator[list[str]]:
    """A hub with replicas of both stages, in processes of their own; the flags with which others join."""
    file = tmp_path_factory.mktemp("served") / "pair.yaml"
    file.write_text(PAIR)
    flags = ["--namespace", f"served-{uuid.uuid4().hex}"]
    with Omni(str(file), ["--etcd-endpoints", endpoint, *flags]):
        yield flags


async def said(omni: AsyncOmni, *given: Any, **named: Any) -> tuple[str, int]:
    """The text of an answer, and how many pictures came."""
    outputs = await collect(omni.generate(*given, **named))
    return text_of(outputs), sum(bool(output.data) for output in outputs)


async def test_a_program_joins_by_the_etcd_alone_and_asks_as_it_knows_it(endpoint: str, served: list[str]) -> None:
    """1. no document is given: the one in force is taken, and replicas that others run are used
    2. a bare text; id, parameters and modalities by position and by keyword; vLLM's own order
    3. what can't be followed is refused by name, and costs nothing
    """
    async with join(endpoint, flags=served) as omni:
        await omni.check_health()
        assert await said(omni, "one two three") == ("one two three", 1)
        assert await said(omni, "one two", "r-1", [{"max_tokens": 1}, None], ["text"]) == ("one ", 0)
        assert await said(
            omni,
            prompt="one two",
            request_id="r-1",
            sampling_params_list=[{"max_tokens": 1}],
            output_modalities=["text"],
        ) == ("one ", 0)
        assert await said(omni, {"prompt": "one two"}, {"max_tokens": 1}, "r-2", output_modalities=["text"]) == (
            "one ",
            0,
        )
        assert await said(omni, [7, 8], sampling_params={"max_tokens": 1}, modalities=["text"]) == ("7 ", 0)
        with pytest.raises(InvalidRequestError, match="lora_request"):
            await said(omni, "one", lora_request=object())
        with pytest.raises(NotImplementedError, match="ask by generate"):
            omni.encode("one", None, "r")
        assert not (omni.errored)
        assert not (omni.is_stopped)
        assert await omni.get_supported_tasks() == ("generate",)
        with pytest.raises(AttributeError, match="a hub holds no model"):
            omni.vllm_config  # noqa: B018
        omni.shutdown()
        await until(lambda: omni.is_stopped, 30.0)
        assert omni.errored


async def test_whoever_can_not_join_hears_what_to_do(tmp_path: Path, endpoint: str, namespace: str) -> None:
    """1. no pipeline is in force, and none was given; 2. one is given, and nobody runs its stages"""
    flags = ["--namespace", namespace]
    with pytest.raises(ConfigError, match="has no pipeline yet"):
        async with join(endpoint, flags=flags):
            pass
    file = tmp_path / "pair.yaml"
    file.write_text(PAIR)
    with pytest.raises(StageUnavailableError, match="stage 1: none is registered"):
        async with join([endpoint], str(file), flags, ready_timeout_s=0.5):
            pass


async def test_a_factory_of_the_programs_own_makes_the_clients(endpoint: str, served: list[str]) -> None:
    asked: list[tuple[int, int]] = []
    made: list[AsyncOmni] = []
    has_omni = asyncio.Event()

    async def own(stage_id: int, replica_id: int) -> Any:
        await has_omni.wait()
        asked.append((stage_id, replica_id))
        return await made[0].connect_replica(stage_id, replica_id)

    async with join(endpoint, flags=served, ready_timeout_s=None, remote_replica_factory=own) as omni:
        made.append(omni)
        has_omni.set()
        await until(lambda: all(stage.pickable for stage in omni.stage_status()), 30.0)
        assert await said(omni, "one two") == ("one two", 1)
    assert sorted(set(asked)) == [(0, 0), (1, 0)]
