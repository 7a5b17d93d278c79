"""Pooled answers: the JSON is what it would be if the arrays were lists, and no piece of it takes long."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import numpy as np
import pytest

from hub.api.vllm.bounds import numbers
from hub.api.vllm.bounds.numbers import AT_ONCE, NumbersResponse


async def sent(content: dict[str, Any]) -> list[bytes]:
    response = NumbersResponse(content)
    assert response.media_type == "application/json"
    return [bytes(part) async for part in response.body_iterator]


def random(*shape: int) -> Any:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def listed(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: listed(value) for name, value in content.items()}
    if isinstance(content, list):
        return [listed(value) for value in content]
    return content.tolist() if isinstance(content, np.ndarray) else content


@pytest.mark.parametrize(
    "values",
    [
        [],
        [random(3)],
        [random(0)],
        ["YmFzZTY0", "AAAA"],
        [[0.5, 1.5]],
        [random(3, 2), random(1, 1), random(0, 4)],
        [random(AT_ONCE - 1), random(AT_ONCE), random(AT_ONCE + 1), random(3 * AT_ONCE)],
        [random(5, AT_ONCE + 3), random(2 * AT_ONCE, 2), random(2, 3, AT_ONCE)],
        [random(64)] * 200,
    ],
)
async def test_what_is_sent_is_the_answer_as_json(values: list[Any]) -> None:
    content = {
        "id": "embd-ü",
        "object": "list",
        "data": [{"index": index, "object": "embedding", "embedding": value} for index, value in enumerate(values)],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    parts = await sent(content)
    assert json.loads(b"".join(parts)) == listed(content)
    assert list(json.loads(b"".join(parts))) == list(content)


async def test_an_answer_without_a_list_is_json_too() -> None:
    assert json.loads(b"".join(await sent({}))) == {}
    for content in (
        {"data": {"a": [1]}},
        {"embeddings": {"float": [[0.5] * 2000] * 300, "int8": [[1]]}, "texts": ["a"]},
    ):
        assert json.loads(b"".join(await sent(content))) == content


@pytest.mark.attack("Z6")
async def test_ten_million_numbers_leave_the_loop_its_turns_and_are_not_kept() -> None:
    """The loop goes on in between; what is made at once is a part of a MiB."""
    vector = random(1024)
    content = {"data": [{"index": index, "embedding": vector} for index in range(3000)]}
    turns, longest_s, size_bytes = 0, 0.0, 0

    async def count() -> None:
        nonlocal turns, longest_s
        while True:
            began_s = time.thread_time()
            await asyncio.sleep(0)
            turns, longest_s = turns + 1, max(longest_s, time.thread_time() - began_s)

    counting = asyncio.create_task(count())
    async for part in NumbersResponse(content).body_iterator:
        assert len(part) < 1 << 20
        size_bytes += len(part)
    counting.cancel()
    assert size_bytes > 3000 * 1024 * 8
    # Of this thread's own time: what others take of the interpreter is theirs.
    assert longest_s < 0.05
    assert turns > 1000


def test_lists_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        def numel(self) -> int:
            return 600

    class Output:
        class outputs:  # noqa: N801
            data = Tensor()

    class Context:
        final_res_batch = (Output, Output)

    made = numbers._bounded(lambda _self, _context: "made")
    assert made(None, Context) == "made"
    monkeypatch.setattr(numbers, "MOST_LISTED", 1199)
    with pytest.raises(ValueError, match="send fewer texts"):
        made(None, Context)
