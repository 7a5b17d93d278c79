"""Pictures in chats, through vLLM's own server: what reaches the stage, and what is refused, unfetched."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from PIL import FliImagePlugin, Image, UnidentifiedImageError

from omni_discovery import wire
from omni_discovery.data_urls import PICTURE_FORMATS
from omni_discovery.deploy.document import DeployConfig
from tests.contract.test_vllm_items import TEXT, build_model, data_url, picture
from tests.integration.api.test_vllm_client import STAGE, events_of, omni_of, serving
from tests.support.engines import as_the_supervisor_has_it
from tests.support.hub_fakes import FakeReplica

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

#: What the replica's vLLM makes of the two words and the picture before them.
CAME_TO = (700, 700, 700, 700, 30, 31)


def speak(replica: FakeReplica, submit: wire.Submit) -> None:
    """One word, with what the prompt came to, and another one."""
    about = replica._about(submit)
    replica.accept(submit)
    told = {"prompt_token_ids": CAME_TO} if "images" in submit.inputs else {}
    replica.say(wire.Chunk(**about, seq=0, modality="text", text="two", token_ids=(20,), **told))
    replica.say(wire.Chunk(**about, seq=1, modality="text", text=" words", token_ids=(21,)))
    replica.done(submit, 2)


@pytest.fixture(scope="module")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> DeployConfig:
    folder = build_model(tmp_path_factory.mktemp("model"))
    return DeployConfig(stages=(msgspec.structs.replace(STAGE, model=str(folder)),), model="looker")


def frontend_of(deploy: DeployConfig, **engine_args: Any) -> Any:
    from hub.api.vllm.server import VllmFrontend

    (stage,) = deploy.stages
    changed = msgspec.structs.replace(stage, engine_args={**stage.engine_args, **engine_args})
    # The tiny model's template reads parts, which can't be told from how it is written.
    flags = "--chat-template-content-format openai"
    return VllmFrontend(msgspec.structs.replace(deploy, stages=(changed,)), flags)


def test_a_renderer_that_can_not_be_made_leaves_the_models_settings_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hub.api.vllm import pictures

    seen: list[int] = []

    class Fails:
        def __init__(self, config: Any, _tokenizer: Any) -> None:
            seen.append(config.model_config.renderer_num_workers)
            raise ValueError("no chat template")

    registry = SimpleNamespace(load_renderer_cls=lambda _: Fails)
    monkeypatch.setattr(pictures, "RENDERER_REGISTRY", registry)
    monkeypatch.setattr(pictures, "tokenizer_args_from_config", lambda _: ("hf", "m"))
    monkeypatch.setattr(pictures, "cached_tokenizer_from_config", lambda _: None)
    config = SimpleNamespace(model_config=SimpleNamespace(renderer_num_workers=3))
    with pytest.raises(ValueError, match="no chat template"):
        pictures.renderer_of(config)
    assert (seen, config.model_config.renderer_num_workers) == ([4], 3)


@pytest.fixture(scope="module")
def looking(deploy: DeployConfig) -> Iterator[Any]:
    with as_the_supervisor_has_it():
        yield frontend_of(deploy)


def show(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def asking(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "looker", "messages": [{"role": "user", "content": list(parts)}], **more}


def file_of(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


RED = data_url(picture("red"))


async def test_the_stage_gets_the_prompt_with_places_and_the_files(looking: Any) -> None:
    """1. the template leaves its places, the file comes as it was sent, for each of several answers
    2. the tokens that are counted and shown are those that the stage made of it, also while the answer streams
    """
    parts = TEXT, show(RED)
    stream = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with serving(looking, speak) as (client, replica):
        body = asking(*parts, n=2, return_token_ids=True)
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        streamed = events_of((await client.post("/v1/chat/completions", json=asking(*parts, **stream))).text)
        plain = (await client.post("/v1/chat/completions", json=asking(TEXT))).json()
        tokenizer = omni_of(client) and looking._renderer.get_tokenizer()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["two words"] * 2
    assert whole["prompt_token_ids"] == list(CAME_TO)
    assert whole["usage"] == {**whole["usage"], "prompt_tokens": len(CAME_TO), "completion_tokens": 4}
    assert {event["usage"]["prompt_tokens"] for event in streamed} == {len(CAME_TO)}
    *pictured, without = replica.of(wire.Submit)
    places = tokenizer.encode("what is this", add_special_tokens=False)
    for submit in pictured:
        assert submit.inputs == {"prompt_token_ids": places, "images": [file_of(RED)]}
    assert len(pictured) == 3
    assert without.inputs == {"prompt_token_ids": places}
    assert plain["usage"]["prompt_tokens"] == len(places)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/v1/responses", ({"type": "input_text", "text": "what is this"}, {"type": "input_image", "image_url": RED})),
        (
            "/v1/messages",
            (
                {"type": "text", "text": "what is this"},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]},
                },
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_other_apis_of_the_server_show_pictures_too(looking: Any, path: str, parts: Any) -> None:
    messages = [{"role": "user", "content": list(parts)}]
    body = {"model": "looker", "input": messages, "messages": messages, "max_tokens": 8}
    async with serving(looking, speak) as (client, replica):
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["input_tokens"] == len(CAME_TO)
    assert [submit.inputs["images"] for submit in replica.of(wire.Submit)] == [[file_of(RED)]]


async def test_a_beam_search_keeps_the_pictures(looking: Any) -> None:
    def speak_likely(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        likely = tuple(wire.TokenLogprob(20 + number, -1.0 - number, 1 + number, "x") for number in range(5))
        about = replica._about(submit)
        replica.say(wire.Chunk(**about, seq=0, modality="text", text="x", token_ids=(20,), logprobs=(likely,)))
        replica.done(submit, 1)

    async with serving(looking, speak_likely) as (client, replica):
        body = asking(show(RED), TEXT, use_beam_search=True, n=2, max_tokens=2)
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert len(answer["choices"]) == 2
    first, *later = replica.of(wire.Submit)
    assert [submit.inputs["images"] for submit in (first, *later)] == [[file_of(RED)]] * 3
    prompt = first.inputs["prompt_token_ids"]
    assert [submit.inputs["prompt_token_ids"] for submit in later] == [[*prompt, 20], [*prompt, 21]]


@asynccontextmanager
async def a_host() -> AsyncIterator[tuple[str, list[str]]]:
    """A web server on this machine that has one picture, and what was asked of it."""
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode().splitlines()[0])
        file = file_of(RED)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: {len(file)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + file)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x.png", asked


@pytest.mark.attack("C13")
async def test_links_are_followed_only_where_the_operator_names_the_host(looking: Any, deploy: DeployConfig) -> None:
    async with a_host() as (url, asked):
        async with serving(looking, speak) as (client, replica):
            for link in (url, url.replace("http://127.0.0.1", "http://[::1]"), "http:///x.png", "file:///etc/passwd"):
                refused = await client.post("/v1/chat/completions", json=asking(show(link), TEXT))
                assert refused.status_code == 400, refused.text
            assert not replica.of(wire.Submit)
        assert asked == []
        async with serving(frontend_of(deploy, allowed_media_domains=["127.0.0.1"]), speak) as (client, replica):
            answer = await client.post("/v1/chat/completions", json=asking(show(url), TEXT))
            assert answer.status_code == 200, answer.text
            assert replica.of(wire.Submit)[0].inputs["images"] == [file_of(RED)]
            other = await client.post(
                "/v1/chat/completions", json=asking(show(url.replace("127.0.0.1", "localhost")), TEXT)
            )
            assert other.status_code == 400
    assert asked == ["GET /x.png HTTP/1.1"]


@pytest.mark.attack("C13")
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", asking(*[show(RED)] * 2, TEXT), "At most 1 image"),
        ("/v1/chat/completions", asking(show("data:image/png;base64,AAAA"), TEXT), "image"),
        ("/v1/chat/completions", asking({**show(RED), "uuid": "a", "image_url": None}, TEXT), "its file"),
        ("/v1/chat/completions", asking({"type": "video_url", "video_url": {"url": RED}}, TEXT), "video"),
        (
            "/v1/chat/completions",
            asking({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
            "audio",
        ),
        ("/v1/chat/completions", asking({"type": "image_embeds", "image_embeds": "AAAA"}, TEXT), "mm-embeds"),
        ("/v1/chat/completions", asking(show(RED), TEXT, truncate_prompt_tokens=4), "truncate_prompt_tokens"),
        ("/v1/chat/completions", asking(show(RED), TEXT, mm_processor_kwargs={"a": 1}), "mm_processor_kwargs"),
        ("/tokenize", asking(show(RED), TEXT), "stage"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
async def test_what_no_stage_takes_is_refused_by_name(looking: Any, path: str, body: dict[str, Any], said: str) -> None:
    async with serving(looking, speak) as (client, replica):
        refused = await client.post(path, json=body)
        assert refused.status_code == 400, refused.text
        assert said in refused.text
        assert not replica.of(wire.Submit)


async def test_pictures_that_no_message_would_hold_are_refused(looking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stream, too: it has not begun."""
    monkeypatch.setattr("hub.api.vllm.pictures.MAX_PICTURES_BYTES", 100)
    async with serving(looking, speak) as (client, _):
        for stream in (False, True):
            refused = await client.post("/v1/chat/completions", json=asking(show(RED), TEXT, stream=stream))
            assert refused.status_code == 400, refused.text
            assert "one request may have 100: send smaller ones" in refused.text


