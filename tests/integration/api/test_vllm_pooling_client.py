"""vLLM's own server over a hub and scripted replicas that pool: what clients see, and what the replicas are told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from omni_discovery import wire
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from stage_runtime.engines.files import npy_of
from tests.support.engines import DEMO, as_the_supervisor_has_it
from tests.support.hub_fakes import FakeReplica, accept_only, running_hub, until

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

STAGE = StageConfig(
    stage_id=0,
    engine="vllm",
    model=str(DEMO / "thinker"),
    engine_args={"dtype": "float32", "max_model_len": 64, "hf_overrides": {"is_matryoshka": True}},
    default_sampling_params={"dimensions": 2},
    final_output="embedding",
)
HUB = "stages: [{stage_id: 0, engine: vllm, model: m, final_output: embedding}]"
ASK: dict[str, Any] = {"model": "m", "input": [5, 6, 7]}


def frontend_of(stage: StageConfig) -> Any:
    from hub.api.vllm.server import VllmFrontend

    return VllmFrontend(DeployConfig(stages=(stage,), model="m"), "")


@pytest.fixture(scope="module")
def frontend() -> Any:
    with as_the_supervisor_has_it():
        return frontend_of(STAGE)


@asynccontextmanager
async def serving(frontend: Any, *scripts: Any) -> AsyncIterator[tuple[httpx.AsyncClient, list[FakeReplica], Any]]:
    replicas = [FakeReplica(script, replica_id=number) for number, script in enumerate(scripts)]
    async with running_hub(*replicas, deploy=HUB) as omni:
        app = await frontend.build(omni)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://hub", timeout=20) as client:
            yield client, replicas, app._app.state.engine_client


def pool(replica: FakeReplica, submit: wire.Submit) -> None:
    """As many as there are tokens, and a two."""
    replica.accept(submit)
    answer_to(replica, submit)


def answer_to(replica: FakeReplica, submit: wire.Submit) -> None:
    file = npy_of(torch.tensor([len(submit.inputs["prompt_token_ids"]), 2.0]))
    replica.chunk(submit, 0, modality="embedding", mime="application/x-npy", attachments=[file])
    replica.done(submit, 1)


def pool_rows(replica: FakeReplica, submit: wire.Submit) -> None:
    """A row for each token."""
    replica.accept(submit)
    file = npy_of(torch.ones(len(submit.inputs["prompt_token_ids"]), 2))
    replica.chunk(submit, 0, modality="embedding", mime="application/x-npy", attachments=[file])
    replica.done(submit, 1)


def say_nothing(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.done(submit, 0)


def die(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.kill_soon()


async def test_each_prompt_is_a_request_and_the_documents_defaults_hold(frontend: Any) -> None:
    async with serving(frontend, pool) as (client, (replica,), _):
        answer = (await client.post("/v1/embeddings", json={**ASK, "input": [[5, 6, 7], [8]]})).json()
        await client.post(
            "/v1/embeddings", json={**ASK, "dimensions": 4, "use_activation": False, "cache_salt": "mine"}
        )
    assert [each["embedding"] for each in answer["data"]] == [[3.0, 2.0], [1.0, 2.0]]
    assert answer["usage"]["prompt_tokens"] == 4
    *two, other = replica.of(wire.Submit)
    assert [submit.params for submit in two] == [{"task": "embed", "dimensions": 2, "use_activation": True}] * 2
    assert other.params == {"task": "embed", "dimensions": 4, "use_activation": False, "cache_salt": "mine"}


async def test_a_replica_that_dies_costs_the_client_nothing(frontend: Any) -> None:
    async with serving(frontend, die, pool) as (client, replicas, _):
        answers = [await client.post("/v1/embeddings", json=ASK) for _ in range(2)]
    assert [answer.json()["data"][0]["embedding"] for answer in answers] == [[3.0, 2.0]] * 2
    assert sum(len(replica.of(wire.Submit)) for replica in replicas) == 3


async def test_what_goes_wrong_is_told_with_its_status(frontend: Any) -> None:
    """1. a stage that pools nothing is to blame; 2. a stage without replicas is a 503 that says when to come back"""
    async with serving(frontend, say_nothing) as (client, (replica,), _):
        empty = await client.post("/v1/embeddings", json=ASK)
        replica.kill()
        gone = await client.post("/v1/embeddings", json=ASK)
    assert (empty.status_code, "pooled nothing" in empty.text) == (500, True)
    assert gone.status_code == 503
    assert int(gone.headers["Retry-After"]) > 0


async def test_an_abort_by_name_ends_a_request_without_an_answer(frontend: Any) -> None:
    from vllm import PoolingParams
    from vllm.inputs.engine import tokens_input

    async with serving(frontend, accept_only) as (_, (replica,), engine):
        made: list[Any] = []

        async def read() -> None:
            made.extend([each async for each in engine.encode(tokens_input([5, 6]), PoolingParams(task="embed"), "r1")])

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            await until(lambda: bool(replica.of(wire.Submit)))
            await engine.abort("r1")
    assert made == []
    assert len({abort.request_id for abort in replica.of(wire.Abort)}) == 1


def test_what_no_stage_takes_is_refused_by_name(frontend: Any) -> None:
    from vllm import PoolingParams
    from vllm.pooling_params import LateInteractionParams

    from hub.api.vllm.pooling import stage_params

    types = {"compressed_token_type_ids": 4}
    assert stage_params(PoolingParams(task="classify", extra_kwargs=types)) == {"task": "classify", **types}
    with pytest.raises(InvalidRequestError, match="extra_kwargs"):
        stage_params(PoolingParams(extra_kwargs={**types, "more": 1}))
    with pytest.raises(InvalidRequestError, match="late_interaction_params"):
        stage_params(PoolingParams(late_interaction_params=LateInteractionParams("cache_query", "k")))


@pytest.mark.parametrize(
    ("architecture", "convert", "kind", "tasks"),
    [
        ("LlamaForCausalLM", "embed", "bi-encoder", ("embed", "token_embed")),
        ("BertModel", "none", "bi-encoder", ("embed", "token_embed")),
        ("BertForSequenceClassification", "none", "cross-encoder", ("classify", "token_classify")),
        ("Qwen3ForCausalLM", "classify", "cross-encoder", ("classify", "token_classify")),
        ("BertForTokenClassification", "none", "bi-encoder", ("token_classify",)),
        ("Qwen2ForRewardModel", "none", "bi-encoder", ("token_classify",)),
        ("HF_ColBERT", "none", "late-interaction", ("token_embed",)),
    ],
)
def test_what_a_model_pools_is_read_off_its_config(
    frontend: Any, architecture: str, convert: str, kind: str, tasks: tuple[str, ...]
) -> None:
    from hub.api.vllm.pooling import tasks_of

    said: dict[str, Any] = {"architectures": [architecture], "convert_type": convert, "score_type": kind}
    assert tasks_of(SimpleNamespace(**said, pooler_config=SimpleNamespace(task=None))) == tasks
    assert tasks_of(SimpleNamespace(**said, pooler_config=SimpleNamespace(task="plugin"))) == ("plugin",)


def test_a_default_that_vllm_has_not_is_refused_as_the_hub_starts(frontend: Any) -> None:
    from msgspec.structs import replace

    with pytest.raises(ConfigError, match="task"):
        frontend_of(replace(STAGE, default_sampling_params={"task": "guess"}))


@pytest.mark.attack("C13")
async def test_nothing_is_fetched_or_unpacked_for_a_stage_that_reads_text(frontend: Any) -> None:
    """Its vLLM would do so first, from any host that the hub reaches, and look then whether the model takes it."""
    visits: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(await reader.readline())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, serving(frontend, pool) as (client, _, _):
        host = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x.png"
        sound: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        links = product(
            ("image_url", "audio_url", "video_url"), (host, "file:///etc/passwd", "data:video/mp4;base64,AA==")
        )
        for part in (sound, *({"type": kind, kind: {"url": link}} for kind, link in links)):
            for path in ("/v1/embeddings", "/pooling"):
                refused = await client.post(
                    path, json={"model": "m", "messages": [{"role": "user", "content": [part]}]}
                )
                assert refused.status_code == 400, (path, part, refused.text)
                assert f"pools text; leave {part['type']} out" in refused.text
        images = await client.post("/v2/embed", json={"model": "m", "images": [host]})
        assert (images.status_code, "pools text" in images.text) == (400, True), images.text
        said = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 1"}]}]}
        assert (await client.post("/v1/embeddings", json=said)).status_code == 200
    assert visits == []


async def test_a_request_with_many_texts_is_served_some_at_a_time(
    frontend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub would turn away what comes beyond its bounds, and the whole request with it. Others are not held up."""
    monkeypatch.setattr("hub.api.vllm.bounds.fan_out.MAX_AT_ONCE", 3)
    async with serving(frontend, accept_only) as (client, (replica,), _):
        asked = asyncio.create_task(client.post("/v1/embeddings", json={**ASK, "input": [[5, n] for n in range(9)]}))
        for number, due in enumerate((3, 4, 5, 6, 7, 8, 9, 9)):
            await until(lambda due=due: len(replica.of(wire.Submit)) >= due)
            assert len(replica.of(wire.Submit)) == due
            answer_to(replica, replica.of(wire.Submit)[number])
        other = asyncio.create_task(client.post("/v1/embeddings", json=ASK))
        await until(lambda: len(replica.of(wire.Submit)) == 10)
        for submit in replica.of(wire.Submit)[8:]:
            answer_to(replica, submit)
        answers = (await asked).json()["data"], (await other).json()["data"]
    assert [len(each) for each in answers] == [9, 1]


