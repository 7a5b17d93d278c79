"""ApiKeyWatch: a hub's copy of the API keys, which an etcd that is away does not take from it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from omni_discovery.records import keys
from omni_discovery.records.api_key import digest_of, encode_api_key
from omni_discovery.testing import FakeKV, ManualClock
from omni_discovery.view.api_keys import ApiKeyWatch
from tests.support.registry import eventually


async def until(told: list[Mapping[str, bytes]], wanted: Mapping[str, bytes]) -> None:
    await eventually(f"the keys to be {sorted(wanted)}", lambda: bool(told) and told[-1] == wanted, 30.0)


async def test_a_key_counts_from_its_creation_to_its_revocation(caplog: pytest.LogCaptureFixture) -> None:
    """1. none at first; 2. two are made, and a value that is none; 3. one is taken back"""
    kv, told = FakeKV(ManualClock()), list[Mapping[str, bytes]]()
    watch = ApiKeyWatch(kv, "team", told.append)
    watch.start()
    await until(told, {})
    await kv.put(keys.api_key_key("team", "alice"), encode_api_key("a", 0))
    await kv.put(keys.api_key_key("team", "broken"), b"{}")
    await kv.put(keys.api_key_key("team", "bob"), encode_api_key("b", 0))
    await kv.put(keys.api_key_key("other", "eve"), encode_api_key("e", 0))
    await until(told, {"alice": digest_of("a"), "bob": digest_of("b")})
    await kv.delete(keys.api_key_key("team", "alice"))
    await until(told, {"bob": digest_of("b")})
    assert caplog.text.count("api_keys.bad_value key=/omni/v1/team/keys/broken") == 1
    await watch.close()
    await watch.close()


async def test_what_is_known_goes_on_to_hold_while_etcd_is_away() -> None:
    kv, told = FakeKV(ManualClock()), list[Mapping[str, bytes]]()
    await kv.put(keys.api_key_key("team", "alice"), encode_api_key("a", 0))
    watch = ApiKeyWatch(kv, "team", told.append)
    watch.start()
    await until(told, {"alice": digest_of("a")})
    kv.is_out = True
    await asyncio.sleep(0.3)
    assert told[-1] == {"alice": digest_of("a")}
    kv.is_out = False
    await kv.put(keys.api_key_key("team", "bob"), encode_api_key("b", 0))
    await until(told, {"alice": digest_of("a"), "bob": digest_of("b")})
    await watch.close()