@pytest.mark.attack("C14")
async def test_small_files_that_unpack_to_large_pictures_are_refused_packed(
    looking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As parts of both forms, and in every API: vLLM would unpack all of them before it looks how many they are."""
    unpacked: list[Any] = []
    monkeypatch.setattr("vllm.multimodal.media.image.ImageMediaIO.load_bytes", lambda *given: unpacked.append(given))
    large = data_url(Image.new("1", (6_000, 6_000)))
    bare = {"image_url": large.replace("data:image/png", "DATA:text/plain;a=b")}
    said = [{"role": "user", "content": [{"type": "input_image", "image_url": large, "detail": "auto"}] * 2}]
    asked = {
        "/v1/chat/completions": asking(show(large), bare, TEXT),
        "/v1/chat/completions/batch": {"model": "looker", "messages": [asking(show(large), bare, TEXT)["messages"]]},
        "/tokenize": asking(bare, bare),
        "/v1/chat/completions?": asking(show(data_url(Image.new("1", (20_000, 20_000))))),
        "/v1/responses": {"model": "looker", "input": said},
    }
    async with serving(looking, speak) as (client, _):
        for path, body in asked.items():
            refused = await client.post(path, json=body)
            assert (refused.status_code, "send fewer or smaller" in refused.text) == (400, True), (
                path,
                refused.text[:400],
            )
    assert unpacked == []


def jpeg_and_film(side: int) -> bytes:
    """A file that is a small JPEG, and a film (FLI) of so many pixels a side to who reads that format."""
    small = io.BytesIO()
    Image.new("RGB", (40, 40), "red").save(small, "JPEG")
    # The film's header lies where a JPEG has its first segment, of an application; its length is the film's type.
    film = bytearray(2 + 2 + 0x11AF)
    film[:6] = b"\xff\xd8\xff\xef\x11\xaf"
    struct.pack_into("<HHHH", film, 6, 1, side, side, 8)
    struct.pack_into("<IHH", film, 128, 30, 0xF1FA, 1)
    struct.pack_into("<IH", film, 144, 14, 13)
    return bytes(film) + small.getvalue()[2:]


@pytest.mark.attack("P22")
def test_a_file_of_two_formats_is_opened_as_the_one_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. the hub's check, by its formats, sees a small picture, where vLLM's server saw a large one
    2. once the server is put up, both see the same, in this process
    3. a film alone is none of the formats
    """
    from vllm.multimodal.media.image import ImageMediaIO

    from hub.api.vllm.pictures import read_few_formats

    # As it is before any server was put up in this process.
    film = FliImagePlugin.FliImageFile, FliImagePlugin._accept
    monkeypatch.setattr(Image, "OPEN", {**Image.OPEN, "FLI": film})
    file = jpeg_and_film(300)
    assert Image.open(io.BytesIO(file), formats=PICTURE_FORMATS).size == (40, 40)
    assert Image.open(io.BytesIO(file), formats=["FLI"]).size == (300, 300)
    read_few_formats()
    for opened in (Image.open(io.BytesIO(file)), ImageMediaIO().load_bytes(file).media):
        assert opened.size == (40, 40)
    with pytest.raises(UnidentifiedImageError):
        Image.open(io.BytesIO(b"\0" + file[1:]), formats=["FLI"])


@pytest.mark.attack("Z68")
def test_pictures_are_opened_in_the_hub_and_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. of a picture the head is read, and its file goes on; 2. what is none, or too large, is the client's mistake"""
    from vllm.multimodal.media.image import ImageMediaIO

    from hub.api.vllm.pictures import open_pictures_only

    monkeypatch.setattr(ImageMediaIO, "load_bytes", ImageMediaIO.load_bytes)
    open_pictures_only()
    buffer = io.BytesIO()
    Image.new("1", (8192, 8192)).save(buffer, "PNG")
    file = buffer.getvalue()
    cut = file[: len(file) // 2]
    for each in (file, cut):
        opened = ImageMediaIO().load_bytes(each)
        assert (opened.media.size, opened.original_bytes) == ((8192, 8192), each)
    with pytest.raises(OSError, match="truncated"):
        opened.media.load()
    for bad in (b"", b"GIF89a", b"\x89PNG"):
        with pytest.raises(ValueError, match="Failed to load image"):
            ImageMediaIO().load_bytes(bad)


async def test_a_model_that_sees_nothing_takes_no_pictures() -> None:
    """Neither one of text alone, nor one that its operator keeps from looking."""
    with as_the_supervisor_has_it():
        from hub.api.vllm.server import VllmFrontend

        frontend = VllmFrontend(DeployConfig(stages=(STAGE,), model="looker"), "")
    async with serving(frontend, speak) as (client, replica):
        refused = await client.post("/v1/chat/completions", json=asking(show(RED), TEXT))
        assert refused.status_code == 400, refused.text
        assert not replica.of(wire.Submit)
