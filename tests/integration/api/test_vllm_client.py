"""vLLM's own server over a hub and scripted replicas: what the client sees, and what the replicas are told."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from hub.api.door.guard import Door, Locks
from hub.api.door.keys import KeyRing, read_key
from hub.api.served_stage import serving_stage
from omni_discovery import wire
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.errors import ConfigError
from tests.support.engines import DEMO, as_the_supervisor_has_it
from tests.support.hub_fakes import FakeReplica, Script, accept_only, running_hub, until
from tests.support.longest_turn import longest_turn

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

STAGE = StageConfig(
    stage_id=0,
    engine="vllm",
    model=str(DEMO / "thinker"),
    engine_args={"dtype": "float32", "max_model_len": 64, "enforce_eager": True},
    default_sampling_params={"temperature": 0.25},
    final_output="text",
)
DEPLOY = DeployConfig(stages=(STAGE,), model="thinker")
HUB = "stages: [{stage_id: 0, engine: vllm, final_output: text, default_sampling_params: {presence_penalty: 0.5}}]"
ASK: dict[str, Any] = {"model": "thinker", "prompt": "1 + 1"}


@pytest.fixture(scope="module")
def frontend() -> Any:
    with as_the_supervisor_has_it():
        from hub.api.vllm.server import VllmFrontend

        return VllmFrontend(DEPLOY, "")


@asynccontextmanager
async def serving(frontend: Any, script: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeReplica]]:
    replica = FakeReplica(script)
    async with running_hub(replica, deploy=HUB) as omni:
        transport = httpx.ASGITransport(await frontend.build(omni), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://hub", timeout=20) as client:
            yield client, replica


def omni_of(client: httpx.AsyncClient) -> Any:
    return client._transport.app._omni  # type: ignore[attr-defined]


def speak(replica: FakeReplica, submit: wire.Submit) -> None:
    """Two words, one token each."""
    about = replica._about(submit)
    replica.accept(submit)
    for seq, word in enumerate(("two", " words")):
        replica.say(wire.Chunk(**about, seq=seq, modality="text", text=word, token_ids=(seq + 20,)))
    replica.done(submit, 2)


async def test_the_replica_gets_tokens_and_parameters_and_the_client_its_words(frontend: Any) -> None:
    """The server's settled values go along; what nobody asked for is left to the document's defaults."""
    async with serving(frontend, speak) as (client, replica):
        answer = (await client.post("/v1/completions", json={**ASK, "seed": 3, "return_token_ids": True})).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("two words", [20, 21], "stop")
    assert answer["usage"]["completion_tokens"] == 2
    (submit,) = replica.of(wire.Submit)
    assert list(submit.inputs) == ["prompt_token_ids"]
    assert submit.params["temperature"] == 0.25
    assert (submit.params["seed"], submit.params["presence_penalty"]) == (3, 0.5)


def speak_likely(replica: FakeReplica, submit: wire.Submit) -> None:
    """Two words, and what else was likely in their places."""
    about = replica._about(submit)
    replica.accept(submit)
    for seq, word in enumerate(("two", " words")):
        other = (wire.TokenLogprob(40 + each, -2.0, 1 + each, "or") for each in range(submit.params["logprobs"]))
        places = ((wire.TokenLogprob(seq + 20, -0.5, 2, word), *other),)
        replica.say(wire.Chunk(**about, seq=seq, modality="text", text=word, token_ids=(seq + 20,), logprobs=places))
    replica.done(submit, 2)


def events_of(body: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line.startswith("data: {")]


async def test_what_was_likely_is_shown_whole_and_streamed(frontend: Any) -> None:
    """Of completions as lists by position, of a chat token by token; a beam search lives off it."""
    chat = {"model": "thinker", "messages": [{"role": "user", "content": "1"}], "logprobs": True, "top_logprobs": 1}
    async with serving(frontend, speak_likely) as (client, replica):
        answer = (await client.post("/v1/completions", json={**ASK, "logprobs": 1, "n": 2})).json()
        streamed = events_of((await client.post("/v1/completions", json={**ASK, "logprobs": 1, "stream": True})).text)
        whole = (await client.post("/v1/chat/completions", json=chat)).json()
        words = events_of((await client.post("/v1/chat/completions", json={**chat, "stream": True})).text)
        beams = (
            await client.post("/v1/completions", json={**ASK, "use_beam_search": True, "n": 2, "max_tokens": 1})
        ).json()
    for choice in answer["choices"]:
        assert choice["logprobs"]["token_logprobs"] == [-0.5, -0.5]
        assert choice["logprobs"]["tokens"] == ["two", " words"]
        assert choice["logprobs"]["top_logprobs"][1] == {" words": -0.5, "or": -2.0}
    said = [event["choices"][0]["logprobs"] for event in streamed]
    assert [token for each in said if each for token in each["tokens"]] == ["two", " words"]
    content = whole["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["logprob"]) for each in content] == [("two", -0.5), (" words", -0.5)]
    assert [len(each["top_logprobs"]) for each in content] == [1, 1]
    told = [event["choices"][0]["logprobs"] for event in words if event["choices"]]
    assert [each for event in told if event for each in event["content"]] == content
    assert len(beams.get("choices", ())) == 2, beams
    assert {submit.params.get("logprobs") for submit in replica.of(wire.Submit)} == {1, 4}


async def test_every_answer_has_the_likelihood_of_its_own_tokens(frontend: Any) -> None:
    """As vLLM's callers get it in each of its ways to put answers out."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    sums: dict[RequestOutputKind, list[tuple[int, float]]] = {}
    async with serving(frontend, speak_likely) as (client, _):
        engine = client._transport.app._app.state.engine_client  # type: ignore[attr-defined]
        for kind in RequestOutputKind:
            params = SamplingParams(logprobs=0, output_kind=kind)
            outputs = [each async for each in engine.generate(tokens_input([5, 6]), params, "r1")]
            answers = [output.outputs[0] for output in outputs]
            sums[kind] = [(len(answer.logprobs), answer.cumulative_logprob) for answer in answers]
    assert sums == {
        RequestOutputKind.CUMULATIVE: [(1, -0.5), (2, -1.0), (2, -1.0)],
        RequestOutputKind.DELTA: [(1, -0.5), (1, -1.0), (0, -1.0)],
        RequestOutputKind.FINAL_ONLY: [(2, -1.0)],
    }


