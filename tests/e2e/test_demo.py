"""``omni demo`` as a user sees it, on a real vLLM: run once, then kept serving for the questions of this file."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import httpx
import openai
import pytest
from PIL import Image

from stage_runtime.demo.processes import alive
from tests.support.hub import Hub
from tests.support.processes import Child, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]


class Demo(Hub):
    """A demo that was told to keep serving."""

    def __init__(self, folder: object) -> None:
        self.folder = folder  # type: ignore[assignment]
        self.namespace = "demo"
        Child.__init__(self, ["demo", "--keep", "--requests", "20", "--output", "out"], self.folder, "demo")

    def _listening(self) -> str | None:
        self.must_run()
        found = re.search(r"ready after .* at (http://\S+)", self.text)
        return found.group(1) if found and "serving until Ctrl-C" in self.text else None


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    running = Demo(tmp_path_factory.mktemp("demo"))
    try:
        yield running.wait_ready(400)
    finally:
        left = running.stop(signal.SIGINT)
    assert not left, running.text[-3000:]
    assert running.process.returncode == 130
    assert "no process is left" in running.text


@pytest.fixture
def client(demo: Demo) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_it_shows_answers_survives_kills_and_leaves_a_picture_and_figures(demo: Demo) -> None:
    for said in ("3 + 4 = 7", "17 - 9 = 8", "26 + 48 = 74", "I can only do sums from 0 to 99.", "answer.png"):
        assert said in demo.text
    assert len(re.findall(r"killed replica \d/\d .* with SIGKILL", demo.text)) == 2
    assert "9 + 9 = 18" in demo.text
    assert f"curl -s {demo.url}/v1/chat/completions" in demo.text
    assert "get --prefix /omni/v1/" in demo.text
    with Image.open(demo.folder / "out" / "answer.png") as picture:
        assert picture.width > picture.height > 50
    numbers = json.loads((demo.folder / "out" / "numbers.json").read_text())
    assert numbers["requests"] == 20
    assert numbers["processes"] >= 8


def test_each_line_that_it_prints_to_try_next_works_when_it_is_pasted(demo: Demo) -> None:
    printed = demo.text.split("try in another terminal:")[1]
    curl, etcdctl, watch = re.findall(r"^(?:curl|ETCDCTL|\S*omni ).*(?:\n  -d .*)?", printed, re.MULTILINE)
    shell = {**os.environ, "XDG_RUNTIME_DIR": str(demo.folder)}

    def paste(line: str) -> str:
        return subprocess.run(
            ["bash", "-c", line], check=True, capture_output=True, timeout=60, env=shell
        ).stdout.decode()

    assert "26 + 48 = 74" in paste(curl)
    assert "/omni/v1/demo/replicas/" in paste(etcdctl)
    assert "namespace demo · " in paste(watch.removesuffix(" --watch"))


def test_the_link_that_it_prints_opens_a_dashboard_that_kills_a_replica_and_the_answer_goes_on(demo: Demo) -> None:
    found = re.search(r"(http://127\.0\.0\.1:\d+/dashboard/)#token=([^&\s]+)&ask=(\S+)", demo.text)
    assert found is not None, demo.text
    url, token, question = found.groups()
    assert unquote(question) == "what is 26 + 48?"
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=120) as http:

        def replicas() -> dict[str, Any]:
            with http.stream("GET", "live") as answer:
                line = next(line for line in answer.iter_lines() if line.startswith("data: "))
            stages = json.loads(line[6:])["stages"]
            return {each["name"]: each for stage in stages for each in stage["replicas"] if each["state"] == "up"}

        assert http.get("session").json()["can_kill"] is True
        before = replicas()
        body = {"messages": [{"role": "user", "content": "26 plus 48"}], "modalities": ["text"], "stream": True}
        text, victim = "", {}
        with http.stream("POST", "try/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if not victim:
                    victim = before[answer.headers["x-omni-replicas"].split(",")[0]]
                    place = f"replicas/{victim['stage_id']}/{victim['replica_id']}/kill"
                    killed = httpx.post(url + place, json={"epoch": victim["epoch"]}, headers=http.headers, timeout=60)
                    assert killed.json()["done"].endswith("with SIGKILL"), killed.text
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
        assert text == "26 + 48 = 74"
        wait_for("its end", lambda: not alive([victim["pid"]]))
        wait_for("another in its place", lambda: len(replicas()) == 4, 200)
        stranger = http.post("replicas/0/0/kill", json={"epoch": 1})
        assert stranger.status_code in (404, 409)
    with httpx.Client(base_url=url, timeout=30) as nobody:
        assert nobody.get("live").status_code == 401


def test_the_official_client_gets_the_answer_and_its_picture(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="omni-demo",
        messages=[{"role": "user", "content": "What is twenty-three plus 19?"}],
        seed=5,
        extra_body={"modalities": ["text", "image"]},
    )
    text, image = answer.choices
    assert text.message.content == "23 + 19 = 42"
    url = image.message.content[0]["image_url"]["url"]
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as picture:
        assert picture.format == "PNG"
        assert picture.width > picture.height, "two digits stand side by side"


def test_the_official_client_gets_log_probabilities_of_the_model(client: openai.OpenAI) -> None:
    """Whole and streamed, as chats and as completions have them; of prompts in tokens, too."""
    asked: Any = {"model": "omni-demo", "messages": [{"role": "user", "content": "one plus two"}], "seed": 5}
    asked |= {"modalities": ["text"], "logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 0}
    for choice in client.chat.completions.create(**asked).choices:
        assert choice.message.content == "1 + 2 = 3"
        places = choice.logprobs.content
        # Special tokens are in none of the words.
        assert "".join(place.token for place in places).startswith(choice.message.content)
        for place in places:
            # What is drawn at temperature 0 is the likeliest.
            assert place.top_logprobs[0].logprob == place.logprob <= 0
            assert len(place.top_logprobs) == 2
    chunks = [chunk for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    streamed = [
        place
        for chunk in chunks
        if chunk.choices[0].index == 1 and chunk.choices[0].logprobs
        for place in chunk.choices[0].logprobs.content
    ]
    assert [place.token for place in streamed] == [place.token for place in places]
    made = client.completions.create(model="omni-demo", prompt=[1, 2, 3], logprobs=1, max_tokens=3, temperature=0)
    (completion,) = made.choices
    assert len(completion.logprobs.tokens) == made.usage.completion_tokens
    assert made.usage.prompt_tokens == 3
    assert [max(each.values()) for each in completion.logprobs.top_logprobs] == completion.logprobs.token_logprobs


def test_vllms_own_fields_reach_the_model_and_are_checked_there(client: openai.OpenAI) -> None:
    asked: Any = {"model": "omni-demo", "prompt": "one plus two", "max_tokens": 20}
    long = client.completions.create(**asked, extra_body={"ignore_eos": True, "min_p": 0.1, "repetition_penalty": 1.1})
    assert long.usage.completion_tokens == 20
    with pytest.raises(openai.BadRequestError, match="bad_words"):
        client.completions.create(**asked, extra_body={"bad_words": ["x" * 300]})


def test_the_official_client_gets_pictures_alone(client: openai.OpenAI) -> None:
    answer = client.images.generate(prompt="What is twenty-three plus 19?", n=2, extra_body={"seed": 5})
    files = [base64.b64decode(each.b64_json) for each in answer.data]
    sizes = set()
    for file in files:
        with Image.open(io.BytesIO(file)) as picture:
            sizes.add(f"{picture.width}x{picture.height}")
    assert len(set(files)) == 2, "each has a seed of its own"
    assert sizes == {answer.size}
    with pytest.raises(openai.UnprocessableEntityError, match="nothing was drawn"):
        client.images.generate(prompt="who won the election?")


def test_what_is_no_sum_gets_words_and_no_picture(demo: Demo) -> None:
    status, body = demo.ask("who won the election?", modalities=["text", "image"])
    assert status == 200
    assert [choice["message"]["content"] for choice in body["choices"]] == ["I can only do sums from 0 to 99."]
    status, body = demo.ask("who won the election?", modalities=["image"])
    assert status == 200
    assert body["choices"][0]["message"]["content"] is None
    assert body["choices"][0]["message"]["refusal"]


def test_the_same_seed_draws_the_same_and_another_seed_another_picture(demo: Demo) -> None:
    def draw(seed: int) -> str:
        status, body = demo.ask("draw a 3", modalities=["image"], seed=seed)
        assert status == 200, body
        return str(body["choices"][0]["message"]["content"][0]["image_url"]["url"])

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(demo: Demo) -> None:
    status, body = demo.ask("one plus two " * 400)
    assert status == 400
    assert "256" in body["error"]["message"]
    assert demo.ask("one plus two", modalities=["text"])[1]["choices"][0]["message"]["content"] == "1 + 2 = 3"


@pytest.mark.parametrize(
    ("params", "said"),
    [([{"tempurature": 1}], "tempurature"), ([{}, {"steps": 0}], "steps"), ([{"max_tokens": "many"}], "max_tokens")],
)
def test_wrong_parameters_of_a_stage_are_refused_by_name(demo: Demo, params: list[object], said: str) -> None:
    status, body = demo.ask("1 + 1", modalities=["text", "image"], sampling_params_list=params)
    assert status == 400, body
    assert said in body["error"]["message"]


def test_omni_replicas_finds_the_demo_by_itself(demo: Demo) -> None:
    wait_for("four replicas", lambda: len([r for r in demo.replicas() if r["status"] == "up"]) == 4, 60)
    assert {replica["model"].rsplit("/", 1)[-1] for replica in demo.replicas()} == {"thinker", "painter"}
