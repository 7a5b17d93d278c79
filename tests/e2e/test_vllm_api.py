"""``omni serve --api vllm`` as a user sees it: vLLM's own OpenAI server in front of one vLLM stage."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.engines import DEMO
from tests.support.hub import Hub
from tests.support.processes import Child, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

THINKER = f"""
model: omni-demo
stages:
  - stage_id: 0
    engine: vllm
    model: {DEMO / "thinker"}
    engine_args:
      dtype: float32
      max_model_len: 256
      max_num_seqs: 8
      kv_cache_memory_bytes: 33554432
      enforce_eager: true
      structured_outputs_config: {{backend: xgrammar, disable_any_whitespace: true}}
    default_sampling_params: {{temperature: 0.0, max_tokens: 2}}
    final_output: text
"""
API = ["--api", "vllm", "--api-args", "--enable-auto-tool-choice --tool-call-parser hermes"]
SUM = [{"role": "user", "content": "What is 3 + 4?"}]
ADD = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "strict": True, "parameters": ADD}}
#: Space, tab and line ends of the thinker's vocabulary, which it likes too well where a grammar allows them.
WHITE = {str(token_id): -100 for token_id in (211, 212, 215, 234)}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    running = Hub.of_yaml(tmp_path_factory.mktemp("vllm-api"), THINKER, *API)
    try:
        yield running.wait_ready(200)
    finally:
        left = running.stop()
    assert not left, running.text[-3000:]
    assert running.process.returncode == 0, running.text[-3000:]


@pytest.fixture
def client(hub: Hub) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hub.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_chat_is_answered_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    """The document's temperature is the default; its max_tokens is not, as vLLM's server has no such default."""
    whole = client.chat.completions.create(model="omni-demo", messages=SUM)
    assert whole.choices[0].message.content == "3 + 4 = 7"
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="omni-demo", messages=SUM, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(texts) == "3 + 4 = 7"
    assert len(texts) > 1
    assert chunks[-1].usage == whole.usage.model_copy(update={"prompt_tokens_details": None})


def test_what_was_likely_is_told_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    """The answer is certain to the model, so that what was taken is what was likeliest."""
    asked = {"model": "omni-demo", "messages": SUM, "logprobs": True, "top_logprobs": 2}
    content = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert "".join(each.token for each in content).startswith("3 + 4 = 7")
    assert all(each.logprob <= 0 and each.top_logprobs[0].token == each.token for each in content)
    assert {len(each.top_logprobs) for each in content} == {2}
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    streamed = [each for choice in chunks if choice.logprobs for each in choice.logprobs.content]
    assert [(each.token, each.logprob) for each in streamed] == [
        (each.token, pytest.approx(each.logprob, abs=1e-3)) for each in content
    ]
    beams = client.completions.create(
        model="omni-demo", prompt="What is 3 + 4?<|answer|>", n=2, max_tokens=5, extra_body={"use_beam_search": True}
    )
    assert beams.choices[0].text.startswith("3 + 4")


def test_completions_take_text_and_tokens_and_give_several_answers(client: openai.OpenAI) -> None:
    asked = {"model": "omni-demo", "prompt": "What is 3 + 4?<|answer|>", "temperature": 0.01}
    answers = client.completions.create(**asked, n=3)
    assert [(choice.index, choice.text) for choice in answers.choices] == [(n, "3 + 4 = 7") for n in range(3)]
    assert client.completions.create(**asked, stop=["="]).choices[0].text == "3 + 4 "
    cut = client.completions.create(**asked, max_tokens=2).choices[0]
    assert (cut.text, cut.finish_reason) == ("3 + ", "length")


def test_a_prompt_is_rated_token_by_token(client: openai.OpenAI) -> None:
    """What a user of an evaluation asks for: a text with the likelihood of each of its tokens, and no answer.

    1. the sum that the model knows is likelier than a wrong one
    2. it is rated again, when the replica's cache holds it, and streamed: to the same
    """
    asked = {"model": "omni-demo", "max_tokens": 0, "echo": True, "logprobs": 1}
    # "what is 3 + 4?<|answer|>3 + 4 = 7", and 8; the same text by itself would begin with a space.
    prompts = [[329, 313, 234, 32, 296, 33, 44, 2, 32, 296, 33, 277, last] for last in (36, 37)]
    right, wrong = client.completions.create(**asked, prompt=prompts).choices
    assert right.text.endswith("3 + 4 = 7")
    rated = right.logprobs.token_logprobs
    assert (len(rated), rated[0]) == (13, None)
    assert rated[-1] > -0.1 > -1 > wrong.logprobs.token_logprobs[-1]
    chunks = list(client.completions.create(**asked, prompt=prompts[0], stream=True))
    streamed = [each for chunk in chunks for choice in chunk.choices for each in choice.logprobs.token_logprobs]
    assert streamed[1:13] == pytest.approx(rated[1:], abs=1e-3)


def test_an_answer_keeps_to_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="omni-demo", messages=SUM, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert choice.choices[0].message.content in ("yes", "no")
    schema = {"type": "json_schema", "json_schema": {"name": "add", "schema": ADD, "strict": True}}
    answer = client.chat.completions.create(model="omni-demo", messages=SUM, response_format=schema)
    assert json.loads(answer.choices[0].message.content)["a"] in (1, 2)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_tool_is_called(client: openai.OpenAI, choice: object) -> None:
    answer = client.chat.completions.create(
        model="omni-demo", messages=SUM, tools=[TOOL], tool_choice=choice, logit_bias=WHITE
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments)["a"] in (1, 2)


def test_a_tool_call_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="omni-demo", messages=SUM, tools=[TOOL], tool_choice="required", logit_bias=WHITE, stream=True
    )
    calls = [call for chunk in stream if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "add"
    assert json.loads("".join(call.function.arguments or "" for call in calls))["a"] in (1, 2)


def test_the_responses_endpoint_answers_too(client: openai.OpenAI) -> None:
    assert client.responses.create(model="omni-demo", input="What is 3 + 4?").output_text == "3 + 4 = 7"


def test_models_health_readiness_and_figures(hub: Hub, client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.model_extra["max_model_len"]) == ("omni-demo", 256)
    assert hub.get("/health")[0] == 200
    assert json.loads(hub.get("/ready")[1])["stages"]["0"]["pickable"] == 1
    assert "omni_hub_requests_total" in hub.get("/metrics")[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"prompt_logprobs": 21}, 400, "prompt"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "logprobs"),
        ({"logprob_token_ids": [5]}, 400, "logprob_token_ids"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "1 + 1 " * 500}]}, 400, "256"),
        ({"model": "another"}, 404, "another"),
    ],
)
def test_what_cant_be_asked_is_refused(
    hub: Hub, stream: bool, fields: dict[str, object], status: int, said: str
) -> None:
    found, body = hub.post({"model": "omni-demo", "messages": SUM, "stream": stream, **fields})
    assert found == status, body
    assert said in body["error"]["message"]
    assert hub.ask("1 + 1", model="omni-demo")[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cant_be_read_is_refused_by_the_replica(hub: Hub, client: openai.OpenAI, stream: bool) -> None:
    """The hub compiles none, so a stream has begun already, and ends with the error."""
    with pytest.raises(openai.APIError, match="regex") as caught:
        list(
            client.chat.completions.create(
                model="omni-demo", messages=SUM, stream=stream, extra_body={"structured_outputs": {"regex": "("}}
            )
        )
    assert str(caught.value.code) == "400"
    assert hub.ask("1 + 1", model="omni-demo")[0] == 200


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stop": [str(number) for number in range(17)]}, "stop"),
        ({"vllm_xargs": {"kv_transfer_params": "mine"}}, "extra_args.kv_transfer_params"),
    ],
)
def test_what_only_the_stage_refuses_is_told_by_name(hub: Hub, fields: dict[str, object], said: str) -> None:
    """vLLM itself has no bound on how many texts may stop an answer, nor on what a client says of KV; a stage has."""
    found, body = hub.post({"model": "omni-demo", "messages": SUM, **fields})
    assert found == 400, body
    assert said in body["error"]["message"]


def nested_schema(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["a", "b"]}
    return schema


BOMBS = {
    "repetitions of repetitions": {"regex": "((([a-z]{1,30}){1,30}){1,30}){1,30}"},
    "a choice of everything": {"choice": ["a" * (number + 1) for number in range(300)]},
    "a schema that holds itself": {
        "json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}}
    },
    "a schema of 2^9 parts": {"json": nested_schema(9)},
    "a grammar that begins with itself": {"grammar": 'root ::= root root | "a"'},
}


@pytest.mark.attack("C24")
@pytest.mark.parametrize("name", BOMBS)
def test_a_form_that_is_hard_to_read_holds_nobody_up_for_long(hub: Hub, name: str) -> None:
    """Answered or refused, and others are answered behind it."""
    asked = {"model": "omni-demo", "messages": SUM, "structured_outputs": BOMBS[name], "max_tokens": 8, "timeout": 50}
    status, body = hub.post(asked)
    # 422: the stage found out only as it ran.
    assert status in {200, 400, 422}, body
    assert hub.ask("1 + 1", model="omni-demo", max_tokens=4)[0] == 200


def test_a_client_that_leaves_ends_its_request(hub: Hub) -> None:
    """Eight long answers are under way when the connection closes: none of them goes on."""

    def cancelled() -> int:
        lines = hub.get("/metrics")[1].splitlines()
        line = next((line for line in lines if line.startswith('omni_hub_requests_total{outcome="cancelled"}')), "x 0")
        return int(float(line.split()[1]))

    before = cancelled()
    asked = {"model": "omni-demo", "messages": SUM, "stream": True, "n": 8, "temperature": 1, "ignore_eos": True}
    request = urllib.request.Request(
        f"{hub.url}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.readline().startswith(b"data: ")
    wait_for("all eight to be cancelled", lambda: cancelled() == before + 8)
    wait_for("nothing to be in flight", lambda: "omni_hub_requests_in_flight 0.0" in hub.get("/metrics")[1])


def test_a_flag_that_would_have_no_effect_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "deploy.yaml").write_text(THINKER)
    child = Child(
        ["serve", "--deploy-config", "deploy.yaml", "--api", "vllm", "--api-args=--max-model-len 64"], tmp_path
    )
    assert child.process.wait(120) == 2, child.text
    assert "--max-model-len is the engine's" in child.text.splitlines()[-1]


def test_two_servers_behind_one_port_answer_alike(tmp_path: Path) -> None:
    """1. thirty connections, whole and streamed: each server answers some, all right
    2. any scrape has the counts of both; one that is killed comes back, and both stop with nothing left
    """
    hub = Hub.of_yaml(tmp_path, THINKER, *API, "--api-server-count", "2")
    try:
        wait_for("both servers", lambda: "api_server.ready" in hub.text and "hub.ready" in hub.text, 300.0)
        hub.wait_ready(200)
        ask_in_turns(hub, 30)
        served = served_by(hub)
        assert sum(served.values()) == 30
        assert set(served) == {"0", "1"}, "both answer"
        (pid,) = re.findall(r"api_server\.ready number=1 pid=(\d+)", hub.text)
        os.kill(int(pid), signal.SIGKILL)
        wait_for("it to come back", lambda: hub.text.count("api_server.ready number=1") == 2, 300.0)
        ask_in_turns(hub, 10)
    finally:
        left = hub.stop()
    assert not left, hub.text[-3000:]
    assert hub.process.returncode == 0, hub.text[-3000:]


def ask_in_turns(hub: Hub, times: int) -> None:
    """Whole and streamed answers, each by a new connection."""
    for number in range(times):
        with openai.OpenAI(base_url=f"{hub.url}/v1", api_key="none", max_retries=0) as client:
            if number % 2:
                chunks = list(client.chat.completions.create(model="omni-demo", messages=SUM, stream=True))
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            else:
                text = client.chat.completions.create(model="omni-demo", messages=SUM).choices[0].message.content
        assert text == "3 + 4 = 7"


def served_by(hub: Hub) -> dict[str, float]:
    """Requests that ended well, by server, as one scrape has it."""
    found = re.findall(r'^omni_hub_requests_total\{outcome="ok",server="(\d)"\} (\S+)$', hub.get("/metrics")[1], re.M)
    return {server: float(count) for server, count in found}
