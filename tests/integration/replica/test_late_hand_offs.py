"""Producers whose hand-offs never come: the replica that fetches them serves everybody else meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from omni_discovery import wire
from omni_discovery.deploy.document import parse_deploy
from stage_runtime.connectors.store.layout import GENERATION_BYTES, TOKEN_BYTES
from stage_runtime.connectors.tcp.frames import Status, pack_answer
from stage_runtime.engine_loop import payloads
from tests.support.local_replica import LocalReplica
from tests.support.replica_hub import RawHub

DEPLOY = """
stages:
  - {stage_id: 0, engine: echo}
  - {stage_id: 1, engine: echo, input_sources: [0], final_output: text}
connectors: {edge: {name: TcpConnector}}
edges: [{from: 0, to: 1, connector: edge}]
"""


class SilentPort:
    """Accepts, announces 100 bytes and sends none, until it is told to: then it sends what is no hand-off."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port = self._listener.getsockname()[1]
        self.accepted: list[socket.socket] = []
        self.go_on = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(pack_answer(Status.HERE, 100))
            self.go_on.wait()
            connection.sendall(bytes(100))

    def close(self) -> None:
        self.go_on.set()
        for each in (self._listener, *self.accepted):
            each.close()


@pytest.fixture
def silent() -> Iterator[SilentPort]:
    port = SilentPort()
    yield port
    port.close()


def reference(port: SilentPort, key: str) -> wire.PayloadRef:
    metadata: dict[str, Any] = {
        "source_host": "127.0.0.1", "source_port": port.port, "data_size": 100, "tls": False, "consume": False,
        "generation": bytes(GENERATION_BYTES), "token": bytes(TOKEN_BYTES), "boot_id": "other",
    }  # fmt: skip
    return wire.PayloadRef(
        from_stage=0, to_stage=1, key=key, connector="TcpConnector", size_bytes=100, metadata=metadata
    )


End = wire.StageDone | wire.StageFailed


def ends(hub: RawHub, count: int) -> dict[str, End]:
    """The ends of the next so many requests."""
    found: dict[str, End] = {}
    while len(found) < count:
        message: Any = hub.receive(hub.output, (wire.StageDone, wire.StageFailed, wire.Chunk), 60.0)
        if not isinstance(message, wire.Chunk):
            found[message.request_id] = message
    return found


@pytest.mark.attack("K1")
@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "in pieces"])
def test_honest_requests_are_served_while_hand_offs_do_not_come(
    silent: SilentPort, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. six requests whose hand-offs a hostile producer does not send, then one that needs none: it is served
    2. one of the six is aborted, and ends at once
    3. the others fail when what came is no hand-off, as hand-offs of stage 0
    """
    monkeypatch.setattr(payloads, "_FETCH_TIMEOUT_S", 120.0)
    deploy = parse_deploy(DEPLOY, "test.yaml")
    with LocalReplica(encrypted=False, stage_id=1, deploy=deploy, capacity=16) as replica:
        hub = replica.raw_hub("hub", None)
        hub.hello()
        for number in range(6):
            name = f"slow{number}"
            ref = reference(silent, name)
            hub.submit(name, "x", **({"stream_from": (0,)} if in_pieces else {"payloads": (ref,)}))
            if in_pieces:
                about = {"epoch": hub.epoch, "request_id": name, "attempt": 0}
                hub.send(wire.Feed(**about, from_stage=0, number=0, payload=ref))
        hub.submit("honest", "hello")
        (served,) = ends(hub, 1).values()
        assert (served.request_id, type(served)) == ("honest", wire.StageDone)
        hub.send(wire.Abort(epoch=hub.epoch, request_id="slow5", attempt=0))
        (aborted,) = ends(hub, 1).values()
        assert (aborted.request_id, type(aborted)) == ("slow5", wire.StageDone)
        silent.go_on.set()
        failed = ends(hub, 5)
        hub.close()
    assert set(failed) == {f"slow{number}" for number in range(5)}
    for end in failed.values():
        assert isinstance(end, wire.StageFailed)
        assert (end.kind, end.from_stage) == (wire.FailureKind.PAYLOAD, 0)


@pytest.fixture
def silent_ports() -> Iterator[list[SilentPort]]:
    ports = [SilentPort() for _ in range(28)]
    yield ports
    for port in ports:
        port.close()


@pytest.mark.attack("P33")
def test_hand_offs_of_two_dozen_silent_producers_leave_threads_to_others(
    silent_ports: list[SilentPort], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. 24 fetches take all threads for producers that nobody knows, and four more wait
    2. the oldest twelve are given up and cancelled, and their requests fail as hand-offs of stage 0
    3. the four begin
    """
    monkeypatch.setattr(payloads, "_FETCH_TIMEOUT_S", 120.0)
    deploy = parse_deploy(DEPLOY, "test.yaml")
    with LocalReplica(encrypted=False, stage_id=1, deploy=deploy, capacity=40) as replica:
        hub = replica.raw_hub("hub", None)
        hub.hello()
        for number, port in enumerate(silent_ports):
            hub.submit(f"r{number}", "x", payloads=(reference(port, f"k{number}"),))
        failed = ends(hub, 12)
        deadline_s = time.monotonic() + 60.0
        while not all(port.accepted for port in silent_ports) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert all(port.accepted for port in silent_ports)
        for port in silent_ports:
            port.go_on.set()
        ends(hub, 16)
        hub.close()
    assert len(failed) == 12
    for end in failed.values():
        assert isinstance(end, wire.StageFailed)
        assert (end.kind, end.from_stage) == (wire.FailureKind.PAYLOAD, 0)
        assert "others wait for its place" in end.reason