async def test_a_request_with_too_many_texts_is_refused_before_one_is_asked(
    frontend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request to the hub has its own count."""
    monkeypatch.setattr("hub.api.vllm.bounds.fan_out.MAX_IN_ALL", 3)
    async with serving(frontend, pool) as (client, (replica,), _):
        refused = await client.post("/v1/embeddings", json={**ASK, "input": [[5]] * 4})
        assert (refused.status_code, "may come to 3 texts" in refused.text) == (400, True), refused.text
        assert not replica.of(wire.Submit)
        for _ in range(2):
            assert (await client.post("/v1/embeddings", json={**ASK, "input": [[5]] * 3})).status_code == 200


@pytest.mark.attack("Z27")
@pytest.mark.parametrize("kind", ["BiEncoderIOProcessor", "LateInteractionIOProcessor"])
async def test_a_query_is_not_kept_with_each_of_its_documents(
    frontend: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads the tokens of a pair: with 16 383 documents, a query of 8000 of them came to a GB.

    The thread that reads everybody's texts does not compare them.
    """
    from vllm.entrypoints.pooling.scoring import io_processor
    from vllm.entrypoints.pooling.scoring import serving as scoring

    kept: list[int] = []
    threads: set[str] = set()

    def build(self: Any, ctx: Any) -> Any:
        threads.add(threading.current_thread().name)
        kept.extend(len(pair.prompt_token_ids) for pair in ctx.final_res_batch)
        return real(self, ctx)

    real = scoring.ServingScores._build_response
    monkeypatch.setattr(scoring.ServingScores, "_build_response", build)
    monkeypatch.setitem(scoring.ScoringIOProcessors, "bi-encoder", getattr(io_processor, kind))
    query, documents = "1 + 1", ["2", "3 + 3", "4"]
    async with serving(frontend, pool if kind.startswith("Bi") else pool_rows) as (client, _, _):
        asked = {"model": "m", "input": [query, *documents]}
        told = (await client.post("/v1/embeddings", json=asked)).json()["usage"]["prompt_tokens"]
        answer = (await client.post("/score", json={"model": "m", "text_1": query, "text_2": documents})).json()
        ranked = (await client.post("/rerank", json={"model": "m", "query": query, "documents": documents})).json()
    assert len(answer["data"]) == len(ranked["results"]) == 3
    assert answer["usage"]["prompt_tokens"] == ranked["usage"]["prompt_tokens"] == told
    # There is a token of padding between two texts.
    assert max(kept) <= 1
    assert threads == {"Pairs_0"}


@pytest.mark.attack("Z30")
def test_two_long_texts_are_compared_in_parts(frontend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, two texts of 16 000 tokens took a GB."""
    from vllm.entrypoints.pooling.scoring import io_processor

    query, document = torch.rand(1000, 4), torch.rand(700, 4)
    expected = torch.matmul(query, document.T).amax(dim=-1).sum()
    real, sizes = torch.matmul, list[int]()

    def multiply(one: Any, other: Any) -> Any:
        made = real(one, other)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(torch, "matmul", multiply)
    assert torch.isclose(io_processor.compute_maxsim_score(query, document), expected)
    assert max(sizes) <= 256 * 700
