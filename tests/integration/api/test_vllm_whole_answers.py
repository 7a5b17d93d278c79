"""Whole answers of vLLM's server with many log probabilities: what they hold up, and that they are as that server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import httpx
import pytest

from omni_discovery import wire
from omni_discovery.deploy.document import DeployConfig, StageConfig
from tests.support.engines import DEMO, as_the_supervisor_has_it
from tests.support.hub_fakes import FakeReplica, running_hub, until
from tests.support.longest_turn import longest_turn

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

STAGE = StageConfig(
    stage_id=0,
    engine="vllm",
    model=str(DEMO / "thinker"),
    engine_args={"dtype": "float32", "max_model_len": 64, "enforce_eager": True},
    final_output="text",
)
HUB: Final = "stages: [{stage_id: 0, engine: vllm, final_output: text}]"
#: In turns of a loop, of its processor time: vLLM's server took 0.5 to 0.8 s for what is asked below.
MOST_S: Final = 0.35
MODULE: Final = "hub.api.vllm.bounds.whole_answers"
MESSAGES: Final = [{"role": "user", "content": "1"}]


@pytest.fixture(scope="module")
def frontend() -> Any:
    with as_the_supervisor_has_it():
        from hub.api.vllm.server import VllmFrontend

        return VllmFrontend(DeployConfig(stages=(STAGE,), model="m"), "--enable-scale-out")


def speak(tokens: int) -> Any:
    """So many tokens, each with as many others as are asked for, and the likelihood of the prompt."""

    @cache
    def likely(token_id: int, most: int) -> tuple[wire.TokenLogprob, ...]:
        others = (wire.TokenLogprob(40 + each, -2.5 - each, 2 + each, f" ä{each}") for each in range(most))
        return (wire.TokenLogprob(token_id, -0.5, 1, f" w{token_id % 7}"), *others)

    def script(replica: FakeReplica, submit: wire.Submit) -> None:
        about = replica._about(submit)
        replica.accept(submit)
        asked, of_prompt = submit.params.get("logprobs"), submit.params.get("prompt_logprobs")
        seq = 0
        if of_prompt is not None:
            places = tuple(likely(each, of_prompt) for each in submit.inputs["prompt_token_ids"][1:])
            replica.say(wire.Chunk(**about, seq=0, modality="text", prompt_logprobs=places))
            seq = 1
        for start in range(0, tokens, 100):
            token_ids = tuple(range(start, min(start + 100, tokens)))
            answered = tuple(likely(each, asked) for each in token_ids) if asked is not None else ()
            chunk = wire.Chunk(
                **about, seq=seq, modality="text", text=" w" * len(token_ids), token_ids=token_ids, logprobs=answered
            )
            replica.say(chunk)
            seq += 1
        replica.done(submit, seq)

    return script


@asynccontextmanager
async def serving(frontend: Any, tokens: int) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    async with running_hub(FakeReplica(speak(tokens)), deploy=HUB) as omni:
        app = await frontend.build(omni)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://hub", timeout=300) as client:
            yield app, client


def chat(answers: int) -> dict[str, Any]:
    return {"messages": MESSAGES, "n": answers, "logprobs": True, "top_logprobs": 20}


def batch(answers: int) -> dict[str, Any]:
    return {"messages": [MESSAGES] * answers, "logprobs": True, "top_logprobs": 20}


def completion(answers: int) -> dict[str, Any]:
    return {"prompt": "1", "n": answers, "logprobs": 20}


def response(_: int) -> dict[str, Any]:
    return {"input": "1", "include": ["message.output_text.logprobs"], "top_logprobs": 20}


def generation(answers: int) -> dict[str, Any]:
    return {"token_ids": [5, 6], "sampling_params": {"n": answers, "logprobs": 20, "max_tokens": 8}}


@pytest.mark.attack("S9")
@pytest.mark.parametrize(
    ("path", "asked", "tokens"),
    [
        ("/v1/chat/completions", chat(8), 250),
        ("/v1/chat/completions/batch", batch(8), 250),
        ("/v1/completions", completion(16), 500),
        ("/v1/responses", response(1), 2000),
        ("/inference/v1/generate", generation(24), 250),
    ],
)
async def test_many_log_probabilities_leave_the_loop_to_others(
    frontend: Any, path: str, asked: dict[str, Any], tokens: int
) -> None:
    async with serving(frontend, tokens) as (_, client):
        # What is done once in a process.
        await client.post("/v1/completions", json={"model": "m", "prompt": "1"})
        async with longest_turn() as turn:
            answer = await client.post(path, json={"model": "m", **asked})
    assert answer.status_code == 200, answer.text
    assert answer.text.count("-20.5") >= 2000
    assert turn.longest_s < MOST_S


@pytest.mark.attack("S9")
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", chat(3)),
        ("/v1/chat/completions", {**chat(3), "return_tokens_as_token_ids": True, "return_token_ids": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "prompt_logprobs": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions/batch", batch(3)),
        ("/v1/completions", completion(3)),
        ("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "logprobs": 2, "echo": True, "return_token_ids": True}),
        ("/v1/completions", {"prompt": [5, 6, 7], "logprobs": 2, "echo": True, "max_tokens": 0}),
        ("/v1/completions", {"prompt": [5, 6, 7], "prompt_logprobs": 0, "n": 2}),
        ("/v1/responses", response(1)),
        ("/v1/responses", {"input": "1"}),
        ("/inference/v1/generate", generation(2)),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 8}}),
        ("/invocations", {**chat(2)}),
    ],
)
async def test_an_answer_is_what_the_server_writes_by_itself(
    frontend: Any, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any]
) -> None:
    """1. in one part, in the loop
    2. in some parts, beside it
    3. as the server writes it
    4. a token a part
    """
    async with serving(frontend, 8) as (_, client):
        answers = [await client.post(path, json={"model": "m", **asked})]
        monkeypatch.setattr(f"{MODULE}.AT_ONCE", 63)
        monkeypatch.setattr(f"{MODULE}._FEW", 0)
        answers.append(await client.post(path, json={"model": "m", **asked}))
        with monkeypatch.context() as without:
            never = SimpleNamespace(get=lambda: False, set=lambda _: None, reset=lambda _: None)
            without.setattr(f"{MODULE}._is_whole", never)
            without.setattr(f"{MODULE}._LONG", ())
            answers.append(await client.post(path, json={"model": "m", **asked}))
        monkeypatch.setattr(f"{MODULE}.AT_ONCE", 1)
        answers.append(await client.post(path, json={"model": "m", **asked}))
    assert [answer.status_code for answer in answers] == [200] * 4, answers[0].text
    shown = [answer.json() for answer in answers]
    for each in shown:
        for name in ("id", "request_id", "created", "created_at"):
            each.pop(name, None)
        for item in each.get("output", ()):
            item.pop("id")
    assert shown == [shown[2]] * 4
    assert {answer.headers["content-type"] for answer in answers} == {"application/json"}
    # Also their order.
    assert len({str(each) for each in shown}) == 1


async def test_what_is_streamed_is_as_the_server_writes_it(frontend: Any) -> None:
    async with serving(frontend, 8) as (_, client):
        said = (await client.post("/v1/chat/completions", json={"model": "m", **chat(1), "stream": True})).text
        told = (await client.post("/v1/responses", json={"model": "m", **response(1), "stream": True})).text
    # The least likely one that is shown, of each token.
    assert said.count("-20.5") == 8
    assert told.count("-20.5") >= 8
    assert "response.completed" in told


@pytest.mark.attack("S9")
async def test_what_nobody_waits_for_is_not_written(frontend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes while its answer is written: the rest is not, and nothing is sent."""
    monkeypatch.setattr(f"{MODULE}.AT_ONCE", 21)
    parts, sent = 0, list[str]()
    is_gone = asyncio.Event()
    from hub.api.vllm.bounds import whole_answers

    turn = whole_answers._PartTurn.__call__

    async def counted(self: Any, call: Any, values: int) -> Any:
        nonlocal parts
        parts += 1
        if parts == 3:
            is_gone.set()
            await until(self._listening.done)
        return await turn(self, call, values)

    monkeypatch.setattr(whole_answers._PartTurn, "__call__", counted)
    async with serving(frontend, 100) as (app, client):
        body = client.build_request("POST", "/v1/chat/completions", json={"model": "m", **chat(1)})
        given = [{"type": "http.request", "body": body.content}]

        async def receive() -> Any:
            if given:
                return given.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        headers = [(name.lower(), value) for name, value in body.headers.raw]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await app({**scope, "query_string": b"", "http_version": "1.1", "raw_path": b""}, receive, send)
    assert (parts, sent) == (3, [])