def speak_of_the_prompt(replica: FakeReplica, submit: wire.Submit) -> None:
    """How likely each token of the prompt was, in two parts, and then a word that is likely itself."""
    about = replica._about(submit)
    replica.accept(submit)
    told = [(wire.TokenLogprob(token_id, -float(token_id), 3, "p"),) for token_id in submit.inputs["prompt_token_ids"]]
    parts = [] if submit.params.get("prompt_logprobs") is None else [told[1:2], told[2:]]
    for seq, places in enumerate(parts):
        replica.say(wire.Chunk(**about, seq=seq, modality="text", prompt_logprobs=tuple(places)))
    likely = ((wire.TokenLogprob(20, -0.5, 1, "so"),),)
    replica.say(wire.Chunk(**about, seq=len(parts), modality="text", text="so", token_ids=(20,), logprobs=likely))
    replica.say(wire.StageDone(**about, seq=len(parts) + 1, finish_reason="stop", stop_reason=20))


async def test_an_echo_has_the_prompts_likelihood_before_the_answers(frontend: Any) -> None:
    """1. whole and streamed, one of each of two answers; of the first token, which nothing comes before, none
    2. without generation only the prompt's
    3. a chat has them beside its answer, and what stopped it
    """
    asked = {"model": "thinker", "prompt": [11, 12, 13, 14], "echo": True, "logprobs": 0}
    chat = {"model": "thinker", "messages": [{"role": "user", "content": "1"}], "prompt_logprobs": 0}
    async with serving(frontend, speak_of_the_prompt) as (client, replica):
        whole = (await client.post("/v1/completions", json={**asked, "n": 2})).json()
        streamed = events_of((await client.post("/v1/completions", json={**asked, "n": 2, "stream": True})).text)
        bare = (await client.post("/v1/completions", json={**asked, "max_tokens": 0})).json()
        beside = (await client.post("/v1/chat/completions", json=chat)).json()
    due = [None, -12.0, -13.0, -14.0, -0.5]
    assert [choice["logprobs"]["token_logprobs"] for choice in whole["choices"]] == [due, due]
    assert whole["choices"][0]["text"].endswith("so")
    for index in range(2):
        mine = [choice for event in streamed for choice in event["choices"] if choice["index"] == index]
        assert [each for choice in mine for each in choice["logprobs"]["token_logprobs"]] == due
    assert bare["choices"][0]["logprobs"]["token_logprobs"] == due[:-1]
    assert beside["choices"][0]["stop_reason"] == 20
    (_, *rest) = beside["prompt_logprobs"]
    submit = replica.of(wire.Submit)[-1]
    assert [int(token_id) for each in rest for token_id in each] == submit.inputs["prompt_token_ids"][1:]
    # Of two answers that go out together, one.
    asked_of = [submit.params.get("prompt_logprobs") for submit in replica.of(wire.Submit)]
    assert (asked_of.count(0), asked_of.count(None)) == (5, 1)


