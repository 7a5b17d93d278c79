"""LoRA adapters by the name of a model, through vLLM's own server: what the client sees, and what replicas are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from omni_discovery import wire
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.errors import ConfigError
from tests.integration.api.test_vllm_client import DEPLOY, HUB, STAGE, speak
from tests.support.engines import as_the_supervisor_has_it
from tests.support.hub_fakes import FakeReplica, running_hub, until

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PAIR = """
stages:
  - {stage_id: 0, engine: vllm}
  - {stage_id: 1, engine: vllm, final_output: text}
"""
DECLARED = {"name": "sql", "path": "/adapters/sql"}
ADDED = {"lora_name": "chat", "lora_path": "/adapters/chat"}


def deploy_with_adapters() -> DeployConfig:
    stage = msgspec.structs.replace(STAGE, engine_args={**STAGE.engine_args, "enable_lora": True})
    return DeployConfig(stages=(stage,), model="thinker")


@pytest.fixture(scope="module")
def frontend() -> Iterator[Any]:
    with as_the_supervisor_has_it(), pytest.MonkeyPatch.context() as patch:
        # So the environment variable of that name has vLLM's server show the routes for adapters.
        patch.setattr("vllm.envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING", True)
        from hub.api.vllm.server import VllmFrontend

        yield VllmFrontend(deploy_with_adapters(), "--lora-modules sql=/adapters/sql")


@asynccontextmanager
async def serving(frontend: Any, *replicas: FakeReplica) -> AsyncIterator[httpx.AsyncClient]:
    async with running_hub(*replicas, deploy=HUB) as omni:
        transport = httpx.ASGITransport(await frontend.build(omni), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://hub", timeout=20) as client:
            yield client


async def names(client: httpx.AsyncClient) -> list[str]:
    return [model["id"] for model in (await client.get("/v1/models")).json()["data"]]


async def ask(client: httpx.AsyncClient, model: str) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": model, "prompt": "1 + 1", "n": 2})


def loads(replica: FakeReplica) -> list[wire.Control]:
    return [control for control in replica.of(wire.Control) if control.method == "add_lora"]


def answer(replica: FakeReplica, error: str = "") -> None:
    about = {"epoch": replica.info.epoch, "call_id": loads(replica)[-1].call_id, "queue_length": 0}
    replica.say(wire.ControlResult(**about, ok=not error, result=None if error else True, error=error))


async def add(client: httpx.AsyncClient, *said: tuple[FakeReplica, str], **more: Any) -> httpx.Response:
    """Add the adapter, and have the replicas answer so."""
    before = [len(loads(replica)) for replica, _ in said]
    adding = asyncio.create_task(client.post("/v1/load_lora_adapter", json={**ADDED, **more}))
    for (replica, error), count in zip(said, before, strict=True):
        await until(lambda replica=replica, count=count: len(loads(replica)) > count)  # type: ignore[misc]
        answer(replica, error)
    return await adding


async def test_a_declared_adapter_goes_with_each_request_for_it(frontend: Any) -> None:
    """1. the hub starts before any replica, and lists the adapter beside the model
    2. every answer of a request for it brings name and path; a request for the model itself brings nothing
    """
    replica = FakeReplica(speak)
    async with serving(frontend, replica) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        with_it, without = await ask(client, "sql"), await ask(client, "thinker")
        missing = await ask(client, "chat")
    assert [(model["id"], model["parent"]) for model in listed] == [("thinker", None), ("sql", "thinker")]
    assert listed[1]["root"] == "/adapters/sql"
    assert (with_it.status_code, without.status_code, missing.status_code) == (200, 200, 404)
    assert with_it.json()["model"] == "sql"
    assert [choice["text"] for choice in with_it.json()["choices"]] == ["two words"] * 2
    assert [submit.params.get("lora") for submit in replica.of(wire.Submit)] == [DECLARED, DECLARED, None, None]
    assert not loads(replica)


async def test_an_adapter_that_is_added_is_loaded_by_every_replica_or_the_one_that_cant_is_named(frontend: Any) -> None:
    """1. one of two replicas has no such path: 404, as vLLM has it, and the adapter is not listed
    2. both load it: it is listed, and asked for with its path
    3. it is removed: a request for it is a 404
    """
    first, second = FakeReplica(speak), FakeReplica(speak, replica_id=1)
    async with serving(frontend, first, second) as client:
        gone = "LoRAAdapterNotFoundError: Loading lora chat failed: No adapter found for /adapters/chat"
        assert (await add(client, (first, ""), (second, gone))).status_code == 404
        other = await add(client, (first, ""), (second, "ValueError: LoRA rank 64 is greater than 16"))
        assert other.status_code == 500
        assert "replica 0/1 of 2 can't load the adapter: ValueError: LoRA rank 64" in other.text
        assert await names(client) == ["thinker", "sql"]
        assert (await add(client, (first, ""), (second, ""))).status_code == 200
        assert loads(second)[-1].args == ("chat", None, "/adapters/chat", {"load_inplace": False})
        assert await names(client) == ["thinker", "sql", "chat"]
        assert (await ask(client, "chat")).status_code == 200
        asked = [submit.params["lora"] for replica in (first, second) for submit in replica.of(wire.Submit)]
        assert asked == [{"name": "chat", "path": "/adapters/chat"}] * 2
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "chat"})).status_code == 200
        assert (await ask(client, "chat")).status_code == 404


async def test_who_cant_be_asked_loads_an_adapter_later_but_never_in_place(frontend: Any) -> None:
    """Without a replica an adapter can be added; one whose weights change in place must be seen to have changed."""
    async with serving(frontend) as client:
        assert (await add(client)).status_code == 200
        assert await names(client) == ["thinker", "sql", "chat"]
    replica = FakeReplica(speak)
    async with serving(frontend, replica) as client:
        assert (await add(client, (replica, "ReplicaLostError: it is gone"))).status_code == 200
        lost = await add(client, (replica, "ReplicaLostError: it is gone"), load_inplace=True)
        assert lost.status_code == 500
        assert (await add(client, (replica, ""), load_inplace=True)).status_code == 200
        assert loads(replica)[-1].args[-1] == {"load_inplace": True}


async def test_a_stage_that_prefills_for_another_gets_the_adapter_too(frontend: Any) -> None:
    from vllm.lora.request import LoRARequest

    from hub.api.vllm.control import StageAdapters

    async with running_hub(deploy=PAIR) as omni:
        adapters = StageAdapters(omni, 1, takes=True)
        asked = adapters.params({"max_tokens": 4}, LoRARequest("sql", 1, "/adapters/sql"))
        assert asked == {0: {"lora": DECLARED}, 1: {"max_tokens": 4, "lora": DECLARED}}
        assert adapters.params({"max_tokens": 4}, None) == {1: {"max_tokens": 4}}


async def test_a_stage_that_takes_none_is_not_asked_for_one(frontend: Any) -> None:
    """Neither by flag, nor while the hub runs; a name that is the model's is refused, too."""
    from hub.api.vllm.server import VllmFrontend

    with pytest.raises(ConfigError, match="enable_lora: true"):
        VllmFrontend(DEPLOY, "--lora-modules sql=/adapters/sql")
    async with serving(VllmFrontend(DEPLOY, "")) as client:
        refused = await add(client)
        assert (refused.status_code, await names(client)) == (500, ["thinker"])
        assert "enable_lora" in refused.text
    async with running_hub(deploy=HUB) as omni:
        with pytest.raises(ConfigError, match="conflicts with a served base model"):
            await VllmFrontend(deploy_with_adapters(), "--lora-modules thinker=/l").build(omni)
