"""A vLLM stage that pools: its numbers are vLLM's own, and a hub gives them to its users, over ``--api vllm`` too."""

from __future__ import annotations

import base64
import io
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest, create_engine
from stage_runtime.engines.vllm.pooling import VllmPoolingEngine
from stage_runtime.testing import EngineContract
from tests.support.engines import THINKER, as_the_supervisor_has_it, run, skip_without_vllms_server

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

#: Once vLLM has loaded, torch's own name for it does nothing.
set_num_threads = torch.set_num_threads
set_num_threads(1)

LONG = pytest.mark.skipif(not os.environ.get("OMNI_LONG"), reason="the long form: make long")
TEXT = "What is 1 + 2?"
ARGS = {name: value for name, value in THINKER.engine_args.items() if name != "handoff"}
#: The thinker, asked for what it thinks of a prompt before it answers. Its first numbers count as a short embedding.
EMBEDDER = msgspec.structs.replace(
    THINKER,
    engine_args={**ARGS, "runner": "pooling", "convert": "embed", "hf_overrides": {"is_matryoshka": True}},
    final_output="embedding",
)


def ask(key: str, text: str = TEXT, **params: Any) -> StageRequest:
    return StageRequest(key, key, inputs={"prompt": text}, params=params)


def array_of(outputs: list[Any]) -> np.ndarray[Any, Any]:
    (only,) = outputs
    array: np.ndarray[Any, Any] = np.load(io.BytesIO(only.pooled_npy), allow_pickle=False)
    assert array.dtype == np.float32
    return array


def vllms_own(llm: Any, prompt: dict[str, Any], **params: Any) -> np.ndarray[Any, Any]:
    """What vLLM itself makes of it, its tokenizer included."""
    from vllm import PoolingParams

    llm.add_request("reference", prompt, PoolingParams(**params))
    made: list[Any] = []
    while llm.has_unfinished_requests():
        made += llm.step()
    (only,) = made
    numbers: np.ndarray[Any, Any] = only.outputs.data.float().numpy()
    return numbers


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    with as_the_supervisor_has_it():
        yield


@pytest.fixture(scope="module")
def embedder(_environment: None) -> Iterator[VllmPoolingEngine]:
    engine = create_engine(EMBEDDER)
    assert isinstance(engine, VllmPoolingEngine)
    engine.load(lambda _phase, _progress: None)
    yield engine
    engine.close()
    engine.close()


class TestPoolingKeepsTheContract(EngineContract):
    """The engine that pools."""

    offers = frozenset({"controls", "metrics"})

    @pytest.fixture
    def engine(self, embedder: VllmPoolingEngine) -> Engine:
        assert not embedder.has_unfinished(), "the test before has left something to do"
        return embedder

    def good_request(self, key: str) -> StageRequest:
        return ask(key)

    def bad_request(self, key: str) -> StageRequest:
        return ask(key, task="classify")


def test_the_numbers_are_vllms_own(embedder: VllmPoolingEngine) -> None:
    """Of a text, of its tokens, of the first dimensions, of every token, and as they are."""
    token_ids = embedder._model.tokenizer.encode(TEXT)
    said = run(
        embedder,
        ask("text"),
        StageRequest("tokens", "tokens", inputs={"prompt_token_ids": token_ids}),
        ask("short", dimensions=8),
        ask("each", task="token_embed"),
        ask("raw", task="token_embed", use_activation=False),
    )
    arrays = {key: array_of(outputs) for key, outputs in said.items()}
    expected: dict[str, dict[str, Any]] = {
        "text": {"task": "embed"},
        "tokens": {"task": "embed"},
        "short": {"task": "embed", "dimensions": 8},
        "each": {"task": "token_embed"},
        "raw": {"task": "token_embed", "use_activation": False},
    }
    for key, params in expected.items():
        own = vllms_own(embedder._llm, {"prompt": TEXT}, **params)
        assert arrays[key].shape == own.shape, key
        np.testing.assert_allclose(arrays[key], own, atol=1e-5, err_msg=key)
    assert [arrays[key].shape for key in ("text", "short", "each")] == [(128,), (8,), (len(token_ids), 128)]
    assert np.linalg.norm(arrays["text"]) == pytest.approx(1.0, abs=1e-4)
    assert abs(arrays["each"] - arrays["raw"]).max() > 1e-3
    (end,) = said["text"]
    assert (end.finish_reason, end.handoff) == ("stop", None)
    assert end.usage == {"prompt_tokens": len(token_ids), "completion_tokens": 0}


