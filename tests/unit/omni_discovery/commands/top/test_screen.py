"""The screen of ``omni top`` as text, and its keys, on a registry in memory.

The screens lie in ``screens``; after a change that is meant, delete the file and run the test: it writes it and fails.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_discovery.commands.operate import Target
from omni_discovery.commands.top import source
from omni_discovery.commands.top.screen import TopApp
from omni_discovery.kv import Listing
from omni_discovery.records import beat, keys
from omni_discovery.records.beat import BeatRecord
from omni_discovery.records.health import HubHealth, ReplicaTrouble, StageLoad
from omni_discovery.records.schema import HubRecord, ReplicaStatus, encode_record
from omni_discovery.testing import FakeKV, ManualClock
from tests.support.top import put_replica, screen_text, shown, wait_shown

SCREENS = Path(__file__).parent / "screens"
NOW = 1_800_000_000.0
DOCUMENT = {
    "model": "m",
    "stages": [
        {"stage_id": 0, "engine": "vllm", "runtime": {"num_replicas": 2}},
        {"stage_id": 1, "engine": "diffusion", "runtime": {"num_replicas": 2}, "final_output": "image"},
    ],
}


def line(name: str, took_s: float, **spans: float) -> dict[str, Any]:
    went = {each.replace("r", "").replace("_", "/"): span for each, span in spans.items()}
    return {
        "request_id": name,
        "shown_id": f"chatcmpl-{name}",
        "outcome": "ok",
        "took_s": took_s,
        "received_at": NOW - 10,
        "replicas": [*went],
        "spans_s": [*went.values()],
    }


ANSWERS = {
    "/admin/requests?": {
        "hub": "h1",
        "requests": [line("a", 2.5, r0_0=0.4, r1_0=2.1), line("b", 7.25, r0_1=0.04, r1_1=7.0)],
    },
    "/admin/requests/b": {
        "hub": "h1",
        "receipts": [{"request_id": "b", "shown_id": "chatcmpl-b", "took_s": 7.25, "outcome": "ok", "hub": "h1"}],
    },
}


@pytest.fixture(autouse=True)
def moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.time, "time", lambda: NOW)
    monkeypatch.setenv("TZ", "UTC")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
async def kv(clock: ManualClock) -> FakeKV:
    """Two stages of two; of the four, one is ejected, one cordoned, and one on its way up."""
    kv = FakeKV(clock)
    await kv.put(keys.pipeline_key("n"), json.dumps(DOCUMENT).encode())
    usual: dict[str, Any] = {"capacity": 8, "version": "0.2.0", "registered_at": NOW - 600, "updated_at": NOW - 2}
    await put_replica(kv, "n", 0, 0, host="gpu-1", device="cuda:0", queue_length=3, pid=11, **usual)
    await put_replica(kv, "n", 0, 1, host="gpu-2", device="cuda:0", queue_length=10, pid=12, **usual)
    await put_replica(kv, "n", 1, 0, host="gpu-1", device="cuda:1", cordoned=True, pid=13, **usual)
    loading = {"status": ReplicaStatus.STARTING, "phase": "loading the model", "progress": 0.4}
    await put_replica(kv, "n", 1, 1, host="gpu-2", device="cuda:1", pid=14, **usual, **loading)
    await kv.put(keys.hub_key("n", "h1"), encode_record(HubRecord(hub_id="h1")))
    item = await kv.get(keys.replica_key("n", 0, 1))
    assert item is not None
    trouble = ReplicaTrouble(stage_id=0, replica_id=1, epoch=item.create_revision, kind="ejected")
    health = HubHealth(troubles=[trouble], loads=[StageLoad(stage_id=0, waiting=2)])
    await kv.put(keys.beat_key("n", "h1"), msgspec.json.encode(BeatRecord(health=health)))
    return kv


@asynccontextmanager
async def answering(kv: FakeKV) -> AsyncIterator[None]:
    """Replicas answer their control keys, as replicas do."""

    async def answer() -> None:
        while True:
            for stage_id, replica_id in ((0, 0), (0, 1), (1, 0), (1, 1)):
                target = Target("n", stage_id, replica_id)
                item, control = await kv.get(target.record_key), await kv.get(target.control_key)
                if item is None:
                    continue
                record = json.loads(item.value)
                asked = {} if control is None else json.loads(control.value)
                record["control_revision"] = 0 if control is None else control.mod_revision
                if control is not None or record.get("cordoned"):
                    record["cordoned"] = asked.get("cordon", False) or (stage_id == 1 and control is None)
                record["weight"] = asked.get("weight", 1.0)
                record["status"] = "draining" if asked.get("drain") else record["status"]
                if json.dumps(record) != json.dumps(json.loads(item.value)):
                    await kv.put(target.record_key, json.dumps(record).encode(), item.lease_id)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(answer())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def is_whole(text: str) -> bool:
    return "ejected" in text and "7.0 s" in text and text.count(" 10 s") == 4


def compare(name: str, text: str) -> None:
    file = SCREENS / name
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        pytest.fail(f"{file} was not there and is written now: look at it")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=lambda size: "x".join(map(str, size)))
async def test_the_screen(kv: FakeKV, tmp_path: Path, size: tuple[int, int]) -> None:
    async with shown(kv, tmp_path, size, ANSWERS) as pilot:
        compare(f"top-{size[0]}x{size[1]}.txt", await wait_shown(pilot, is_whole))


async def test_without_a_hub_to_ask_rates_are_unknown_and_never_zero(kv: FakeKV, tmp_path: Path) -> None:
    async with shown(kv, tmp_path) as pilot:
        text = await wait_shown(pilot, lambda text: "ejected" in text and text.count(" 10 s") == 4)
    [row] = re.findall(r"^  0/0 .*$", text, re.MULTILINE)
    assert row.split()[1:] == ["up", "3/8", "0", "-", "-", "-", "10", "s", "2", "s"]
    assert "rates of 0 of 1 hubs" in text


async def test_the_lease_of_a_row_in_sight_is_what_etcd_says_of_it(
    kv: FakeKV, clock: ManualClock, tmp_path: Path
) -> None:
    """1. 8 of 10 seconds pass without a renewal: two are left, and that is said in words, too
    2. etcd is away: what it said before is not shown for news
    """

    def row(text: str) -> str:
        return next(iter(re.findall(r"^  0/0 .*$", text, re.MULTILINE)), "")

    async with shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: " 10 s" in row(text))
        await clock.advance(8.0)
        text = await wait_shown(pilot, lambda text: " 2 s    2 s" in row(text))
        assert "up, not renewed" in row(text)
        kv.is_out = True
        await wait_shown(pilot, lambda text: row(text).endswith(" -    2 s"))


async def test_a_large_pool_costs_etcd_no_more_than_a_screen(kv: FakeKV, tmp_path: Path) -> None:
    """200 replicas on 24 lines: the leases of those that can't be seen are not asked for."""
    for replica_id in range(200):
        await put_replica(kv, "n", 3, replica_id)
    async with shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: " 10 s" in text)
        app = pilot.app
        assert isinstance(app, TopApp)
        assert "0/0" in app.source.in_sight
        assert len(app.source.in_sight) < 24
        await pilot.press("end")
        await wait_shown(pilot, lambda _: "3/199" in app.source.in_sight and "0/0" not in app.source.in_sight)
        text = await wait_shown(pilot, lambda text: re.search(r"^  3/199 .* 10 s", text, re.MULTILINE) is not None)
        names = re.findall(r"^  (3/\d+) ", text, re.MULTILINE)
        assert names == [f"3/{at}" for at in range(200 - len(names), 200)], "each row is one line"


