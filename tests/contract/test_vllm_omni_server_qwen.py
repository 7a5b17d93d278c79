"""vLLM-Omni's own server over a hub and scripted replicas, in front of a model that listens, looks, writes and speaks.

Run in the environment that `make omni-test` makes.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import wave
from pathlib import Path
from typing import Any

import msgspec
import pytest

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni has an environment of its own: make omni-test", allow_module_level=True)

from omni_discovery import wire
from omni_discovery.deploy.document import DeployConfig
from tests.contract.test_vllm_omni_server import SAMPLES, decode, serving
from tests.support.engines import as_the_supervisor_has_it
from tests.support.hub_fakes import FakeReplica
from tests.support.omni_media import tone
from tests.support.omni_models import qwen_omni_stages
from tests.support.tiny_qwen_omni import write_qwen2_5_omni

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

TRIO = """
stages:
  - {stage_id: 0, engine: echo, final_output: text}
  - {stage_id: 1, engine: echo}
  - {stage_id: 2, engine: echo, final_output: audio}
"""
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "say hello"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny-omni"
    write_qwen2_5_omni(folder)
    return str(folder)


def frontend_of(model: str, **first_args: Any) -> Any:
    """The server; ``first_args`` are further engine arguments of the first stage."""
    first, *others = qwen_omni_stages(model)
    first = msgspec.structs.replace(first, engine_args={**first.engine_args, **first_args})
    with as_the_supervisor_has_it():
        from hub.api.vllm.omni.server import OmniFrontend

        return OmniFrontend(DeployConfig(stages=(first, *others), model="tiny"), "")


@pytest.fixture(scope="module")
def thinking(model: str) -> Any:
    return frontend_of(model)


def write(replica: FakeReplica, submit: wire.Submit, seq: int, text: str, token_ids: tuple[int, ...]) -> None:
    replica.say(wire.Chunk(**replica._about(submit), seq=seq, modality="text", text=text, token_ids=token_ids))


def think(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    write(replica, submit, 0, "hello ", (104, 105))
    write(replica, submit, 1, "you", (106,))
    replica.done(submit, 2)


def talk(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.done(submit, 0)


def frames_of(sound: str) -> bytes:
    with wave.open(io.BytesIO(base64.b64decode(sound))) as file:
        samples: bytes = file.readframes(file.getnframes())
        return samples


async def test_a_chat_is_answered_with_text_and_sound(thinking: Any) -> None:
    """Whole and streamed; text alone where only that is asked for, and sound alone."""
    async with serving(thinking, think, talk, decode, deploy=TRIO) as (client, (thinker, talker, _), _):
        whole = (await client.post("/v1/chat/completions", json=ASK)).json()
        streamed = await client.post("/v1/chat/completions", json={**ASK, "stream": True})
        before = len(talker.of(wire.Submit))
        text = (await client.post("/v1/chat/completions", json={**ASK, "modalities": ["text"]})).json()
        assert len(talker.of(wire.Submit)) == before
        sound = (await client.post("/v1/chat/completions", json={**ASK, "modalities": ["audio"]})).json()
    messages = [choice["message"] for choice in whole["choices"]]
    assert [each["content"] for each in messages if each.get("content")] == ["hello you"], whole
    assert [frames_of(each["audio"]["data"]) for each in messages if each.get("audio")] == [b"".join(SAMPLES)]
    assert [choice["message"]["content"] for choice in text["choices"]] == ["hello you"], text
    assert text["usage"]["completion_tokens"] == 3
    assert [frames_of(choice["message"]["audio"]["data"]) for choice in sound["choices"]] == [b"".join(SAMPLES)]
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    pieces = [
        (event.get("modality"), event["choices"][0]["delta"].get("content")) for event in events if event["choices"]
    ]
    assert "".join(piece for kind, piece in pieces if kind == "text" and piece) == "hello you", streamed.text[:2000]
    assert b"".join(frames_of(piece) for kind, piece in pieces if kind == "audio" and piece) == b"".join(SAMPLES)
    assert all(set(submit.inputs) == {"prompt_token_ids"} for submit in thinker.of(wire.Submit))


async def test_files_in_a_chat_reach_the_thinker_as_they_came(thinking: Any) -> None:
    """1. beside text, whole and streamed, with what is said of their processing; nothing of them is read in the hub
    2. links are refused, and so is what the server would have to write into the prompt
    """
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(tone(0.1)).decode(), "format": "wav"}}
    messages = [{"role": "user", "content": [sound, {"type": "text", "text": "what is this?"}]}]
    ask = {"model": "tiny", "messages": messages, "modalities": ["text"]}
    link = {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/a.wav"}}
    async with serving(thinking, think, talk, decode, deploy=TRIO) as (client, (thinker, _, _), _):
        heard = await client.post(
            "/v1/chat/completions", json={**ask, "mm_processor_kwargs": {"use_audio_in_video": True}}
        )
        streamed = await client.post("/v1/chat/completions", json={**ask, "stream": True})
        submits = thinker.of(wire.Submit)
        linked = await client.post(
            "/v1/chat/completions", json={**ask, "messages": [{"role": "user", "content": [link]}]}
        )
        with_tools = await client.post(
            "/v1/chat/completions", json={**ask, "tools": [{"type": "function", "function": {"name": "a"}}]}
        )
        elsewhere = await client.post("/v1/chat/completions/batch", json={**ask, "messages": [messages]})
        assert len(thinker.of(wire.Submit)) == len(submits) == 2
    assert heard.json()["choices"][0]["message"]["content"] == "hello you", heard.text
    assert "hello " in streamed.text
    assert submits[0].inputs == {"messages": messages, "mm_processor_kwargs": {"use_audio_in_video": True}}
    assert submits[1].inputs == {"messages": messages}
    assert (linked.status_code, with_tools.status_code) == (400, 501), (linked.text, with_tools.text)
    assert (elsewhere.status_code, "input_audio" in elsewhere.text) == (501, True), elsewhere.text


async def test_links_on_the_operators_list_reach_the_thinker_and_no_others(model: str) -> None:
    """The replica fetches them; the server, which would fetch for itself, sees none of them."""
    linking = frontend_of(model, allowed_media_domains=["media.example.org"], allowed_local_media_path="/srv/media")
    text = {"type": "text", "text": "what is this?"}
    asks = [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": url}}, text]}],
            "modalities": ["text"],
        }
        for url in ("https://media.example.org/a.wav", "file:///srv/media/a.wav", "https://other.example.org/a.wav")
    ]
    async with serving(linking, think, talk, decode, deploy=TRIO) as (client, (thinker, _, _), _):
        answers = [await client.post("/v1/chat/completions", json=each) for each in asks]
        batch = await client.post("/v1/chat/completions/batch", json={**asks[0], "messages": [asks[0]["messages"]]})
        submits = thinker.of(wire.Submit)
    assert [each.status_code for each in answers] == [200, 200, 400], [each.text for each in answers]
    assert "only files of media.example.org are fetched here" in answers[2].text
    assert [each.inputs for each in submits] == [{"messages": each["messages"]} for each in asks[:2]]
    assert batch.status_code == 501, batch.text
