"""What texts cost a hub with vLLM's server, wherever that server makes them tokens, and who waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Final

import httpx
import msgspec
import pytest
import torch

from omni_discovery import wire
from omni_discovery.deploy.document import DeployConfig, StageConfig
from stage_runtime.engines.files import npy_of
from tests.support.engines import THINKER, as_the_supervisor_has_it, skip_without_vllms_server
from tests.support.hub_fakes import FakeReplica, running_hub, until
from tests.support.longest_turn import longest_turn

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

#: Processor time of one refused request: 8 MB of text were eleven seconds.
MOST_S: Final = 1.5
LONG: Final = "What is 3 + 4? " * 500_000
HUB: Final = "stages: [{stage_id: 0, engine: vllm, model: m, final_output: %s}]"
TEXT = msgspec.structs.replace(THINKER, final_output="text", default_sampling_params={"max_tokens": 1})
POOLS = StageConfig(
    stage_id=0,
    engine="vllm",
    model=THINKER.model,
    engine_args={"dtype": "float32", "max_model_len": 128, "enforce_eager": True},
    final_output="embedding",
)
CROSS = msgspec.structs.replace(
    POOLS,
    engine_args={
        **POOLS.engine_args,
        "max_model_len": 8192,
        "convert": "classify",
        "hf_overrides": {
            "architectures": ["LlamaForSequenceClassification"],
            "num_labels": 1,
            "max_position_embeddings": 8192,
        },
    },
)


def pool(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    file = npy_of(torch.tensor([float(len(submit.inputs["prompt_token_ids"]))]))
    replica.chunk(submit, 0, modality="embedding", mime="application/x-npy", attachments=[file])
    replica.done(submit, 1)


@asynccontextmanager
async def served(stage: StageConfig, script: Any = pool) -> AsyncIterator[tuple[Any, httpx.AsyncClient, FakeReplica]]:
    skip_without_vllms_server()
    from hub.api.vllm.server import VllmFrontend

    with as_the_supervisor_has_it():
        frontend = VllmFrontend(DeployConfig(stages=(stage,), model="m"), "")
    replica = FakeReplica(script)
    async with running_hub(replica, deploy=HUB % stage.final_output) as omni:
        app: Any = await frontend.build(omni)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://hub", timeout=60) as client:
            yield app._app, client, replica


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[httpx.Response, float]:
    """The answer, and the processor time until then."""
    began_s = time.process_time()
    answer = await client.post(path, json=body)
    return answer, time.process_time() - began_s


@pytest.mark.attack("R20")
@pytest.mark.parametrize("path", ["/generative_scoring", "/invocations"])
async def test_what_can_never_be_scored_is_refused_before_it_is_read(path: str) -> None:
    asked = {"query": [1] * 32_000, "items": [""] * 4000, "label_token_ids": [1]}
    async with served(TEXT) as (_, client, _):
        answer, taken_s = await ask(client, path, asked)
        text, _ = await ask(client, path, {"query": LONG, "items": ["a"], "label_token_ids": [1]})
    assert (answer.status_code, text.status_code) == (400, 400)
    assert taken_s < MOST_S


@pytest.mark.attack("R21")
async def test_a_text_of_which_little_is_wanted_is_cut_before_it_is_made_tokens() -> None:
    """1. texts that are cut to some tokens cost little and get an answer, the same as without the bound
    2. texts that no context holds are refused
    """
    short = "What is 3 + 4? " * 100
    cut = {"model": "m", "max_tokens_per_query": 10, "max_tokens_per_doc": 7}
    async with served(POOLS) as (_, client, replica):
        for size in (len(short), len(LONG)):
            text = LONG[:size]
            answer, taken_s = await ask(client, "/rerank", {**cut, "query": text, "documents": [short, "a"]})
            assert (answer.status_code, taken_s < MOST_S) == (200, True), answer.text
            answer, taken_s = await ask(client, "/score", {**cut, "text_1": "a", "text_2": text})
            assert (answer.status_code, taken_s < MOST_S) == (200, True), answer.text
        seen = [len(submit.inputs["prompt_token_ids"]) for submit in replica.of(wire.Submit)]
        assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
        assert max(seen) <= 11
        for path, body in (
            ("/rerank", {"query": LONG, "documents": ["a"]}),
            ("/v1/embeddings", {"input": LONG}),
            ("/v2/embed", {"texts": [LONG], "input_type": "x", "truncate": "NONE"}),
        ):
            answer, taken_s = await ask(client, path, {"model": "m", **body})
            assert (answer.status_code, taken_s < MOST_S) == (400, True), (path, taken_s, answer.text)


@pytest.mark.attack("R21")
@pytest.mark.parametrize("side", ["left", "right", None])
async def test_a_cut_text_has_the_tokens_that_it_has_without_the_bound(side: str | None) -> None:
    words = " ".join(f"{number} + {number * 7}?" for number in range(20_000))
    async with served(POOLS) as (app, client, replica):
        tokenizer = app.state.engine_client.renderer.get_tokenizer()
        token_ids = tokenizer.encode(words)
        more = {} if side is None else {"truncation_side": side}
        asked = {"model": "m", "input": words, "truncate_prompt_tokens": 20, **more}
        answer, taken_s = await ask(client, "/v1/embeddings", asked)
        (submit,) = replica.of(wire.Submit)
    assert (answer.status_code, taken_s < MOST_S) == (200, True), answer.text
    wanted = token_ids[-20:] if side == "left" else token_ids[:20]
    assert list(submit.inputs["prompt_token_ids"]) == wanted


@pytest.mark.attack("R22")
async def test_pairs_that_come_to_more_text_than_a_body_are_refused_and_leave_nothing_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. the query can't be read, paired with 1000 documents: one pair is looked at; the next client is served at once
    2. pairs that each can be read, but are too much together
    """
    async with served(CROSS) as (app, client, _):
        # A sixteenth of what is allowed otherwise: reading so much text takes its time.
        monkeypatch.setattr("hub.api.vllm.bounds.texts.MAX_CHARACTERS", 1 << 19)
        answer, taken_s = await ask(
            client, "/rerank", {"model": "m", "query": LONG[:100_000], "documents": ["b"] * 1000}
        )
        assert (answer.status_code, taken_s < MOST_S) == (400, True), answer.text
        other, taken_s = await ask(client, "/score", {"model": "m", "text_1": "a", "text_2": "b"})
        assert (other.status_code, taken_s < MOST_S) == (200, True), other.text
        waiting = app.state.engine_client.renderer._executor.submit.__self__._of_long._waiting
        # What was given up is passed over, a job at a time.
        await until(lambda: not waiting, 2.0)
        words = "a " * 500
        refused, _ = await ask(client, "/rerank", {"model": "m", "query": words, "documents": ["b"] * 1000})
    assert (refused.status_code, "characters together" in refused.text) == (400, True), refused.text


