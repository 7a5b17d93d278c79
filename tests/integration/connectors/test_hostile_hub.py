"""A registered hub that has turned hostile names hand-offs of its own making to a real replica."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from omni_discovery import wire
from tests.integration.connectors.test_pipeline import deploy_of
from tests.support.replica_stage import Deployment


@pytest.mark.attack("A19")
@pytest.mark.parametrize("kind", ["TcpConnector", "AutoConnector"])
def test_a_replica_connects_to_registered_producers_only(
    kind: str, endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. the painter starts first: it learns of the thinker when it has to fetch from it
    2. references to a stranger's port, and to another one of the thinker's host, fail as hand-offs that are not there
    3. the stranger has heard nothing, and an honest reference works as before
    """
    with Deployment(endpoint, namespace, deploy_of(kind, tmp_path), tmp_path) as running, socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        running.start(1)
        (painting,) = running.wait_up(1)
        running.start(0)
        (thinking,) = running.wait_up(0)
        thinker, painter = running.session(thinking), running.session(painting)
        thinker.submit("r1", "seven", next_stages=(1,))
        thinker.acknowledged()
        (honest,) = thinker.collect("r1")[1].payloads
        host, port = honest.metadata["source_host"], honest.metadata["source_port"]

        def draw(attempt: int, ref: wire.PayloadRef) -> wire.StageDone | wire.StageFailed:
            painter.submit("r1", attempt=attempt, payloads=(ref,))
            painter.acknowledged()
            ended: wire.StageDone | wire.StageFailed = painter.collect("r1")[1]
            return ended

        assert isinstance(draw(0, honest), wire.StageDone)
        places = [(host, stranger.getsockname()[1]), (host, port + 1), ("localhost", port), ("169.254.169.254", 80)]
        for attempt, (forged_host, forged_port) in enumerate(places, 1):
            without_segment = {name: each for name, each in honest.metadata.items() if not name.startswith("shm")}
            metadata = {**without_segment, "source_host": forged_host, "source_port": forged_port}
            failed = draw(attempt, msgspec.structs.replace(honest, metadata=metadata))
            assert isinstance(failed, wire.StageFailed)
            assert failed.kind is wire.FailureKind.PAYLOAD
            assert "where no registered replica of that stage hands over" in failed.reason
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()
        assert isinstance(draw(9, honest), wire.StageDone)
