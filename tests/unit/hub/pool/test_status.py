"""Why a stage has nobody: named in the 503, in /ready, and for replicas that this hub can't use."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from hub.api.routes import ready_response
from hub.async_omni import AsyncOmni
from hub.config import HubConfig
from hub.pool.entry import Entry
from hub.pool.stage_pool import PoolOptions, StagePool, StageStatus
from hub.pool.status import NO_FAILURES, cause_absent, slow_ones, troubles_of, why_absent
from omni_discovery.balancing.policies import LeastLoadBalancer
from omni_discovery.curve import KeyPair
from omni_discovery.errors import StageUnavailableError
from omni_discovery.records.health import TroubleKind
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.table import Delta, View
from tests.support.hub_fakes import ONE_STAGE, deploy_of, until

TASK: Any = {"request_id": "r"}
UP = ReplicaInfo("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", 0, ReplicaStatus.UP, 0, 0.0, 0.0, 0)


def pool_of(*infos: ReplicaInfo) -> StagePool:
    pool = StagePool(0, LeastLoadBalancer(), PoolOptions(pick_timeout_s=0.05))
    for number, info in enumerate(infos):
        pool.core.upsert(replace(info, input_addr=f"tcp://h:{number}", replica_id=number), pool.now())
        pool.core.session_up(f"tcp://h:{number}", pool.now())
    return pool


def test_a_stage_fails_while_its_last_five_requests_did_and_not_long_ago() -> None:
    streak = NO_FAILURES
    for number in range(4):
        streak = streak.extended("AError", float(number))
    assert streak.describe(4.0) == ""
    streak = streak.extended("BError", 10.0)
    assert streak.describe(40.0) == "its last 5 requests failed (AError, BError), the last 30 s ago"
    assert streak.describe(40.1) == ""


async def test_a_replica_without_a_session_is_a_trouble_from_its_end_or_three_seconds_after_its_registration() -> None:
    """1. a session ends: named at once; 2. none has begun: named after 3 s"""
    pool = pool_of(UP, UP)
    begun_s = pool.now()
    pool.core.session_down("tcp://h:0", begun_s, "it is gone")
    pool.core.upsert(replace(UP, input_addr="tcp://h:7", replica_id=7), begun_s)
    troubles = {each.replica_id: each.reason for each in pool.core.troubles(begun_s + 2.9, 1000.0).shown}
    assert troubles == {0: "it is gone"}
    assert {each.replica_id for each in pool.core.troubles(begun_s + 3.1, 1000.0).shown} == {0, 7}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"cordoned": True}, "cordoned"),
        ({"status": ReplicaStatus.DRAINING}, "draining"),
        ({"status": ReplicaStatus.DRAINING, "phase": "asleep"}, "draining"),
        ({"status": ReplicaStatus.STARTING}, "starting"),
        ({"status": ReplicaStatus.STARTING, "phase": "loading the model"}, "starting (loading the model)"),
        (
            {"status": ReplicaStatus.STARTING, "phase": "loading the model", "progress": 0.47},
            "starting (loading the model 40 %)",
        ),
        ({"status": ReplicaStatus.STARTING, "phase": "ready"}, "starting"),
        ({"status": ReplicaStatus.STARTING, "phase": "asleep"}, "asleep"),
        ({"status": ReplicaStatus.ERROR, "reason": "out of memory"}, "with an error (out of memory)"),
        ({"weight": 0.0}, "of weight 0"),
    ],
)
async def test_a_request_that_finds_nobody_is_told_why_each_is_out(change: dict[str, Any], cause: str) -> None:
    pool = pool_of(replace(UP, **change), UP, UP)
    pool.core.session_down("tcp://h:1", pool.now())
    pool.core.session_down("tcp://h:2", pool.now())
    with pytest.raises(StageUnavailableError) as caught:
        await pool.pick("r", TASK)
    assert str(caught.value) == f"no UP replica for stage 0 after 0.1s (3 registered: 2 without a session, 1 {cause})"
    pool.core.session_up("tcp://h:1", pool.now())
    pool.core.session_up("tcp://h:2", pool.now())
    assert (pool.core.status.pickable, pool.core.status.why_absent) == (2, f"3 registered: 1 {cause}")


async def test_a_replica_whose_security_differs_is_named_by_ready_and_by_the_503() -> None:
    """1. this hub encrypts; one replica's record holds a key and nobody is there, the other's holds none
    2. /ready and the error say of the second that it is unusable, and why
    """
    omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", KeyPair.generate(), HubConfig(pick_timeout_s=0.2))
    await omni.start()
    try:
        keyed = replace(UP, input_addr="tcp://127.0.0.1:10", curve_public_key=KeyPair.generate().public, replica_id=1)
        omni.apply_view(View(replicas={(0, 0): UP, (0, 1): keyed}, revision=5), Delta())
        await until(lambda: omni.stage_status()[0].registered == 2)
        body = json.loads(bytes(ready_response(omni).body))
        assert "holds no CURVE public key" in body["stages"]["0"]["why"]
        assert "1 unusable (its record holds no CURVE public key" in body["reason"]
        with pytest.raises(StageUnavailableError, match=r"2 registered: .*1 unusable \(its record holds no CURVE"):
            async for _ in omni.generate({"prompt": "x"}):
                pass
    finally:
        await omni.close()


def test_a_stage_fails_after_five_failures_in_a_row_until_half_a_minute_is_quiet() -> None:
    """1. four in a row are not enough, the fifth is; 2. half a minute later it is ready to be tried
    3. one more failure: it fails again, and one request that is served ends the streak
    """
    pool = pool_of(UP).core
    for number in range(4):
        pool.stage_failed("ReplicaLostError", float(number))
    assert pool.status.failures.describe(4.0) == ""
    pool.stage_failed("EngineFailedError", 4.0)
    told = pool.status.failures.describe(6.0)
    assert told == "its last 5 requests failed (ReplicaLostError, EngineFailedError), the last 2 s ago"
    assert pool.status.failures.describe(35.0) == ""
    pool.stage_failed("ReplicaLostError", 50.0)
    assert pool.status.failures.describe(50.0).startswith("its last 6 requests failed (EngineFailedError, Replica")
    pool.stage_served()
    assert pool.status.failures.describe(50.0) == ""


def test_a_new_process_of_a_stage_ends_its_streak_and_a_session_that_is_back_does_not() -> None:
    pool = pool_of(UP).core
    for _ in range(5):
        pool.stage_failed("EngineFailedError", 1.0)
    pool.session_down("tcp://h:0", 1.0)
    pool.session_up("tcp://h:0", 1.0)
    assert pool.status.failures.count == 5
    pool.upsert(replace(UP, input_addr="tcp://h:0", pid=7), 1.0)
    pool.session_up("tcp://h:0", 1.0)
    assert pool.status.failures.count == 0


async def test_ready_lists_what_is_ejected_and_turns_while_requests_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. a replica of three is ejected: ready, and the replica is listed with when and why
    2. five requests have failed in a row: not ready, and the reason quotes no engine
    """
    omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", None, HubConfig())
    await omni.start()
    try:
        pool = pool_of(UP, UP, UP).core
        monkeypatch.setattr(omni, "stage_status", lambda: (pool.status,))
        monkeypatch.setattr(omni, "troubles", lambda: pool.troubles(time.monotonic(), time.time()).shown)
        for _ in range(3):
            pool.failed("tcp://h:1", time.monotonic(), "its engine raised")
        response = ready_response(omni)
        stage = json.loads(bytes(response.body))["stages"]["0"]
        assert (response.status_code, stage["pickable"]) == (200, 3)
        (ejected,) = stage["ejected"]
        assert (ejected["replica"], ejected["why"]) == ("0/1", "3 failures in a row, the last: its engine raised")
        assert 0.0 <= datetime.fromisoformat(ejected["until"]).timestamp() - time.time() + 1.0 < 3.0
        for _ in range(5):
            pool.stage_failed("EngineFailedError", time.monotonic())
        response = ready_response(omni)
        body = json.loads(bytes(response.body))
        assert (response.status_code, body["ready"]) == (503, False)
        assert "stage 0: its last 5 requests failed (EngineFailedError)" in body["reason"]
        assert body["stages"]["0"]["failing"].startswith("its last 5 requests failed")
    finally:
        await omni.close()