@pytest.mark.attack("R23")
async def test_each_request_gets_its_turn_in_the_thread_that_reads_texts() -> None:
    from hub.api.vllm.bounds import texts

    done: list[str] = []
    executor = ThreadPoolExecutor(1)
    texts.serve_by_turns(executor)
    may_go = threading.Event()

    async def of_request(name: str, jobs: int) -> None:
        texts.start_http_request(10)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(executor, done.append, name) for _ in range(jobs)))

    held = executor.submit(may_go.wait, 10)
    async with asyncio.TaskGroup() as group:
        group.create_task(of_request("large", 1000))
        group.create_task(of_request("small", 2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        may_go.set()
    assert held.result()
    assert (done[:4].count("small"), len(done)) == (2, 1002)
    executor.shutdown()


@pytest.mark.attack("Z7")
async def test_each_client_gets_its_turn_there_however_many_requests_another_has() -> None:
    from hub.api import exchange
    from hub.api.vllm.bounds import texts

    done: list[str] = []
    executor = ThreadPoolExecutor(1)
    texts.serve_by_turns(executor)
    may_go = threading.Event()

    async def of_client(host: str) -> None:
        exchange._current.set(exchange.Exchange(host=host))
        texts.start_http_request(10)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(executor, done.append, host) for _ in range(2)))

    held = executor.submit(may_go.wait, 10)
    async with asyncio.TaskGroup() as group:
        for host in ("10.0.0.1",) * 100 + ("10.0.0.2",):
            group.create_task(of_client(host))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        may_go.set()
    assert held.result()
    assert (done[:4].count("10.0.0.2"), len(done)) == (2, 202)
    executor.shutdown()