async def test_a_prompts_likelihood_comes_as_vllms_callers_get_it(frontend: Any) -> None:
    """Once where an answer comes in pieces, else with all that is said; never before the answer begins."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    found: dict[RequestOutputKind, list[tuple[Any, Any]]] = {}
    async with serving(frontend, speak_of_the_prompt) as (client, _):
        engine = client._transport.app._app.state.engine_client  # type: ignore[attr-defined]
        for kind in RequestOutputKind:
            params = SamplingParams(prompt_logprobs=0, logprobs=0, output_kind=kind)
            outputs = [each async for each in engine.generate(tokens_input([5, 6, 7]), params, "r1")]
            shown = [[each and list(each) for each in output.prompt_logprobs] for output in outputs]
            found[kind] = [
                (places, output.outputs[0].stop_reason) for places, output in zip(shown, outputs, strict=True)
            ]
    whole = [None, [6], [7]]
    assert found == {
        RequestOutputKind.CUMULATIVE: [(whole, None), (whole, 20)],
        RequestOutputKind.DELTA: [(whole, None), ([], 20)],
        RequestOutputKind.FINAL_ONLY: [(whole, 20)],
    }


async def test_a_prompt_without_its_likelihood_is_the_stages_fault(frontend: Any) -> None:
    async with serving(frontend, speak_likely) as (client, _):
        answer = await client.post("/v1/completions", json={**ASK, "prompt": [5, 6, 7], "echo": True, "logprobs": 0})
    assert answer.status_code == 500, answer.text
    assert "stage 0 gave logprobs of 0 tokens of a prompt that has 2" in answer.text


async def test_an_abort_before_the_prompt_was_told_of_is_an_end_and_no_failure(frontend: Any) -> None:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    async with serving(frontend, accept_only) as (client, replica):
        engine = client._transport.app._app.state.engine_client  # type: ignore[attr-defined]
        outputs = engine.generate(tokens_input([5, 6, 7]), SamplingParams(prompt_logprobs=0), "r1")
        first = asyncio.create_task(anext(outputs, None))
        await until(lambda: replica.of(wire.Submit))
        await engine.abort("r1")
        last = await first
    assert last is None or last.outputs[0].finish_reason == "abort"


@pytest.mark.parametrize(
    ("asked", "said", "taken"),
    [
        ({"n": 9}, "n: 9 answers, where one request may have 8", 8),
        ({"n": 6, "prompt": ["1", "2", "3"]}, "may come to 16 texts, or prompts", 15),
        ({"n": 8, "echo": True, "logprobs": 20, "stream": True, "prompt": [5] * 60}, "each of 8 answers", 7),
        ({"n": 8, "prompt_logprobs": 20, "prompt": [5] * 60}, "each of 8 answers", 7),
        ({"n": 8, "logit_bias": {"5": 1.0}, "prompt": ["1", "2"]}, "1 tokens for each of 16 answers", 14),
    ],
)
async def test_no_request_takes_a_hub_for_itself(
    frontend: Any, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], said: str, taken: int
) -> None:
    """With one answer less it is taken, and each is a request to a replica. A beam search is many, but few at once."""
    monkeypatch.setattr("hub.api.vllm.params.MAX_ANSWERS", 8)
    monkeypatch.setattr("hub.api.vllm.bounds.fan_out.MAX_IN_ALL", 16)
    monkeypatch.setattr("hub.api.vllm.params.MAX_PROMPT_LOGPROBS", 8 * 60 * 21 - 1)
    monkeypatch.setattr("omni_discovery.inputs.token_choices.MAX_BIASED_TOKENS", 15)
    async with serving(frontend, speak) as (client, replica):
        answer = await client.post("/v1/completions", json={**ASK, **asked})
        assert answer.status_code == 400, answer.text
        assert said in answer.text
        assert not replica.of(wire.Submit)
        await client.post("/v1/completions", json={**ASK, **asked, "n": asked["n"] - 1})
        assert len(replica.of(wire.Submit)) == taken
    async with serving(frontend, speak_likely) as (client, replica):
        beams = {**ASK, "use_beam_search": True, "n": 2, "max_tokens": 12, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=beams)).status_code == 200
        assert len(replica.of(wire.Submit)) > 16


@pytest.mark.parametrize("shown", ["echo", "return_token_ids"])
@pytest.mark.attack("S6")
async def test_a_prompt_that_is_shown_in_each_answer_counts_with_each(
    frontend: Any, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    """The server puts all of it into every whole answer; a stream passes them on."""
    monkeypatch.setattr("hub.api.generation.body.MOST_ANSWER_BYTES", 4000)
    asked = {**ASK, "prompt": [5] * 60, "n": 9}
    async with serving(frontend, speak) as (client, replica):
        refused = await client.post("/v1/completions", json={**asked, shown: True})
        assert (refused.status_code, "shown in each of 9 answers is too long" in refused.text) == (400, True)
        assert not replica.of(wire.Submit)
        for more in ({}, {shown: True, "n": 2}, {shown: True, "stream": True}):
            assert (await client.post("/v1/completions", json={**asked, **more})).status_code == 200


@pytest.mark.attack("S5")
async def test_a_thousand_prompts_leave_the_loop_to_others(frontend: Any) -> None:
    """The server asked for all of them in one turn of the loop, 0.6 ms each; and each reads all that is asked anew."""
    many = {**ASK, "prompt": [[5]] * 1000, "max_tokens": 1}
    async with serving(frontend, speak) as (client, replica):
        await client.post("/v1/completions", json=ASK)
        async with longest_turn() as turn:
            answer = await client.post("/v1/completions", json=many)
            refused = await client.post("/v1/completions", json={**many, "user": "x" * 100_000})
    assert len(replica.of(wire.Submit)) > 1
    assert answer.status_code in (200, 429), answer.text
    assert turn.longest_s < 0.25
    assert refused.status_code == 400
    assert "count for each of 1000 answers" in refused.text


@pytest.mark.attack("Z41")
@pytest.mark.parametrize("wrong", ["x" + "/a" * 8000, "x" + " " * 60_000], ids=["path", "spaces"])
async def test_an_error_with_a_long_text_leaves_the_loop_to_others(frontend: Any, wrong: str) -> None:
    """The server looks for paths in it: 8000 characters took five seconds."""
    async with serving(frontend, speak) as (client, _):
        async with longest_turn() as turn:
            refused = await client.post("/v1/completions", json={**ASK, "model": wrong})
        assert (refused.status_code, len(refused.text) < 3000) == (404, True)
        assert "does not exist" in refused.text
    assert turn.longest_s < 0.25


@pytest.mark.attack("Z54")
async def test_the_description_of_all_routes_is_made_beside_the_loop(frontend: Any) -> None:
    async with serving(frontend, speak) as (client, _), longest_turn() as turn:
        first, second = await asyncio.gather(*(client.get("/openapi.json") for _ in range(2)))
        assert (first.status_code, first.content) == (200, second.content)
        assert "/v1/chat/completions" in first.json()["paths"]
    assert turn.longest_s < 0.25


@pytest.mark.attack("Z40")
async def test_a_cookie_that_is_slow_to_read_is_not_read(frontend: Any) -> None:
    async with serving(frontend, speak) as (client, _), longest_turn() as turn:
        assert (await client.get("/health", headers={"Cookie": 'a="' + "\\" * 60_000})).status_code == 200
    assert turn.longest_s < 0.25


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_body_without_end_is_not_read(frontend: Any, monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    monkeypatch.setattr("hub.api.vllm.bounds.body.MAX_BYTES", 1000)
    given = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(1000):
            given += 100
            yield b" " * 100

    headers = {"Content-Type": "application/json"} | ({"Content-Length": "100000"} if is_told else {})
    async with serving(frontend, speak) as (client, _):
        for path in ("/v1/completions", "/invocations"):
            given = 0
            answer = await client.post(path, content=body(), headers=headers)
            assert answer.status_code == 413, answer.text
            assert "longer than 1000 bytes" in answer.json()["error"]["message"]
            assert given == (0 if is_told else 1100)
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200


HUGE = {"type": "array", "items": {"type": "integer"}, "minItems": 10**9, "maxItems": 10**9}
CHAT = {"model": "thinker", "messages": [{"role": "user", "content": "1 + 1"}]}
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": HUGE}}


@pytest.mark.attack("D5")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"structured_outputs": {"json": HUGE}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(HUGE)}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a" * 500_000]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": HUGE}}}, "response_format"),
        ({"response_format": TAG}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": HUGE}}]}, "tools[0]"),
        ({"z": [[]] * 60_000}, "lists and objects"),
    ],
)
async def test_a_small_request_that_costs_much_is_refused_by_its_field(
    frontend: Any, asked: dict[str, Any], said: str
) -> None:
    async with serving(frontend, speak) as (client, replica):
        answer = await client.post("/v1/chat/completions", json={**CHAT, **asked})
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
        wide = json.dumps(CHAT).encode("utf-16")
        answer = await client.post("/v1/completions", content=wide, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert "UTF-8" in answer.text
        assert not replica.of(wire.Submit)


async def test_what_a_client_was_told_is_one_line_of_the_log(frontend: Any) -> None:
    """A stream that fails behind its beginning: vLLM's server would write down where in the code. A bug stays one."""
    lines, handler = io.StringIO(), logging.Handler()
    handler.emit = lambda record: lines.write(logging.Formatter().format(record) + "\n")  # type: ignore[assignment, return-value, method-assign]
    logging.getLogger().addHandler(handler)
    logger = logging.getLogger("vllm.entrypoints.openai.completion.serving")
    # Once an engine was loaded in this process, vLLM's own logger passes nothing on.
    passing = {each: each.propagate for each in (logger, logging.getLogger("vllm"))}
    for each in passing:
        each.propagate = True
    try:
        async with serving(frontend, failing) as (client, _):
            answer = await client.post("/v1/completions", json={**ASK, "stream": True})
            logger.exception("a bug", exc_info=ValueError("of ours"))
    finally:
        logging.getLogger().removeHandler(handler)
        for each, was in passing.items():
            each.propagate = was
    assert '"error"' in answer.text
    told, _, bug = lines.getvalue().partition("a bug\n")
    assert "Error in completion stream generator: " in told
    assert "Traceback" not in told
    assert "ValueError: of ours" in bug


