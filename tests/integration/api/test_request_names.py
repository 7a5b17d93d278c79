"""One request under all of its names: the client's label, the hub's id, the replicas; in headers and in both logs."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from tests.support.hub import Hub
from tests.support.processes import wait_for

PAIR = """
stages:
  - {stage_id: 0, engine: echo, engine_args: {fail_on: FAIL}, final_output: text}
  - {stage_id: 1, engine: echo, engine_args: {modality: image}, final_output: image}
"""


def ask(url: str, text: str, label: str, **fields: Any) -> tuple[int, dict[str, str], str]:
    body = json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": label, "Authorization": "Bearer my-key"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, dict(response.headers.items()), response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers.items()), error.read().decode()


async def talk(url: str) -> str:
    """The hub's id for one request in segments."""
    async with connect(f"ws{url.removeprefix('http')}/v1/stream", additional_headers={"x-request-id": "talk-1"}) as it:
        await it.send(json.dumps({"type": "segment", "prompt": "hi", "last": True}))
        while json.loads(await it.recv())["type"] != "done":
            pass
        assert it.response is not None
        assert it.response.headers["x-request-id"] == "talk-1"
        return it.response.headers["x-omni-request-id"]


@pytest.fixture
def hub(tmp_path: Path) -> Any:
    hub = Hub.of_yaml(tmp_path, PAIR, "--access-log")
    try:
        yield hub.wait_ready()
    finally:
        hub.stop()


def test_a_request_is_found_by_each_of_its_names(hub: Hub) -> None:
    """1. whole, streamed, in segments, failed: each answer has the label, our id and the replicas that are known
    2. two requests with one label at a time are two requests
    3. the access log has a line for each with all of them, and the failed one's lines in both logs have its label
    """
    status, headers, body = ask(hub.url, "my prompt", "whole-1")
    ours = [headers["x-omni-request-id"]]
    assert (status, json.loads(body)["id"], headers["x-request-id"]) == (200, ours[0], "whole-1")
    assert headers["x-omni-replicas"] == "0/0, 1/0"
    status, headers, body = ask(hub.url, "my prompt", "whole-1", stream=True)
    ours.append(headers["x-omni-request-id"])
    assert (status, headers["x-request-id"], headers["x-omni-replicas"]) == (200, "whole-1", "0/0")
    assert f'"id":"{ours[1]}"' in body
    ours.append(asyncio.run(talk(hub.url)))
    status, headers, _ = ask(hub.url, "my prompt FAIL", "failed-1")
    ours.append(headers["x-omni-request-id"])
    assert (status, headers["x-request-id"]) == (500, "failed-1")
    assert headers["x-omni-replicas"] == "0/0"
    assert len(set(ours)) == 4

    pattern = r"http\.request (.*) request=(\S+) trace=- x_request_id=(\S+) key=- replicas=(\S+)"
    wait_for("four lines", lambda: len(re.findall(pattern.replace("(.*)", "(.*/v1/.*)"), hub.text)) == 4)
    logged = {ours: (head, label, replicas) for head, ours, label, replicas in re.findall(pattern, hub.text)}
    assert [logged[each][1:] for each in ours] == [
        ("whole-1", "0/0,1/0"),
        ("whole-1", "0/0,1/0"),
        ("talk-1", "0/0,1/0"),
        ("failed-1", "0/0"),
    ]
    assert logged[ours[0]][0].startswith("method=POST path=/v1/chat/completions status=200 duration_s=")
    assert " status=500 " in logged[ours[3]][0]
    failed = re.findall(r"request\.failed request=(\S+)~\d+ x_request_id=(\S+) .* kind=(\S+)", hub.text)
    assert sorted(failed) == sorted((ours[3], "failed-1", kind) for kind in ("EngineFailedError", "engine"))
    assert "my prompt" not in hub.text
    assert "my-key" not in hub.text
