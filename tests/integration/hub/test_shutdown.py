"""How a hub goes: nothing that waits for etcd holds up what is left to do on its loop."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from hub.serve.running_hub import RunningHub
from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.records.keys import hubs_prefix
from tests.support.hub_fakes import until
from tests.support.quiet import soon_s
from tests.support.registry import EtcdServer
from tests.support.serving import serve_config


async def test_an_etcd_that_does_not_answer_holds_up_neither_the_loop_nor_the_end_for_long(
    tmp_path: Path, server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. a hub is registered; etcd freezes; 2. the hub stops: it waits a bounded time for etcd, and its loop runs"""
    closing_took_s = 0.0
    close = OmniCoordClientForHub._close_once

    def timed_close(client: OmniCoordClientForHub) -> bool:
        nonlocal closing_took_s
        began_s = time.monotonic()
        is_first = close(client)
        closing_took_s = time.monotonic() - began_s
        return is_first

    monkeypatch.setattr(OmniCoordClientForHub, "_close_once", timed_close)
    async with AsyncExitStack() as stack:
        config = serve_config(tmp_path, server.endpoint, "test", 2.0)
        hub = RunningHub(config, server.endpoint, "http://here", asyncio.Event())
        assert await hub.start(stack) is not None
        prefix = hubs_prefix(config.namespace)
        await until(lambda: prefix in server.etcdctl("get", "--prefix", prefix, "--keys-only"))
        server.signal(signal.SIGSTOP)
        most_s, looked_s = 0.0, time.monotonic()

        async def look() -> None:
            nonlocal most_s, looked_s
            while True:
                await asyncio.sleep(0.01)
                now_s = time.monotonic()
                most_s, looked_s = max(most_s, now_s - looked_s), now_s

        looking = asyncio.create_task(look())
        await stack.aclose()
        looking.cancel()
    assert 0.5 < closing_took_s < soon_s(10.0)
    assert most_s < closing_took_s / 2
