"""``omni key`` on a registry in memory: a key is shown once, and only its hash is kept."""

from __future__ import annotations

import json

import pytest

from omni_discovery.commands.access.key import _create, _list, _revoke
from omni_discovery.errors import ConfigError
from omni_discovery.records import keys
from omni_discovery.records.api_key import decode_api_key, digest_of
from omni_discovery.testing import FakeKV, ManualClock

NS = "n"


async def test_a_key_is_printed_once_alone_and_kept_as_a_hash(capsys: pytest.CaptureFixture[str]) -> None:
    kv = FakeKV(ManualClock())
    assert await _create(kv, NS, "alice") == 0
    told = capsys.readouterr()
    key = told.out.strip()
    assert len(key) == len("omni-") + 32
    assert "omni key revoke alice" in told.err
    item = await kv.get(keys.api_key_key(NS, "alice"))
    assert item is not None
    assert decode_api_key(item).sha256 == digest_of(key).hex()
    assert key.encode() not in item.value
    await _create(kv, NS, "bob")
    assert capsys.readouterr().out.strip() != key
    assert await _list(kv, NS) == 0
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines() if "Z" in line] == ["alice", "bob"]
    assert key not in told.out


async def test_a_script_gets_a_line_of_json_for_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    kv = FakeKV(ManualClock())
    await _create(kv, NS, "bob")
    await _create(kv, NS, "alice")
    capsys.readouterr()
    assert await _list(kv, NS, as_json=True) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["name"] for each in lines] == ["alice", "bob"]
    assert all(set(each) == {"name", "created_at"} and each["created_at"] > 0 for each in lines)
    await _revoke(kv, NS, "alice")
    await _revoke(kv, NS, "bob")
    capsys.readouterr()
    assert await _list(kv, NS, as_json=True) == 0
    assert capsys.readouterr().out == ""


async def test_a_name_is_taken_once_and_free_again_when_its_key_is_revoked(capsys: pytest.CaptureFixture[str]) -> None:
    kv = FakeKV(ManualClock())
    await _create(kv, NS, "alice")
    before = await kv.get(keys.api_key_key(NS, "alice"))
    with pytest.raises(ConfigError, match=r"there is a key 'alice' already, .* 'omni key revoke alice' first"):
        await _create(kv, NS, "alice")
    assert await kv.get(keys.api_key_key(NS, "alice")) == before
    assert await _revoke(kv, NS, "alice") == 0
    with pytest.raises(ConfigError, match="there is no key 'alice': 'omni key list'"):
        await _revoke(kv, NS, "alice")
    await _create(kv, NS, "alice")
    assert "revoked: alice" in capsys.readouterr().out


async def test_none_and_one_that_can_not_be_read_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    kv = FakeKV(ManualClock())
    assert await _list(kv, NS) == 0
    assert "omni key create NAME" in capsys.readouterr().err
    await kv.put(keys.api_key_key(NS, "broken"), b"{}")
    assert await _list(kv, NS) == 0
    assert "opens nothing: /omni/v1/n/keys/broken" in capsys.readouterr().err
