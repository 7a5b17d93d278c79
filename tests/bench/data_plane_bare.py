"""The floor of the data plane: one DEALER and one ROUTER, each driven by its file descriptor on uvloop, and msgpack."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import uvloop
import zmq

from omni_discovery.curve import KeyPair, secure_client, secure_server

_encoder = msgspec.msgpack.Encoder()


class Ask(msgspec.Struct, frozen=True):
    """A request."""

    request_id: int
    prompt: str


class Answer(msgspec.Struct, frozen=True):
    """The same words back; with others before and after it where three replies are wanted."""

    request_id: int
    text: str
    is_last: bool = True


class FdSocket:
    """A ZMQ socket as a reader of the running loop, drained as far as it goes each time."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_draining = self._is_due = False
        self._loop.add_reader(self._fd, self._drain)
        self._look_again()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send at once."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        # A send may take the edge of what came in meanwhile; while draining, that is found anyway.
        if not self._is_draining:
            self._look_again()

    def close(self) -> None:
        """No reader, no socket."""
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)

    def _look_again(self) -> None:
        if not self._is_due and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            self._is_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_due, self._is_draining = False, True
        try:
            while True:
                self._on_frames(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            self._is_draining = False


class BareServer:
    """Says everything back. For an Actor: a loop of its own in a thread.

    With ``replies`` 3 it sends as many messages for each request as a replica does.
    """

    def __init__(self, keys: KeyPair | None, replies: int = 1) -> None:
        self._keys = keys
        self._replies = replies
        self._bound = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=uvloop.run, args=(self._serve(),), daemon=True)
        self._thread.start()
        self._bound.wait(10.0)

    def address(self) -> str:
        """Where it listens."""
        return self._address

    def shut(self) -> None:
        """Stop the loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(5.0)

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        decoder = msgspec.msgpack.Decoder(Ask)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.sndhwm = socket.rcvhwm = 4096
        if self._keys is not None:
            secure_server(socket, self._keys)
        socket.bind("tcp://127.0.0.1:*")
        self._address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

        def answer(frames: list[bytes]) -> None:
            ask = decoder.decode(frames[1])
            if self._replies == 3:
                server.send((frames[0], _encoder.encode(Answer(ask.request_id, "", is_last=False))))
                server.send((frames[0], _encoder.encode(Answer(ask.request_id, ask.prompt, is_last=False))))
                server.send((frames[0], _encoder.encode(Answer(ask.request_id, ""))))
            else:
                server.send((frames[0], _encoder.encode(Answer(ask.request_id, ask.prompt))))

        server = FdSocket(socket, answer)
        self._bound.set()
        await self._done.wait()
        server.close()
        context.term()


class BareClient:
    """Asks; ``on_answer`` hears the number of each request that was answered."""

    def __init__(self, address: str, keys: tuple[KeyPair, str] | None, on_answer: Callable[[int], Any]) -> None:
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._on_answer = on_answer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.sndhwm = socket.rcvhwm = 4096
        if keys is not None:
            secure_client(socket, *keys)
        socket.connect(address)
        self._socket = FdSocket(socket, self._read)

    async def ready(self) -> None:
        """What is sent before the connection stands is kept."""

    def ask(self, request_id: int, prompt: str) -> None:
        """Send one request."""
        self._socket.send((_encoder.encode(Ask(request_id, prompt)),))

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()
        self._context.term()

    def _read(self, frames: list[bytes]) -> None:
        answer = self._decoder.decode(frames[0])
        if answer.is_last:
            self._on_answer(answer.request_id)
