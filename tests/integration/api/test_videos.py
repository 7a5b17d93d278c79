"""The routes of /v1/videos, asked by OpenAI's own clients of a real replica; hubs among each other are elsewhere."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
from collections.abc import AsyncIterator
from typing import Any

import av
import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, ConflictError, NotFoundError

from stage_runtime.engines.echo.engine import draw_png
from tests.support.filming import FILMER
from tests.support.hub_fakes import show
from tests.support.speaking import DRAWER, Served, served

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")

#: Words, and a film of them.
TOLD = """
model: told
stages:
  - {stage_id: 0, engine: echo, final_output: text}
  - stage_id: 1
    engine: torch
    engine_args: {target: "tests.support.filming:film", capacity: 8, frame_rate_hz: 10}
    default_sampling_params: {fps: 10}
    final_output: video
"""


@pytest.fixture
async def hub() -> AsyncIterator[Served]:
    async with served(FILMER) as running:
        yield running


async def ended(client: AsyncOpenAI, video_id: str) -> Any:
    async with asyncio.timeout(30.0):
        while (video := await client.videos.retrieve(video_id)).status not in {"completed", "failed"}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return video


def read(file: bytes) -> tuple[int, tuple[int, int], list[float]]:
    """The number of frames, their size, and how bright the first and the last are."""
    with av.open(io.BytesIO(file)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    height, width, _ = frames[0].shape
    return len(frames), (width, height), [float(frames[at].mean()) for at in (0, -1)]


async def test_a_video_is_made_shown_listed_fetched_and_deleted(hub: Served) -> None:
    async with hub.client as client:
        made = await client.videos.create(prompt="a cat", seconds="4", size="64x32", extra_body={"fps": 5})  # type: ignore[arg-type]
        assert (made.object, made.status, made.progress, made.model) == ("video", "queued", 0, "filmer")
        assert (made.seconds, made.size, made.error, made.prompt) == ("4", "64x32", None, None)
        done = await ended(client, made.id)
        assert (done.status, done.progress, done.id) == ("completed", 100, made.id)
        assert done.created_at <= done.completed_at < done.expires_at
        content = await client.videos.download_content(made.id)
        assert content.response.headers["content-type"] == "video/mp4"
        assert int(content.response.headers["content-length"]) == len(content.content)
        count, size, (first, last) = read(content.content)
        assert (count, size) == (20, (64, 32))
        assert first < 20 < 230 < last
        assert [video.id async for video in client.videos.list()] == [made.id]
        gone = await client.videos.delete(made.id)
        assert (gone.id, gone.deleted, gone.object) == (made.id, True, "video.deleted")
        for ask in (client.videos.retrieve, client.videos.delete, client.videos.download_content):
            with pytest.raises(NotFoundError, match="there is no video"):
                await ask(made.id)
        assert [video.id async for video in client.videos.list()] == []


async def test_the_synchronous_client_waits_for_a_video_that_begins_with_a_picture(hub: Served) -> None:
    """The same from a file in a form, and from a URL that holds the file, in JSON."""
    picture = draw_png("a")
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"

    def ask() -> list[bytes]:
        with hub.sync_client as client:
            made = client.videos.create_and_poll(prompt="a cat", input_reference=("cat.png", picture, "image/png"))
            assert made.status == "completed"
            asked = {"prompt": "a cat", "seconds": 1, "input_reference": {"image_url": url}}
            answer = httpx.post(f"{hub.address}/v1/videos", json=asked, timeout=30.0)
            again = client.videos.poll(answer.json()["id"])
            assert (again.status, again.seconds) == ("completed", "1")
            return [client.videos.download_content(each.id).content for each in (made, again)]

    for file in await asyncio.to_thread(ask):
        _, _, (first, last) = read(file)
        assert last < 20 < 230 < first


async def test_a_repeated_post_makes_another_job_whatever_key_it_has(hub: Served) -> None:
    """Idempotency keys are of answers, and a job is made by each POST; nor is there anything to resume."""
    async with httpx.AsyncClient(base_url=hub.address, timeout=30.0) as client:
        for name, status in (("Idempotency-Key", 200), ("Idempotency-Key", 200), ("x-omni-resume", 400)):
            answer = await client.post("/v1/videos", json={"prompt": "a cat", "seconds": 1}, headers={name: "new"})
            assert answer.status_code == status, answer.text


async def test_pages_of_the_list_go_on_behind_an_id_in_both_orders(hub: Served) -> None:
    async with hub.client as client:
        ids = [(await client.videos.create(prompt=f"cat {number}")).id for number in range(5)]
        for each in ids:
            await ended(client, each)
        assert [video.id async for video in client.videos.list(limit=2)] == ids[::-1]
        assert [video.id async for video in client.videos.list(limit=2, order="asc")] == ids
        page = await client.videos.list(limit=3, order="asc", after=ids[0])
        assert ([video.id for video in page.data], page.has_more) == (ids[1:4], True)
        for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "video_1"}):
            with pytest.raises(BadRequestError):
                await client.videos.list(**wrong)  # type: ignore[arg-type]


async def test_what_fails_says_why_and_has_no_file(hub: Served) -> None:
    """The stage's own error."""
    async with hub.client as client:
        made = await client.videos.create(prompt="FAIL")
        failed = await ended(client, made.id)
        assert (failed.status, failed.progress, failed.error.code) == ("failed", 0, "engine_failed")
        assert "it was told to fail by 'FAIL'" in failed.error.message
        with pytest.raises(ConflictError, match="'failed': its 'error' says why"):
            await client.videos.download_content(made.id)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "size": "big"}, "size"),
        ({"prompt": "x", "seconds": "4", "num_frames": 8}, "both say how long"),
        ({"prompt": "x", "input_reference": {"image_url": "http://127.0.0.1:1/x.png"}}, "image_url"),
        ({"prompt": "x", "no_such_field": 1}, "no_such_field"),
        ({"prompt": "x", "input_reference": {"image_url": "data:image/png;base64,@@@"}}, "input_reference"),
        ({"prompt": "x", "input_reference": {"image_url": "data:image/png;base64,R0lG"}}, "send a PNG, JPEG"),
        (
            {"prompt": "x", "size": "4096x16"},
            "'size' can't be 4096x16 at stage 0: width is 4096, and it is at most 256",
        ),
        ({"prompt": "x", "seconds": "100"}, "'seconds' can't be 100 at stage 0: num_frames is 2400, and it is at most"),
        ({"prompt": "x", "num_frames": 481}, "'num_frames' can't be 481 at stage 0: it is at most 480"),
        ({"prompt": "x", "guidance_scale": 3}, "'guidance_scale' can't be 3.0 at stage 0: it is not known to this"),
        ({"prompt": "x", "sampling_params_list": [{"height": "9"}]}, "'height' can't be '9' at stage 0: it is a whole"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_refused_at_once(hub: Served, fields: dict[str, Any], why: str) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{hub.address}/v1/videos", json=fields)
        assert (answer.status_code, why in answer.json()["error"]["message"]) == (400, True), answer.text
        assert (await http.get(f"{hub.address}/v1/videos")).json()["data"] == []


async def test_another_model_is_refused_at_once(hub: Served) -> None:
    async with hub.client as client:
        with pytest.raises(NotFoundError, match="sora-2"):
            await client.videos.create(prompt="a cat", model="sora-2")
        assert [video.id async for video in client.videos.list()] == []


async def test_of_replicas_that_do_not_say_what_they_take_a_job_says_it(hub: Served) -> None:
    """As those of the release before: one of them may take anything, until its engine says no."""
    (replica,) = hub.replicas
    show(hub.omni, dataclasses.replace(replica.info, params=None))
    async with hub.client as client:
        made = await client.videos.create(prompt="a cat", extra_body={"guidance_scale": 3})
        failed = await ended(client, made.id)
        assert failed.error.code == "invalid_request"
        assert "'guidance_scale' is not known to this stage" in failed.error.message


@pytest.mark.parametrize("variant", ["thumbnail", "spritesheet"])
async def test_other_variants_of_a_video_are_refused(hub: Served, variant: Any) -> None:
    async with hub.client as client:
        made = await client.videos.create(prompt="a cat")
        with pytest.raises(BadRequestError, match="variant"):
            await client.videos.download_content(made.id, variant=variant)
        with pytest.raises(APIStatusError) as refused:
            await client.videos.remix(made.id, prompt="a dog")
        assert refused.value.status_code == 404


@pytest.mark.attack("J5")
@pytest.mark.parametrize("video_id", ["..%2f..%2fetc%2fpasswd", "video_x", "video_" + "A" * 32, "%00", "a" * 4000])
async def test_an_id_that_is_none_is_not_found(hub: Served, video_id: str) -> None:
    async with httpx.AsyncClient() as http:
        for path in (video_id, f"{video_id}/content"):
            answer = await http.get(f"{hub.address}/v1/videos/{path}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"


async def test_of_a_pipeline_that_tells_and_films_only_the_film_is_fetched() -> None:
    async with served(TOLD) as told, told.client as client:
        made = await client.videos.create(prompt="a cat", seconds="1")  # type: ignore[arg-type]
        done = await ended(client, made.id)
        assert done.status == "completed"
        count, _, _ = read((await client.videos.download_content(made.id)).content)
        assert count == 10


async def test_a_pipeline_without_a_stage_of_video_says_so() -> None:
    async with served(DRAWER) as drawer, drawer.client as client:
        with pytest.raises(BadRequestError, match="no stage of it has final_output: video"):
            await client.videos.create(prompt="a cat")
        with pytest.raises(BadRequestError, match="no stage of it has final_output: video"):
            await client.videos.list()


async def test_a_chat_shows_a_video_as_a_part_of_its_message(hub: Served) -> None:
    async with httpx.AsyncClient(timeout=30.0) as http:
        asked = {"messages": [{"role": "user", "content": "a cat"}]}
        answer = await http.post(f"{hub.address}/v1/chat/completions", json=asked)
    (part,) = answer.json()["choices"][0]["message"]["content"]
    assert part["type"] == "video_url"
    assert part["video_url"]["url"].startswith("data:video/mp4;base64,")


@pytest.mark.attack("Z53")
async def test_videos_that_are_not_read_are_few_of_one_client(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps some megabytes: a thousand stopped the loop for seconds."""
    async with hub.client as client, httpx.AsyncClient(base_url=hub.address) as http:
        made = await client.videos.create(prompt="a cat", seconds="4", size="256x256", extra_body={"fps": 24})  # type: ignore[arg-type]
        await ended(client, made.id)
        path = f"/v1/videos/{made.id}/content"
        with monkeypatch.context() as patch:
            patch.setattr("hub.api.videos.endpoint._MOST_DOWNLOADS_OF_CLIENT", 2)
            patch.setattr("hub.jobs.service.JobService._in_threads", endless)
            unread = [await http.send(http.build_request("GET", path), stream=True) for _ in range(2)]
            assert [each.status_code for each in unread] == [200, 200]
            full = await http.get(path)
        assert (full.status_code, full.headers["retry-after"]) == (429, "2")
        assert "2 videos are on their way to this client" in full.json()["error"]["message"]
        assert (await http.get(f"/v1/videos/{made.id}")).status_code == 200
        for each in unread:
            await each.aclose()
        async with asyncio.timeout(30.0):
            while (await http.get(path)).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.mark.attack("Z53")
async def test_the_longest_download_gives_its_place_to_one_that_finds_none(
    hub: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. all places are taken, by others; 2. a moment later, one is refused; 3. after long, the first one is cut off"""
    async with hub.client as client, httpx.AsyncClient(base_url=hub.address) as http:
        made = await client.videos.create(prompt="a cat", seconds="4", size="256x256", extra_body={"fps": 24})  # type: ignore[arg-type]
        await ended(client, made.id)
        path = f"/v1/videos/{made.id}/content"
        monkeypatch.setattr("hub.api.videos.endpoint._MOST_DOWNLOADS", 2)
        with monkeypatch.context() as patch:
            patch.setattr("hub.jobs.service.JobService._in_threads", endless)
            unread = [await http.send(http.build_request("GET", path), stream=True) for _ in range(2)]
        full = await http.get(path)
        assert (full.status_code, full.headers["retry-after"]) == (429, "2")
        monkeypatch.setattr("hub.api.videos.endpoint._LONG_DOWNLOAD_S", 0.0)
        assert (await http.get(path)).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            await unread[0].aread()
        await unread[1].aclose()


async def endless(_self: Any, first: bytes, pieces: Any) -> AsyncIterator[bytes]:
    pieces.close()
    yield first[:1]
    await asyncio.Event().wait()
