"""A batch of prompts over one hub and scripted replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from hub.config import HubConfig
from hub.omni import BatchOptions, run_batch
from hub.results import OmniResult
from omni_discovery import wire
from omni_discovery.errors import EngineFailedError, InvalidRequestError
from tests.support.hub_fakes import PAIR, QUICK, FakeReplica, accept_only, echo, picture, running_hub, until


async def run(omni: Any, prompts: Sequence[Any], at_once: int = 4, **more: Any) -> list[OmniResult]:
    return await run_batch(omni, prompts, BatchOptions(at_once, 5.0, **more), lambda: None)


async def test_each_prompt_gets_one_result_in_order_with_what_every_final_stage_put_out() -> None:
    thinker, painter = FakeReplica(echo), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        results = await run(omni, [f"prompt {number}" for number in range(10)])
    assert [result.index for result in results] == list(range(10))
    assert [result.text for result in results] == [f"prompt {number} " for number in range(10)]
    assert all(result.images == (b"PNG",) for result in results)
    assert [(stage.stage_id, stage.modality, stage.finish_reason) for stage in results[3].stages] == [
        (0, "text", "stop"),
        (1, "image", "stop"),
    ]
    assert results[3].timings_s["total"] > 0
    assert len({result.request_id for result in results}) == 10


async def test_prompts_may_be_text_tokens_messages_or_inputs() -> None:
    replica = FakeReplica(echo)
    async with running_hub(replica) as omni:
        await run(omni, ["a", [1, 2], [{"role": "user", "content": "b"}], {"prompt": "c"}], at_once=1)
    assert [submit.inputs for submit in replica.of(wire.Submit)] == [
        {"prompt": "a"},
        {"prompt_token_ids": [1, 2]},
        {"messages": [{"role": "user", "content": "b"}]},
        {"prompt": "c"},
    ]


async def test_a_prompt_that_fails_fails_alone() -> None:
    """1. one prompt is no prompt, one breaks its engine, one can't be sent, the last is fine
    2. each has a result; reading what a failed one said raises its error
    """

    def script(replica: FakeReplica, submit: wire.Submit) -> None:
        if submit.inputs.get("prompt") == "boom":
            replica.accept(submit)
            replica.fail(submit)
        else:
            echo(replica, submit)

    async with running_hub(FakeReplica(script)) as omni:
        wrong, broken, strange, fine = await run(omni, [5, "boom", {"prompt": object()}, "fine"])
    assert strange.error is not None
    assert isinstance(wrong.error, InvalidRequestError)
    with pytest.raises(InvalidRequestError, match="int 5"):
        _ = wrong.text
    assert isinstance(broken.error, EngineFailedError)
    with pytest.raises(EngineFailedError):
        _ = broken.images
    assert (fine.error, fine.text, fine.finish_reason) == (None, "fine ", "stop")


async def test_no_more_run_at_once_than_allowed_and_each_that_ends_is_told() -> None:
    """The replica never answers before it has waited: what has been submitted and not answered is what runs."""
    held: list[wire.Submit] = []
    most, told = 0, 0

    def hold(replica: FakeReplica, submit: wire.Submit) -> None:
        nonlocal most
        held.append(submit)
        most = max(most, len(held))
        asyncio.get_running_loop().call_later(0.02, lambda: echo(replica, held.pop(held.index(submit))))

    def count() -> None:
        nonlocal told
        told += 1

    async with running_hub(FakeReplica(hold), config=HubConfig(request_timeout_s=20.0)) as omni:
        results = await run_batch(omni, ["x"] * 9, BatchOptions(3, 20.0), count)
    assert [result.text for result in results] == ["x "] * 9
    assert most <= 3
    assert told == 9


async def test_a_cancelled_batch_aborts_what_runs_and_begins_nothing_more() -> None:
    replica = FakeReplica(accept_only)
    async with running_hub(replica, config=QUICK) as omni:
        task = asyncio.create_task(run(omni, ["x"] * 8, at_once=2))
        await until(lambda: len(replica.of(wire.Submit)) >= 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        begun = len(replica.of(wire.Submit))
        await until(lambda: len(replica.of(wire.Abort)) >= begun)
        assert begun <= 2


async def test_parameters_may_be_a_list_with_one_entry_for_each_stage() -> None:
    thinker, painter = FakeReplica(echo), FakeReplica(picture, stage_id=1)
    async with running_hub(thinker, painter, deploy=PAIR) as omni:
        outputs = omni.generate({"prompt": "a"}, sampling_params_list=[{"seed": 7}, None])
        assert [output.text async for output in outputs if output.text] == ["a "]
        with pytest.raises(InvalidRequestError, match="2 stages"):
            await anext(omni.generate({"prompt": "a"}, sampling_params_list=[{}, {}, {}]))
        with pytest.raises(InvalidRequestError, match="not both"):
            await anext(omni.generate({"prompt": "a"}, params={}, sampling_params_list=[None, None]))
    assert thinker.of(wire.Submit)[0].params == {"max_tokens": 8, "seed": 7}
    assert painter.of(wire.Submit)[0].params == {}