@pytest.mark.attack("Z31")
async def test_short_requests_do_not_wait_for_long_ones() -> None:
    """One is long by its body, another becomes it by texts that were counted; all clients have the same threads."""
    from hub.api.vllm.bounds import texts
    from hub.api.vllm.bounds.body import Body

    executor = ThreadPoolExecutor(1)
    texts.serve_by_turns(executor, short_apart=True)
    may_go, done = threading.Event(), list[str]()

    async def of_request(name: str, body_bytes: int, characters: int) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b" " * body_bytes}

        body = Body({"type": "http", "headers": []}, receive)
        body.enter()
        await body.receive()
        texts.start_http_request(10).characters = characters
        await asyncio.get_running_loop().run_in_executor(executor, done.append, name)

    held = executor.submit(may_go.wait, 10)
    long = [
        asyncio.create_task(of_request(*each)) for each in (("body", (64 << 10) + 1, 0), ("texts", 10, (64 << 10) + 1))
    ]
    async with asyncio.timeout(5):
        await of_request("short", 64 << 10, 64 << 10)
    assert done == ["short"]
    may_go.set()
    await asyncio.gather(*long)
    assert held.result()
    assert sorted(done) == ["body", "short", "texts"]
    executor.shutdown()


@pytest.mark.attack("Z31")
async def test_a_short_text_is_read_while_a_long_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. a million characters, which take a second, are being made tokens: they had all other clients wait
    2. short texts and chats are made tokens meanwhile, and have the tokens that they have alone
    """
    from transformers import TokenizersBackend

    real, began, ended = TokenizersBackend._encode_plus, threading.Event(), list[int]()

    def encode(self: Any, text: str, *given: Any, **options: Any) -> Any:
        if len(text) == 1_000_000:
            began.set()
        made = real(self, text, *given, **options)
        ended.append(len(text))
        return made

    more = {"max_model_len": 1 << 20, "hf_overrides": {"max_position_embeddings": 1 << 20}}
    stage = msgspec.structs.replace(TEXT, engine_args={**TEXT.engine_args, **more})
    asked = [{"model": "m", "prompt": f"What is 3 + {number}? "} for number in range(20)]
    chat = {"model": "m", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    async with served(stage) as (_, client, _):
        alone = [(await client.post("/tokenize", json=each)).json() for each in (*asked, chat)]
        monkeypatch.setattr(TokenizersBackend, "_encode_plus", encode)
        long = asyncio.create_task(client.post("/tokenize", json={"model": "m", "prompt": LONG[:1_000_000]}))
        await until(began.is_set)
        beside = await asyncio.gather(*(client.post("/tokenize", json=each) for each in (*asked, chat)))
        assert len(ended) >= 21
        assert max(ended) < 1000
        assert (await long).status_code == 200
    assert [each.json() for each in beside] == alone


@pytest.mark.parametrize("short_apart", [False, True])
@pytest.mark.parametrize("is_short", [False, True])
def test_where_vllm_replaces_a_stuck_thread_all_that_waits_behind_it_is_done(
    monkeypatch: pytest.MonkeyPatch, *, is_short: bool, short_apart: bool
) -> None:
    """1. a chat template is stuck, and others wait behind it; vLLM gives it 30 s, then it replaces the threads
    2. what waits is done, in turn, and what comes later; 3. the stuck one goes on: it does nothing else
    """
    from vllm.renderers.base import _SwappableExecutor

    from hub.api.vllm.bounds import texts

    monkeypatch.setattr(texts, "_is_short", lambda: is_short)
    executor = _SwappableExecutor(1)
    texts.serve_by_turns(executor, short_apart=short_apart)
    began, may_end, done = threading.Event(), threading.Event(), list[tuple[int, int]]()

    def template() -> int:
        began.set()
        may_end.wait(30)
        return threading.get_ident()

    def note(number: int) -> None:
        done.append((number, threading.get_ident()))

    stuck = executor.submit(template)
    assert began.wait(10)
    waiting = [executor.submit(note, number) for number in range(5)]
    try:
        executor.replace_inner()
        for each in (*waiting, executor.submit(note, 5)):
            each.result(10)
        assert not stuck.done()
    finally:
        may_end.set()
    of_stuck = stuck.result(10)
    executor.submit(note, 6).result(10)
    assert [number for number, _ in done] == list(range(7))
    assert {thread for _, thread in done} ^ {of_stuck} == {done[0][1], of_stuck}
    executor.shutdown()


@pytest.mark.attack("R23")
async def test_what_a_refused_or_cancelled_request_has_queued_is_not_done() -> None:
    from hub.api.vllm.bounds import texts

    executor = ThreadPoolExecutor(1)
    texts.serve_by_turns(executor)
    may_go, done = threading.Event(), list[int]()
    loop = asyncio.get_running_loop()
    # Of no request: it is done even if the thread begins late.
    held = executor.submit(may_go.wait, 10)
    asked = texts.start_http_request(10)
    refused = [loop.run_in_executor(executor, done.append, each) for each in range(10)]
    texts.start_http_request(10)
    cancelled = loop.run_in_executor(executor, done.append, 100)
    cancelled.cancel()
    # The executor's own future is cancelled in the loop's next turn.
    await asyncio.sleep(0)
    last = loop.run_in_executor(executor, done.append, 101)
    asked.has_failed = True
    may_go.set()
    await last
    assert held.result()
    results = await asyncio.gather(*refused, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in results)
    assert done == [101]
    executor.shutdown()


@pytest.mark.attack("R23")
async def test_thousands_of_texts_leave_the_loop_to_others() -> None:
    """The server asks for all of them in one turn of the loop, which took a third of a millisecond for each."""
    async with served(POOLS) as (_, client, replica):
        await client.post("/pooling", json={"model": "m", "input": "a"})
        async with longest_turn() as turn:
            answer = await client.post("/pooling", json={"model": "m", "input": ["a"] * 4000})
    assert len(replica.of(wire.Submit)) > 1
    assert answer.status_code in (200, 429), answer.text
    assert turn.longest_s < 0.3


@pytest.mark.attack("R24")
async def test_a_text_is_made_tokens_only_as_far_as_a_context_reaches() -> None:
    """A long context times its longest token is more than a body: the begin of a text is tried first.

    1. not cut: refused once its begin has too many tokens; 2. cut: from its begin
    3. spaces, of which many are one token: tried further; 4. what is tokenized in the loop has a bound of its own
    """
    from vllm.exceptions import VLLMValidationError

    from hub.api.vllm.bounds import texts

    async with served(TEXT) as (app, _, _):
        tokenizer = app.state.engine_client.renderer.get_tokenizer()
        usual = len(tokenizer.encode(LONG[:15_000], add_special_tokens=False))

        def work() -> None:
            asked = texts.start_http_request(1000)
            with pytest.raises(VLLMValidationError, match="can't fit"):
                tokenizer.encode(LONG)
            for make in (tokenizer, tokenizer.tokenize, lambda text: tokenizer([text])):
                with pytest.raises(VLLMValidationError, match="can't fit"):
                    make(LONG)
            chat = [{"role": "user", "content": LONG}]
            with pytest.raises(VLLMValidationError, match="can't fit"):
                tokenizer.apply_chat_template(chat, chat_template="{{ messages[0].content }}", tokenize=True)
            assert asked.characters == 0
            cut = tokenizer(LONG, truncation=True, max_length=1000, add_special_tokens=False)["input_ids"]
            assert 0 < asked.characters < 50_000
            texts.start_http_request(10**6)
            part = LONG[-15_000:] if tokenizer.truncation_side == "left" else LONG[:15_000]
            token_ids = tokenizer.encode(part, add_special_tokens=False)
            assert cut == (token_ids[-1000:] if tokenizer.truncation_side == "left" else token_ids[:1000])
            assert len(texts.beginning(tokenizer, LONG, 1000)) < 50_000
            assert texts.beginning(tokenizer, "a", 1000) == "a"
            of_words: Any = SimpleNamespace(encode=lambda text, **_: text.split())
            assert 100_000 < len(texts.beginning(of_words, " " * 100_000 + LONG, 1000)) < 200_000

        def work_at_length() -> None:
            texts.start_http_request(10**7)
            tokenizer.encode(LONG[: 5 << 20])
            with pytest.raises(VLLMValidationError, match="characters together"):
                tokenizer.encode(LONG[: 5 << 20])

        assert usual > 1000
        began_s = time.process_time()
        await asyncio.to_thread(work)
        assert time.process_time() - began_s < MOST_S
        await asyncio.to_thread(work_at_length)
        texts.start_http_request(10**6)
        tokenizer.encode(LONG[: 60 << 10])
        with pytest.raises(VLLMValidationError, match="at this place"):
            tokenizer.encode(LONG[: 60 << 10])


@pytest.mark.attack("R25")
@pytest.mark.parametrize("stage", [TEXT, POOLS], ids=["text", "numbers"])
async def test_every_route_of_the_server_is_one_that_was_looked_at(stage: StageConfig) -> None:
    """A route that is not known yet: look at what it reads, and where, then add it to KNOWN."""
    from hub.api.vllm.served_routes import KNOWN, UNBOUNDED

    async with served(stage) as (app, _, _):
        paths = {getattr(route, "path", "") for route in app.router.routes}
    assert {"/tokenize", "/v1/models", "/metrics"} <= paths
    # vLLM puts these up once its environment lets a process load adapters; they stay closed.
    assert paths - {"/adapters", "/adapters/{adapter_name}"} <= KNOWN | UNBOUNDED


@pytest.mark.attack("R25")
async def test_a_route_of_a_later_release_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    from fastapi import FastAPI
    from starlette.websockets import WebSocket

    from hub.api.vllm.served_routes import close_unknown_routes

    app, ran = FastAPI(), list[str]()

    @app.post("/v1/new/{name}")
    async def new(name: str) -> None:
        ran.append(name)

    @app.post("/v1/completions/derender")
    async def derender() -> None:
        ran.append("derender")

    @app.websocket("/v1/new")
    async def talk(_: WebSocket) -> None:
        ran.append("socket")

    @app.get("/version")
    async def version() -> str:
        return "1"

    close_unknown_routes(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://hub") as client:
        answers = [await client.post("/v1/new/a"), await client.get("/version")]
        unbounded = await client.post("/v1/completions/derender")
    said: list[Any] = []
    scope = {"type": "websocket", "path": "/v1/new", "headers": [], "query_string": b"", "subprotocols": []}

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        said.append(message)

    await app(scope, receive, send)
    assert [answer.status_code for answer in answers] == [501, 200]
    assert (unbounded.status_code, "use /detokenize" in unbounded.text) == (501, True)
    assert (said[0]["type"], ran) == ("websocket.close", [])
    assert [record.getMessage().split(":")[0] for record in caplog.records if "route_closed" in record.msg] == [
        "api.route_closed path=/v1/new/{name}",
        "api.route_closed path=/v1/new",
    ]
