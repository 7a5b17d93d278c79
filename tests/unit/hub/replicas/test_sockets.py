"""A replica's sockets are opened together, or none of them is."""

from __future__ import annotations

import pytest

from hub.config import HubConfig
from hub.replicas.long_turns import LongTurns
from hub.replicas.resolver import Resolution, Resolver
from hub.replicas.sockets import ConnectionListener, make_context, open_connections
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.wire.session import SocketName


class Broken(Resolver):
    """Fails at the second name."""

    def resolve(self, host: str) -> Resolution:
        if host == "output.example":
            raise KeyError(host)
        return super().resolve(host)


class Nobody(ConnectionListener):
    def connection_made(self, name: SocketName) -> None:
        """Of no interest."""

    def connection_lost(self, name: SocketName) -> None:
        """Of no interest."""

    def connection_missed(self) -> None:
        """Of no interest."""

    def frames_received(self, name: SocketName, frames: list[bytes]) -> None:
        """Of no interest."""

    def fell_silent(self) -> None:
        """Of no interest."""


async def test_whatever_ends_the_attempt_to_connect_leaves_no_socket_open() -> None:
    info = ReplicaInfo(
        input_addr="tcp://127.0.0.1:9",
        output_addr="tcp://output.example:9",
        stage_id=0,
        status=ReplicaStatus.UP,
        queue_length=0,
        last_heartbeat=0.0,
        registered_at=0.0,
        replica_id=0,
        epoch=1,
    )
    context = make_context()
    try:
        with pytest.raises(KeyError):
            open_connections(context, info, "hub", None, HubConfig(), Nobody(), Broken(), LongTurns())
        assert [socket for socket in context._sockets if not socket.closed] == []
    finally:
        context.destroy(linger=0)
