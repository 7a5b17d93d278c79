"""Revoking hubs and showing them, on a registry in memory."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from omni_discovery.commands.findings.checks import Evidence
from omni_discovery.commands.hubs import allow_hub, read_hubs, revoke_hub
from omni_discovery.commands.registry import read_hub_records
from omni_discovery.commands.tables import hub_table
from omni_discovery.errors import ConfigError
from omni_discovery.records import beat, keys
from omni_discovery.records.beat import BeatRecord
from omni_discovery.records.schema import HubRecord, encode_record
from omni_discovery.testing import FakeKV, ManualClock
from omni_discovery.view.table import ReplicaTable

NS = "n"


@pytest.fixture
async def kv() -> FakeKV:
    kv = FakeKV(ManualClock())
    for hub_id in ("front-1", "front-2"):
        record = HubRecord(hub_id=hub_id, address="http://10.0.0.5:8000", host="gpu-7", pid=4, started_at=940.0)
        await kv.put(keys.hub_key(NS, hub_id), encode_record(record))
    await kv.put(keys.beat_key(NS, "front-1"), b'{"revision": 7, "written_at": 999.0}')
    return kv


async def test_a_revocation_says_what_was_written_and_is_taken_back(
    kv: FakeKV, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await revoke_hub(kv, NS, "front-1") == 0
    item = await kv.get(keys.hub_control_key(NS, "front-1"))
    assert item is not None
    assert json.loads(item.value) == {"revoked": True}
    told = capsys.readouterr().out
    assert f'{item.key} says {{"revoked": true}} as of revision {item.mod_revision}' in told
    assert [line.revoked for line in (await read_hubs(kv, NS, 1000.0))[0]] == [True, False]
    assert await allow_hub(kv, NS, "front-1") == 0
    assert "revoked no more" in capsys.readouterr().out
    assert await allow_hub(kv, NS, "front-1") == 0
    assert "was not revoked" in capsys.readouterr().out
    assert [line.revoked for line in (await read_hubs(kv, NS, 1000.0))[0]] == [False, False]


async def test_a_hub_that_is_not_there_is_revoked_only_by_force(kv: FakeKV) -> None:
    with pytest.raises(ConfigError, match=r"no hub front-9 is registered .* there are: front-1, front-2; .*--force"):
        await revoke_hub(kv, NS, "front-9")
    assert await revoke_hub(kv, NS, "front-9", force=True) == 0
    found = {line.hub_id: line for line in (await read_hubs(kv, NS, 1000.0))[0]}
    assert (found["front-9"].registered, found["front-9"].revoked) == (False, True)


async def test_the_table_fits_and_shows_who_is_revoked_who_beats_and_what_is_nonsense(kv: FakeKV) -> None:
    await revoke_hub(kv, NS, "front-1")
    await kv.put(keys.hub_control_key(NS, "front-2"), b'{"revoked": 1}')
    console = Console(file=io.StringIO(), width=80)
    console.print(hub_table((await read_hubs(kv, NS, 1000.0))[0], NS, 1000.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in text.splitlines())
    first = next(line for line in text.splitlines() if line.strip().startswith("front-1"))
    assert first.split() == ["front-1", "revoked", "10.0.0.5:8000", "gpu-7:4", "1", "s", "60", "s"]
    assert "! front-2: revoked is 1; right would be true or false" in " ".join(text.split())


async def test_without_hubs_the_table_says_so() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(hub_table((await read_hubs(FakeKV(ManualClock()), NS, 1000.0))[0], NS, 1000.0))
    assert "no hub is registered" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", ["", "a/b", "-x", "x" * 64])
def test_what_can_be_no_hubs_id_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="omni hubs"):
        keys.check_hub_id(wrong)


@pytest.mark.attack("D4")
@pytest.mark.parametrize(
    "forged",
    [{"started_at": -1e308}, {"address": "http://" + "a" * 4000}, {"host": "h" * 4096, "pid": 1}],
    ids=lambda forged: next(iter(forged)),
)
async def test_one_record_does_not_cut_what_the_other_hubs_show(kv: FakeKV, forged: dict[str, Any]) -> None:
    await kv.put(keys.hub_key(NS, "forged"), encode_record(HubRecord(hub_id="forged", **forged)))
    await kv.put(keys.hub_control_key(NS, "front-3"), b'{"revoked": "' + b"x" * 4096 + b'"}')
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(hub_table((await read_hubs(kv, NS, 1000.0))[0], NS, 1000.0))
    lines = captured.get().splitlines()
    assert max(len(line) for line in lines) <= 80
    for hub_id in ("front-1", "front-2"):
        row = next(line for line in lines if line.strip().startswith(hub_id))
        assert "live" in row, row
        assert "10.0.0.5:8000" in row, row
        assert "60 s" in row, row
    assert len(lines) < 20, lines


@pytest.mark.attack("Q63")
async def test_of_thousands_of_hubs_and_beats_commands_read_1024_and_say_how_many_are_left_out(
    kv: FakeKV, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that is looked for by its id is found, wherever it stands."""
    decoded: list[str] = []
    real = beat.decode_beat

    def decode(key: str, value: bytes) -> BeatRecord:
        decoded.append(key)
        return real(key, value)

    monkeypatch.setattr(beat, "decode_beat", decode)
    for number in range(1500):
        if number < 1200:
            await kv.put(keys.hub_key(NS, f"x{number}"), b'{"hub_id":"x%d"}' % number)
        await kv.put(keys.beat_key(NS, f"x{number}"), b'{"revision": 7}')
    found, refused_count = await read_hubs(kv, NS, 1000.0)
    assert (len(found), refused_count) == (1024, 1202 - 1024)
    assert {line.hub_id for line in found} >= {"front-1", "front-2"}
    # All but front-2 have a beat.
    assert len(decoded) == 1023
    listing = await kv.list(keys.namespace_prefix(NS))
    table = ReplicaTable(NS)
    table.replace(listing, 1000.0)
    assert len(Evidence(NS, table.snapshot(), listing.items, 1000.0).beats()) == 1023
    assert len(await read_hub_records(kv, NS)) == 1024
    assert "178 more records of hubs are not read: there are too many" in capsys.readouterr().err
    assert await revoke_hub(kv, NS, "x1199") == 0
    found, _ = await read_hubs(kv, NS, 1000.0)
    (revoked,) = [line for line in found if line.revoked]
    assert revoked.hub_id == "x1199"
