"""A TCP proxy that counts the bytes it passes on, both ways: what one hub costs the network, headers of TCP aside."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from omni_discovery.loop_thread import LoopThread
from tests.support.proxy import open_endpoint

_CHUNK_BYTES: Final = 1 << 16


class CountingProxy:
    """Listens on a free port of this machine and passes everything on to an endpoint."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._passed_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("counting-proxy")
        self._server = self._thread.run(self._open(), 10.0)

    @property
    def address(self) -> str:
        """``host:port`` to connect to."""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    def passed_bytes(self) -> int:
        """Payload bytes so far, both ways together."""
        return self._passed_bytes

    def close(self) -> None:
        """Cut all connections."""
        self._thread.run(self._close(), 10.0)
        self._thread.close()

    async def _open(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await open_endpoint(self._target)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                self._passed_bytes += len(data)
                sink.write(data)
                await sink.drain()
        sink.close()
