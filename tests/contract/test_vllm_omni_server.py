"""vLLM-Omni's own server over a hub and scripted replicas: what clients see, and what replicas are told.

Run in the environment that `make omni-test` makes, like test_vllm_omni.py beside it.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
import re
import threading
import time
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile, PngInfo

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni has an environment of its own: make omni-test", allow_module_level=True)

from hub.api.door.guard import Door, Locks
from hub.api.door.keys import KeyRing, read_key
from hub.request.outputs import OmniOutput
from omni_discovery import wire
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.errors import ConfigError, EngineFailedError
from tests.support.engines import THINKER, as_the_supervisor_has_it
from tests.support.hub_fakes import FakeReplica, Script, accept_only, running_hub, until
from tests.support.omni_models import omni_stages
from tests.support.tiny_qwen3_tts import write_model

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

#: The same stages for the hub, whose replicas are scripted.
PAIR = "stages: [{stage_id: 0, engine: echo}, {stage_id: 1, engine: echo, final_output: audio}]"
BRUSH = StageConfig(stage_id=0, engine="diffusion", final_output="image")
CHATS = "stages: [{stage_id: 0, engine: echo, final_output: text}]"
#: Processor time of one refused request.
MOST_S = 1.5
PAINTER = "stages: [{stage_id: 0, engine: echo, final_output: image}]"
SPEECH: dict[str, Any] = {"model": "tiny", "input": "hello world", "voice": "ethan", "response_format": "pcm"}
#: Samples at both ends of what 16 bits hold.
SAMPLES = (b"\x01\x00\xff\x7f\x00\x00\x01\x80" * 40, b"\x10\x00\xf0\xff" * 60)


def wav(samples: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(24000)
        writer.writeframes(samples)
    return file.getvalue()


def png(size: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model") / "tiny-tts"
    write_model(folder)
    talker, decoder = omni_stages(str(folder), async_chunk=True)
    with as_the_supervisor_has_it():
        from hub.api.vllm.omni.server import OmniFrontend

        deploy = DeployConfig(stages=(talker, decoder), model="tiny")
        return OmniFrontend(deploy, "--chat-template '{{ messages[-1].content }}'")


@pytest.fixture(scope="module")
def drawing() -> Any:
    with as_the_supervisor_has_it():
        from hub.api.vllm.omni.server import OmniFrontend

        return OmniFrontend(DeployConfig(stages=(BRUSH,), model="brush"), "")


@pytest.fixture(scope="module")
def chatting() -> Any:
    with as_the_supervisor_has_it():
        from hub.api.vllm.omni.server import OmniFrontend

        stage = msgspec.structs.replace(THINKER, final_output="text", default_sampling_params={"max_tokens": 1})
        return OmniFrontend(DeployConfig(stages=(stage,), model="m"), "")


def talk(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.done(submit, 0)


def decode(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    for seq, samples in enumerate(SAMPLES):
        replica.chunk(submit, seq, modality="audio", mime="audio/wav", attachments=[wav(samples)])
    replica.done(submit, len(SAMPLES))


def draw(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.chunk(submit, 0, modality="image", mime="image/png", attachments=[png()])
    replica.done(submit, 1)


@asynccontextmanager
async def serving(
    frontend: Any, *scripts: Any, deploy: str = PAIR
) -> AsyncIterator[tuple[httpx.AsyncClient, list[FakeReplica], Any]]:
    replicas = [FakeReplica(script, stage_id) for stage_id, script in enumerate(scripts)]
    async with running_hub(*replicas, deploy=deploy) as omni:
        app = await frontend.build(omni)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://hub", timeout=60) as client:
            yield client, replicas, omni


async def test_a_speech_is_asked_of_the_talker_and_heard_sample_by_sample(speaking: Any) -> None:
    """1. whole: the talker gets what the server's adapter settled, the defaults stay the document's
    2. streamed, in both of the server's ways: the same samples
    """
    async with serving(speaking, talk, decode) as (client, (talker, _), _):
        whole = await client.post("/v1/audio/speech", json={**SPEECH, "seed": 7, "max_new_tokens": 24})
        raw = await client.post("/v1/audio/speech", json={**SPEECH, "stream_format": "audio"})
        events = await client.post("/v1/audio/speech", json={**SPEECH, "stream": True})
    expected = b"".join(SAMPLES)
    assert (whole.status_code, whole.content) == (200, expected), whole.text[:500]
    assert (raw.status_code, raw.content) == (200, expected), raw.text[:500]
    told = [json.loads(line[6:]) for line in events.text.splitlines() if line.startswith("data: {")]
    heard = b"".join(base64.b64decode(each["audio"]) for each in told if each["type"] == "speech.audio.delta")
    assert heard == expected, events.text[:500]
    assert told[-1]["type"] == "speech.audio.done"
    first = talker.of(wire.Submit)[0]
    information = first.inputs["additional_information"]
    assert information["text"] == ["hello world"]
    assert (information["speaker"], information["task_type"]) == (["ethan"], ["CustomVoice"])
    assert first.params == {"seed": 7, "max_tokens": 24}
    assert talker.of(wire.Submit)[1].params == {}


async def test_a_chat_is_answered_with_sound(speaking: Any) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "say hello"}]}
    async with serving(speaking, talk, decode) as (client, (talker, _), _):
        whole = (await client.post("/v1/chat/completions", json={**ask, "modalities": ["audio"]})).json()
        streamed = await client.post("/v1/chat/completions", json={**ask, "modalities": ["audio"], "stream": True})
        voiced = await client.post("/v1/chat/completions", json={**ask, "voice": "ethan"})
    assert voiced.status_code == 200, voiced.text
    with wave.open(io.BytesIO(base64.b64decode(whole["choices"][0]["message"]["audio"]["data"]))) as file:
        assert file.readframes(file.getnframes()) == b"".join(SAMPLES)
    assert talker.of(wire.Submit)[0].inputs == {"prompt": "say hello"}
    assert talker.of(wire.Submit)[2].inputs == {
        "prompt": "say hello",
        "additional_information": {"speaker": ["ethan"]},
    }
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") for event in events if event["choices"]]
    assert len([piece for piece in pieces if piece]) == len(SAMPLES)


async def test_a_picture_is_drawn_by_the_stage_that_draws(drawing: Any) -> None:
    ask = {"prompt": "a red square", "size": "8x8", "seed": 3, "num_inference_steps": 2, "negative_prompt": "blue"}
    async with serving(drawing, draw, deploy=PAINTER) as (client, (painter,), _):
        answer = await client.post("/v1/images/generations", json=ask)
        several = await client.post("/v1/images/generations", json={**ask, "n": 2})
        edited = await client.post("/v1/images/edits", data={"prompt": "x", "url": "http://127.0.0.1:1/"})
    assert answer.status_code == 200, answer.text
    with Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))) as picture:
        assert picture.getpixel((4, 4)) == (200, 30, 30)
    (submit,) = painter.of(wire.Submit)
    assert submit.inputs == {"prompt": "a red square"}
    drawn = {"seed": 3, "num_inference_steps": 2, "negative_prompt": "blue", "height": 8, "width": 8}
    assert submit.params == drawn
    assert (several.status_code, edited.status_code) == (501, 501)
    assert "one request makes one picture" in several.json()["error"]["message"]


async def test_a_chat_is_answered_with_a_picture(drawing: Any) -> None:
    ask = {"model": "brush", "messages": [{"role": "user", "content": "a red square"}], "modalities": ["image"]}
    async with serving(drawing, draw, deploy=PAINTER) as (client, (painter,), _):
        answer = await client.post("/v1/chat/completions", json={**ask, "seed": 3, "height": 8, "width": 8})
    assert answer.status_code == 200, answer.text
    (part,) = [each for each in answer.json()["choices"][0]["message"]["content"] if each["type"] == "image_url"]
    with Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))) as picture:
        assert picture.getpixel((4, 4)) == (200, 30, 30)
    (submit,) = painter.of(wire.Submit)
    assert submit.inputs == {"prompt": "a red square"}
    assert submit.params == {"seed": 3, "height": 8, "width": 8}


@pytest.mark.attack("M4")
async def test_a_picture_is_put_out_as_it_came_and_in_other_forms_where_asked(drawing: Any) -> None:
    """As a PNG, its file is not packed again: a small file of many pixels would become a large one."""
    async with serving(drawing, draw, deploy=PAINTER) as (client, _, _):
        ask = {"prompt": "a red square"}
        plain = (await client.post("/v1/images/generations", json=ask)).json()
        photo = (await client.post("/v1/images/generations", json={**ask, "output_format": "jpeg"})).json()
    assert base64.b64decode(plain["data"][0]["b64_json"]) == png()
    with Image.open(io.BytesIO(base64.b64decode(photo["data"][0]["b64_json"]))) as picture:
        assert (picture.format, picture.size) == ("JPEG", (8, 8))


def draw_large(*sizes: int) -> Script:
    """Square pictures of these sizes, of one colour: small files."""

    def script(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        for seq, size in enumerate(sizes):
            replica.chunk(submit, seq, modality="image", mime="image/png", attachments=[png(size)])
        replica.done(submit, len(sizes))

    return script


@pytest.mark.attack("M4")
@pytest.mark.parametrize("sizes", [(6000,), (2048,) * 9])
async def test_pictures_count_as_they_are_unpacked(drawing: Any, sizes: tuple[int, ...]) -> None:
    async with serving(drawing, draw_large(*sizes), deploy=PAINTER) as (client, _, _):
        answer = await client.post("/v1/images/generations", json={"prompt": "a red square"})
    assert (answer.status_code, "longer than 128 MiB" in answer.text) == (500, True), answer.text[:500]


@pytest.mark.attack("M4")
async def test_pictures_are_unpacked_beside_the_loop(drawing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def load(picture: Any) -> Any:
        threads.append(threading.current_thread())
        return PngImageFile.load(picture)

    from hub.api.vllm.omni import outputs

    monkeypatch.setattr(outputs._Picture, "load", load)
    async with serving(drawing, draw_large(64, 64), deploy=PAINTER) as (client, _, _):
        answer = await client.post("/v1/images/generations", json={"prompt": "a red square"})
    assert (answer.status_code, len(answer.json()["data"])) == (200, 2), answer.text[:500]
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.attack("M4")
async def test_of_small_pictures_neither_the_number_nor_the_texts_are_free() -> None:
    """A file of 1 KB may have a text of 1 MB, and a replica may send any number of them."""
    from vllm.sampling_params import RequestOutputKind

    from hub.api.vllm.omni.outputs import FinalStage

    file, about = io.BytesIO(), PngInfo()
    about.add_text("note", "x" * 1_000_000, zip=True)
    Image.new("RGB", (1, 1)).save(file, "PNG", pnginfo=about)
    stage = FinalStage("r", RequestOutputKind.FINAL_ONLY, [])
    for _ in range(100):
        assert await stage.add(OmniOutput("r", 0, "image", data=file.getvalue(), mime="image/png")) is None
    made = await stage.add(OmniOutput("r", 0, "image", finish_reason="stop"))
    assert made is not None
    assert len(made.images) == 100
    assert not any(picture.text or picture.info for picture in made.images)
    assert stage._size.size_bytes > 100 * 16 << 10


@pytest.mark.attack("M4")
async def test_a_file_that_is_no_picture_fails_the_request(drawing: Any) -> None:
    def scribble(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.chunk(submit, 0, modality="image", mime="image/png", attachments=[png()[:45]])
        replica.done(submit, 1)

    async with serving(drawing, scribble, deploy=PAINTER) as (client, _, _):
        answer = await client.post("/v1/images/generations", json={"prompt": "a red square"})
    assert (answer.status_code, "a picture can't be read as PNG" in answer.text) == (500, True), answer.text[:500]


async def outputs_of(script: Script, deploy: str, kind: str = "FINAL_ONLY") -> list[Any]:
    """What the server gets of the last stage."""
    from vllm.sampling_params import RequestOutputKind

    from hub.api.vllm.omni.outputs import FinalStage

    async with running_hub(FakeReplica(script), deploy=deploy) as omni:
        stage = FinalStage("r", RequestOutputKind[kind], [])
        shown = [await stage.add(each) async for each in omni.generate({"prompt": "a"}) if not each.is_summary]
    return [each for each in shown if each is not None]


WRITER = "stages: [{stage_id: 0, engine: echo, final_output: text}]"


@pytest.mark.attack("M4")
async def test_the_tokens_of_a_prompt_are_counted_up_to_a_bound() -> None:
    def count(prompt_tokens: int) -> Script:
        def script(replica: FakeReplica, submit: wire.Submit) -> None:
            replica.accept(submit)
            usage = {"prompt_tokens": prompt_tokens}
            replica.say(wire.StageDone(**replica._about(submit), seq=0, finish_reason="stop", usage=usage))

        return script

    for named, counted in ((7, 7), (1 << 28, 1 << 20)):
        (made,) = await outputs_of(count(named), WRITER)
        assert len(made.prompt_token_ids) == counted


@pytest.mark.attack("M4")
async def test_words_and_sound_without_end_are_bounded_unless_they_are_streamed() -> None:
    def speak(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        for seq in range(3):
            replica.chunk(submit, seq, modality="audio", mime="audio/wav", attachments=[wav(bytes(40 << 20))])
        replica.done(submit, 3)

    def write(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        for seq in range(50):
            replica.chunk(submit, seq, text="x" * (3 << 20))
        replica.done(submit, 50)

    for script, deploy, pieces in ((speak, WRITER.replace("text", "audio"), 4), (write, WRITER, 51)):
        with pytest.raises(EngineFailedError, match="longer than 128 MiB"):
            await outputs_of(script, deploy)
        assert len(await outputs_of(script, deploy, "DELTA")) == pieces


async def test_an_error_has_the_hubs_status_also_before_a_stream(speaking: Any) -> None:
    """A stage without replicas, one that is full, and one that fails: whole and streamed."""
    reject, fail = FakeReplica.reject, FakeReplica.fail

    def refuse(replica: FakeReplica, submit: wire.Submit) -> None:
        reject(replica, submit, wire.FailureKind.INVALID)

    def break_down(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        fail(replica, submit)

    for script, status in ((refuse, 400), (break_down, 500)):
        async with serving(speaking, talk, script) as (client, _, _):
            for more in ({}, {"stream": True}, {"stream_format": "audio"}):
                answer = await client.post("/v1/audio/speech", json={**SPEECH, **more})
                assert answer.status_code == status, (more, answer.text)
                assert "message" in answer.json()["error"]
    async with serving(speaking, talk) as (client, _, _):
        answer = await client.post("/v1/audio/speech", json={**SPEECH, "stream": True})
        ready = await client.get("/ready")
    assert (answer.status_code, ready.status_code) == (503, 503)
    assert answer.json()["error"]["code"] == "stage_unavailable"


async def test_what_a_hub_cannot_do_is_a_501_with_the_reason(speaking: Any) -> None:
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/videos", {"prompt": "a cat"}),
        ("/v1/audio/voices", {}),
        ("/v1/omni/sleep", {}),
        ("/v1/images/edits", {}),
        ("/v1/audio/speech", {**SPEECH, "ref_audio": "http://127.0.0.1:1/voice.wav"}),
        ("/v1/audio/speech", {**SPEECH, "extra_params": {"cfg": 2}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"input_audio": {"data": ""}}]}]}),
    ]
    async with serving(speaking, talk, decode) as (client, (talker, _), _):
        for path, body in asks:
            answer = await client.post(path, json=body)
            assert answer.status_code == 501, (path, answer.text)
            assert answer.json()["error"]["code"] == "not_served"
        unknown = await client.post("/v1/audio/speech", json={**SPEECH, "voice": "nobody"})
        assert (unknown.status_code, "ethan" in unknown.text) == (400, True)
        assert not talker.of(wire.Submit)


@pytest.mark.attack("C15")
async def test_a_body_that_costs_much_is_refused(speaking: Any) -> None:
    async with serving(speaking, talk, decode) as (client, (talker, _), _):
        long = await client.post("/v1/audio/speech", content=b"{" + b" " * (9 << 20) + b"}")
        deep = await client.post("/v1/audio/speech", content=b'{"input":' + b"[" * 100_000 + b"}")
        assert (long.status_code, deep.status_code) == (413, 400)
        assert not talker.of(wire.Submit)


@pytest.mark.attack("D5")
async def test_a_small_request_that_costs_much_is_refused(speaking: Any) -> None:
    huge = {"type": "array", "items": {"type": "integer"}, "minItems": 10**9, "maxItems": 10**9}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": huge}}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with serving(speaking, talk, decode) as (client, (talker, _), _):
        for more, said in (({"response_format": form}, "response_format"), ({"n": 10**6}, "n")):
            answer = await client.post("/v1/chat/completions", json={**chat, **more})
            assert answer.status_code in (400, 501), answer.text
            assert said in answer.json()["error"]["message"]
        small = {"structured_outputs": {"choice": ["yes", "no"]}}
        assert (await client.post("/v1/chat/completions", json={**chat, **small})).status_code == 501
        assert not talker.of(wire.Submit)


@pytest.mark.attack("Q3")
@pytest.mark.parametrize(("depth", "reason"), [(1000, "nested too deep"), (100_000, "50000 lists and objects")])
async def test_arguments_of_a_call_that_are_nested_too_deep_are_the_clients_mistake(
    speaking: Any, depth: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    nested = '{"a":' + "[" * depth + "]" * depth + "}"
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": nested}}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    function_call = {"type": "function_call", "call_id": "a", "name": "a", "arguments": nested}
    response = {"model": "tiny", "max_output_tokens": 1, "input": [function_call, {"role": "user", "content": "a"}]}
    chat = {"model": "tiny", "messages": said}
    async with serving(speaking, talk, decode) as (client, (talker, _), _):
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions/batch", {**chat, "messages": [said]}),
            ("/v1/responses", response),
            ("/tokenize", chat),
        ):
            answer = await client.post(path, json=body)
            assert (answer.status_code, reason in answer.text) == (400, True), (path, answer.text[:300])
        assert not talker.of(wire.Submit)
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.attack("U2")
async def test_calls_that_an_answer_must_have_are_read_for_a_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. all of the text is read again for each piece; with no time left the stream ends with the reason
    2. the replica is told to stop; the next answer is read in full
    """
    from hub.api.vllm.bounds import reading

    with as_the_supervisor_has_it():
        from hub.api.vllm.omni.server import OmniFrontend

        stage = msgspec.structs.replace(THINKER, final_output="text", default_sampling_params={"max_tokens": 64})
        frontend = OmniFrontend(
            DeployConfig(stages=(stage,), model="m"), "--enable-auto-tool-choice --tool-call-parser hermes"
        )
    text = json.dumps([{"name": "a", "parameters": {"x": "word " * 100}}])
    pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
    is_first = True

    def call(replica: FakeReplica, submit: wire.Submit) -> None:
        nonlocal is_first
        about = replica._about(submit)
        replica.accept(submit)
        for seq, piece in enumerate(pieces):
            replica.say(wire.Chunk(**about, seq=seq, modality="text", text=piece, token_ids=(7,)))
        if not is_first:
            replica.done(submit, len(pieces))
        is_first = False

    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"}
    monkeypatch.setattr(reading, "MOST_S", 0.0)
    async with serving(frontend, call, deploy=CHATS) as (client, (replica,), _):
        answer = await client.post("/v1/chat/completions", json={**chat, "stream": True})
        assert "too long to be read for tool calls" in answer.text, answer.text[-500:]
        await until(lambda: bool(replica.of(wire.Abort)))
        monkeypatch.setattr(reading, "MOST_S", 60.0)
        again = await client.post("/v1/chat/completions", json={**chat, "stream": True})
    assert "error" not in again.text
    assert '"finish_reason":"tool_calls"' in again.text


