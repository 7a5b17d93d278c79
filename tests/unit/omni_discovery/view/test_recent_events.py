"""Events: what changes for a person is told once, and what only counts is not."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from omni_discovery.records.health import ReplicaTrouble, TroubleKind
from omni_discovery.records.schema import HubRecord, ReplicaInfo, ReplicaStatus
from omni_discovery.view.recent_events import MOST_EVENTS, RecentEvents, Tone
from omni_discovery.view.table import Delta, View

UP = ReplicaInfo("tcp://h:1", "tcp://h:2", 0, ReplicaStatus.UP, 0, 0.0, 0.0, 1, epoch=5, host="alpha", pid=77)


def told(events: RecentEvents) -> list[tuple[str, str]]:
    return [(event.about, event.text) for event in reversed(events.newest_first())]


def followed(*deltas: Delta, **view: Any) -> RecentEvents:
    events = RecentEvents()
    events.follow_view(View(**view), Delta(), 1.0)
    for number, delta in enumerate(deltas, 2):
        events.follow_view(View(**view), delta, float(number))
    return events


def test_what_is_there_when_the_hub_comes_is_no_news() -> None:
    events = RecentEvents()
    view = View(replicas={(0, 1): UP}, hubs=MappingProxyType({"a": HubRecord(hub_id="a")}))
    events.follow_view(view, Delta(added=(UP,), hubs_changed=True, pipeline_changed=True), 1.0)
    assert told(events) == []
    events.follow_view(view, Delta(updated=(replace(UP, cordoned=True),)), 2.0)
    assert told(events) == [("0/1", "is cordoned")]


def test_the_life_of_a_replica_is_told() -> None:
    starting = replace(UP, status=ReplicaStatus.STARTING)
    draining = replace(UP, status=ReplicaStatus.DRAINING, reason="drained by an operator")
    changed = replace(UP, weight=0.5, cordoned=True)
    events = followed(
        Delta(added=(starting,)),
        Delta(updated=(replace(starting, phase="loading", progress=0.5),)),
        Delta(updated=(UP,)),
        Delta(updated=(replace(UP, queue_length=7),)),
        Delta(updated=(changed,)),
        Delta(updated=(draining,)),
        Delta(removed=(draining,)),
    )
    assert told(events) == [
        ("0/1", "registered on alpha, process 77"),
        ("0/1", "is up"),
        ("0/1", "is cordoned"),
        ("0/1", "weighs 0.5 now"),
        ("0/1", "drains: drained by an operator"),
        ("0/1", "is not cordoned any more"),
        ("0/1", "weighs 1 now"),
        ("0/1", "has ended: drained by an operator"),
    ]


def test_a_replica_that_vanishes_is_lost_and_another_life_of_it_is_another() -> None:
    again = replace(UP, epoch=9, pid=78)
    events = followed(Delta(added=(UP,)), Delta(removed=(UP,)), Delta(added=(again,)))
    assert told(events)[2:] == [
        ("0/1", "is lost: its record is gone, and it has not said goodbye (it was up)"),
        ("0/1", "registered on alpha, process 78"),
        ("0/1", "is up"),
    ]
    assert [event.tone for event in events.newest_first()][2] is Tone.BAD


def test_hubs_come_and_go_and_the_registry_too() -> None:
    events = followed()
    two = View(hubs=MappingProxyType({"a": HubRecord(hub_id="a")}), stale_since_s=9.0)
    events.follow_view(two, Delta(hubs_changed=True, pipeline_changed=True), 2.0)
    events.follow_view(View(), Delta(hubs_changed=True), 3.0)
    assert [about for about, _ in told(events)] == ["hub a", "pipeline", "registry", "hub a", "registry"]


def test_a_trouble_is_told_once_as_long_as_it_lasts() -> None:
    events = RecentEvents()
    trouble = ReplicaTrouble(stage_id=0, replica_id=1, epoch=5, kind=TroubleKind.EJECTED, since=1.0, reason="no\x1b[1m")
    for at in (1.0, 2.0):
        events.follow_troubles([trouble], at)
    assert len(told(events)) == 1
    assert "\x1b" not in told(events)[0][1]
    events.follow_troubles([], 3.0)
    events.follow_troubles([trouble, ReplicaTrouble(stage_id=0, replica_id=2, kind="of-a-later-release")], 4.0)
    assert [about for about, _ in told(events)] == ["0/1", "0/1", "0/2"]


@pytest.mark.parametrize(
    ("kind", "tone"),
    [(TroubleKind.PROBED, Tone.WARN), (TroubleKind.EJECTED, Tone.BAD), ("of-a-later-release", Tone.BAD)],
)
def test_a_replica_on_probation_is_a_warning_and_other_troubles_are_worse(kind: str, tone: Tone) -> None:
    events = RecentEvents()
    events.follow_troubles([ReplicaTrouble(stage_id=0, replica_id=1, kind=kind)], 1.0)
    assert [each.tone for each in events.newest_first()] == [tone]


def test_a_bounded_number_is_kept() -> None:
    events = RecentEvents()
    for number in range(2 * MOST_EVENTS):
        events.add(float(number), Tone.GOOD, "x", "y")
    newest = events.newest_first()
    assert (len(newest), newest[0].number) == (MOST_EVENTS, 2 * MOST_EVENTS)
