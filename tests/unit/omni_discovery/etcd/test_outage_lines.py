"""What the log says of an etcd that goes away: one line, and one when it is back."""

from __future__ import annotations

import logging

import pytest

from omni_discovery.backoff import Backoff
from omni_discovery.errors import RegistryDeniedError, RegistryRefusedError, RegistryUnavailableError
from omni_discovery.etcd.channel import Outage
from omni_discovery.kv import Listing
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaRecord, ReplicaStatus
from omni_discovery.registration.registrars import ReplicaRegistrar
from omni_discovery.testing import FakeKV, ManualClock
from omni_discovery.view.table import ReplicaTable
from omni_discovery.view.watcher import Watcher


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().split()[0] for record in caplog.records if record.levelno > logging.DEBUG]


def test_an_outage_is_one_line_and_its_end_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now_s = [100.0]
    outage = Outage(["a:1", "b:2"], lambda: now_s[0])
    outage.call_answered()
    for _ in range(100):
        outage.call_failed("nobody answers")
    now_s[0] = 112.5
    outage.call_answered()
    outage.call_answered()
    assert [record.getMessage() for record in caplog.records] == [
        "etcd.away endpoints=a:1,b:2 reason=nobody answers",
        "etcd.back endpoints=a:1,b:2 after_s=12.5",
    ]


def test_a_failure_is_loud_when_it_is_news() -> None:
    backoff = Backoff(1.0, 2.0)
    away, denied, refused = RegistryUnavailableError("x"), RegistryDeniedError("y"), RegistryRefusedError("z")
    told = [backoff.log_level(error) for error in (away, denied, denied, refused, away, refused)]
    assert told == [logging.DEBUG, logging.WARNING, logging.DEBUG, logging.WARNING, logging.DEBUG, logging.WARNING]
    backoff.reset()
    assert backoff.log_level(refused, logging.ERROR) == logging.ERROR


class Refusing(FakeKV):
    """It may refuse to list."""

    refuses = False

    async def list(self, prefix: str, *, keys_only: bool = False) -> Listing:
        if self.refuses:
            raise RegistryDeniedError("no")
        return await super().list(prefix, keys_only=keys_only)


async def test_a_watcher_repeats_neither_what_the_connection_says_nor_itself(caplog: pytest.LogCaptureFixture) -> None:
    """1. etcd is away for a minute: no line of the watcher's; 2. it is back and refuses: one line; 3. all is well"""
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    kv = Refusing(clock)
    table = ReplicaTable("n")
    watcher = Watcher(kv, table, keys.namespace_prefix("n"), lambda *_: None, clock=clock)
    watcher.start()
    await clock.advance(1.0)
    kv.is_out = True
    await clock.advance(60.0)
    assert table.snapshot().stale_since_s is not None
    assert events(caplog) == []
    kv.is_out, kv.refuses = False, True
    await clock.advance(60.0)
    assert events(caplog) == ["watcher.stale"]
    kv.refuses = False
    await clock.advance(10.0)
    assert events(caplog) == ["watcher.stale", "watcher.fresh"]
    await watcher.close()


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