async def test_no_etcd_is_said_and_nothing_else_is_made_up(tmp_path: Path) -> None:
    kv = FakeKV(ManualClock(NOW))
    kv.is_out = True
    async with shown(kv, tmp_path) as pilot:
        assert "waiting for etcd" in await wait_shown(pilot, lambda text: "cordon" in text)


async def test_events_stand_below_as_they_happen(kv: FakeKV, tmp_path: Path) -> None:
    async with shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: "ejected" in text)
        await kv.delete(keys.replica_key("n", 0, 0))
        text = await wait_shown(pilot, lambda text: "0/0 is lost" in text)
        assert not re.search(r"^  0/0 ", text, re.MULTILINE)


async def test_c_cordons_and_u_takes_it_back(kv: FakeKV, tmp_path: Path) -> None:
    """0/1 is left to serve stage 0: no question is asked."""
    async with answering(kv), shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: "ejected" in text)
        await pilot.press("c")
        await wait_shown(pilot, lambda text: "replica 0/0 is cordoned" in text and "up, cordoned" in text)
        assert json.loads((await kv.get(Target("n", 0, 0).control_key)).value) == {"cordon": True}  # type: ignore[union-attr]
        await pilot.press("u")
        await wait_shown(pilot, lambda text: "replica 0/0 takes work again" in text)
        assert await kv.get(Target("n", 0, 0).control_key) is None


