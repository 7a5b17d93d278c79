"""What several hubs report about the replicas of one view."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.records.beat import BeatRecord
from omni_discovery.records.health import (
    MOST_STAGES,
    MOST_TROUBLES,
    HubHealth,
    ReplicaTrouble,
    StageFailures,
    StageLoad,
)
from omni_discovery.records.schema import HubRecord, ReplicaInfo, ReplicaStatus
from omni_discovery.view.hub_reports import SeenTrouble, read_reports
from omni_discovery.view.table import View

NOW_S = 1_700_000_000.0


def trouble(kind: str, replica_id: int = 0, epoch: int = 5, **fields: Any) -> ReplicaTrouble:
    return ReplicaTrouble(stage_id=0, replica_id=replica_id, epoch=epoch, kind=kind, **fields)


def view(*hubs: str, revoked: frozenset[str] = frozenset()) -> View:
    here = ReplicaInfo("i", "o", 0, ReplicaStatus.UP, 0, 0.0, 0.0, replica_id=0, epoch=5)
    return View(replicas={(0, 0): here}, hubs={hub_id: HubRecord(hub_id=hub_id) for hub_id in hubs}, revoked=revoked)


def beat(*troubles: ReplicaTrouble, more: int = 0) -> BeatRecord:
    return BeatRecord(health=HubHealth(troubles=list(troubles), more=more))


def test_hubs_that_see_the_same_are_named_together_and_others_apart() -> None:
    beats = {"a": beat(trouble("ejected", reason="first")), "b": beat(trouble("ejected")), "c": beat(trouble("probed"))}
    reports = read_reports(view("a", "b", "c"), beats)
    assert [(each.word, each.hubs) for each in reports.troubles[0, 0]] == [
        ("ejected", ("a", "b")),
        ("on probation", ("c",)),
    ]
    first, second = reports.lines(NOW_S)
    assert first.endswith("by hubs a, b: first")
    assert second.startswith("0/0 is on probation at hub c")


def test_reports_of_hubs_that_are_gone_or_revoked_and_of_former_lives_do_not_count() -> None:
    beats = {"gone": beat(trouble("ejected")), "bad": beat(trouble("ejected")), "a": beat(trouble("ejected", epoch=4))}
    reports = read_reports(view("a", "bad", revoked=frozenset({"bad"})), beats)
    assert (dict(reports.troubles), reports.lost, reports.silent) == ({}, (), ())


def test_a_replica_is_lost_unless_that_life_is_in_the_view() -> None:
    losses = beat(trouble("lost"), trouble("lost", 1, since=NOW_S - 5, host="gpu", pid=3))
    reports = read_reports(view("a"), {"a": losses})
    (line,) = reports.lines(NOW_S)
    assert line.startswith("0/1 was lost at ")
    assert line.endswith("(process 3 on gpu) and not replaced, says hub a")


def test_what_is_not_reported_is_told() -> None:
    hubs = [f"hub-{number}" for number in range(6)]
    (line,) = read_reports(view(*hubs), {"hub-0": BeatRecord()}).lines(NOW_S)
    assert line == "hubs hub-0, hub-1, hub-2, hub-3 and 2 more do not report ejections: unknown"
    (line,) = read_reports(view("a"), {"a": beat(more=7)}).lines(NOW_S)
    assert line.startswith("7 more replicas are in trouble")


def test_a_moment_of_another_day_has_its_date_and_one_that_is_none_does_no_harm() -> None:
    reports = read_reports(view("a"), {"a": beat(trouble("ejected", until=NOW_S - 3 * 86_400))})
    (line,) = reports.lines(NOW_S)
    assert "until 2023-11-1" in line
    reports = read_reports(view("a"), {"a": beat(trouble("ejected", until=1e300, reason="\x1b[2J\n"))})
    (line,) = reports.lines(NOW_S)
    assert "until an unknown time" in line


def test_an_ejection_that_is_ignored_says_so() -> None:
    reports = read_reports(view("a"), {"a": beat(trouble("ejected", until=NOW_S, is_picked=True))})
    assert "by hub a, yet picked since too few others are left" in next(reports.lines(NOW_S))


def test_a_lost_process_is_named_where_it_is_known() -> None:
    seen = [SeenTrouble(trouble("lost", since=NOW_S, **fields), ("a",)) for fields in ({"pid": 7, "host": "h"}, {})]
    known, unknown = (each.describe(NOW_S) for each in seen)
    assert "(process 7 on h)" in known
    assert "process" not in unknown


def _flood(hubs: int, each: int) -> tuple[View, dict[str, BeatRecord]]:
    """Hubs that all report the same replicas, loads and failures, far more than any hub has."""
    troubles = [trouble("lost", number) for number in range(1, each + 1)]
    failures = [StageFailures(stage_id=number, failed=1, kinds={"k" * 5000: 1}) for number in range(each)]
    loads = [StageLoad(stage_id=number, waiting=1, refused=1) for number in range(each)]
    health = HubHealth(troubles=troubles, failures=failures, loads=loads)
    names = [f"evil-{number}" for number in range(hubs)]
    return view(*names), dict.fromkeys(names, BeatRecord(health=health))


@pytest.mark.attack("V3")
def test_a_hub_names_no_more_than_a_hub_has_and_the_rest_is_counted() -> None:
    reports = read_reports(*_flood(40, 1000))
    assert len(reports.lost) == MOST_TROUBLES
    assert {len(each.hubs) for each in reports.lost} == {40}
    assert reports.more == 1000 - MOST_TROUBLES
    for health in reports.health.values():
        assert len(health.failures) == len(health.loads or []) == MOST_STAGES
        assert max(len(kind) for each in health.failures for kind in each.kinds) <= 64


@pytest.mark.attack("V3")
def test_what_waits_for_a_stage_is_added_up_once_for_all_stages() -> None:
    """Else each of a thousand stages costs a look at all that each of a thousand hubs says."""
    reports = read_reports(*_flood(40, 3))
    assert reports.loads == {0: (40, 40), 1: (40, 40), 2: (40, 40)}
    assert reports.failed == {0: 40, 1: 40, 2: 40}
    silent = read_reports(view("a", "b"), {"a": beat()})
    assert silent.loads is None
    assert silent.failed is None