@pytest.mark.attack("Q4")
async def test_a_text_that_no_context_holds_is_not_made_tokens(speaking: Any, caplog: pytest.LogCaptureFixture) -> None:
    """And it is the client's mistake: of a chat, vLLM-Omni's server made it a 500, with a stack in the log."""
    long = "a " * 3_500_000
    messages = [{"role": "user", "content": long}]
    async with serving(speaking, talk, decode) as (client, (talker, _), _):
        assert (await client.post("/tokenize", json={"model": "tiny", "prompt": "a b"})).status_code == 200
        for path, body, said in (
            ("/tokenize", {"prompt": long}, "can't fit into the model's context"),
            ("/tokenize", {"messages": messages}, "can't fit into the model's context"),
            ("/v1/chat/completions", {"messages": messages}, "maximum context length"),
        ):
            answer = await client.post(path, json={"model": "tiny", **body})
            assert (answer.status_code, said in answer.text) == (400, True), (path, answer.text[:300])
        assert not talker.of(wire.Submit)
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.attack("Q65")
async def test_no_log_probabilities_are_asked_of_a_stage(speaking: Any) -> None:
    """They are refused wherever a request may name them: no stage is asked, and none is shown."""
    messages = [{"role": "user", "content": "hi"}]
    chat = {"model": "tiny", "messages": messages}
    listed = [{"logprobs": 20, "max_tokens": 4}, {}]
    async with serving(speaking, talk, decode) as (client, (talker, _), _):
        for path, body in (
            ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 20}),
            ("/v1/chat/completions", {**chat, "prompt_logprobs": 20}),
            ("/v1/chat/completions", {**chat, "sampling_params_list": listed}),
            ("/v1/completions", {"model": "tiny", "prompt": "hi", "logprobs": 20}),
            ("/v1/completions", {"model": "tiny", "prompt": "hi", "prompt_logprobs": 20}),
        ):
            answer = await client.post(path, json=body)
            assert 400 <= answer.status_code < 502, (path, body, answer.text[:300])
            assert answer.status_code != 500, (path, body, answer.text[:300])
        assert not talker.of(wire.Submit)