async def test_a_revoked_hub_is_ready_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", None, HubConfig())
    await omni.start()
    try:
        omni.apply_view(View(replicas={(0, 0): UP}, revoked=frozenset({"hub-1"}), revision=5), Delta())
        # Its sessions may still stand: replicas only drop what it says.
        monkeypatch.setattr(omni, "stage_status", lambda: (StageStatus(0, 1, 1),))
        response = ready_response(omni)
        body = json.loads(bytes(response.body))
        assert (response.status_code, body["stages"]["0"]["pickable"]) == (503, 0)
        assert "omni hub allow hub-1" in body["reason"]
    finally:
        await omni.close()


def entry_of(**fields: Any) -> Entry:
    entry = Entry(replace(UP, **fields), is_local=False)
    entry.listed = entry.pickable = entry.answers = True
    return entry


def test_a_stage_of_which_all_can_take_work_says_nothing_and_one_without_any_says_so() -> None:
    assert why_absent([entry_of()]) == ""
    gone = entry_of()
    gone.listed = False
    assert why_absent([gone]) == why_absent([]) == "none is registered"


def test_the_causes_are_named_by_how_many_have_them() -> None:
    entries = [entry_of(weight=0.0), entry_of(cordoned=True), entry_of(cordoned=True), entry_of()]
    for entry in entries[:3]:
        entry.pickable = False
    assert why_absent(entries) == "4 registered: 2 cordoned, 1 of weight 0"


