"""What a request leaves behind in its hub: no ring of objects, so that the collector of rings has nothing to do."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.support.speaking import served

_PAIR = """
stages:
  - {stage_id: 0, engine: echo, final_output: text}
  - {stage_id: 1, engine: echo, final_output: text}
"""
_REQUESTS = 20


@contextmanager
def _rings() -> Iterator[Counter[str]]:
    """The objects that only the collector can free, of those that are made meanwhile, by type."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    found: Counter[str] = Counter()
    try:
        yield found
        gc.collect()
        found.update(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def _chat(url: str, **fields: object) -> bytes:
    """The whole answer to a chat, over a connection of its own."""
    parts = urlsplit(url)
    body = json.dumps({"messages": [{"role": "user", "content": "one two three"}], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return answer


async def test_requests_and_their_connections_leave_no_rings_behind() -> None:
    """1. whole chats and streams come, each over a connection of its own, and end
    2. of what a request is made of, from its connection to its state machine, nothing waits for the collector
    """
    async with served(_PAIR) as hub:
        for is_streamed in (False, True):
            await _chat(hub.address, stream=is_streamed)
            await asyncio.sleep(0.2)
            with _rings() as rings:
                for _ in range(_REQUESTS):
                    assert b" 200 OK" in await _chat(hub.address, stream=is_streamed)
                await asyncio.sleep(0.2)
            of_requests = {
                name: count for name, count in rings.items() if name.startswith(("hub.", "uvicorn.", "starlette."))
            }
            assert of_requests == {}
            # The rest is asyncio's own, of the sockets here and there.
            assert rings.total() < 20 * _REQUESTS
