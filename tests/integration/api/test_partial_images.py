"""Unfinished pictures of a real painter, as OpenAI's own clients read them."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError
from PIL import Image

from hub.api.routes import build_app
from hub.async_omni import AsyncOmni
from omni_discovery.deploy.document import encode_deploy
from stage_runtime.engines.base import create_engine
from tests.support.child_replica import ChildReplica
from tests.support.hub_fakes import deploy_of, show, started_hub, until
from tests.support.local_replica import LocalReplica
from tests.support.painting import PAINTING
from tests.support.serving import CONFIG, HUBS, KEYS
from tests.support.speaking import DRAWER, Served, served

#: A painter takes seconds where others use the processors, too.
PATIENT = replace(CONFIG, request_timeout_s=60.0, accept_timeout_s=10.0, accept_limit_s=20.0, silence_grace_s=2.0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the supervisor has it; threads that wait for each other take far longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
async def hub() -> AsyncIterator[Served]:
    async with served(PAINTING, PATIENT) as running:
        yield running


def pixels_of(b64_json: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64_json))).convert("L"), dtype=np.float64)


def far(one: Any, other: Any) -> float:
    """How unlike the pictures of two events are."""
    return float(np.abs(pixels_of(one.b64_json) - pixels_of(other.b64_json)).mean())


def names(events: list[Any]) -> list[str]:
    return [f"{each.type}/{getattr(each, 'partial_image_index', '')}" for each in events]


def check_nearing(events: list[Any]) -> None:
    """Each unfinished picture is as large as the finished one, and the last is nearer to it than the first."""
    *unfinished, last = events
    assert {each.size for each in events} == {"224x128"}
    assert [pixels_of(each.b64_json).shape for each in events] == [(128, 224)] * len(events)
    distances = [far(each, last) for each in unfinished]
    assert distances[0] > distances[-1] > 0


async def test_both_clients_read_unfinished_pictures_that_come_nearer_to_the_finished_one(hub: Served) -> None:
    """The picture is the one that comes unstreamed, with its size and its token counts."""
    asked: dict[str, Any] = {"prompt": "draw 42", "extra_body": {"seed": 5}}

    def ask() -> list[Any]:
        with hub.sync_client as sync:
            return list(sync.images.generate(**asked, stream=True, partial_images=3))

    async with hub.client as client:
        whole = await client.images.generate(**asked)
        stream = await client.images.generate(**asked, stream=True, partial_images=3)
        for events in ([each async for each in stream], await asyncio.to_thread(ask)):
            partial = [f"image_generation.partial_image/{index}" for index in range(3)]
            assert names(events) == [*partial, "image_generation.completed/"]
            check_nearing(events)
            assert whole.data is not None
            assert events[-1].b64_json == whole.data[0].b64_json
            assert {(each.output_format, each.quality, each.background) for each in events} == {("png", "auto", "auto")}


async def test_edits_have_unfinished_pictures_too(hub: Served) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    asked: dict[str, Any] = {"image": file.getvalue(), "prompt": "as 17", "stream": True}

    def ask() -> list[Any]:
        with hub.sync_client as sync:
            return list(sync.images.edit(**asked, partial_images=2))

    async with hub.client as client:
        stream = await client.images.edit(**asked, partial_images=2)
        for events in ([each async for each in stream], await asyncio.to_thread(ask)):
            partial = [f"image_edit.partial_image/{index}" for index in range(2)]
            assert names(events) == [*partial, "image_edit.completed/"]
            check_nearing(events)


async def test_what_comes_before_a_finished_picture_is_of_that_picture(hub: Served) -> None:
    """1. three pictures, each of its own seed: no index comes twice or falls before a finished one
    2. each unfinished picture is nearer to the finished one behind it than to the other two
    """
    async with hub.client as client:
        asked: dict[str, Any] = {"prompt": "8", "n": 3, "extra_body": {"seed": 5}}
        stream = await client.images.generate(**asked, stream=True, partial_images=3)
        events = [each async for each in stream]
    finished = [each for each in events if each.type == "image_generation.completed"]
    assert len(finished) == 3
    assert events[-1] is finished[-1]
    last, place, unfinished = -1, 0, 0
    for event in events:
        if event is finished[place]:
            last, place = -1, place + 1
            continue
        assert event.partial_image_index > last
        last, unfinished = event.partial_image_index, unfinished + 1
        if last == 2:
            assert far(event, finished[place]) == min(far(event, each) for each in finished)
    assert unfinished >= 3


async def test_only_who_asks_gets_them_and_no_more_than_asked(hub: Served) -> None:
    """None with 0, and none in a chat; four, and a list of parameters that asks for some, are refused by name."""
    async with hub.client as client, httpx.AsyncClient(base_url=f"{hub.address}/v1", timeout=30.0) as http:
        for count in (0, 1):
            stream = await client.images.generate(prompt="7", stream=True, partial_images=count)
            assert len([each async for each in stream]) == count + 1
        for wrong in (-1, 4, True, "2"):
            refused = await http.post(
                "/images/generations", json={"prompt": "7", "stream": True, "partial_images": wrong}
            )
            assert refused.status_code == 400
            assert "partial_images" in refused.json()["error"]["message"]
        unasked = [None, {"partial_images": 2}]
        with pytest.raises(BadRequestError, match="'sampling_params_list': unfinished pictures come by /v1/images"):
            await client.chat.completions.create(
                model="", messages=[{"role": "user", "content": "7"}], extra_body={"sampling_params_list": unasked}
            )


async def test_a_painter_whose_document_asks_for_them_shows_none_in_chats_and_whole_answers() -> None:
    document = PAINTING.rstrip()[: -len("final_output: image}")] + (
        "default_sampling_params: {partial_images: 2}, final_output: image}\n"
    )
    async with served(document, PATIENT) as hub, hub.client as client:
        answer = await client.images.generate(prompt="7")
        chat = await client.chat.completions.create(model="", messages=[{"role": "user", "content": "7"}])
    assert len(answer.data or []) == 1
    assert len(chat.choices[0].message.content or []) == 1


async def test_an_engine_that_can_give_none_draws_as_ever() -> None:
    """Its replica is never asked, as it would refuse the parameter."""
    async with served(DRAWER, PATIENT) as hub, hub.client as client:
        stream = await client.images.generate(prompt="7", stream=True, partial_images=3)
        assert names([each async for each in stream]) == ["image_generation.completed/"]


def painter_of(replica_id: int) -> LocalReplica:
    deploy = deploy_of(PAINTING)
    engine = create_engine(deploy.stage(1))
    engine.load(lambda _phase, _progress: None)
    return LocalReplica(HUBS, deploy=deploy, engine=engine, stage_id=1, replica_id=replica_id, epoch=80 + replica_id)


@pytest.fixture
def replicas() -> Iterator[tuple[LocalReplica, ChildReplica, LocalReplica]]:
    """The first stage; a painter in a process of its own that hangs behind its first unfinished picture; another."""
    deploy = deploy_of(PAINTING)
    first = create_engine(deploy.stage(0))
    first.load(lambda _phase, _progress: None)
    stuck = "tests.support.painting:StuckPainter"
    child = ChildReplica(HUBS, 0, 90, stage_id=1, deploy=encode_deploy(deploy).decode(), engine_class=stuck)
    with ExitStack() as stack:
        thinker = stack.enter_context(LocalReplica(HUBS, deploy=deploy, engine=first, stage_id=0))
        yield thinker, stack.enter_context(child), stack.enter_context(painter_of(1))


async def test_a_painter_that_is_killed_is_replaced_and_no_index_comes_twice(
    replicas: tuple[LocalReplica, ChildReplica, LocalReplica],
) -> None:
    """1. the only painter has shown unfinished picture 0 and is killed; another appears
    2. it draws the same from the beginning: the client gets 1 and 2, and the picture that nobody disturbed has
    """
    thinker, lost, other = replicas
    omni = AsyncOmni(deploy_of(PAINTING), "hub-1", KEYS, PATIENT, "round-robin")
    async with started_hub(omni, thinker.info, lost.info, timeout_s=30.0):
        transport = httpx.ASGITransport(app=build_app(omni, deploy_of(PAINTING), 0))
        http = httpx.AsyncClient(transport=transport, base_url="http://hub/v1")
        async with AsyncOpenAI(base_url="http://hub/v1", api_key="none", http_client=http, max_retries=0) as client:
            asked: dict[str, Any] = {"prompt": "42", "extra_body": {"seed": 5}}

            async def replace_painter() -> None:
                await until(lambda: _has_shown(omni), 30.0)
                lost.kill()
                show(omni, thinker.info, other.info)

            replacing = asyncio.create_task(replace_painter())
            stream = await client.images.generate(**asked, stream=True, partial_images=3)
            events = [each async for each in stream]
            await replacing
            whole = await client.images.generate(**asked)
    assert names(events) == [*(f"image_generation.partial_image/{n}" for n in range(3)), "image_generation.completed/"]
    assert whole.data is not None
    assert events[-1].b64_json == whole.data[0].b64_json
    check_nearing(events)


def _has_shown(omni: AsyncOmni) -> bool:
    """Whether an unfinished picture of the only request came."""
    assert omni._orchestrator is not None
    return any(
        run.seen.partial_images
        for each in omni._orchestrator._requests.active.values()
        for run in each.machine.runs.values()
    )