@pytest.mark.parametrize(("prompt", "text"), [("What is 3 + 4?", "What is 3 + 4?"), ([30, 31], "12")])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_alone_asks_the_stage_for_nothing(frontend: Any, prompt: Any, text: str, stream: bool) -> None:
    asked = {"model": "thinker", "prompt": prompt, "echo": True, "stream": stream}
    async with serving(frontend, speak) as (client, replica):
        answer = await client.post("/v1/completions", json=asked)
        alone = await client.post("/v1/completions", json={**asked, "max_tokens": 0, "stream": False})
    texts = [event["choices"][0]["text"] for event in (events_of(answer.text) if stream else [answer.json()])]
    assert alone.json()["choices"][0]["text"] == text
    assert "".join(texts) == f"{text}two words"
    assert "prompt_logprobs" not in replica.of(wire.Submit)[0].params


async def test_a_stage_that_leaves_out_what_was_asked_is_to_blame(frontend: Any) -> None:
    async with serving(frontend, speak) as (client, _):
        answer = await client.post("/v1/completions", json={**ASK, "logprobs": 1})
    assert answer.status_code == 500, answer.text
    assert "stage 0 gave logprobs of 0 tokens" in answer.text


async def test_whose_prompts_are_remembered_together_is_told_to_the_stage(frontend: Any) -> None:
    """And what the operator's own logits processors may read."""
    asked = {**ASK, "cache_salt": "team a", "vllm_xargs": {"planet": 1}}
    async with serving(frontend, speak) as (client, replica):
        answer = await client.post("/v1/completions", json=asked)
        await client.post("/v1/completions", json=ASK)
    assert answer.status_code == 200, answer.text
    told = [(each.params.get("cache_salt"), each.params.get("extra_args")) for each in replica.of(wire.Submit)]
    assert told == [("team a", {"planet": 1}), (None, None)]


async def test_several_answers_are_several_requests_with_seeds_of_their_own(frontend: Any) -> None:
    async with serving(frontend, speak) as (client, replica):
        answer = (await client.post("/v1/completions", json={**ASK, "n": 3, "seed": 5})).json()
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [(n, "two words") for n in range(3)]
    assert sorted(submit.params["seed"] for submit in replica.of(wire.Submit)) == [5, 6, 7]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"model": "thinker", "input": "x"}, "makes text and no embeddings or scores: ask /v1/chat"),
        ("/rerank", {}, "makes text and no embeddings or scores"),
        ("/scale_elastic_ep", {"new_data_parallel_size": 2}, "start and stop them with omni serve"),
    ],
)
async def test_what_is_not_here_says_what_is(frontend: Any, path: str, body: dict[str, Any], said: str) -> None:
    async with serving(frontend, speak) as (client, _):
        refused = await client.post(path, json=body)
    assert (refused.status_code, said in refused.text) == (400, True), refused.text


async def test_a_stream_comes_word_by_word(frontend: Any) -> None:
    async with serving(frontend, speak) as (client, _):
        body = (await client.post("/v1/completions", json={**ASK, "stream": True})).text
    events = events_of(body)
    assert [event["choices"][0]["text"] for event in events] == ["two", " words", ""]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_two_requests_of_one_name_do_not_disturb_each_other(frontend: Any) -> None:
    headers = {"X-Request-Id": "same"}
    async with serving(frontend, speak) as (client, _):
        answers = await asyncio.gather(*[client.post("/v1/completions", json=ASK, headers=headers) for _ in range(4)])
    assert [answer.status_code for answer in answers] == [200] * 4


