"""Two real replicas whose edge is carried by each connector in turn, chosen by one line of the deploy document."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hub.replicas.references import flaw_of_references
from omni_discovery import wire
from omni_discovery.deploy.document import ConnectorConfig, EdgeConfig
from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.wire import FailureKind
from tests.support.certificates import make_certificates
from tests.support.mooncake import mooncake_host, mooncake_master
from tests.support.netns import Host
from tests.support.replica_hub import eventually
from tests.support.replica_stage import Deployment, echo_stages
from tests.support.yuanrong import yuanrong

#: Edges whose consumers connect to the producer, at the address in its record.
WITH_ADDRESS = ("", "AutoConnector", "TcpConnector", "TcpConnector with TLS", "MooncakeTransferEngineConnector")


@pytest.mark.parametrize(
    "kind", ["", "AutoConnector", "SharedMemoryConnector", "TcpConnector", "TcpConnector with TLS", "YuanrongConnector"]
)
def test_a_hand_off_goes_from_replica_to_replica(kind: str, endpoint: str, namespace: str, tmp_path: Path) -> None:
    hand_over(kind, endpoint, namespace, tmp_path)


@pytest.mark.parametrize("kind", ["MooncakeTransferEngineConnector", "MooncakeConnector"])
def test_a_hand_off_goes_from_replica_to_replica_by_mooncake(kind: str, namespace: str, tmp_path: Path) -> None:
    """The same, where all of it runs on a host of its own."""
    host = mooncake_host()
    if kind == "MooncakeConnector":
        mooncake_master()
    process = multiprocessing.get_context("spawn").Process(target=_on_host, args=(host, kind, namespace, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0


def _on_host(host: Host, kind: str, namespace: str, folder: Path) -> None:
    # A process of its own: where gRPC runs already, its threads are on the host where they began.
    with host.inside(), EmbeddedEtcd() as etcd:
        hand_over(kind, etcd.endpoint, namespace, folder)


def hand_over(kind: str, endpoint: str, namespace: str, tmp_path: Path) -> None:
    """1. stage 0 hands 100 kB over; what the hub sees of it is small
    2. stage 1 draws it, twice; 3. once it is released, it is gone
    """
    with Deployment(endpoint, namespace, deploy_of(kind, tmp_path), tmp_path) as running:
        running.start(0)
        running.start(1)
        (thinking,), (painting,) = running.wait_up(0), running.wait_up(1)
        assert set(thinking.connectors) == ({"0-1"} if kind in WITH_ADDRESS else set())
        assert not painting.connectors
        thinker, painter = running.session(thinking), running.session(painting)
        thinker.submit("r1", "seven", next_stages=(1,))
        thinker.acknowledged()
        _, done, _ = thinker.collect("r1")
        assert isinstance(done, wire.StageDone)
        (ref,) = done.payloads
        assert (ref.connector, ref.size_bytes > 100_000) == (kind.partition(" ")[0] or "AutoConnector", True)
        assert len(wire.encode(done)) < 1000
        assert ("source_host" in ref.metadata) == (kind in WITH_ADDRESS)
        assert flaw_of_references(thinking, done) == ""
        for attempt in range(2):
            painter.submit("r1", attempt=attempt, payloads=done.payloads)
            painter.acknowledged()
            _, drawn, pictures = painter.collect("r1")
            assert isinstance(drawn, wire.StageDone)
            assert pictures[0].startswith(b"\x89PNG")
        thinker.send(wire.ReleasePayloads(epoch=thinker.epoch, request_id="r1"))
        attempts = iter(range(2, 100))

        def gone() -> bool:
            painter.submit("r1", attempt=next(attempts), payloads=done.payloads)
            painter.acknowledged()
            failed = painter.collect("r1")[1]
            return isinstance(failed, wire.StageFailed) and failed.kind is FailureKind.PAYLOAD

        assert eventually(gone)
    assert not Path("/dev/shm", ref.metadata.get("shm", "nowhere")).exists()


def deploy_of(kind: str, folder: Path) -> Any:
    """Two stages; the edge between them names a connector, or none."""
    deploy = echo_stages({"payload_bytes": 100_000}, {"modality": "image"})
    if not kind:
        return deploy
    extra: dict[str, Any] = {}
    if kind.endswith("TLS"):
        made = make_certificates(folder)
        extra = {"tls": {"cert": made.server_cert, "key": made.server_key, "ca": made.ca}}
    if kind == "YuanrongConnector":
        extra = yuanrong().settings
    return msgspec.structs.replace(
        deploy,
        edges=(EdgeConfig(from_=0, to=1, connector="it", max_inflight=8),),
        connectors={"it": ConnectorConfig(name=kind.partition(" ")[0], extra=extra)},
    )
