"""The ZMQ thread's turns: what one of them takes, whatever a hub sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import zmq

from omni_discovery.errors import WireError
from omni_discovery.wire.session import Peer
from stage_runtime.config import ServerConfig
from stage_runtime.lifecycle import LifeState
from stage_runtime.server.handshake import ReplicaState
from stage_runtime.server.router import Router
from stage_runtime.server.server import ReplicaServer

PEER = Peer("h/0123456789abcdef", "h")


class Heads:
    """A router with as many messages of one size as anybody asks for."""

    def __init__(self, size_bytes: int) -> None:
        self.head = bytes(size_bytes)

    def receive_frame(self) -> tuple[Peer, bytes]:
        return PEER, self.head


@pytest.fixture
def server() -> Iterator[ReplicaServer]:
    """Bound, with no thread."""
    state = ReplicaState(lambda: LifeState.READY, lambda: 1)
    server = ReplicaServer(ServerConfig(), "127.0.0.1", None, state, lambda _job: None)
    yield server
    server.close()


@pytest.mark.attack("Q21")
@pytest.mark.parametrize(("size_bytes", "taken"), [(100, 64), (100 << 10, 6), (4 << 20, 1)])
def test_a_turn_takes_few_messages_where_they_are_large(server: ReplicaServer, size_bytes: int, taken: int) -> None:
    """What one hub sends must not put off the answers to others for long: a turn ends, and more may wait."""
    handled: list[int] = []
    handle: Callable[[Peer, bytes, float], Any] = lambda _peer, head, _now_s: handled.append(len(head))  # noqa: E731
    assert server._receive(cast("Router", Heads(size_bytes)), handle, 0.0)
    assert handled == [size_bytes] * taken


@pytest.mark.attack("Q25")
def test_a_message_of_very_many_frames_is_dropped_in_turns_and_others_are_heard() -> None:
    """1. one hub sends a message of 100 000 frames and then a good one, another hub a good one
    2. the first is refused once; its frames are dropped over a dozen turns or more; both good ones are heard
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = Router(context, ServerConfig(), "127.0.0.1", None, lambda _key: frozenset())
    hubs = [context.socket(zmq.DEALER) for _ in range(2)]
    try:
        for number, hub in enumerate(hubs):
            hub.linger = 0
            hub.identity = f"h{number}/0123456789abcdef".encode()
            hub.connect(f"tcp://127.0.0.1:{router.port}")
        hubs[0].send_multipart([b""] * 100_000)
        for hub in hubs:
            hub.send(b"well")
        heard, refused, turns = list[str](), 0, 0
        while len(heard) < 2:
            assert router.socket.poll(30_000)
            try:
                peer, head = router.receive_frame()
                assert peer is not None
                heard.append(peer.hub_id)
                assert head == b"well"
            except WireError:
                refused += 1
            except zmq.Again:
                turns += 1
        assert (sorted(heard), refused) == (["h0", "h1"], 1)
        assert turns >= 12
    finally:
        for hub in hubs:
            hub.close()
        router.close(0)
        router.listener.close()
        context.term()