async def test_d_drains_after_a_yes_alone(kv: FakeKV, tmp_path: Path) -> None:
    async with answering(kv), shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: "ejected" in text)
        await pilot.press("d")
        asked = await wait_shown(pilot, lambda text: "Drain replica 0/0" in text)
        assert "It finishes the 3 requests that it has" in asked
        await pilot.press("n")
        await wait_shown(pilot, lambda text: "replica 0/0 is left as it is" in text)
        assert await kv.get(Target("n", 0, 0).control_key) is None
        await pilot.press("d")
        await wait_shown(pilot, lambda text: "Drain replica 0/0" in text)
        await pilot.press("y")
        await wait_shown(pilot, lambda text: "replica 0/0 drains, 3 in flight" in text and "draining" in text)


async def test_a_stage_is_left_with_nobody_only_after_a_yes(kv: FakeKV, tmp_path: Path) -> None:
    await kv.delete(keys.replica_key("n", 0, 1))
    async with answering(kv), shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: "0/0" in text)
        await pilot.press("c")
        await wait_shown(pilot, lambda text: "No other replica of stage 0 takes work" in text)
        await pilot.press("escape")
        await wait_shown(pilot, lambda text: "replica 0/0 is left as it is" in text)
        assert await kv.get(Target("n", 0, 0).control_key) is None


async def test_w_sets_a_weight_and_refuses_what_is_none(kv: FakeKV, tmp_path: Path) -> None:
    async with answering(kv), shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: "ejected" in text)
        await pilot.press("down", "w")
        await wait_shown(pilot, lambda text: "weight of replica 0/1, which is 1 now" in text)
        await pilot.press("x", "enter")
        await wait_shown(pilot, lambda text: "'x' is no weight; right would be a number from 0 to 1000" in text)
        await pilot.press("backspace", "0", ".", "5", "enter")
        await wait_shown(pilot, lambda text: "replica 0/1 weighs 0.5" in text)
        assert json.loads((await kv.get(Target("n", 0, 1).control_key)).value) == {"weight": 0.5}  # type: ignore[union-attr]


async def test_another_process_with_the_same_id_is_not_touched(kv: FakeKV, tmp_path: Path) -> None:
    async with shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: "ejected" in text)
        await pilot.press("d")
        await wait_shown(pilot, lambda text: "Drain replica 0/0" in text)
        await kv.delete(keys.replica_key("n", 0, 0))
        await put_replica(kv, "n", 0, 0)
        await pilot.press("y")
        await wait_shown(pilot, lambda text: "not done: replica 0/0 is another process by now" in text)
        assert await kv.get(Target("n", 0, 0).control_key) is None


async def test_h_opens_the_last_events_of_a_replica(kv: FakeKV, tmp_path: Path) -> None:
    await kv.delete(keys.replica_key("n", 0, 0))
    await put_replica(kv, "n", 0, 0, host="gpu-1", pid=15, registered_at=NOW - 5, version="0.2.0", device="cuda:0")
    async with shown(kv, tmp_path, (120, 40)) as pilot:
        await wait_shown(pilot, lambda text: re.search(r"^  0/0 .*lost", text, re.MULTILINE) is not None)
        await pilot.press("h")
        text = await wait_shown(pilot, lambda text: "its processes, as omni history has them" in text)
        assert text.index("on gpu-1:15") < text.index("on gpu-1:11")
        assert ", release 0.2.0, gpu-1, cuda:0" in text, "what a narrow table has no column for"
        await pilot.press("escape")
        await wait_shown(pilot, lambda text: "its processes" not in text)


