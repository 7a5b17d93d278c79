"""What a hub says of itself over HTTP: /docs, /openapi.json and the models, asked by OpenAI's clients."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shlex
from collections.abc import AsyncIterator
from html import unescape
from typing import Any

import httpx
import openai
import pytest

from stage_runtime.engines.echo.engine import draw_png
from tests.support.speaking import Served, served

#: It puts out all there is; the name has a slash, as many have.
ALL = """
model: org/everything
stages:
  - {stage_id: 0, engine: echo, final_output: text}
  - stage_id: 1
    engine: torch
    engine_args: {target: "tests.support.speaking:speak", capacity: 8, voices: [ann]}
    final_output: audio
    input_from: [0]
  - {stage_id: 2, engine: echo, engine_args: {modality: image}, final_output: image, input_from: [0]}
  - stage_id: 3
    engine: torch
    engine_args: {target: "tests.support.filming:film", capacity: 8}
    final_output: video
    input_from: [0]
"""
#: The id of a video in the page's examples.
EXAMPLE_ID = f"video_{0:032x}"


@pytest.fixture
async def hub() -> AsyncIterator[Served]:
    async with served(ALL) as running:
        yield running


def request_of(command: str) -> dict[str, Any]:
    """The request that a curl command of the page sends."""
    name, url, *words = shlex.split(command)
    assert name == "curl"
    asked: dict[str, Any] = {"method": "GET", "url": url, "headers": {}}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        match flag:
            case "-H":
                key, _, text = value.partition(": ")
                asked["headers"][key] = text
            case "-X":
                asked["method"] = value
            case "-d":
                asked |= {"method": "POST", "content": value}
            case "-F":
                key, _, text = value.partition("=")
                file = ("picture.png", draw_png("a"), "image/png")
                asked.setdefault("files", []).append((key, file if text == "@picture.png" else (None, text)))
                asked["method"] = "POST"
            case _:
                assert flag == "--output"
    return asked


async def made_video(hub: Served) -> str:
    """The id of a video that is there."""
    async with httpx.AsyncClient(timeout=30.0) as http, asyncio.timeout(30.0):
        video = (await http.post(f"{hub.address}/v1/videos", json={"prompt": "a cat"})).json()
        while video["status"] != "completed":
            assert video["error"] is None
            await asyncio.sleep(0.05)
            video = (await http.get(f"{hub.address}/v1/videos/{video['id']}")).json()
        return str(video["id"])


async def test_each_example_of_the_page_works_as_it_stands(hub: Served) -> None:
    """They are sent to the address that the page names, which is the one it was asked at."""
    async with httpx.AsyncClient(timeout=30.0) as http:
        page = await http.get(f"{hub.address}/docs")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
        document = (await http.get(f"{hub.address}/openapi.json")).json()
        commands = [unescape(each) for each in re.findall("<pre>(.*?)</pre>", page.text, re.DOTALL)]
        assert len(commands) == sum(len(methods) for methods in document["paths"].values())
        video_id = await made_video(hub)
        for command in commands:
            asked = request_of(command.replace(EXAMPLE_ID, video_id))
            assert asked["url"].startswith(hub.address + "/")
            answer = await http.request(**asked)
            assert (answer.status_code, answer.content != b"") == (200, True), command


async def test_openais_clients_list_and_find_the_model(hub: Served) -> None:
    def ask() -> list[Any]:
        with hub.sync_client as sync:
            return [sync.models.list().data[0], sync.models.retrieve("org/everything")]

    async with hub.client as client:
        (listed,) = (await client.models.list()).data
        found = await client.models.retrieve("org/everything")
        assert [listed, found, *await asyncio.to_thread(ask)] == [listed] * 4
        assert (found.id, found.object, found.owned_by) == ("org/everything", "model", "omni-discovery")
        with pytest.raises(openai.NotFoundError, match="'org/nothing' is not served here; there is 'org/everything'"):
            await client.models.retrieve("org/nothing")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.models.delete("org/everything")
    assert refused.value.status_code == 405
    body = json.loads(refused.value.response.text)
    assert body["error"]["code"] == "method_not_allowed"


async def test_a_name_that_is_sent_with_its_slash_is_found_and_an_empty_one_is_not(hub: Served) -> None:
    async with httpx.AsyncClient() as http:
        answers = [await http.get(f"{hub.address}/v1/models/{name}") for name in ("org/everything", "")]
    assert [each.status_code for each in answers] == [200, 404]
    assert answers[1].json()["error"]["code"] == "model_not_found"


@pytest.mark.attack("O6")
async def test_requests_for_another_protocol_are_served_and_are_one_line_of_the_log(
    hub: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn's is a line for each, of anybody without a key, without end."""
    caplog.set_level(logging.INFO)
    async with httpx.AsyncClient(headers={"Connection": "Upgrade", "Upgrade": "h2c"}) as http:
        answers = [await http.get(f"{hub.address}/health") for _ in range(5)]
    assert [each.json() for each in answers] == [{"status": "ok"}] * 5
    lines = [each.getMessage() for each in caplog.records if "upgrade" in each.getMessage().lower()]
    assert lines == ["http.no_upgrade client=127.0.0.1: it asked for another protocol than WebSocket"]
