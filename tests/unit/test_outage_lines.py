"""What the log says of an etcd that goes away: one line, and one when it is back."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

import pytest

from omni_discovery import keys
from omni_discovery._waiting import Backoff
from omni_discovery.errors import RegistryDeniedError, RegistryRefusedError, RegistryUnavailableError
from omni_discovery.etcd_outage import Outage
from omni_discovery.kv import WatchBatch
from omni_discovery.messages import ReplicaRecord, ReplicaStatus
from omni_discovery.registrations import ReplicaRegistrar
from omni_discovery.table import ReplicaTable
from omni_discovery.testing import FakeKV, ManualClock, settle
from omni_discovery.watcher import Watcher


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().split()[0] for record in caplog.records if record.levelno > logging.DEBUG]


def test_an_outage_is_one_line_and_its_end_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now_s = [100.0]
    outage = Outage(["a:1", "b:2"], lambda: now_s[0])
    outage.answered()
    for _ in range(100):
        outage.failed("nobody answers")
    now_s[0] = 112.5
    outage.answered()
    outage.answered()
    assert [record.getMessage() for record in caplog.records] == [
        "etcd.away endpoints=a:1,b:2 reason=nobody answers",
        "etcd.back endpoints=a:1,b:2 after_s=12.5",
    ]


def test_a_failure_is_loud_when_it_is_news() -> None:
    backoff = Backoff(1.0, 2.0)
    away, denied, refused = RegistryUnavailableError("x"), RegistryDeniedError("y"), RegistryRefusedError("z")
    told = [backoff.loudness(error) for error in (away, denied, denied, refused, away, refused)]
    assert told == [logging.DEBUG, logging.WARNING, logging.DEBUG, logging.WARNING, logging.DEBUG, logging.WARNING]
    backoff.reset()
    assert backoff.loudness(refused, logging.ERROR) == logging.ERROR


class Deaf(FakeKV):
    """It may refuse its watches."""

    error: Exception | None = None

    async def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        if self.error is not None:
            raise self.error
        async for batch in super().watch(prefix, start_revision):
            yield batch


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RegistryUnavailableError("away"), []),
        (RegistryDeniedError("no"), ["watcher.stale", "watcher.fresh"]),
    ],
)
async def test_a_watcher_repeats_neither_what_the_connection_says_nor_itself(
    caplog: pytest.LogCaptureFixture, error: Exception, told: list[str]
) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    kv = Deaf(clock)
    watcher = Watcher(kv, ReplicaTable("n"), keys.namespace_prefix("n"), lambda *_: None, clock=clock)
    watcher.start()
    await settle()
    kv.is_out, kv.error = True, error
    await clock.advance(60.0)
    kv.is_out, kv.error = False, None
    await clock.advance(10.0)
    await watcher.close()
    assert [event for event in events(caplog) if event != "watcher.relist"] == told or not told


async def test_a_registrar_is_silent_while_etcd_is_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    kv = FakeKV(clock)
    record = ReplicaRecord(stage_id=0, replica_id=0, input_addr="i", output_addr="o", status=ReplicaStatus.UP)
    registrar = ReplicaRegistrar(kv, "n", record, ttl_s=10.0, clock=clock)
    registrar.start()
    await clock.advance(1.0)
    caplog.clear()
    kv.is_out = True
    registrar.update(
        ReplicaRecord(stage_id=0, replica_id=0, input_addr="i", output_addr="o", status=ReplicaStatus.DOWN)
    )
    await clock.advance(120.0)
    assert set(events(caplog)) <= {"lease.suspect"}
    assert len(events(caplog)) <= 1
    kv.is_out = False
    await clock.advance(10.0)
    await registrar.close()
