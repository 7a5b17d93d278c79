"""A hub or a replica of the release before, whose heartbeats are on the connections for messages, beside one of this.

Hubs have a third connection for them now, and replicas have none. The former side is made of today's with the sockets
that it had.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import zmq

from hub.async_omni import AsyncOmni
from hub.replicas import sockets
from omni_discovery.curve import KeyPair
from stage_runtime.server import router
from tests.support.hub_fakes import ONE_STAGE, QUICK, ask, deploy_of, started_hub, until
from tests.support.local_replica import LocalReplica
from tests.support.proxy import behind_proxies
from tests.support.quiet import soon_s

KEYS = KeyPair.generate()
TIMEOUT_S = 0.6
CONFIG = replace(QUICK, zmq_heartbeat_interval_s=0.2, zmq_heartbeat_timeout_s=TIMEOUT_S, silence_grace_s=1.0)
QUIET_S = 4 * TIMEOUT_S


class NoPulse:
    """The former hub has no such connection."""

    made = 0

    def __init__(self, *_: Any) -> None:
        NoPulse.made += 1

    def connect(self, *_: Any) -> None:
        """Nothing to connect."""

    def insist(self) -> None:
        """Nothing to insist on."""

    def close(self) -> None:
        """Nothing to close."""


def former_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = sockets._configure

    def with_heartbeats(socket: zmq.Socket[bytes], *rest: Any) -> None:
        usual(socket, *rest)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 200)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 600)

    monkeypatch.setattr(sockets, "_configure", with_heartbeats)
    monkeypatch.setattr(sockets, "Pulse", NoPulse)
    monkeypatch.setattr(NoPulse, "made", 0)


def former_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = router._configure

    def with_heartbeats(socket: zmq.Socket[bytes], *rest: Any) -> None:
        usual(socket, *rest)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        socket.setsockopt(zmq.HEARTBEAT_TTL, 3000)

    monkeypatch.setattr(router, "_configure", with_heartbeats)


def nobody_former(_monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are of this release."""


@pytest.mark.parametrize("make_former", [former_hub, former_replica, nobody_former])
async def test_who_lives_is_not_taken_for_dead_and_who_is_silent_is(
    make_former: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. for several heartbeat timeouts nothing is asked, and then again and again: the session stands all the time
    2. the network goes silent, though each connection stands: that is seen in time
    3. it comes back: the next request is answered at once
    """
    make_former(monkeypatch)
    with LocalReplica({KEYS.public: "hub-1"}) as replica, behind_proxies(replica.info) as (info, ways):
        omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", KEYS, CONFIG)
        async with started_hub(omni, info, timeout_s=10.0):
            assert (NoPulse.made > 0) == (make_former is former_hub)

            def losses() -> float | None:
                return omni.metrics.get_sample_value("omni_hub_session_losses_total", {"stage": "0"})

            await asyncio.sleep(QUIET_S)
            began_s = time.monotonic()
            while time.monotonic() - began_s < QUIET_S:
                assert await ask(omni) == "hello there"
                assert omni.stage_status()[0].pickable == 1
                await asyncio.sleep(0.05)
            assert not losses()
            for way in ways:
                way.freeze()
            silent_s = time.monotonic()
            await until(lambda: omni.stage_status()[0].pickable == 0)
            assert time.monotonic() - silent_s < soon_s(TIMEOUT_S + 1.0)
            assert losses() == 1
            for way in ways:
                way.thaw()
            await until(lambda: omni.stage_status()[0].pickable == 1)
            assert await ask(omni) == "hello there"
