"""Real servers say which release they are, and it is said once what that means."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.etcd.releases.versions import VersionLog
from omni_discovery.etcd.store import EtcdKV
from tests.support.binaries import require_debian_etcd, wheel_etcd
from tests.support.registry import eventually


@pytest.mark.parametrize(("binary", "line"), [(wheel_etcd, "3.5."), (require_debian_etcd, "3.4.")])
def test_the_release_and_its_bugs_are_named_once_however_many_connect(
    binary: Callable[[], Path], line: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EtcdKV, "version_log", VersionLog())
    caplog.set_level(logging.INFO)

    async def connect(endpoint: str) -> str:
        kv = EtcdKV(endpoint)
        await kv.get("/")
        await eventually("the answer", lambda: kv.server_versions[endpoint])
        await kv.close()
        return kv.server_versions[endpoint]

    with EmbeddedEtcd(binary=binary()) as etcd:
        for _ in range(3):
            assert asyncio.run(connect(etcd.endpoint)).startswith(line)
    said = [record.getMessage() for record in caplog.records]
    assert sum("etcd.version" in message for message in said) == 1
    (bugs,) = (message for message in said if "etcd.known_bugs" in message)
    assert "a renewal may be granted for a lease that has ended" in bugs
    assert "puts it back" in bugs