def refusing(kind: wire.FailureKind) -> Any:
    def script(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.reject(submit, kind)

    return script


def failing(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.fail(submit)


@pytest.mark.parametrize(
    ("script", "status", "kind"),
    [
        (refusing(wire.FailureKind.INVALID), 400, "BadRequestError"),
        (failing, 500, "Internal Server Error"),
    ],
)
async def test_what_the_stage_says_is_told_with_its_status(frontend: Any, script: Any, status: int, kind: str) -> None:
    async with serving(frontend, script) as (client, _):
        answer = await client.post("/v1/completions", json=ASK)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == kind


async def test_a_stage_without_replicas_is_a_503_that_says_when_to_come_back(frontend: Any) -> None:
    async with running_hub(deploy=HUB) as omni:
        transport = httpx.ASGITransport(await frontend.build(omni), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://hub", timeout=20) as client:
            answer = await client.post("/v1/completions", json=ASK)
            health = await client.get("/health")
            ready = await client.get("/ready")
    assert answer.status_code == 503, answer.text
    assert answer.headers["Retry-After"] == "5"
    assert "stage 0" in answer.json()["error"]["message"]
    assert (health.status_code, ready.status_code) == (200, 503)


async def test_a_hub_that_has_stopped_is_not_healthy(frontend: Any) -> None:
    async with serving(frontend, speak) as (client, _):
        await omni_of(client).close()
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/completions", json=ASK)).status_code in (500, 503)


async def test_an_abort_by_name_ends_all_answers_of_the_request(frontend: Any) -> None:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    async with serving(frontend, accept_only) as (client, replica):
        engine = client._transport.app._app.state.engine_client  # type: ignore[attr-defined]
        outputs = engine.generate(tokens_input([5, 6]), SamplingParams(n=2), "r1")

        async def read() -> list[Any]:
            return [output async for output in outputs]

        reading = asyncio.create_task(read())
        await until(lambda: len(replica.of(wire.Submit)) >= 1)
        await engine.abort("r2")
        assert not replica.of(wire.Abort)
        await engine.abort(["r1"])
        await until(lambda: len(replica.of(wire.Abort)) >= 1)
        reading.cancel()


async def test_what_is_asked_of_the_engine_reaches_every_replica_of_the_stage(frontend: Any) -> None:
    """1. both replicas are put to sleep, once what runs has ended; one that can't is told
    2. vLLM's way of ending what runs first is refused
    """
    from vllm.exceptions import VLLMError

    replicas = FakeReplica(speak), FakeReplica(speak, replica_id=1)

    async def answer(method: str, *results: Any) -> list[wire.Control]:
        await until(lambda: all(asked(replica, method) for replica in replicas))
        for replica, result in zip(replicas, results, strict=True):
            about = {"epoch": replica.info.epoch, "call_id": asked(replica, method)[-1].call_id, "queue_length": 0}
            ok = not isinstance(result, Exception)
            error = "" if ok else f"RuntimeError: {result}"
            replica.say(wire.ControlResult(**about, ok=ok, result=result if ok else None, error=error))
        return asked(replicas[0], method)

    def asked(replica: FakeReplica, method: str) -> list[wire.Control]:
        return [control for control in replica.of(wire.Control) if control.method == method]

    async with running_hub(*replicas, deploy=HUB) as omni:
        app = await frontend.build(omni)
        engine = app._app.state.engine_client
        sleeping = asyncio.create_task(engine.sleep(2, "wait"))
        (control,) = await answer("sleep", None, None)
        await sleeping
        assert control.args == (2,)
        is_sleeping = asyncio.create_task(engine.is_sleeping())
        await answer("is_sleeping", True, False)
        assert await is_sleeping
        resetting = asyncio.create_task(engine.reset_prefix_cache())
        await answer("reset_prefix_cache", True, False)
        assert not await resetting
        waking = asyncio.create_task(engine.wake_up())
        await answer("wake_up", None, ValueError("no memory"))
        with pytest.raises(VLLMError, match="0/1 of 2: RuntimeError: no memory"):
            await waking
        with pytest.raises(VLLMError, match="mode=wait"):
            await engine.sleep(1, "abort")
        with pytest.raises(NotImplementedError):
            await engine.pause_generation()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--max-model-len 64", "--max-model-len is the engine's"),
        ("--port 1", "--port has no effect"),
        ("--ssl-keyfile a", "--ssl-keyfile is a flag of omni serve for every API"),
        ("--ssl-ciphers a", "--ssl-ciphers has no effect"),
        ("--api-key k-1", r"--api-key is a flag of omni serve for every API: give it --api-key-file FILE"),
        ("--no-such-flag", "no-such-flag"),
        ("--enable-auto-tool-choice", "--tool-call-parser"),
        ("--tool-call-parser", "expected one argument"),
    ],
)
def test_flags_that_would_have_no_effect_are_refused(frontend: Any, flags: str, said: str) -> None:
    from hub.api.vllm.flags import parse_flags

    with pytest.raises(ConfigError, match=said) as caught:
        parse_flags(flags)
    assert "k-1" not in str(caught.value)


async def test_a_parser_that_the_tokenizer_does_not_fit_is_an_error_of_the_flag() -> None:
    with as_the_supervisor_has_it():
        from hub.api.vllm.server import VllmFrontend

        unfit = VllmFrontend(DEPLOY, "--enable-auto-tool-choice --tool-call-parser llama3_json")
    async with running_hub(FakeReplica(speak), deploy=HUB) as omni:
        with pytest.raises(ConfigError, match="--api-args: "):
            await unfit.build(omni)


@pytest.mark.attack("A10", "A28")
async def test_no_route_of_vllms_server_is_open_without_a_key_but_its_probes(frontend: Any) -> None:
    """Every route that the server has, those that it leaves unguarded itself among them."""
    locks = Locks(KeyRing([read_key("alice", "a-key", "x")]))
    async with running_hub(FakeReplica(speak), deploy=HUB) as omni:
        app = await frontend.build(omni)
        door = Door(app, locks, omni.hub_metrics.count_key, omni.rejections.count)
        routes = {
            (method, re.sub(r"{[^}]*}", "x", route.path))
            for route in app._app.routes
            for method in getattr(route, "methods", None) or {"GET"}
            if route.path != "/metrics"
        }
        assert {path for _, path in routes} >= {"/invocations", "/tokenize", "/docs", "/openapi.json"}
        transport = httpx.ASGITransport(door, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://hub", timeout=20) as client:
            opened = set()
            for method, path in sorted(routes):
                if (await client.request(method, path, json=ASK)).status_code != 401:
                    opened.add((method, path))
            assert opened <= {(method, path) for method in ("GET", "HEAD") for path in ("/health", "/ping", "/ready")}
            assert ("GET", "/health") in opened
            assert (await client.get("/ready")).json() == {"ready": True}
            key = {"Authorization": "Bearer a-key"}
            assert "stages" in (await client.get("/ready", headers=key)).json()
            for path in ("/v1/completions", "/invocations"):
                assert (await client.post(path, json=ASK, headers=key)).status_code == 200


def test_a_model_in_two_stages_is_served_by_the_one_that_decodes(frontend: Any) -> None:
    """The prompt goes to the prefill stage, the parameters to the decode stage."""
    transfer = {"kv_transfer_config": {"kv_connector": "NixlConnector"}}
    prefill = StageConfig(stage_id=0, engine="vllm", model="m", engine_args={"pd": "prefill", **transfer})
    decode = StageConfig(stage_id=1, engine="vllm", model="m", engine_args={"pd": "decode"}, final_output="text")
    assert serving_stage(DeployConfig(stages=(prefill, decode))) is decode
    other = StageConfig(stage_id=1, engine="vllm", model="n", engine_args={"pd": "decode"}, final_output="text")
    with pytest.raises(ConfigError, match="takes the hand-off"):
        serving_stage(DeployConfig(stages=(prefill, other)))


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ((StageConfig(stage_id=0, engine="vllm", final_output="image"),), "final_output: text"),
        ((StageConfig(stage_id=0, engine="echo", final_output="text"),), "is echo"),
        ((StageConfig(stage_id=0, engine="vllm"), StageConfig(stage_id=1, engine="vllm", final_output="text")), "1"),
        ((StageConfig(stage_id=0, engine="vllm", final_output="text", engine_args={"runner": "pooling"}),), "pools"),
        ((StageConfig(stage_id=0, engine="vllm", final_output="text", model="/no/such/model"),), "/no/such/model"),
    ],
)
def test_a_pipeline_that_vllms_server_cant_speak_for_is_refused(frontend: Any, stages: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        type(frontend)(DeployConfig(stages=stages), "")


@pytest.mark.parametrize(("status", "shown"), [(403, 403), (413, 413), (422, 422), (418, 400)])
async def test_the_status_of_an_engines_refusal_is_the_clients(frontend: Any, status: int, shown: int) -> None:
    """One that this release does not know is the 400 that it was before."""

    def refuse(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        about = replica._about(submit)
        kind = wire.FailureKind.INVALID
        replica.say(wire.StageFailed(**about, kind=kind, reason="not that", status=status))

    async with serving(frontend, refuse) as (client, _):
        answer = await client.post("/v1/completions", json=ASK)
    assert (answer.status_code, "not that" in answer.json()["error"]["message"]) == (shown, True), answer.text


async def test_a_client_names_its_request_and_the_servers_own_ids_stay_ours(frontend: Any) -> None:
    """1. two requests with one label at a time: both are served, and no id is made of the label
    2. the answer names the label, our id and the replica; the replica is told the label for its log
    3. of a stream the headers leave before any replica is known
    """
    from hub.api.exchange import Exchanges

    named = {"x-request-id": "mine/7"}
    async with serving(frontend, speak) as (inner, replica):
        transport = httpx.ASGITransport(Exchanges(inner._transport.app))  # type: ignore[attr-defined]
        async with httpx.AsyncClient(transport=transport, base_url="http://hub", timeout=20) as client:
            ask = [client.post("/v1/completions", json=ASK, headers=named) for _ in range(2)]
            answers = await asyncio.gather(*ask)
            streamed = await client.post("/v1/completions", json={**ASK, "stream": True}, headers=named)
    for answer in answers:
        assert answer.status_code == 200, answer.text
        ours = answer.headers["x-omni-request-id"]
        assert (answer.headers["x-request-id"], answer.headers["x-omni-replicas"]) == ("mine/7", "0/0")
        assert answer.json()["id"] == f"cmpl-{ours}"
        assert sum(ours in submit.request_id for submit in replica.of(wire.Submit)) == 1
    assert (streamed.headers["x-request-id"], "x-omni-replicas" in streamed.headers) == ("mine/7", False)
    assert {submit.label for submit in replica.of(wire.Submit)} == {"mine/7"}
    assert not any("mine" in submit.request_id for submit in replica.of(wire.Submit))


#: Near the bound: the part of vLLM's check that comes before its threads takes 0.2 s.
AT_THE_BOUND = {
    "prefixItems": [{"type": "integer", "minimum": -(2**63) + each, "maximum": 2**62} for each in range(127)]
}
FORMS = {
    "json": {"structured_outputs": {"json": AT_THE_BOUND}},
    "regex": {"structured_outputs": {"regex": "[a-z]{1,2048}"}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "a"'}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "tag": {"response_format": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": AT_THE_BOUND}}},
}


@pytest.mark.attack("E6")
@pytest.mark.parametrize("asked", FORMS.values(), ids=list(FORMS))
async def test_a_hub_compiles_no_form(frontend: Any, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]) -> None:
    """1. a compiler that would hold up whoever calls it until another client has been answered
    2. a form is asked for, and the other client comes behind it: both are answered, the form by the replica
    """
    other_is_answered = threading.Event()
    compiled: list[str] = []

    def compile_for_long(name: str) -> None:
        compiled.append(name)
        other_is_answered.wait(3)

    for name in ("from_json_schema", "from_regex", "from_ebnf", "from_lark", "from_structural_tag"):
        monkeypatch.setattr(f"xgrammar.Grammar.{name}", lambda *_, name=name, **__: compile_for_long(name))
    async with serving(frontend, speak) as (client, replica):
        form = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, **asked}))
        other = await client.post("/v1/completions", json=ASK)
        other_is_answered.set()
        answer = await form
        assert (answer.status_code, other.status_code) == (200, 200), answer.text
        assert not compiled
        forms = [submit.params.get("structured_outputs") for submit in replica.of(wire.Submit)]
        assert sum(each is not None for each in forms) == 1


