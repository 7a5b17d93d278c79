"""Handshakes that fail leave nothing behind: not even a ring of objects, of which each would hold 256 KiB of TLS's."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from hub.api.connections import ConnectionLimits
from hub.api.door.handshakes import TlsListener
from hub.api.door.tls import TlsFiles, load_context
from hub.api.protocols import BoundedServer
from tests.support.certificates import make_certificates
from tests.support.hub_fakes import until

STRANGERS = 40


def greeting() -> bytes:
    """What a client's TLS says first."""
    sent = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="h")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing but the end of the last reference ends an object."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects())


@pytest.mark.attack("Z4")
@pytest.mark.parametrize("says", [greeting(), b"GET / HTTP/1.1\r\n\r\n", b""])
async def test_strangers_who_leave_in_mid_handshake_leave_nothing(
    says: bytes, tmp_path: Path, no_collector: None
) -> None:
    pems = make_certificates(tmp_path)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Nobody gets so far."""

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.setblocking(False)
        bounded = BoundedServer(ConnectionLimits(), lambda _reason: None)
        config = uvicorn.Config(app, log_config=None, lifespan="off", **bounded.protocols)
        config.load()
        state, begun = ServerState(), 0

        def make() -> Any:
            return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

        tls = TlsListener(listener, load_context(TlsFiles(pems.server_cert, pems.server_key)), bounded, make)
        begins = tls._begin

        def count(*given: Any) -> None:
            nonlocal begun
            begun += 1
            begins(*given)

        tls._begin = count  # type: ignore[method-assign]
        before = alive()
        for _ in range(STRANGERS):
            with socket.create_connection(listener.getsockname()) as stranger:
                stranger.sendall(says)
                await asyncio.sleep(0.01)
        await until(lambda: begun == STRANGERS and not len(bounded.connections))
        tls.close()
        await tls.wait_closed()
        # What is in the loop's own list for the next turn.
        await asyncio.sleep(0.05)
        left = alive() - before
        kinds = ("TlsInput", "SSLProtocol", "Handshake", "BoundedHttp", "traceback")
        assert {name: left[name] for name in kinds} == dict.fromkeys(kinds, 0)