async def test_r_opens_the_slowest_requests_and_enter_the_way_of_one(kv: FakeKV, tmp_path: Path) -> None:
    async with shown(kv, tmp_path, answers=ANSWERS) as pilot:
        await wait_shown(pilot, is_whole)
        await pilot.press("r")
        text = await wait_shown(pilot, lambda text: "the slowest of the last requests" in text)
        assert text.index("chatcmpl-b") < text.index("chatcmpl-a")
        await pilot.press("enter")
        await wait_shown(pilot, lambda text: "ok after 7.25 s" in text and "by hub h1" in text)
        await pilot.press("escape", "escape")
        await wait_shown(pilot, lambda text: "take work" in text)


async def test_r_says_what_is_missing_where_no_hub_can_be_asked(kv: FakeKV, tmp_path: Path) -> None:
    async with shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: "ejected" in text)
        await pilot.press("r")
        await wait_shown(pilot, lambda text: "--all-hubs" in text and "--admin-token-file" in text)


async def test_rows_are_sorted_and_filtered_while_they_are_live(kv: FakeKV, tmp_path: Path) -> None:
    def names(text: str) -> list[str]:
        return re.findall(r"^  (\d/\d) ", text, re.MULTILINE)

    async with shown(kv, tmp_path, answers=ANSWERS) as pilot:
        assert names(await wait_shown(pilot, is_whole)) == ["0/0", "0/1", "1/0", "1/1"]
        await pilot.press("s")
        text = await wait_shown(pilot, lambda text: "by state" in text)
        assert names(text) == ["0/1", "0/0", "1/0", "1/1"]
        await pilot.press("o")
        assert names(await wait_shown(pilot, lambda text: "by state reversed" in text)) == ["0/0", "0/1", "1/1", "1/0"]
        await pilot.press("slash", *"gpu-2")
        text = await wait_shown(pilot, lambda text: "filter gpu-2" in text and names(text) == ["0/1", "1/1"])
        await put_replica(kv, "n", 0, 2, host="gpu-2")
        await wait_shown(pilot, lambda text: names(text) == ["0/2", "0/1", "1/1"])
        await pilot.press("enter", "escape")
        await wait_shown(pilot, lambda text: len(names(text)) == 5)


async def test_the_cursor_stays_on_its_replica_when_others_come_and_go(kv: FakeKV, tmp_path: Path) -> None:
    async with answering(kv), shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: "ejected" in text)
        await pilot.press("down")
        await kv.delete(keys.replica_key("n", 0, 0))
        await wait_shown(pilot, lambda text: "0/0 is lost" in text)
        await pilot.press("w")
        await wait_shown(pilot, lambda text: "weight of replica 0/1" in text)


async def test_a_refresh_below_a_page_does_not_disturb_it(kv: FakeKV, tmp_path: Path) -> None:
    async with shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: "ejected" in text)
        await pilot.press("d")
        await wait_shown(pilot, lambda text: "Drain replica 0/0" in text)
        await put_replica(kv, "n", 3, 0)
        pilot.app.draw()  # type: ignore[attr-defined]
        assert "Drain replica 0/0" in screen_text(pilot.app)  # type: ignore[arg-type]
        await pilot.press("n")
        await wait_shown(pilot, lambda text: "stage 3" in text)


@pytest.mark.attack("Q42")
async def test_of_thousands_of_beats_only_those_of_hubs_are_read_and_none_is_listed(
    kv: FakeKV, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    decoded: list[str] = []
    real_list, real_decode = FakeKV.list, beat.decode_beat

    async def list_keys(self: FakeKV, prefix: str, *, keys_only: bool = False) -> Listing:
        listed.append(prefix)
        return await real_list(self, prefix, keys_only=keys_only)

    def decode(key: str, value: bytes) -> BeatRecord:
        decoded.append(key)
        return real_decode(key, value)

    monkeypatch.setattr(FakeKV, "list", list_keys)
    monkeypatch.setattr(beat, "decode_beat", decode)
    for number in range(3000):
        await kv.put(keys.beat_key("n", f"x{number}"), msgspec.json.encode(BeatRecord()))
    async with shown(kv, tmp_path) as pilot:
        await wait_shown(pilot, lambda text: "ejected" in text)
    assert keys.beats_prefix("n") not in listed
    assert set(decoded) == {keys.beat_key("n", "h1")}
