"""An engine says with which status a request is refused, and the client of the HTTP API gets that one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import openai
import pytest

from hub.api.routes import build_app
from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.engines.base import EngineOutput, StageRequest
from stage_runtime.engines.echo.engine import EchoEngine
from tests.support.hub_fakes import ONE_STAGE, collect, deploy_of
from tests.support.local_replica import LocalReplica
from tests.support.serving import HUBS, hub_of


class Picky(EchoEngine):
    """Refuses ``at the door 413`` when it is added, ``later 413`` by its first output, with the status in the text."""

    def __init__(self) -> None:
        super().__init__(StageConfig(stage_id=0, engine="echo", final_output="text"))
        self._later: dict[str, int] = {}

    def add(self, request: StageRequest) -> None:
        *when, status = _text(request.inputs).split()
        if when[0] == "at":
            raise InvalidRequestError("this engine does not do that", int(status))
        super().add(request)
        self._later[request.key] = int(status)

    def step(self) -> list[EngineOutput]:
        outputs = []
        for output in super().step():
            status = self._later.pop(output.key, 0)
            if status:
                self.abort(output.key)
                outputs.append(EngineOutput(output.key, error=(FailureKind.INVALID, "not that, either", status)))
        return outputs


def _text(inputs: Mapping[str, Any]) -> str:
    return str(inputs.get("prompt") or inputs["messages"][-1]["content"])


@pytest.fixture
async def omni() -> AsyncIterator[Any]:
    engine = Picky()
    engine.load(lambda _phase, _progress: None)
    with LocalReplica(HUBS, engine=engine) as replica:
        async with hub_of(ONE_STAGE, replica) as running:
            yield running


KINDS: list[tuple[int, type[openai.APIStatusError], str]] = [
    (400, openai.BadRequestError, "invalid_request"),
    (403, openai.PermissionDeniedError, "permission_denied"),
    (404, openai.NotFoundError, "not_found"),
    (409, openai.ConflictError, "conflict"),
    (413, openai.APIStatusError, "request_too_large"),
    (415, openai.APIStatusError, "unsupported_media_type"),
    (422, openai.UnprocessableEntityError, "unprocessable_request"),
]


async def test_each_status_of_an_engine_is_the_clients(omni: Any) -> None:
    """As OpenAI's client has it, at the door of the engine or behind it, whole or streamed; Python gets it, too."""
    transport = httpx.ASGITransport(build_app(omni, deploy_of(ONE_STAGE), 0))
    http = httpx.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(base_url="http://hub/v1", api_key="x", http_client=http, max_retries=0) as client:
        for status, kind, code in KINDS:
            for text, stream, why in (("at the door", False, "does not do that"), ("later", True, "not that, either")):
                asked: Any = [{"role": "user", "content": f"{text} {status}"}]
                with pytest.raises(kind) as caught:
                    await client.chat.completions.create(messages=asked, model="echo", stream=stream)
                assert (caught.value.status_code, caught.value.code) == (status, code)
                assert why in caught.value.message
    with pytest.raises(InvalidRequestError) as raised:
        await collect(omni.generate({"prompt": "later 422"}))
    assert raised.value.status == 422
    assert omni.stage_status()[0].failures.count == 0


@pytest.mark.parametrize("status", [200, 401, 429, 500])
async def test_a_status_that_is_no_refusal_is_the_engines_own_fault(omni: Any, status: int) -> None:
    """Others would have clients log in or try again; with another meaning they are an engine's bug, and say so."""
    transport = httpx.ASGITransport(build_app(omni, deploy_of(ONE_STAGE), 0))
    async with httpx.AsyncClient(transport=transport, base_url="http://hub") as client:
        for text in ("at the door", "later"):
            body = {"messages": [{"role": "user", "content": f"{text} {status}"}]}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 500
            assert "400, 403, 404, 409, 413, 415, 422" in answer.json()["error"]["message"]
