"""POST /v1/completions and /v1/images/generations, asked by OpenAI's own clients over HTTP, of real replicas."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, InternalServerError, UnprocessableEntityError

from stage_runtime.engines.echo.engine import draw_png
from tests.support.hub_fakes import until
from tests.support.longest_turn import longest_turn
from tests.support.speaking import DRAWER, SPEAKER, Served, served

PROMPT = "one two three"
ASK: Any = {"model": "", "prompt": PROMPT}


@pytest.fixture
async def hub() -> AsyncIterator[Served]:
    async with served(DRAWER) as running:
        yield running


@pytest.fixture
async def client(hub: Served) -> AsyncIterator[AsyncOpenAI]:
    async with hub.client as made:
        yield made


async def test_a_prompt_is_completed_whole_and_streamed(hub: Served, client: AsyncOpenAI) -> None:
    def ask() -> Any:
        with hub.sync_client as sync:
            return sync.completions.create(**ASK)

    for answer in (await client.completions.create(**ASK), await asyncio.to_thread(ask)):
        (choice,) = answer.choices
        assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, PROMPT, "stop", None)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3)
        assert answer.id.startswith("cmpl-")
    stream = await client.completions.create(**ASK, stream=True, stream_options={"include_usage": True}, max_tokens=2)
    chunks = [each async for each in stream]
    assert "".join(choice.text for each in chunks for choice in each.choices) == "one two "
    assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_several_prompts_and_answers_keep_their_places(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="", prompt=["one", "two two"], n=2)
    assert [(each.index, each.text) for each in answer.choices] == [
        *((0, "one"), (1, "one"), (2, "two two"), (3, "two two"))
    ]
    assert answer.usage is not None
    # Each prompt counts once.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    tokens = await client.completions.create(model="", prompt=[[5, 6], [7]])
    assert [each.text for each in tokens.choices] == ["5 6", "7"]


async def test_vllms_fields_are_taken_and_what_is_wrong_is_refused(client: AsyncOpenAI) -> None:
    more: Any = {"extra_body": {"ignore_eos": True, "min_p": 0.1, "repetition_penalty": 1.1, "top_k": 5}}
    assert (await client.completions.create(**ASK, **more)).choices[0].text == PROMPT
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": []}, "'prompt' is a text"),
        ({"prompt": ["a", [1]] * 5, "n": 8}, "80 answers were asked for"),
        ({"prompt": [["a"]]}, "Expected 'int', got 'str'"),
        ({"prompt": [1] * 530_000, "n": 16}, "'prompt' has 530000 token ids; 524288 are the most"),
        ({"logprobs": 2}, "engine 'echo', which gives none"),
        ({"echo": True}, "'echo' is not served here"),
        ({"model": "gpt"}, ""),
    ]
    for more, said in refused[:-1]:
        with pytest.raises(BadRequestError, match=said):
            await client.completions.create(**{**ASK, **more})
    with pytest.raises(APIError, match="'gpt' is not served here"):
        await client.completions.create(model="gpt", prompt="x")


async def test_an_answer_that_fails_ends_the_others_at_once() -> None:
    document = """
    stages: [{stage_id: 0, engine: echo, engine_args: {delay_s: 0.05, fail_on: bad}, final_output: text}]
    """
    asked: Any = {"model": "", "prompt": ["word " * 5000, "bad"]}
    async with served(document) as hub, hub.client as client:
        with pytest.raises(InternalServerError, match="told to fail on 'bad'"):
            await client.completions.create(**asked)
        await until(lambda: len(hub.replicas[0].loop) == 0, 30.0)
        stream = await client.completions.create(**asked, stream=True)
        with pytest.raises(APIError, match="told to fail on 'bad'"):
            async for _ in stream:
                pass
        await until(lambda: len(hub.replicas[0].loop) == 0, 30.0)


async def test_pictures_are_drawn_alone(hub: Served, client: AsyncOpenAI) -> None:
    def ask() -> Any:
        with hub.sync_client as sync:
            return sync.images.generate(prompt="a cat", n=2)

    other = await client.images.generate(prompt="a cat", n=2, response_format="b64_json")
    for answer in (other, await asyncio.to_thread(ask)):
        assert answer.data is not None
        assert [base64.b64decode(each.b64_json or "") for each in answer.data] == [draw_png("a cat")] * 2
        assert (answer.output_format, answer.size) == ("png", "16x16")
        assert answer.usage is not None
        assert answer.usage.input_tokens == 2


async def test_what_can_not_be_drawn_is_refused_with_the_reason(client: AsyncOpenAI) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"response_format": "url"}, "pictures come as 'b64_json'"),
        ({"size": "huge"}, "size"),
        ({"n": 11}, "n"),
        ({"output_format": "webp"}, "'output_format' is not served here"),
        ({"prompt": " "}, "'prompt' is empty"),
    ]
    for more, said in refused:
        with pytest.raises(BadRequestError, match=said):
            await client.images.generate(**{"prompt": "a cat", **more})


async def test_a_pipeline_that_draws_nothing_says_so() -> None:
    async with served(SPEAKER) as hub, hub.client as client:
        with pytest.raises(BadRequestError, match="this pipeline draws nothing"):
            await client.images.generate(prompt="a cat")


async def test_a_prompt_of_which_nothing_is_drawn_is_told_from_a_failure() -> None:
    document = DRAWER.replace("engine: echo, final", "engine: echo, engine_args: {handoff_on: dog}, final", 1)
    async with served(document) as hub, hub.client as client:
        with pytest.raises(UnprocessableEntityError, match="nothing was drawn"):
            await client.images.generate(prompt="a cat")


@pytest.mark.attack("Z52")
async def test_companions_are_counted_once_and_before_they_are_looked_at(hub: Served) -> None:
    """Sixty thousand of them, for sixteen answers, held the loop for four seconds."""
    companions = {f"a{number}": "x" for number in range(60_000)}
    asked = {"messages": [{"role": "user", "content": "a cat"}], "companions": companions, "n": 16}
    async with httpx.AsyncClient(base_url=hub.address) as http, longest_turn() as turn:
        refused = await http.post("/v1/chat/completions", json=asked, timeout=30.0)
    assert (refused.status_code, "60000 companions; a request may have 8" in refused.text) == (400, True)
    assert turn.longest_s < 0.4