@pytest.mark.attack("R43")
@pytest.mark.parametrize(
    "more",
    [
        {"sampling_params_list": [{"foo": 1}]},
        {"sampling_params_list": [{"temperature": "x"}]},
    ],
)
async def test_what_the_server_cannot_read_is_the_clients_error(speaking: Any, more: dict[str, Any]) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more}
    async with serving(speaking, talk, decode) as (client, (talker, _), _):
        answer = await client.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
        assert not talker.of(wire.Submit)


@pytest.mark.attack("C13")
async def test_nothing_that_a_client_names_is_fetched(speaking: Any) -> None:
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as host:
        url = f"http://127.0.0.1:{host.sockets[0].getsockname()[1]}/x"
        part = {"type": "image_url", "image_url": {"url": url}}
        message = {"role": "user", "content": [part]}
        said = {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}
        asks: list[tuple[str, dict[str, Any]]] = [
            ("/v1/audio/speech", {**SPEECH, "ref_audio": url}),
            ("/v1/audio/speech/batch", {**SPEECH, "items": [{"input": "hi", "ref_audio": url}]}),
            ("/v1/chat/completions", {"model": "tiny", "messages": [message]}),
            ("/v1/chat/completions/batch", {"model": "tiny", "messages": [[message]]}),
            ("/v1/responses", {"model": "tiny", "input": [said]}),
            ("/tokenize", {"model": "tiny", "messages": [message]}),
            ("/v1/images/edits", {"prompt": "x", "url": url}),
            ("/v1/videos", {"prompt": "x", "input_reference": url}),
        ]
        async with serving(speaking, talk, decode) as (client, (talker, _), _):
            for path, body in asks:
                answer = await client.post(path, json=body)
                assert 400 <= answer.status_code < 600, path
            assert not talker.of(wire.Submit)
    assert heard == []