def test_what_stages_before_handed_over_is_pooled_and_handed_on(embedder: VllmPoolingEngine) -> None:
    token_ids = embedder._model.tokenizer.encode(TEXT)
    handed = {0: {"token_ids": token_ids}}
    pieces = {0: {"pieces": [{"token_ids": token_ids[:2]}, {"token_ids": token_ids[2:]}]}}
    said = run(
        embedder,
        ask("direct"),
        replace(ask("handed"), inputs={}, payloads=handed, next_stages=(2,)),
        replace(ask("pieces"), inputs={}, payloads=pieces),
    )
    for key in ("handed", "pieces"):
        np.testing.assert_allclose(array_of(said[key]), array_of(said["direct"]), atol=1e-5)
    (end,) = said["handed"]
    assert end.handoff is not None
    np.testing.assert_array_equal(end.handoff["pooled"].numpy(), array_of(said["handed"]))


@pytest.mark.parametrize(
    ("inputs", "params", "named"),
    [
        ({"prompt": TEXT}, {"temperature": 0.5}, "'temperature' is not known"),
        ({"prompt": TEXT}, {"normalize": True}, "'normalize' is not known"),
        ({"prompt": TEXT}, {"task": "classify"}, "classify"),
        ({"prompt": TEXT}, {"task": "score"}, "score"),
        ({"prompt": TEXT}, {"dimensions": 0}, "dimensions"),
        ({"prompt": TEXT}, {"dimensions": 129}, "129"),
        ({"prompt": TEXT}, {"use_activation": 1}, "use_activation"),
        ({"prompt": TEXT}, {"lora": "x"}, "no adapters"),
        ({"prompt": ""}, {}, "empty"),
        ({"prompt_token_ids": [9] * 129}, {}, "length is 128 tokens; the prompt has 129"),
        ({"prompt_token_ids": [640]}, {}, "vocabulary"),
        ({"messages": [{"role": "user", "content": TEXT}]}, {}, "reads a prompt"),
    ],
    ids=str,
)
def test_what_can_not_be_pooled_is_refused_by_name_and_the_engine_lives(
    embedder: VllmPoolingEngine, inputs: dict[str, Any], params: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        embedder.add(StageRequest("bad", "bad", inputs=inputs, params=params))
    assert not embedder.has_unfinished()


@pytest.mark.attack("G1")
def test_others_are_pooled_while_a_long_prompt_is_read(
    embedder: VllmPoolingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. two long prompts; the tokenizer does not come to an end with the first
    2. another request is answered; the second one is aborted; 3. the first is read, and answered
    """
    go_on = threading.Event()

    class Slow:
        def encode(self, text: str, **options: Any) -> list[int]:
            if len(text) > 1000:
                assert go_on.wait(60)
            return [30, 31] if options["add_special_tokens"] else []

    monkeypatch.setattr(embedder._model.bounded, "_tokenizer", Slow())
    # As if so long a text could fit.
    monkeypatch.setattr(embedder._model.bounded, "_token_characters", 10_000)
    embedder.add(ask("long", "a" * 70_000))
    embedder.add(ask("second", "b" * 70_000))
    with pytest.raises(InvalidRequestError, match="running already"):
        embedder.add(ask("long"))
    embedder.add(StageRequest("k", "k", inputs={"prompt_token_ids": [30, 31]}))
    said: list[EngineOutput] = []
    while not said:
        said += embedder.step()
    assert [output.key for output in said] == ["k"]
    embedder.abort("second")
    assert [(output.key, output.finish_reason) for output in embedder.step()] == [("second", "abort")]
    assert embedder.has_unfinished()
    go_on.set()
    read: list[EngineOutput] = []
    while embedder.has_unfinished():
        read += embedder.step()
    assert [output.key for output in read] == ["long"]
    assert np.allclose(array_of(read), array_of(said))


def test_a_prompt_may_fill_the_context_for_no_answer_follows(embedder: VllmPoolingEngine) -> None:
    full = StageRequest("full", "full", inputs={"prompt_token_ids": [30] * 128})
    assert array_of(run(embedder, full)["full"]).shape == (128,)


@pytest.mark.parametrize(
    ("runner", "final_output", "named"),
    [("pooling", "text", "embedding"), ("generate", "embedding", "must be pooling")],
)
def test_a_document_that_contradicts_itself_is_refused(runner: str, final_output: Any, named: str) -> None:
    stage = msgspec.structs.replace(THINKER, engine_args={**ARGS, "runner": runner}, final_output=final_output)
    with pytest.raises(ConfigError, match=named):
        create_engine(stage)


# ---- before a hub


@asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch, engine: VllmPoolingEngine, stage: StageConfig
) -> AsyncIterator[tuple[Any, Any, Any]]:
    """A hub before it: in Python, by its own API, and by vLLM's server."""
    skip_without_vllms_server()
    import httpx

    from hub.api.routes import build_app
    from hub.api.vllm.server import VllmFrontend
    from omni_discovery.deploy.document import encode_deploy
    from tests.support.local_replica import LocalReplica
    from tests.support.serving import HUBS, hub_of

    step = engine.step

    def alone() -> list[EngineOutput]:
        # A thread that is new to torch counts its own threads anew, in the middle of its first step.
        set_num_threads(1)
        return step()

    deploy = DeployConfig(stages=(stage,), model="m")
    monkeypatch.setattr(engine, "step", alone)
    frontend = VllmFrontend(deploy, "")
    with LocalReplica(HUBS, engine=engine) as replica:
        async with hub_of(encode_deploy(deploy).decode(), replica) as omni:
            apps = (build_app(omni, deploy, 0), await frontend.build(omni))
            clients = [
                httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://hub", timeout=60) for app in apps
            ]
            async with clients[0], clients[1]:
                yield omni, clients[0], clients[1]


async def test_a_hub_gives_embeddings_in_python_and_by_vllms_server(
    embedder: VllmPoolingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. AsyncOmni and the batch API give arrays, the chat of the hub's own API says where else to ask
    2. /v1/embeddings takes texts and tokens, and gives floats, base64, fewer dimensions
    3. /pooling and /score compare; what can't be asked is refused with its status
    """
    expected = array_of(run(embedder, ask("text"))["text"])
    token_ids = embedder._model.tokenizer.encode(TEXT)
    async with served(monkeypatch, embedder, EMBEDDER) as (omni, own, vllms):
        await _in_python(omni, expected)
        chat = {"messages": [{"role": "user", "content": TEXT}]}
        for client in (own, vllms):
            answer = await client.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 400
            assert "/v1/embeddings" in answer.json()["error"]["message"]
        await _embeddings(vllms, token_ids, expected)
        await _pooled_and_scored(vllms, expected)


async def _in_python(omni: Any, expected: np.ndarray[Any, Any]) -> None:
    from hub.omni import BatchOptions, run_batch

    outputs = [each async for each in omni.generate({"prompt": TEXT})]
    assert [(each.modality, each.mime) for each in outputs[:1]] == [("embedding", "application/x-npy")]
    np.testing.assert_allclose(outputs[0].embedding, expected, atol=1e-5)
    assert [each.embedding for each in outputs[1:]] == [None, None]
    params = {0: {"dimensions": 4}}
    (good,) = await run_batch(omni, [TEXT], BatchOptions(1, 60.0, params, None), lambda: None)
    assert good.embedding is not None
    assert good.embedding.shape == (4,)
    with pytest.raises(InvalidRequestError, match="classify"):
        _ = [each async for each in omni.generate({"prompt": TEXT}, params={0: {"task": "classify"}})]


async def _embeddings(client: Any, token_ids: list[int], expected: np.ndarray[Any, Any]) -> None:
    asked = {"model": "m", "input": [TEXT, "other"]}
    answer = (await client.post("/v1/embeddings", json=asked)).json()
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected, atol=1e-5)
    assert np.abs(np.subtract(answer["data"][1]["embedding"], expected)).max() > 1e-3
    assert answer["usage"]["prompt_tokens"] > len(token_ids)
    by_tokens = {"model": "m", "input": token_ids, "encoding_format": "base64"}
    answer = (await client.post("/v1/embeddings", json=by_tokens)).json()
    numbers = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), np.float32)
    np.testing.assert_allclose(numbers, expected, atol=1e-5)
    short = (
        await client.post("/v1/embeddings", json={**by_tokens, "encoding_format": "float", "dimensions": 8})
    ).json()
    norm = np.linalg.norm(expected[:8])
    np.testing.assert_allclose(short["data"][0]["embedding"], expected[:8] / norm, atol=1e-4)
    for wrong, status in (
        ({"dimensions": 999}, 400),
        ({"input": "1 + 1 " * 200}, 400),
        ({"input": []}, 400),
        ({"model": "another"}, 404),
    ):
        answer = await client.post("/v1/embeddings", json={**asked, **wrong})
        assert answer.status_code == status, (wrong, answer.text)


async def _pooled_and_scored(client: Any, expected: np.ndarray[Any, Any]) -> None:
    answer = (await client.post("/pooling", json={"model": "m", "input": TEXT})).json()
    np.testing.assert_allclose(answer["data"][0]["data"], expected, atol=1e-5)
    refused = await client.post("/pooling", json={"model": "m", "input": TEXT, "task": "classify"})
    assert refused.status_code == 400, refused.text
    scores = (await client.post("/score", json={"model": "m", "text_1": TEXT, "text_2": [TEXT, "other"]})).json()
    same, other = (each["score"] for each in scores["data"])
    assert same == pytest.approx(1.0, abs=1e-4)
    assert other < same
    ranked = await client.post("/rerank", json={"model": "m", "query": TEXT, "documents": ["other", TEXT]})
    assert [each["index"] for each in ranked.json()["results"]] == [1, 0]
    assert (await client.post("/classify", json={"model": "m", "input": TEXT})).status_code == 404


# ---- what else a model may pool


CLASSIFIER: dict[str, Any] = {**ARGS, "runner": "pooling", "load_format": "dummy", "convert": "classify"}


def classifier(labels: int, **more: Any) -> StageConfig:
    """The thinker's shape with a head of noise."""
    overrides = {"architectures": ["LlamaForSequenceClassification"], "num_labels": labels}
    args = {**CLASSIFIER, "hf_overrides": overrides, **more}
    return msgspec.structs.replace(THINKER, engine_args=args, final_output="embedding")


@asynccontextmanager
async def loaded(monkeypatch: pytest.MonkeyPatch, stage: StageConfig) -> AsyncIterator[tuple[VllmPoolingEngine, Any]]:
    skip_without_vllms_server()
    engine = create_engine(stage)
    assert isinstance(engine, VllmPoolingEngine)
    engine.load(lambda _phase, _progress: None)
    try:
        async with served(monkeypatch, engine, stage) as (_, __, client):
            yield engine, client
    finally:
        engine.close()


@LONG
async def test_a_classifier_gives_the_odds_of_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loaded(monkeypatch, classifier(3)) as (engine, client):
        odds = vllms_own(engine._llm, {"prompt": TEXT}, task="classify")
        answer = (await client.post("/classify", json={"model": "m", "input": TEXT})).json()
        chat = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": TEXT}]})
        embeddings = await client.post("/v1/embeddings", json={"model": "m", "input": TEXT})
        raw = (await client.post("/classify", json={"model": "m", "input": TEXT, "use_activation": False})).json()
    (given,) = answer["data"]
    np.testing.assert_allclose(given["probs"], odds, atol=1e-5)
    assert (given["num_classes"], sum(given["probs"])) == (3, pytest.approx(1.0, abs=1e-5))
    assert sum(raw["data"][0]["probs"]) != pytest.approx(1.0, abs=1e-5)
    assert "/classify" in chat.json()["error"]["message"]
    assert embeddings.status_code == 404


@LONG
async def test_a_cross_encoder_scores_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loaded(monkeypatch, classifier(1)) as (engine, client):
        answer = await client.post("/score", json={"model": "m", "text_1": TEXT, "text_2": ["3", "other"]})
        pair = embedder_ids(engine, TEXT + "3")
        own = vllms_own(engine._llm, {"prompt_token_ids": pair}, task="classify")
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["score"] == pytest.approx(float(own[0]), abs=1e-5)


def embedder_ids(engine: VllmPoolingEngine, text: str) -> list[int]:
    return list(engine._model.tokenizer.encode(text))


@LONG
@pytest.mark.parametrize("said_by", ["default_sampling_params", "pooler_config"])
async def test_defaults_of_the_document_are_those_of_the_server(monkeypatch: pytest.MonkeyPatch, said_by: str) -> None:
    """Late interaction: every token of a query against every token of a text, compared in the hub."""
    defaults: dict[str, Any] = {"use_activation": False}
    args = dict(EMBEDDER.engine_args)
    if said_by == "pooler_config":
        args["pooler_config"] = {"task": "token_embed"}
    else:
        defaults["task"] = "token_embed"
    stage = msgspec.structs.replace(EMBEDDER, engine_args=args, default_sampling_params=defaults)
    async with loaded(monkeypatch, stage) as (engine, client):
        pooled = (await client.post("/pooling", json={"model": "m", "input": TEXT})).json()
        own = vllms_own(engine._llm, {"prompt": TEXT}, task="token_embed", use_activation=False)
        np.testing.assert_allclose(pooled["data"][0]["data"], own, atol=1e-5)
        scored = await client.post("/score", json={"model": "m", "text_1": TEXT, "text_2": [TEXT, "other"]})
        assert scored.status_code == 200, scored.text
        embeddings = await client.post("/v1/embeddings", json={"model": "m", "input": TEXT})
        assert embeddings.status_code == 404
