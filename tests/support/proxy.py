"""A TCP proxy in front of a server: it cuts connections, refuses new ones, or goes silent with all of them open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from omni_discovery.etcd.config import socket_path
from omni_discovery.loop_thread import LoopThread
from omni_discovery.records.schema import ReplicaInfo

_ABORT: Final = struct.pack("ii", 1, 0)
_CALL_S: Final = 5.0


async def open_endpoint(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an endpoint as parse_endpoints returns it."""
    if path := socket_path(endpoint):
        return await asyncio.open_unix_connection(path)
    host, _, port = endpoint.rpartition(":")
    return await asyncio.open_connection(host, int(port))


class TcpProxy:
    """Forwards to the endpoint ``target`` from a thread of its own while it is entered."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._thread = LoopThread("tcp-proxy")
        #: Every connection that was ever made, both ways.
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._refuses = False
        self._port = 0
        #: How many connections were asked for, refused ones included.
        self.attempts = 0

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._thread.run(self._listen(), _CALL_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._stop(), _CALL_S)
        self._thread.close()

    def cut(self) -> None:
        """Reset every connection there is; new ones are taken."""
        self._thread.run(self._reset_all(), _CALL_S)

    def refuse(self) -> None:
        """Reset every connection, and each new one at once."""
        self._refuses = True
        self.cut()

    def take(self) -> None:
        """Take new connections again."""
        self._refuses = False

    def freeze(self) -> None:
        """Forward nothing more, in neither direction; nothing is closed, nothing is lost."""
        self._thread.call(self._flows.clear)

    def thaw(self) -> None:
        self._thread.call(self._flows.set)

    async def _listen(self) -> None:
        self._flows.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        # What was accepted just now has no task yet.
        await asyncio.sleep(0.01)
        self._flows.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reset_all()
        # What was aborted is closed in the loop's next turn.
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.attempts += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._refuses:
            self._reset(writer)
            return
        try:
            far_reader, far_writer = await open_endpoint(self._target)
        except OSError:
            self._reset(writer)
            return
        self._writers.add(far_writer)
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(65536):
                await self._flows.wait()
                writer.write(content)
                await writer.drain()
        writer.close()

    async def _reset_all(self) -> None:
        for writer in list(self._writers):
            self._reset(writer)

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            connection: socket.socket = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        writer.transport.abort()


@contextmanager
def behind_proxies(info: ReplicaInfo) -> Iterator[tuple[ReplicaInfo, list[TcpProxy]]]:
    """A replica's record with addresses that lead to it through proxies, for its input and its output, and these."""
    with ExitStack() as stack:
        addrs = (info.input_addr, info.output_addr)
        ways = [stack.enter_context(TcpProxy(addr.removeprefix("tcp://"))) for addr in addrs]
        input_addr, output_addr = (f"tcp://{way.endpoint}" for way in ways)
        yield replace(info, input_addr=input_addr, output_addr=output_addr), ways
