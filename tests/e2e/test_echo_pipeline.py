"""The whole product from the front door, with the echo engine: HTTP, hub, etcd, ZMQ, replicas, shared memory."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.sync.client import connect

from omni_discovery.etcd.embedded import find_binary
from tests.support.hub import ECHO_PAIR, Hub
from tests.support.processes import Child, wait_for

pytestmark = pytest.mark.e2e

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    running = Hub.of_yaml(tmp_path_factory.mktemp("echo"), ECHO_PAIR)
    try:
        yield running.wait_ready()
    finally:
        left = running.stop()
    assert not left, running.text[-3000:]


@pytest.fixture
def client(hub: Hub) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hub.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_both_final_outputs_come_back_as_one_choice_each(hub: Hub) -> None:
    status, body = hub.ask("red green blue", modalities=["text", "image"])
    assert status == 200, body
    text, image = body["choices"]
    assert text["message"]["content"] == "red green blue"
    (part,) = image["message"]["content"]
    assert part["type"] == "image_url"
    assert base64.b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,")).startswith(PNG)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 3


def test_input_in_segments_is_answered_segment_by_segment(hub: Hub) -> None:
    """Over the WebSocket: both stages answer each segment, from the same replicas, and pictures differ as words do."""
    with connect(f"{hub.url.replace('http', 'ws', 1)}/v1/stream") as client:
        frames: list[dict[str, Any]] = []
        for number, prompt in enumerate(("red", "green blue", "red")):
            client.send(json.dumps({"type": "segment", "prompt": prompt, "last": number == 2}))
            while sum(frame["type"] == "segment_end" for frame in frames) < 2 * (number + 1):
                frames.append(json.loads(client.recv(30)))
        while frames[-1]["type"] != "done":
            frames.append(json.loads(client.recv(30)))
    assert sum(frame["type"] == "stage_end" for frame in frames) == 2
    texts = ["".join(each.get("text", "") for each in frames if each.get("segment") == number) for number in range(3)]
    assert texts == ["red", "green blue", "red"]
    pictures = {frame["segment"]: frame["data"] for frame in frames if "data" in frame}
    assert pictures[0] == pictures[2] != pictures[1]


def test_a_companion_runs_with_the_request_and_changes_the_picture(hub: Hub) -> None:
    pictures = set()
    for companions in ({}, {"negative": "blurry"}, {"negative": "grey"}):
        status, body = hub.ask("red green blue", modalities=["image"], companions=companions)
        assert status == 200, body
        pictures.add(body["choices"][0]["message"]["content"][0]["image_url"]["url"])
    assert len(pictures) == 3
    status, body = hub.ask("x", modalities=["text"], companions={"negative": "blurry"})
    assert (status, "nothing comes after stage 0" in body["error"]["message"]) == (400, True)


def test_text_alone_never_reaches_the_second_stage(hub: Hub) -> None:
    status, body = hub.ask("just words", modalities=["text"])
    assert status == 200
    assert [choice["message"]["content"] for choice in body["choices"]] == ["just words"]


def test_the_official_client_reads_whole_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo-pair",
        messages=[{"role": "user", "content": "one two"}],
        extra_body={"modalities": ["text", "image"]},
    )
    assert answer.choices[0].message.content == "one two"
    assert len(answer.choices) == 2
    assert answer.choices[0].finish_reason == "stop"


def test_the_official_client_reads_streams_and_tells_the_modalities_apart(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="echo-pair",
        messages=[{"role": "user", "content": "one two three"}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"modalities": ["text", "image"]},
    )
    chunks = list(stream)
    content = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    words = [chunk.choices[0].delta.content for chunk in content if chunk.model_extra["modality"] == "text"]
    assert "".join(words) == "one two three"
    assert len(words) == 3
    assert sum(chunk.model_extra["modality"] == "image" for chunk in content) == 1
    assert chunks[-1].usage.completion_tokens == 3


def test_models_and_health_and_metrics_answer(hub: Hub, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo-pair"]
    assert hub.get("/health")[0] == 200
    assert "omni_" in hub.get("/metrics")[1]


def test_many_requests_at_once_all_get_their_own_answer(hub: Hub) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda index: hub.ask(f"number {index}", modalities=["text"]), range(64)))
    texts = [body["choices"][0]["message"]["content"] for status, body in answers if status == 200]
    assert texts == [f"number {index}" for index in range(64)]


def test_omni_replicas_shows_the_table(hub: Hub) -> None:
    table = Child(["replicas", "--namespace", hub.namespace], hub.folder, "table")
    assert table.process.wait(30) == 0
    assert table.text.count("up") >= 4
    assert "namespace test" in table.text


def test_etcdctl_shows_readable_json_under_leases(hub: Hub) -> None:
    etcdctl = find_binary(None).with_name("etcdctl")
    printed = subprocess.run(
        [etcdctl, "--endpoints", hub.endpoint, "get", "--prefix", "/omni/v1/test/replicas/"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert printed[0::2] == [f"/omni/v1/test/replicas/{stage}/{replica}" for stage in (0, 1) for replica in (0, 1)]
    for line in printed[1::2]:
        record = json.loads(line)
        assert record["status"] == "up"
        assert record["input_addr"].startswith("tcp://127.0.0.1:")
        assert "secret" not in line


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        ({"messages": []}, 400, "'messages' is empty"),
        ({"messages": [{"role": "user", "content": "  "}]}, 400, "empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "role"),
        ({"messages": [{"role": "user", "content": "x"}], "modalities": ["smell"]}, 400, "smell"),
        ({"messages": [{"role": "user", "content": "x"}], "model": "other"}, 404, "echo-pair"),
        ({"messages": [{"role": "user", "content": "x"}], "temprature": 1}, 400, "temprature"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 17}, 400, "$.n"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, 400, "tools"),
        ({"messages": [{"role": "user", "content": "x" * 10_000_000}]}, 413, "send less"),
        ({"messages": [{"role": "user", "content": "x"}], "sampling_params_list": [{}, {}, {}]}, 400, "stages"),
    ],
)
def test_bad_requests_get_an_openai_error_and_the_hub_lives_on(hub: Hub, body: object, status: int, said: str) -> None:
    found, answer = hub.post(body)
    assert found == status, answer
    assert said in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert hub.ask("still here")[0] == 200


def test_an_unknown_path_is_told_in_the_same_shape(hub: Hub) -> None:
    status, answer = hub.post({}, "/v1/nonsense")
    assert status == 404
    assert "/v1/nonsense" in answer["error"]["message"]


def test_the_death_of_one_replica_of_each_stage_is_not_noticed_by_clients(hub: Hub) -> None:
    """1. 40 requests run, 8 at a time
    2. after the tenth, one replica of each stage is killed with SIGKILL
    3. every request is answered rightly
    4. the supervisors bring both back
    """
    before = hub.replicas()
    victims = [next(each for each in before if each["stage_id"] == stage)["pid"] for stage in (0, 1)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(hub.ask, f"question {index}") for index in range(40)]
        concurrent.futures.wait(asked[:10])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        answers = [future.result() for future in asked]
    assert [status for status, _ in answers] == [200] * 40
    assert [body["choices"][0]["message"]["content"] for _, body in answers] == [f"question {n}" for n in range(40)]

    def healed() -> bool:
        up = [each for each in hub.replicas() if each["status"] == "up"]
        return len(up) == 4 and not {each["pid"] for each in up} & set(victims)

    wait_for("both to be back", healed, 40)


def test_a_stopped_hub_leaves_no_process_and_no_record(tmp_path: Path) -> None:
    running = Hub.of_yaml(tmp_path, ECHO_PAIR).wait_ready()
    assert len(running.tree()) >= 6
    assert running.stop(signal.SIGINT) == []
    assert running.process.returncode == 0, running.text[-2000:]


def test_a_killed_hub_takes_everything_with_it(tmp_path: Path) -> None:
    """kill -9 of the hub: nobody is left to clean up, so the kernel must."""
    running = Hub.of_yaml(tmp_path, ECHO_PAIR).wait_ready()
    assert running.stop(signal.SIGKILL) == []