async def test_a_form_that_is_no_json_is_refused_by_the_hub(frontend: Any) -> None:
    async with serving(frontend, speak) as (client, replica):
        asked = {"structured_outputs": {"structural_tag": "{"}}
        answer = await client.post("/v1/chat/completions", json={**CHAT, **asked})
        assert answer.status_code == 400, answer.text
        assert not replica.of(wire.Submit)


def speak_at_length(chunks: int) -> Script:
    """So many chunks of 3 MB."""

    def speak_on(replica: FakeReplica, submit: wire.Submit) -> None:
        about = replica._about(submit)
        replica.accept(submit)
        for seq in range(chunks):
            replica.say(wire.Chunk(**about, seq=seq, modality="text", text="x" * (3 << 20), token_ids=(20,)))
        replica.done(submit, chunks)

    return speak_on


@pytest.mark.attack("M6")
async def test_a_whole_answer_without_end_is_ended(frontend: Any) -> None:
    """For one prompt, and for several prompts together; the error says what to do instead."""
    for prompts, chunks in ((["1"], 50), (["1", "2", "3"], 16)):
        async with serving(frontend, speak_at_length(chunks)) as (client, _):
            answer = await client.post("/v1/completions", json={**ASK, "prompt": prompts}, timeout=60)
        assert (answer.status_code, "longer than 128 MiB: ask for it with 'stream': true" in answer.text) == (500, True)