def test_progress_is_told_in_tens_and_no_more_than_all() -> None:
    for progress, told in [(0.0, "loading"), (0.01, "loading 0 %"), (0.99, "loading 90 %"), (1.5, "loading 100 %")]:
        entry = entry_of(status=ReplicaStatus.STARTING, phase="loading", progress=progress)
        assert cause_absent(entry) == f"starting ({told})"
    entry = entry_of(status=ReplicaStatus.STARTING, phase="loading", reason="x" * 300)
    assert cause_absent(entry) == f"starting (loading; {'x' * 200})"


def serving(mean_s: float, served: int = 5, at_s: float = 1000.0) -> Entry:
    entry = entry_of(replica_id=int(mean_s * 1000))
    entry.served, entry.mean_service_s, entry.served_at_s = served, mean_s, at_s
    return entry


def slow(*entries: Entry) -> list[str]:
    return [each.reason for each in slow_ones(entries, 1000.0)]


def test_slow_is_who_takes_three_times_as_long_as_the_median_of_the_others_and_a_tenth_of_a_second_longer() -> None:
    told = "its requests take 0.75 s each, those of the other replicas of its stage 0.25 s"
    assert slow(serving(0.75), serving(0.125), serving(0.25), serving(0.375)) == [told]
    assert slow(serving(0.75), serving(0.125), serving(0.375)) == [told]
    assert slow(serving(0.74), serving(0.25)) == []
    assert slow(serving(0.125), serving(0.03125)) == [], "by less than a tenth of a second"
    assert slow(serving(0.75)) == [], "nobody is there to be compared with"


def test_slow_is_said_only_of_those_who_have_served_enough_and_lately() -> None:
    usual = serving(0.25)
    assert len(slow(serving(0.75, 5, 700.0), usual)) == 1
    assert slow(serving(0.75, 4), usual) == []
    assert slow(serving(0.75, 5, 699.9), usual) == []
    gone = serving(0.75)
    gone.listed = False
    assert slow(gone, usual) == []
    (trouble,) = slow_ones([serving(0.75), usual], 1000.0)
    assert (trouble.kind, trouble.replica_id, trouble.is_picked) == (TroubleKind.SLOW, 750, True)


@pytest.mark.attack("Z39")
def test_of_thousands_that_nobody_can_use_some_are_told_of_and_the_others_counted() -> None:
    odd = [entry_of(replica_id=number) for number in range(1000)]
    for entry in odd:
        entry.pickable = False
        entry.unusable = f"its address {entry.info.replica_id} " + "n\u0303" * 5000
    found, more = troubles_of(odd, is_panic=False, now_s=100.0, wall_s=5000.0)
    assert (len(found), more, {len(trouble.reason) for trouble in found}) == (64, 936, {160})
    text = why_absent(odd)
    assert text.startswith("1000 registered: 1 unusable (its address 0 ")
    assert text.endswith(", 992 for other reasons")
    assert len(text) < 8 * 300


def test_troubles_name_what_is_unusable_silent_ejected_or_probed_in_that_order_of_weight() -> None:
    unusable, silent, fresh, ejected, probed, down, gone = (entry_of(replica_id=number) for number in range(7))
    gone.listed, gone.unusable = False, "no matter"
    unusable.unusable = "no key"
    for entry in (silent, fresh):
        entry.answers, entry.down_since_s = False, 97.0
    fresh.down_since_s = 97.1
    for entry in (ejected, probed):
        entry.health.eject(99.0, 4.0, 60.0, "it broke")
    probed.health.end_ejection()
    down.info = replace(down.info, status=ReplicaStatus.DOWN)
    down.unusable = "no matter"
    found, more = troubles_of(
        [unusable, silent, fresh, ejected, probed, down, gone], is_panic=True, now_s=100.0, wall_s=5000.0
    )
    assert [(each.replica_id, each.kind, each.since, each.until, each.is_picked) for each in found] == [
        (0, TroubleKind.UNUSABLE, 0.0, 0.0, False),
        (1, TroubleKind.NO_SESSION, 4997.0, 0.0, False),
        (3, TroubleKind.EJECTED, 4999.0, 5003.0, True),
        (4, TroubleKind.PROBED, 4999.0, 0.0, True),
    ]
    assert (found[0].reason, more) == ("no key", 0)
