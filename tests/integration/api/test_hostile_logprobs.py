"""Log probabilities that replicas make up: not asked for, of tokens that are not there, or without end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from hub.api.routes import build_app
from omni_discovery import wire
from tests.support.hub_fakes import FakeReplica, Script, deploy_of, running_hub

#: The engine's name says that clients may ask for them; the replicas are scripted.
DOCUMENT = "stages: [{stage_id: 0, engine: vllm, final_output: text}]"
CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}
COMPLETION = "/v1/completions", {"prompt": "hello"}


def likely(count: int, tokens: int, chunks: int = 1, text: str = "a") -> Script:
    """So many log probabilities in each of so many chunks, for so many tokens."""
    places = tuple((wire.TokenLogprob(number, -0.5, 1, text),) for number in range(count))

    def script(replica: FakeReplica, submit: wire.Submit) -> None:
        about = replica._about(submit)
        replica.accept(submit)
        for seq in range(chunks):
            token_ids = tuple(range(tokens))
            replica.say(wire.Chunk(**about, seq=seq, modality="text", text="a ", token_ids=token_ids, logprobs=places))
        replica.done(submit, chunks)

    return script


@asynccontextmanager
async def serving(*scripts: Script) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    replicas = [FakeReplica(script, replica_id=number) for number, script in enumerate(scripts)]
    async with running_hub(*replicas, deploy=DOCUMENT) as omni:
        transport = httpx.ASGITransport(build_app(omni, deploy_of(DOCUMENT), 0))
        async with httpx.AsyncClient(transport=transport, base_url="http://hub", timeout=60) as client:
            yield client, omni


@pytest.mark.attack("M5")
@pytest.mark.parametrize(("path", "ask"), [CHAT, COMPLETION])
async def test_what_was_not_asked_for_is_not_shown(path: str, ask: dict[str, Any]) -> None:
    async with serving(likely(3, 3, chunks=2)) as (client, _):
        whole = (await client.post(path, json=ask)).json()
        streamed = (await client.post(path, json={**ask, "stream": True})).text
        asked = (await client.post(path, json={**ask, "logprobs": True if "chat" in path else 0})).json()
    assert whole["choices"][0].get("logprobs") is None
    assert "-0.5" not in streamed
    assert streamed.endswith("data: [DONE]\n\n")
    assert str(asked).count("'token': 'a'" if "chat" in path else "-0.5, ") >= 5


@pytest.mark.attack("M5")
async def test_those_of_other_tokens_are_the_replicas_failure_and_another_answers() -> None:
    async with serving(likely(2, 1), likely(1, 1)) as (client, omni):
        answers = [await client.post(CHAT[0], json={**CHAT[1], "logprobs": True}) for _ in range(4)]
        dropped = omni.metrics.get_sample_value("omni_hub_dropped_frames_total", {"reason": "content"})
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {len(answer.json()["choices"][0]["logprobs"]["content"]) for answer in answers} == {1}
    assert dropped


@pytest.mark.attack("M5")
@pytest.mark.parametrize(("path", "ask"), [CHAT, COMPLETION])
async def test_an_answer_of_them_is_as_long_as_others_may_be(path: str, ask: dict[str, Any]) -> None:
    """Long texts of tokens: 2 MB in each message, and 5 times that as a chat shows them."""
    async with serving(likely(2, 2, chunks=80, text="t" * (1 << 20))) as (client, _):
        answer = await client.post(path, json={**ask, "logprobs": True if "chat" in path else 0})
    assert (answer.status_code, "longer than 128 MiB: ask for it with 'stream': true" in answer.text) == (500, True)
