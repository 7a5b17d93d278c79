"""POST /v1/images/edits, and pictures as events: asked by OpenAI's own clients over HTTP, of real replicas."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, BadRequestError, InternalServerError
from PIL import Image

from hub.api.generation.body import MAX_BODY_BYTES
from stage_runtime.engines.echo.engine import draw_png
from tests.support.speaking import DRAWER, Served, served

#: One stage that inverts the colours of the pictures that it is shown.
EDITOR = """
model: editor
stages:
  - stage_id: 0
    engine: torch
    engine_args: {target: "tests.support.callables:inverted", capacity: 8}
    final_output: image
"""
SIDE = 4


def png_of(*pixels: tuple[int, ...]) -> bytes:
    """A square picture whose rows begin with these pixels and repeat the last."""
    picture = Image.new("RGBA" if len(pixels[0]) == 4 else "RGB", (SIDE, SIDE))
    picture.putdata([*pixels, *[pixels[-1]] * (SIDE * SIDE - len(pixels))])
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def pixels_of(b64_json: str | None) -> list[Any]:
    picture = Image.open(io.BytesIO(base64.b64decode(b64_json or "")))
    return [picture.getpixel((number % SIDE, number // SIDE)) for number in range(SIDE * SIDE)]


RED, BLUE = png_of((255, 0, 0)), png_of((0, 0, 255))
CYAN, YELLOW = [(0, 255, 255)] * SIDE**2, [(255, 255, 0)] * SIDE**2


@pytest.fixture
async def hub() -> AsyncIterator[Served]:
    async with served(EDITOR) as running:
        yield running


@pytest.fixture
async def client(hub: Served) -> AsyncIterator[AsyncOpenAI]:
    async with hub.client as made:
        yield made


async def test_pictures_are_edited_as_files_of_every_kind_that_the_clients_send(
    hub: Served, client: AsyncOpenAI
) -> None:
    """Bare bytes, a named file, and a list; the same for the asynchronous and the synchronous client."""
    for image, drawn in (
        (RED, [CYAN]),
        (("red.png", io.BytesIO(RED), "image/png"), [CYAN]),
        ([RED, BLUE], [CYAN, YELLOW]),
    ):

        def ask(image: Any = image) -> Any:
            with hub.sync_client as sync:
                return sync.images.edit(image=image, prompt="invert", model="editor", size="auto")

        answers = [await asyncio.to_thread(ask)]
        # The first reading has left the file at its end.
        if not isinstance(image, tuple):
            answers.append(await client.images.edit(image=image, prompt="invert", response_format="b64_json"))
        for answer in answers:
            assert [pixels_of(each.b64_json) for each in answer.data or []] == drawn
            assert (answer.output_format, answer.size) == ("png", f"{SIDE}x{SIDE}")


async def test_only_what_the_mask_leaves_transparent_is_edited_and_n_edits_come(client: AsyncOpenAI) -> None:
    mask = png_of((0, 0, 0, 0), (0, 0, 0, 255))
    answer = await client.images.edit(image=RED, mask=mask, prompt="invert", n=3, extra_body={"seed": 7})
    assert [pixels_of(each.b64_json) for each in answer.data or []] == [[CYAN[0], *[(255, 0, 0)] * 15]] * 3


async def test_edits_come_as_events(hub: Served, client: AsyncOpenAI) -> None:
    """The engine gives no unfinished pictures: those that may be sent before are none."""

    def ask() -> list[Any]:
        with hub.sync_client as sync:
            return list(sync.images.edit(image=[RED, BLUE], prompt="invert", stream=True, partial_images=2))

    stream = await client.images.edit(image=[RED, BLUE], prompt="invert", stream=True, partial_images=2)
    for events in ([each async for each in stream], await asyncio.to_thread(ask)):
        assert [each.type for each in events] == ["image_edit.completed"] * 2
        assert [pixels_of(each.b64_json) for each in events] == [CYAN, YELLOW]
        assert {(each.size, each.output_format) for each in events} == {(f"{SIDE}x{SIDE}", "png")}


async def test_drawn_pictures_come_as_events_whose_counts_add_up_to_the_whole() -> None:
    async with served(DRAWER) as hub, hub.client as client:

        def ask() -> list[Any]:
            with hub.sync_client as sync:
                return list(sync.images.generate(prompt="a cat", n=3, stream=True))

        whole = await client.images.generate(prompt="a cat", n=3)
        stream = await client.images.generate(prompt="a cat", n=3, stream=True, partial_images=3)
        for events in ([each async for each in stream], await asyncio.to_thread(ask)):
            assert [each.type for each in events] == ["image_generation.completed"] * 3
            assert [base64.b64decode(each.b64_json) for each in events] == [draw_png("a cat")] * 3
            assert whole.usage is not None
            assert sum(each.usage.input_tokens for each in events) == whole.usage.input_tokens == 2
            assert sum(each.usage.output_tokens for each in events) == whole.usage.output_tokens
        async with httpx.AsyncClient() as http:
            body = {"prompt": "a cat", "stream": True}
            answer = await http.post(f"{hub.address}/v1/images/generations", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        name, data, *rest = answer.text.split("\n")
        assert (name, json.loads(data[6:])["type"], rest) == (
            "event: image_generation.completed",
            "image_generation.completed",
            ["", ""],
        )


async def test_a_failure_is_a_status_and_amid_the_events_an_event(client: AsyncOpenAI) -> None:
    with pytest.raises(InternalServerError, match="it was told to fail"):
        await client.images.edit(image=RED, prompt="fail")
    with pytest.raises(InternalServerError, match="it was told to fail"):
        await client.images.edit(image=RED, prompt="fail", stream=True)
    document = "stages: [{stage_id: 0, engine: torch, final_output: image, engine_args: {target: "
    document += '"tests.support.callables:inverted"}}]'
    async with served(document) as hub, hub.client as other:
        stream = await other.images.edit(image=[RED, b"GIF89a" + bytes(20)], prompt="invert", stream=True)
        with pytest.raises(APIError, match="stage 0"):
            assert [each async for each in stream] == []


async def test_what_can_not_be_edited_is_refused_with_the_reason(hub: Served, client: AsyncOpenAI) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"image": b"no picture"}, "'image' is no picture that can be read here"),
        ({"prompt": " "}, "'prompt' is empty"),
        ({"n": 11}, "n"),
        ({"response_format": "url"}, "pictures come as 'b64_json'"),
        ({"extra_body": {"ref": "x"}}, "unknown field 'ref'"),
        ({"extra_body": {"guidance_scale": 3}}, "the parameter 'guidance_scale' is not known to this stage"),
    ]
    for more, said in refused:
        with pytest.raises(BadRequestError, match=said):
            await client.images.edit(**{"image": RED, "prompt": "invert", **more})
    with pytest.raises(APIStatusError, match="send less in one request, or smaller pictures") as long:
        await client.images.edit(image=RED + bytes(MAX_BODY_BYTES), prompt="invert")
    assert long.value.status_code == 413
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{hub.address}/v1/images/edits", json={"prompt": "invert"})
    assert (answer.status_code, "curl -F image=@cat.png" in answer.text) == (415, True)
    async with served("stages: [{stage_id: 0, engine: echo, final_output: text}]") as other, other.client as asking:
        with pytest.raises(BadRequestError, match="this pipeline draws nothing"):
            await asking.images.edit(image=RED, prompt="invert")


@pytest.mark.attack("A30")
@pytest.mark.parametrize("header", ["Origin: https://evil.example", "Origin: null"])
async def test_a_form_that_a_strange_page_sends_is_refused_before_its_body_is_read(hub: Served, header: str) -> None:
    """A browser sends forms without asking first: only the headers are sent here, and the answer is there."""
    address = urlsplit(hub.address)

    def ask() -> bytes:
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=30.0) as connection:
            head = "POST /v1/images/edits HTTP/1.1", f"Host: {address.netloc}", header, "Content-Length: 1000000"
            connection.sendall("\r\n".join([*head, "Content-Type: multipart/form-data; boundary=x", "", ""]).encode())
            return connection.recv(4096)

    assert (await asyncio.to_thread(ask)).startswith(b"HTTP/1.1 403 ")
