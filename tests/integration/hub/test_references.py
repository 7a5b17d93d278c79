"""Replicas that name hand-offs at addresses which are not theirs: the hub passes none of them on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from hub.async_omni import AsyncOmni
from omni_discovery import wire
from omni_discovery.errors import EngineFailedError
from tests.support.hub_fakes import PAIR, FakeReplica, Script, accept_only, collect, echo, picture, running_hub

REGISTERED = {"0-1": {"connector": "TcpConnector", "host": "10.0.0.1", "port": 4000}}
IN_PIECES = PAIR + "async_chunk: true\n"


def reference(replica: FakeReplica, submit: wire.Submit, host: str) -> wire.PayloadRef:
    metadata = {"source_host": host, "source_port": 4000}
    return msgspec.structs.replace(replica.payload(submit, 1), metadata=metadata)


def done_with(host: str) -> Script:
    def script(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        about = replica._about(submit)
        refs = (reference(replica, submit, host),)
        replica.say(wire.StageDone(**about, seq=0, finish_reason="stop", payloads=refs))

    return script


def piece_with(host: str) -> Script:
    def script(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        about = replica._about(submit)
        replica.say(wire.HandOffPiece(**about, number=0, payloads=(reference(replica, submit, host),)))

    return script


def registered(replica: FakeReplica) -> FakeReplica:
    replica.info = replace(replica.info, connectors=REGISTERED)
    return replica


async def ask(omni: AsyncOmni) -> str:
    async with asyncio.timeout(30):
        return "".join(output.mime for output in await collect(omni.generate({"prompt": "a"})))


async def test_the_registered_address_is_passed_on() -> None:
    first, second = registered(FakeReplica(done_with("10.0.0.1"))), FakeReplica(picture, stage_id=1)
    async with running_hub(first, second, deploy=PAIR) as omni:
        assert await ask(omni) == "image/png"
    (submit,) = second.of(wire.Submit)
    assert submit.payloads[0].metadata["source_host"] == "10.0.0.1"


@pytest.mark.attack("A19")
@pytest.mark.parametrize("script", [done_with("169.254.169.254"), piece_with("169.254.169.254")])
async def test_another_address_is_the_replicas_failure_and_another_replica_does_the_work(script: Script) -> None:
    deploy = IN_PIECES if script.__qualname__.startswith("piece") else PAIR
    forging = registered(FakeReplica(script))
    honest, second = FakeReplica(echo, replica_id=1), FakeReplica(picture, stage_id=1)
    async with running_hub(forging, honest, second, deploy=deploy) as omni:
        for _ in range(4):
            assert await ask(omni) == "image/png"
    assert forging.of(wire.Submit)
    for submit in second.of(wire.Submit):
        assert all("source_host" not in ref.metadata for ref in submit.payloads)


@pytest.mark.attack("A19")
async def test_without_another_replica_the_request_fails_and_says_why() -> None:
    forging, second = registered(FakeReplica(done_with("169.254.169.254"))), FakeReplica(accept_only, stage_id=1)
    async with running_hub(forging, second, deploy=PAIR) as omni:
        with pytest.raises(EngineFailedError, match=r"its hand-off names '169.254.169.254' port 4000"):
            await ask(omni)
        assert omni.metrics.get_sample_value("omni_hub_dropped_frames_total", {"reason": "reference"})
    assert not second.of(wire.Submit)