@pytest.mark.attack("A28")
async def test_no_route_is_open_without_a_key_but_probes(speaking: Any) -> None:
    """Every route that the server has, those over WebSockets as well."""
    locks = Locks(KeyRing([read_key("alice", "a-key", "x")]))
    async with running_hub(FakeReplica(talk), FakeReplica(decode, 1), deploy=PAIR) as omni:
        app = await speaking.build(omni)
        door = Door(app, locks, omni.hub_metrics.count_key, omni.rejections.count)
        routes = {
            (method, re.sub(r"{[^}]*}", "x", route.path))
            for route in app._app.routes
            for method in getattr(route, "methods", None) or {"GET"}
            if route.path != "/metrics"
        }
        served = {"/v1/audio/speech", "/v1/images/generations", "/v1/realtime", "/v1/omni/sleep", "/v1/videos"}
        assert {path for _, path in routes} >= served
        transport = httpx.ASGITransport(door, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://hub", timeout=60) as client:
            opened = set()
            for method, path in sorted(routes):
                if (await client.request(method, path, json=SPEECH)).status_code != 401:
                    opened.add((method, path))
            assert opened <= {(method, path) for method in ("GET", "HEAD") for path in ("/health", "/ping", "/ready")}
            key = {"Authorization": "Bearer a-key"}
            models = (await client.get("/v1/models", headers=key)).json()
            assert [each["id"] for each in models["data"]] == ["tiny"]
            assert (await client.post("/v1/audio/speech", json=SPEECH, headers=key)).status_code == 200


async def test_a_client_that_goes_away_ends_its_request(speaking: Any) -> None:
    async with serving(speaking, accept_only, decode) as (client, (talker, _), _):
        asking = asyncio.create_task(client.post("/v1/audio/speech", json={**SPEECH, "stream_format": "audio"}))
        await until(lambda: bool(talker.of(wire.Submit)))
        asking.cancel()
        await until(lambda: bool(talker.of(wire.Abort)))


async def test_figures_and_readiness_are_the_hubs(speaking: Any) -> None:
    async with serving(speaking, talk, decode) as (client, _, _):
        await client.post("/v1/audio/speech", json=SPEECH)
        figures = (await client.get("/metrics")).text
        assert (await client.get("/ready")).json()["ready"]
        assert (await client.get("/health")).status_code == 200
    assert 'omni_hub_requests_total{outcome="ok"} 1.0' in figures


def test_flags_of_the_engine_and_the_listener_are_refused() -> None:
    with as_the_supervisor_has_it():
        from hub.api.vllm.omni.server import OmniFrontend
    deploy = DeployConfig(stages=(BRUSH,), model="brush")
    for flags, said in (
        ("--port 1", "no effect on a hub"),
        ("--max-model-len 8", "the engine's"),
        ("--api-key a", "--api-key-file"),
    ):
        with pytest.raises(ConfigError, match=said):
            OmniFrontend(deploy, flags)


@pytest.mark.parametrize("kind", ["speaking", "drawing"])
async def test_no_route_ends_in_an_error_of_the_server_itself(kind: str, request: pytest.FixtureRequest) -> None:
    """Whatever it has a route for is answered, or refused with a reason."""
    frontend = request.getfixturevalue(kind)
    scripts, deploy = ((talk, decode), PAIR) if kind == "speaking" else ((draw,), PAINTER)
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": frontend._arguments.served_model_name[0], "input": "hi", "prompt": "hi", "max_tokens": 4}
    broken: dict[str, str] = {}
    async with serving(frontend, *scripts, deploy=deploy) as (client, _, omni):
        app = await frontend.build(omni)
        for route in app._app.routes:
            path = re.sub(r"{[^}]*}", "x", route.path)
            for method in sorted(getattr(route, "methods", None) or ()):
                asked = await client.request(method, path, json={**body, "messages": messages})
                if asked.status_code == 500:
                    broken[f"{method} {path}"] = asked.text[:300]
    assert not broken


@pytest.mark.attack("R26")
async def test_megabytes_behind_one_thread_are_not_made_tokens(chatting: Any) -> None:
    """A chat of a few kilobytes waited for seconds behind it, in the one thread that makes tokens."""
    long = "What is 3 + 4? " * 500_000
    asked = {
        "/tokenize": {"prompt": long},
        "/v1/completions": {"model": "m", "prompt": long, "max_tokens": 1},
        "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": long}]},
        "/generative_scoring": {"query": long, "items": ["a"], "label_token_ids": [1]},
        "/invocations": {"query": long, "items": ["a"], "label_token_ids": [1]},
    }
    async with serving(chatting, talk, deploy=CHATS) as (client, _, _):
        shown = await client.post("/tokenize", json={"prompt": "a b", "return_token_strs": True})
        assert (shown.status_code, len(shown.json()["token_strs"])) == (200, shown.json()["count"])
        for path, body in asked.items():
            began_s = time.process_time()
            answer = await client.post(path, json=body)
            taken_s = time.process_time() - began_s
            assert (answer.status_code in (400, 501), taken_s < MOST_S) == (True, True), (path, taken_s, answer.text)


