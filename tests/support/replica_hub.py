"""A hub made of two bare DEALER sockets, for talking to one replica frame by frame."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zmq

from omni_discovery import wire
from omni_discovery.curve import KeyPair, secure_client
from tests.support.quiet import patience_s

_Message = TypeVar("_Message")


class RawHub:
    """Speaks the wire protocol and nothing more; every receive is bounded."""

    def __init__(
        self,
        hub_id: str,
        keys: KeyPair | None,
        input_addr: str,
        output_addr: str,
        replica_public: str,
        epoch: int,
        routing_id: str = "",
        receive_queue: int = 1000,
    ) -> None:
        self.hub_id = hub_id
        self._receive_queue = receive_queue
        self.routing_id = routing_id or f"{hub_id}/{secrets.token_hex(8)}"
        self.epoch = epoch
        #: What came with a batch and was not asked for yet, with its attachments, by socket.
        self._unread: dict[zmq.Socket[bytes], deque[tuple[wire.FromReplica, Sequence[bytes | memoryview]]]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.input = self._connect(keys, input_addr, replica_public)
        self.output = self._connect(keys, output_addr, replica_public)

    def _connect(self, keys: KeyPair | None, address: str, replica_public: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.identity = self.routing_id.encode()
        socket.linger = 0
        socket.rcvhwm = self._receive_queue
        socket.reconnect_ivl = 50
        if keys is not None:
            secure_client(socket, keys, replica_public)
        socket.connect(address)
        return socket

    def send(self, message: wire.ToReplica) -> None:
        """Cut where it is long."""
        self.input.send_multipart(wire.cut([wire.encode(message)]))

    def hello(self, timeout_s: float = 5.0) -> tuple[wire.Welcome, wire.Welcome]:
        frame = wire.encode(wire.Hello(hub_id=self.hub_id, epoch=self.epoch))
        self.input.send(frame)
        self.output.send(frame)
        return self.receive(self.input, wire.Welcome, timeout_s), self.receive(self.output, wire.Welcome, timeout_s)

    def submit(self, request_id: str, prompt: str = "", *, attempt: int = 0, **fields: Any) -> None:
        inputs = {"prompt": prompt} if prompt else {}
        fields = {"inputs": inputs, **fields}
        self.send(wire.Submit(epoch=self.epoch, request_id=request_id, attempt=attempt, **fields))

    def acknowledged(self, timeout_s: float = 5.0) -> wire.Accepted | wire.Rejected:
        answer: wire.Accepted | wire.Rejected = self.receive(self.input, (wire.Accepted, wire.Rejected), timeout_s)
        return answer

    def receive(
        self, socket: zmq.Socket[bytes], kind: type[_Message] | tuple[type[Any], ...], timeout_s: float = 5.0
    ) -> _Message:
        """The next message, which must be of that kind; unasked-for load reports and credits are skipped."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        deadline_s = time.monotonic() + patience_s(timeout_s)
        unread = self._unread.setdefault(socket, deque())
        while True:
            while unread:
                message, attachments = unread.popleft()
                if isinstance(message, wire.Welcome | wire.Grant | wire.Recall) and type(message) not in kinds:
                    continue
                assert isinstance(message, kind), message
                self.attachments = [bytes(attachment) for attachment in attachments]
                return message
            left_ms = max(0, int(1000 * (deadline_s - time.monotonic())))
            if not socket.poll(left_ms):
                raise TimeoutError(f"no {kind} within {timeout_s} s")
            messages, attached = wire.decode_from_replica(socket.recv_multipart())
            unread.extend((each, attached) for each in messages)

    def collect(self, request_id: str, timeout_s: float = 10.0) -> tuple[list[wire.Chunk], Any, list[bytes]]:
        """All chunks of one request, its end, and the attachments; frames of others are an error."""
        chunks: list[wire.Chunk] = []
        attachments: list[bytes] = []
        while True:
            message: Any = self.receive(self.output, (wire.Chunk, wire.StageDone, wire.StageFailed), timeout_s)
            assert message.request_id == request_id, message
            if not isinstance(message, wire.Chunk):
                return chunks, message, attachments
            assert message.seq == len(chunks)
            chunks.append(message)
            attachments += self.attachments

    def hears_nothing(self, for_s: float) -> bool:
        """Whether both sockets stay silent for that long."""
        poller = zmq.Poller()
        poller.register(self.input, zmq.POLLIN)
        poller.register(self.output, zmq.POLLIN)
        return not poller.poll(int(for_s * 1000))

    def close(self) -> None:
        self.input.close()
        self.output.close()
        self._context.term()


def eventually(holds: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Whether something comes true in time."""
    deadline_s = time.monotonic() + patience_s(timeout_s)
    while time.monotonic() < deadline_s:
        if holds():
            return True
        time.sleep(0.01)
    return holds()
