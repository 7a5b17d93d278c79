"""A hub that may not join is told so before anybody has heard of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from hub.serve.running_hub import RunningHub
from omni_discovery.deploy.document import encode_deploy, parse_deploy
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records.keys import namespace_prefix, pipeline_key
from tests.support.registry import EtcdServer
from tests.support.serving import serve_config

OTHER = parse_deploy("stages: [{stage_id: 0, engine: echo, model: another, final_output: text}]", "other.yaml")


@pytest.fixture
def slow_server(tmp_path: Path) -> Iterator[EtcdServer]:
    """Elections take 1 s, so no lease is shorter than 2."""
    server = EtcdServer(tmp_path, flags=["--heartbeat-interval=100", "--election-timeout=1000"])
    server.start()
    yield server
    server.kill()


@pytest.mark.parametrize("case", ["another document", "too short a TTL"])
async def test_a_hub_that_is_refused_has_written_nothing_and_met_nobody(
    tmp_path: Path, slow_server: EtcdServer, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """1. another document is in force, or the TTL is shorter than this etcd grants; 2. the hub raises what to do
    3. it was never registered, not even for a moment: nothing in its namespace has changed
    """
    caplog.set_level(logging.INFO)
    server = slow_server
    config = serve_config(tmp_path, server.endpoint, "joining", 5.0)
    kv = EtcdKV(server.endpoint)
    try:
        if case == "another document":
            await kv.create(pipeline_key("joining"), encode_deploy(OTHER))
            said = "already runs another pipeline"
        else:
            config, said = replace(config, ttl_s=1.0), "--omni-heartbeat-timeout"
        before = await kv.list(namespace_prefix("joining"))
        async with AsyncExitStack() as stack:
            hub = RunningHub(config, server.endpoint, "http://here", asyncio.Event())
            with pytest.raises(ConfigError, match=said):
                await hub.start(stack)
        after = await kv.list(namespace_prefix("joining"))
    finally:
        await kv.close()
    assert (after.revision, after.items) == (before.revision, before.items)
    assert not [record for record in caplog.records if record.name.startswith("hub")]