@pytest.mark.parametrize("most", [7, -1])
@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_text_is_cut_on_the_side_that_is_asked_for(chatting: Any, side: str, most: int) -> None:
    """-1: to what the model's context leaves."""
    cut = {"truncate_prompt_tokens": most, "truncation_side": side}
    prompt = " ".join(f"{number} + {number * 7}?" for number in range(2000))
    async with serving(chatting, talk, deploy=CHATS) as (client, (replica,), _):
        whole = (await client.post("/tokenize", json={"prompt": prompt[:200]})).json()["tokens"]
        last = (await client.post("/tokenize", json={"prompt": prompt[-200:]})).json()["tokens"]
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 1, **cut})
        chat = [{"role": "user", "content": prompt}]
        told = await client.post("/v1/chat/completions", json={"model": "m", "messages": chat, "max_tokens": 1, **cut})
    assert (answer.status_code, told.status_code) == (200, 200), (answer.text, told.text)
    read = replica.of(wire.Submit)[0].inputs["prompt_token_ids"]
    assert len(read) == 7 or most == -1
    assert list(read[-5:] if side == "left" else read[:5]) == (last[-5:] if side == "left" else whole[:5])


@pytest.mark.attack("R25")
@pytest.mark.parametrize("name", ["chatting", "speaking", "drawing"])
async def test_every_route_of_the_server_is_one_that_was_looked_at(name: str, request: pytest.FixtureRequest) -> None:
    """A route that is not known yet: look at what it reads, and where, then add it to KNOWN."""
    from hub.api.vllm.served_routes import KNOWN

    deploys: dict[str, tuple[Any, ...]] = {
        "chatting": (CHATS, talk),
        "speaking": (PAIR, talk, decode),
        "drawing": (PAINTER, draw),
    }
    deploy, *scripts = deploys[name]
    async with running_hub(*(FakeReplica(each, number) for number, each in enumerate(scripts)), deploy=deploy) as omni:
        app: Any = await request.getfixturevalue(name).build(omni)
    paths = {getattr(route, "path", "") for route in app._app.router.routes}
    assert {"/tokenize", "/v1/models", "/v1/audio/speech"} <= paths
    assert paths <= KNOWN
