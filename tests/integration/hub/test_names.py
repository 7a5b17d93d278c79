"""Replicas whose records name hosts: a DNS that does not answer stops only those, and never ZMQ's I/O thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hub.replicas.resolver import Resolver
from omni_discovery.records.health import TroubleKind
from omni_discovery.records.schema import ReplicaInfo
from tests.support.hub_fakes import QUICK, FakeReplica, ask, running_hub, show, until

CONFIG = replace(QUICK, unmet_after_s=0.3)


@pytest.fixture
def dns() -> Iterator[SimpleNamespace]:
    """``good`` is this host, ``slow`` is not answered before the end of the test."""
    over = threading.Event()
    numbers = {"good": ["127.0.0.1"], "both": ["::1", "127.0.0.1"]}

    def lookup(host: str) -> list[str]:
        if host == "slow":
            over.wait()
        if host not in numbers:
            raise OSError("no such name")
        return numbers[host]

    yield SimpleNamespace(numbers=numbers, resolver=Resolver(lookup, timeout_s=0.2, ttl_s=0.2))
    over.set()


def at(replica: FakeReplica, host: str) -> FakeReplica:
    """The replica with a record that names this host."""
    addrs = [addr.replace("127.0.0.1", host) for addr in (replica.info.input_addr, replica.info.output_addr)]
    replica.info = replace(replica.info, input_addr=addrs[0], output_addr=addrs[1])
    return replica


@pytest.mark.attack("A6")
async def test_a_dns_that_never_answers_makes_one_replica_unusable_and_stops_no_request(
    dns: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """1. of three replicas one names a host that DNS does not answer for, one a host that it knows
    2. the other two serve every request, also while the hub tries the third again and again
    3. the log says why the third is not used
    """
    caplog.set_level(logging.WARNING, "hub")
    served, named, slow = FakeReplica(), at(FakeReplica(replica_id=1), "good"), at(FakeReplica(replica_id=2), "slow")
    async with running_hub(served, named, slow, config=CONFIG, wait=False, resolver=dns.resolver) as omni:
        await until(lambda: sum(stage.pickable for stage in omni.stage_status()) == 2)
        for _ in range(40):
            assert await ask(omni) == "hello there "
            await asyncio.sleep(0.02)
        await until(lambda: "'slow' can't be resolved here: the DNS has not answered for 0.2 s" in caplog.text)
        assert {stage.pickable for stage in omni.stage_status()} == {2}
        (trouble,) = omni.troubles()
        assert (trouble.kind, trouble.replica_id) == (TroubleKind.UNUSABLE, 2)
        assert "'slow' can't be resolved here" in trouble.reason
        assert not slow.received


async def test_a_name_that_appears_later_and_one_that_moves_are_followed(dns: SimpleNamespace) -> None:
    """The second number of a name is tried where nobody answers at the first."""
    replica = at(FakeReplica(), "late")
    async with running_hub(replica, config=CONFIG, wait=False, resolver=dns.resolver) as omni:
        await asyncio.sleep(0.3)
        assert not replica.received
        dns.numbers["late"] = ["127.0.0.2", "127.0.0.1"]
        await until(lambda: sum(stage.pickable for stage in omni.stage_status()) == 1, 30)
        assert await ask(omni) == "hello there "
        assert not omni.troubles()


async def test_ipv6_by_number_and_by_name(dns: SimpleNamespace) -> None:
    replicas = [FakeReplica(replica_id=number, bind=("tcp://[::1]:*", "tcp://[::1]:*")) for number in range(2)]
    second = replicas[1].info
    addrs = [addr.replace("[::1]", "both") for addr in (second.input_addr, second.output_addr)]
    replicas[1].info = replace(second, input_addr=addrs[0], output_addr=addrs[1])
    async with running_hub(*replicas, config=CONFIG, resolver=dns.resolver) as omni:
        for _ in range(4):
            assert await ask(omni) == "hello there "
        assert all(len(replica.received) > 2 for replica in replicas)


@pytest.mark.attack("C10")
@pytest.mark.parametrize("addr", ["ipc:///tmp/omni-of-another", "inproc://other", "tcp://*:5"])
async def test_addresses_that_are_no_host_and_port_are_refused(addr: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "hub")
    replica = FakeReplica()
    async with running_hub(replica) as omni:
        bad: ReplicaInfo = replace(replica.info, replica_id=1, epoch=replica.info.epoch + 1, output_addr=addr)
        show(omni, replica.info, replace(bad, input_addr="tcp://127.0.0.1:9"))
        await until(lambda: "replica.unusable" in caplog.text)
        assert await ask(omni) == "hello there "
    assert f"its address '{addr}'" in caplog.text