@pytest.mark.attack("M6")
@pytest.mark.parametrize(("is_websocket", "is_streamed", "is_shared"), [(0, 0, 1), (0, 1, 0), (1, 0, 0)])
async def test_all_answers_to_one_request_count_together(is_websocket: int, is_streamed: int, is_shared: int) -> None:
    """Not those of a stream, which are passed on, and not the messages of a WebSocket, which come one by one."""
    from hub.api.vllm.bounds import fan_out

    fan_out.start_http_request(is_websocket=bool(is_websocket))
    first, second = (fan_out.answer_size(is_streamed=bool(is_streamed)) for _ in range(2))
    assert (first is second) == bool(is_shared)


@pytest.fixture(scope="module")
def reading_calls() -> Any:
    with as_the_supervisor_has_it():
        from hub.api.vllm.server import VllmFrontend

        return VllmFrontend(DEPLOY, "--enable-auto-tool-choice --tool-call-parser hermes")


CALL = '<tool_call>\n{"name": "a", "arguments": {"x": %d}}\n</tool_call>\n'
CALLS = 200
TOOLS = [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}]


def call_often(replica: FakeReplica, submit: wire.Submit) -> None:
    """Many calls, fifteen characters at a time."""
    text = "".join(CALL % number for number in range(CALLS))
    about = replica._about(submit)
    replica.accept(submit)
    for seq, begin in enumerate(range(0, len(text), 15)):
        replica.say(wire.Chunk(**about, seq=seq, modality="text", text=text[begin : begin + 15], token_ids=(7,)))
    replica.done(submit, -(-len(text) // 15))


@pytest.mark.attack("Q64")
async def test_a_long_answer_with_calls_is_read_by_the_parser_a_few_times_only(
    reading_calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser reads all of the text again with each piece; here of 11 kB in 800 pieces, and each call arrives."""
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    read: list[int] = []
    real = Hermes2ProToolParser.extract_tool_calls_streaming

    def extract(self: Any, previous_text: str, current_text: str, *more: Any, **named: Any) -> Any:
        read.append(len(current_text))
        return real(self, previous_text, current_text, *more, **named)

    monkeypatch.setattr(Hermes2ProToolParser, "extract_tool_calls_streaming", extract)
    ask = {"model": "thinker", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "stream": True}
    async with serving(reading_calls, call_often) as (client, _):
        answer = await client.post("/v1/chat/completions", json=ask)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    told: dict[int, str] = {}
    for event in events:
        for call in event["choices"][0]["delta"].get("tool_calls", ()) if event["choices"] else ():
            told[call["index"]] = told.get(call["index"], "") + call["function"].get("arguments", "")
    assert told == {number: json.dumps({"x": number}) for number in range(CALLS)}
    assert max(read) > 10_000
    assert sum(length > 8192 for length in read) < 60


@pytest.mark.attack("Q64")
async def test_an_answer_that_is_read_for_too_long_ends_with_an_error_and_its_replica_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. a parser that reads all of the text again for each piece has no time left for this answer
    2. the stream ends with the reason; the replica is told to stop; the next answer is read in full
    """
    from hub.api.vllm.bounds import reading

    with as_the_supervisor_has_it():
        from hub.api.vllm.server import VllmFrontend

        frontend = VllmFrontend(DEPLOY, "--enable-auto-tool-choice --tool-call-parser pythonic")
    ended: list[wire.Submit] = []

    def call_for_ever(replica: FakeReplica, submit: wire.Submit) -> None:
        about = replica._about(submit)
        replica.accept(submit)
        text = f"[a(x={'word ' * 400!r})]"
        for seq, begin in enumerate(range(0, len(text), 4)):
            replica.say(wire.Chunk(**about, seq=seq, modality="text", text=text[begin : begin + 4], token_ids=(7,)))
        if ended:
            replica.done(submit, -(-len(text) // 4))
        ended.append(submit)

    ask = {"model": "thinker", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "stream": True}
    monkeypatch.setattr(reading, "MOST_S", 0.0)
    async with serving(frontend, call_for_ever) as (client, replica):
        answer = await client.post("/v1/chat/completions", json=ask)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert "too long to be read for tool calls" in events[-1]["error"]["message"]
        assert events[-1]["error"]["code"] == 400
        await until(lambda: bool(replica.of(wire.Abort)))
        monkeypatch.setattr(reading, "MOST_S", 60.0)
        again = await client.post("/v1/chat/completions", json=ask)
    assert "error" not in again.text
    assert '"finish_reason":"tool_calls"' in again.text


#: What a custom tool is given, with all that JSON escapes.
GIVEN = "\"\N{GRINNING FACE}' \\ \n" * 20


def call_custom(replica: FakeReplica, submit: wire.Submit) -> None:
    """Three characters at a time, with the ends of escapes in other pieces than their begins."""
    text = "<tool_call>\n" + json.dumps({"name": "t", "arguments": {"input": GIVEN}}) + "\n</tool_call>"
    about = replica._about(submit)
    replica.accept(submit)
    for seq, begin in enumerate(range(0, len(text), 3)):
        replica.say(wire.Chunk(**about, seq=seq, modality="text", text=text[begin : begin + 3], token_ids=(7,)))
    replica.done(submit, -(-len(text) // 3))


async def test_what_a_custom_tool_is_given_comes_piece_by_piece(reading_calls: Any) -> None:
    from vllm.entrypoints.openai.responses import streaming_events

    ask = {"model": "thinker", "input": "a", "stream": True, "tools": [{"type": "custom", "name": "t"}]}
    async with serving(reading_calls, call_custom) as (client, _):
        answer = await client.post("/v1/responses", json=ask)
    assert hasattr(streaming_events.decode_custom_tool_input_prefix, "omni_wraps")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    pieces = [each["delta"] for each in events if each["type"] == "response.custom_tool_call_input.delta"]
    assert len(pieces) > 10
    assert "".join(pieces) == GIVEN


@pytest.mark.attack("Z24")
async def test_what_a_custom_tool_is_given_is_not_decoded_character_by_character_for_each_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. only pieces that end within an escape are left to vLLM, which takes 5 to 80 ms for 64 KB, once for each
    2. all texts that come of them go on the one before
    3. what never is a text takes its time, and no more than that of one answer
    """
    import partial_json_parser
    from vllm.entrypoints.openai.responses import streaming_events
    from vllm.exceptions import VLLMError

    from hub.api.vllm.bounds import reading
    from hub.api.vllm.bounds.body import Body

    async def receive() -> Any:
        return {"type": "http.request"}

    reading.bound_custom_calls()
    Body({"type": "http", "headers": []}, receive).enter()
    asked, real = list[str](), partial_json_parser.loads
    monkeypatch.setattr(partial_json_parser, "loads", lambda text, *more: asked.append(text) or real(text, *more))
    whole = json.dumps({"input": GIVEN})
    texts = [streaming_events.decode_custom_tool_input_prefix(whole[:end]) for end in range(len(whole) + 1)]
    assert all(text.startswith(before) for before, text in pairwise(texts))
    assert texts[-1] == GIVEN
    within = asked[len('{"input": "') : -2]
    assert all(re.search(r"\\(u\w{0,4})?$", text) for text in within)
    assert streaming_events.decode_custom_tool_input_prefix('{"input": ' + "[" * 100_000) == ""
    monkeypatch.setattr(reading, "MOST_S", 0.0)
    with pytest.raises(VLLMError, match="too long to be read for tool calls"):
        streaming_events.decode_custom_tool_input_prefix('{"input": "' + '\n\\"' * 1000)


#: A parser of vLLM's searches it for the end of a call in the square of its length: for about a minute.
CALLS_WITHOUT_END = "functools[" * 40_000


def call_without_end(replica: FakeReplica, submit: wire.Submit) -> None:
    about = replica._about(submit)
    replica.accept(submit)
    replica.say(wire.Chunk(**about, seq=0, modality="text", text=CALLS_WITHOUT_END, token_ids=(7,)))
    replica.done(submit, 1)


@pytest.mark.attack("X1")
async def test_a_whole_answer_that_takes_a_minute_to_be_read_for_calls_is_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After a second at most: all other clients wait meanwhile."""
    with as_the_supervisor_has_it():
        from hub.api.vllm.server import VllmFrontend

        frontend = VllmFrontend(DEPLOY, "--enable-auto-tool-choice --tool-call-parser phi4_mini_json")
    ask = {"model": "thinker", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    async with serving(frontend, call_without_end) as (client, _):
        began_s = time.thread_time()
        answer = await client.post("/v1/chat/completions", json=ask, timeout=120)
        assert time.thread_time() - began_s < 10
    said = answer.json()["choices"][0]["message"]
    assert (said["content"], said.get("tool_calls") or []) == (CALLS_WITHOUT_END, [])
    assert "api.calls_not_read" in caplog.text


@pytest.mark.attack("Q64")
@pytest.mark.parametrize("is_paced", [True, False])
def test_pieces_of_an_answer_with_tools_go_on_together_with_all_that_is_in_them(is_paced: bool) -> None:
    """Tokens and their log probabilities, too; without a pace each piece goes on as it comes."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from hub.api.vllm.client import _Answer
    from hub.request.outputs import OmniOutput

    asked = SamplingParams(logprobs=0, output_kind=RequestOutputKind.DELTA)
    answer = _Answer("r", "a", [1], asked, is_paced=is_paced)
    shown = []
    for number in range(20_000):
        place = wire.TokenLogprob(number, -1.0, 1, "abc")
        end = "stop" if number == 19_999 else None
        output = OmniOutput("r", 0, "text", "abc", token_ids=(number,), logprobs=((place,),), finish_reason=end)
        if (each := answer.add(0, output)) is not None:
            shown.append(each.outputs[0])
    assert "".join(each.text for each in shown) == "abc" * 20_000
    assert [token for each in shown for token in each.token_ids] == list(range(20_000))
    assert [next(iter(place)) for each in shown for place in each.logprobs] == list(range(20_000))
    assert (shown[-1].finish_reason, len(shown) < 1600) == ("stop", is_paced)


@pytest.mark.attack("Y9")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_beam_search_that_may_keep_too_many_tokens_is_refused(
    frontend: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each beam that has ended it keeps all tokens to the end, the prompt's among them."""
    monkeypatch.setattr("hub.api.vllm.bounds.beams.MAX_BEAM_TOKENS", 40)
    asked = {"model": "thinker", "use_beam_search": True, "n": 2, "ignore_eos": True}
    asked |= {"prompt": "1"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "1"}]}
    async with serving(frontend, speak_likely) as (client, _):
        refused = await client.post(path, json={**asked, "max_tokens": 12})
        taken = await client.post("/v1/completions", json={**asked, "prompt": "1", "messages": None, "max_tokens": 1})
    assert (refused.status_code, "use_beam_search: 2 beams of" in refused.text) == (400, True), refused.text
    assert taken.status_code == 200, taken.text
