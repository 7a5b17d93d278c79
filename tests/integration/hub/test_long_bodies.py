"""Bodies that take long to be read hold up nobody but whoever has sent them."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from tests.support.speaking import DRAWER, served

#: Some 20 ms of the loop each, and refused when they have been read.
_DEAR = {"messages": [{"role": "user", "content": "a"}], "modalities": ["none"]}
_DEAR_PARAMS = [{"x": [{"a": 0, "b": 1}] * 32_000}]


class _Client:
    """One request over a connection of its own, the last byte of which is held back."""

    def __init__(self, address: str, path: str, body: bytes) -> None:
        self._address, self._path, self._body = urlsplit(address), path, body
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None

    async def begin(self) -> None:
        host = self._address.netloc
        self._reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        head = f"POST {self._path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        length = f"Content-Length: {len(self._body)}\r\n\r\n"
        self._writer.write((head + length).encode() + self._body[:-1])
        await self._writer.drain()

    async def finish(self) -> bytes:
        """The status line, once there is an answer."""
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(self._body[-1:])
        answer = await self._reader.read()
        self._writer.close()
        return answer.partition(b"\r\n")[0]


@pytest.mark.attack("S2")
async def test_many_long_bodies_that_end_at_one_moment_do_not_hold_up_a_short_request() -> None:
    """1. forty bodies that take long to be read are there but for their last byte
    2. their last bytes come at one moment, and a short request behind them
    3. that is answered while most of them wait for their turn; in the end all have their answers
    """
    dear = json.dumps({**_DEAR, "sampling_params_list": _DEAR_PARAMS}).encode()
    short = json.dumps({"messages": [{"role": "user", "content": "hello"}], "modalities": ["text"]}).encode()
    async with served(DRAWER) as hub:
        clients = [_Client(hub.address, "/v1/chat/completions", dear) for _ in range(40)]
        for client in clients:
            await client.begin()
        honest = _Client(hub.address, "/v1/chat/completions", short)
        await honest.begin()
        await asyncio.sleep(0.5)
        answers = [asyncio.create_task(client.finish()) for client in clients]
        await asyncio.sleep(0)
        assert await honest.finish() == b"HTTP/1.1 200 OK"
        assert sum(each.done() for each in answers) < 30
        assert set(await asyncio.gather(*answers)) == {b"HTTP/1.1 400 Bad Request"}
