"""``omni serve --api vllm-omni`` with a speaking model: two hubs with vLLM-Omni's own server, etcd, real replicas.

Needs the environment that `make omni-test` makes: the server runs in each hub's own Python.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import signal
import ssl
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.records.keys import pipeline_key
from tests.support.certificates import make_certificates
from tests.support.hub import Hub
from tests.support.omni_cluster import MARKS, PYTHON, assert_same_sound, speaking, write_model
from tests.support.processes import Child, wait_for
from tests.support.registry import etcdctl

pytestmark = MARKS

FLAGS = ("--api", "vllm-omni", "--api-args=--chat-template '{{ messages[-1].content }}'")
KEY = "a-key-of-alice-41c0"
_READY_S = 300.0
_MOST_KILLS = 6
TEXT = "hello world"
SPEECH = {"model": "tiny-tts", "voice": "ethan", "input": TEXT, "language": "English"}


@dataclass
class Served:
    """A hub with the stages, and one beside it behind TLS and keys, which has none."""

    hub: Hub
    locked: Hub
    here: httpx.Client
    there: httpx.Client
    ca: str
    #: Its endpoint.
    etcd: str

    @property
    def clients(self) -> tuple[httpx.Client, httpx.Client]:
        return self.here, self.there

    @property
    def text(self) -> str:
        """The logs of both."""
        return self.hub.text + self.locked.text

    def decoders(self) -> list[int]:
        """The living replicas that make sound of codes."""
        told = self.hub.replicas("--etcd-endpoints", self.etcd)
        up = [each["pid"] for each in told if (each["stage_id"], each["status"]) == (1, "up")]
        return [pid for pid in up if Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("omni")
    model = write_model(folder)
    pems = make_certificates(folder)
    (folder / "keys").write_text(f"alice:{KEY}\n")
    (folder / "keys").chmod(0o600)
    (folder / "locked").mkdir()
    document = folder / "deploy.yaml"
    document.write_text(speaking(model, talkers=1, defaults="max_tokens: 160, seed: 7"))
    door = [
        "--api-key-file",
        str(folder / "keys"),
        "--ssl-certfile",
        pems.server_cert,
        "--ssl-keyfile",
        pems.server_key,
    ]
    door += ["--max-requests-per-client", "1"]
    with EmbeddedEtcd() as etcd:
        flags = ["--deploy-config", str(document), "--etcd-endpoints", etcd.endpoint, *FLAGS]
        voices = str(folder / "voices")
        variables = {"SPEAKER_SAMPLES_DIR": voices, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        hub = Hub(folder, flags, variables=variables, python=PYTHON)
        locked = Hub(folder / "locked", [*flags, "--hub-only", *door], variables=variables, python=PYTHON)
        try:
            hub.wait_ready(_READY_S)
            locked.url = wait_for("the second hub to listen", locked._listening, _READY_S)
            context, headers = ssl.create_default_context(cafile=pems.ca), {"Authorization": f"Bearer {KEY}"}
            with (
                httpx.Client(base_url=hub.url, timeout=120) as here,
                httpx.Client(base_url=locked.url, timeout=120, verify=context, headers=headers) as there,
            ):
                wait_for("the second hub to see all stages", lambda: there.get("/ready").status_code == 200, _READY_S)
                yield Served(hub, locked, here, there, pems.ca, etcd.endpoint)
        finally:
            left = [*locked.stop(), *hub.stop()]
    assert not left, hub.text[-3000:]


def openai_client(client: httpx.Client, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key=key, http_client=client, max_retries=0)


def spoken(client: httpx.Client, on_third: Callable[[], None] = lambda: None) -> bytes:
    """The samples of one streamed speech; ``on_third`` is called when three pieces of it were heard."""
    heard: list[bytes] = []
    body = {**SPEECH, "response_format": "pcm", "stream_format": "audio"}
    with client.stream("POST", "/v1/audio/speech", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for piece in answer.iter_raw():
            heard.append(piece)
            if len(heard) == 3:
                on_third()
    assert len(heard) > 3
    return b"".join(heard)


def frames_of(file: bytes) -> bytes:
    with wave.open(io.BytesIO(file)) as reader:
        assert reader.getframerate() == 24000
        return reader.readframes(reader.getnframes())


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def test_a_speech_is_the_same_in_every_way_to_ask_for_it_and_through_both_hubs(served: Served) -> None:
    """Whole and streamed, as bytes and as events, in a batch, as files of other formats, and by the openai client."""
    expected = spoken(served.here)
    assert len(set(expected)) > 100, "that is silence"
    assert spoken(served.there) == expected
    for client in served.clients:
        speech = openai_client(client).audio.speech
        more = {"language": "English"}
        asked: dict[str, Any] = {"model": "tiny-tts", "voice": "ethan", "input": TEXT, "extra_body": more}
        assert speech.create(**asked, response_format="pcm").content == expected
        assert frames_of(speech.create(**asked, response_format="wav").content) == expected
        for form, begin in (("flac", b"fLaC"), ("opus", b"OggS")):
            assert speech.create(**asked, response_format=form).content.startswith(begin)
    events = events_of(served.here.post("/v1/audio/speech", json={**SPEECH, "response_format": "pcm", "stream": True}))
    pieces = [base64.b64decode(each["audio"]) for each in events if each["type"] == "speech.audio.delta"]
    assert b"".join(pieces) == expected
    assert len(pieces) > 3
    items = {"items": [{"input": TEXT}, {"input": TEXT}], "response_format": "pcm"}
    batch = served.here.post("/v1/audio/speech/batch", json={**SPEECH, **items}).json()
    assert len(batch["results"]) == 2, batch
    for each in batch["results"]:
        assert_same_sound(base64.b64decode(each["audio_data"]), expected)
    assert "ethan" in served.there.get("/v1/audio/voices").json()["voices"]


def test_a_chat_is_answered_with_sound(served: Served) -> None:
    expected = spoken(served.here)
    asked: dict[str, Any] = {"model": "tiny-tts", "messages": [{"role": "user", "content": TEXT}]}
    chats = openai_client(served.there).chat.completions
    sound = chats.create(**asked, modalities=["audio"]).choices[0].message.audio
    assert sound is not None
    assert frames_of(base64.b64decode(sound.data)) == expected
    events = events_of(
        served.here.post("/v1/chat/completions", json={**asked, "modalities": ["audio"], "stream": True})
    )
    pieces = [event["choices"][0]["delta"].get("content") for event in events if event["choices"]]
    assert b"".join(frames_of(base64.b64decode(piece)) for piece in pieces if piece) == expected


def test_no_sample_is_missing_or_heard_twice_at_either_hub_when_a_decoder_dies(served: Served) -> None:
    """Decoders are killed while a client of each hub listens, until it was the work of one of them."""
    expected = spoken(served.here)
    wait_for("both decoders", lambda: len(served.decoders()) == 2, _READY_S)
    for number in range(_MOST_KILLS):
        killed = served.decoders()[number % 2]
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(spoken, served.there)
            assert_same_sound(spoken(served.here, on_third=lambda: os.kill(killed, signal.SIGKILL)), expected)  # noqa: B023
            assert_same_sound(other.result(timeout=120), expected)
        if "replica.lost_at_work replica=1/" in served.text:
            break
        wait_for("another decoder", lambda: len(set(served.decoders()) - {killed}) == 2, _READY_S)  # noqa: B023
    assert "replica.lost_at_work replica=1/" in served.text
    assert "request.failed" not in served.text


@pytest.mark.attack("A28")
def test_without_a_key_no_route_of_the_server_opens(served: Served) -> None:
    with httpx.Client(base_url=served.locked.url, verify=ssl.create_default_context(cafile=served.ca)) as stranger:
        for path in ("/v1/audio/speech", "/v1/chat/completions", "/v1/images/generations", "/v1/videos", "/tokenize"):
            assert stranger.post(path, json=SPEECH).status_code == 401, path
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/ready").json() == {"ready": True}
        with pytest.raises(openai.AuthenticationError):
            openai_client(stranger, "wrong").models.list()
    assert KEY not in served.text


@pytest.mark.attack("A28")
async def test_a_websocket_speaks_to_those_with_a_key(served: Served) -> None:
    context = ssl.create_default_context(cafile=served.ca)
    url = served.locked.url.replace("https", "wss")
    for path in ("/v1/audio/speech/stream", "/v1/realtime", "/v1/duplex"):
        with pytest.raises(InvalidStatus) as caught:
            await connect(url + path, ssl=context)
        assert caught.value.response.status_code == 401, path
    expected = spoken(served.here)
    key = {"Authorization": f"Bearer {KEY}"}
    async with (
        asyncio.timeout(120.0),
        connect(f"{url}/v1/audio/speech/stream", ssl=context, additional_headers=key) as client,
    ):
        config = {"voice": "ethan", "language": "English", "response_format": "pcm", "model": "tiny-tts"}
        await client.send(json.dumps({"type": "session.config", **config}))
        await client.send(json.dumps({"type": "input.text", "text": f"{TEXT}"}))
        await client.send(json.dumps({"type": "input.done"}))
        heard = b""
        async for frame in client:
            heard += frame if isinstance(frame, bytes) else b""
            if isinstance(frame, str) and json.loads(frame)["type"] == "session.done":
                break
    assert heard == expected


@pytest.mark.attack("C15")
async def test_what_a_client_may_send_and_have_under_way_is_bounded(served: Served) -> None:
    """1. a second speech of the same client, while the first is heard
    2. a body that is too long, and JSON that is nested too deeply, also over a WebSocket
    """
    refused: list[httpx.Response] = []
    spoken(served.there, on_third=lambda: refused.append(served.there.post("/v1/audio/speech", json=SPEECH)))
    assert [(each.status_code, "retry-after" in each.headers) for each in refused] == [(429, True)]
    deep = b'{"input":' + b"[" * 100_000 + b"}"
    headers = {"Content-Type": "application/json"}
    for body, status in ((b"{" + b" " * (9 << 20) + b"}", 413), (deep, 400)):
        assert served.here.post("/v1/audio/speech", content=body, headers=headers).status_code == status
    url = served.hub.url.replace("http", "ws")
    async with asyncio.timeout(60.0), connect(f"{url}/v1/audio/speech/stream") as client:
        await client.send(deep.decode())
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1008


@pytest.mark.attack("A30")
def test_pages_of_other_sites_are_refused(served: Served) -> None:
    body = {**SPEECH, "response_format": "pcm"}
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        assert served.here.post("/v1/audio/speech", json=body, headers=headers).status_code == 403, headers
    as_text = served.here.post("/v1/audio/speech", content=json.dumps(body), headers={"Content-Type": "text/plain"})
    assert as_text.status_code == 400, "a page may send that without asking"


@pytest.mark.attack("A3")
def test_a_hub_that_joins_loads_no_code_of_a_model(served: Served, tmp_path: Path) -> None:
    """It reads models itself, also that of a later stage, by a document that is not its own."""
    stages: list[dict[str, Any]] = [
        {"stage_id": 0, "engine": "echo", "model": "m"},
        {"stage_id": 1, "engine": "vllm-omni", "model": "m", "engine_args": {"trust_remote_code": True}},
        {"stage_id": 2, "engine": "vllm-omni", "model": "m", "final_output": "audio"},
    ]
    etcdctl(served.etcd, "put", pipeline_key("strange"), json.dumps({"stages": stages}))
    flags = ["--etcd-endpoints", served.etcd, "--namespace", "strange", "--port", "0"]
    child = Child(["serve", "--hub-only", "--api", "vllm-omni", *flags], tmp_path, python=PYTHON)
    assert child.process.wait(120) == 2
    assert "--allow remote-code" in child.text


@pytest.mark.attack("C13")
def test_what_a_hub_has_not_is_a_501_and_nothing_is_fetched(served: Served) -> None:
    for path, body in (
        ("/v1/videos", {"prompt": "a cat"}),
        ("/v1/videos/sync", {"prompt": "a cat"}),
        ("/v1/images/generations", {"prompt": "a cat"}),
        ("/v1/images/edits", {"prompt": "a cat"}),
        ("/v1/audio/generate", {"input": "rain"}),
        ("/v1/omni/sleep", {}),
        ("/start_profile", {}),
        ("/v1/audio/speech", {**SPEECH, "ref_audio": f"{served.hub.url}/v1/audio/voices"}),
    ):
        answer = served.here.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_served"), (path, answer.text)
    assert served.here.get("/v1/videos").status_code == 501


def test_the_hub_says_in_its_log_and_its_metrics_what_it_serves(served: Served) -> None:
    assert "hub.listening url=" in served.hub.text
    assert re.search(r"hub\.ready url=https://", served.locked.text)
    figures = served.here.get("/metrics").text
    assert re.search(r'omni_hub_requests_total\{outcome="ok"\} \d', figures)
