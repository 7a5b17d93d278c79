"""What somebody who listens on the network between a hub and a replica gets to read."""

from __future__ import annotations

import asyncio
import logging

import pytest

from hub.async_omni import AsyncOmni
from omni_discovery.curve import KeyPair
from tests.support.hub_fakes import ONE_STAGE, QUICK, collect, deploy_of, show, text_of, until
from tests.support.local_replica import LocalReplica
from tests.support.sniffer import Sniffer

MARKER = "the-crown-jewels-are-under-the-third-flagstone"


async def ask(replica: LocalReplica, hub_keys: KeyPair | None, prompt: str) -> str:
    omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", hub_keys, QUICK, "random")
    await omni.start()
    try:
        show(omni, replica.info)
        await until(lambda: omni.stage_status()[0].pickable == 1)
        return text_of(await collect(omni.generate({"prompt": prompt}, request_id=f"id-{MARKER}")))
    finally:
        await omni.close()


def test_no_prompt_answer_or_name_is_ever_readable_on_the_wire() -> None:
    """1. somebody listens; a request runs whose prompt, answer and id hold a marker
    2. both ports were used, and the marker went by on neither
    """
    keys = KeyPair.generate()
    with LocalReplica({keys.public: "hub-1"}) as replica, Sniffer(replica.ports) as sniffer:
        assert asyncio.run(ask(replica, keys, f"{MARKER} for ever")) == f"{MARKER} for ever"
    assert sniffer.lost == 0
    assert all(sniffer.size_bytes(port) > 500 for port in replica.ports)
    assert sniffer.seen(b"CURVE") == replica.ports
    for text in (MARKER, "submit", "hub-1", "welcome", keys.secret):
        assert sniffer.seen(text.encode()) == set(), text


def test_without_encryption_the_same_ears_hear_everything() -> None:
    """The control: were the marker readable, the test above would see it, on the way in and on the way out."""
    with LocalReplica(encrypted=False) as replica, Sniffer(replica.ports) as sniffer:
        assert asyncio.run(ask(replica, None, f"{MARKER} for ever")) == f"{MARKER} for ever"
    assert sniffer.lost == 0
    assert sniffer.seen(MARKER.encode()) == replica.ports
    assert sniffer.seen(b"hub-1") == replica.ports
    assert sniffer.seen(b"CURVE") == set()


@pytest.mark.parametrize("hub_is_encrypted", [True, False])
async def test_two_sides_that_do_not_agree_on_encryption_say_nothing_to_each_other(
    hub_is_encrypted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """1. one side encrypts, the other does not: no session, no bug, nothing in clear; 2. once they agree, it serves."""
    keys = KeyPair.generate()
    with LocalReplica({keys.public: "hub-1"}, encrypted=not hub_is_encrypted) as replica:
        with Sniffer(replica.ports) as sniffer, caplog.at_level(logging.ERROR):
            omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", keys if hub_is_encrypted else None, QUICK, "random")
            await omni.start()
            show(omni, replica.info)
            await asyncio.sleep(0.7)
            assert omni.stage_status()[0].pickable == 0
            await omni.close()
        assert caplog.records == []
        assert sniffer.seen(b"hello") == set()
        assert sniffer.seen(b"welcome") == set()
        assert replica.engine.begun == []
        answer = await ask(replica, None if hub_is_encrypted else keys, "and now")
        assert answer == "and now"
