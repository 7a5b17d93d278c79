"""Which findings tell why a replica gets nothing, and why requests wait or fail."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.commands.findings.checks import Finding, Grade
from omni_discovery.commands.why.causes import of_replica, of_requests

HUBS = {"hub-1"}
WHY = ("omni", "why", "1/2")
WAITING = ("omni", "why", "--waiting")


def finding(topic: str, grade: Grade = Grade.PROBLEM, **fields: Any) -> Finding:
    return Finding(grade, topic, f"a finding about {topic}", **fields)


def topics(found: list[Finding]) -> list[str]:
    return [each.topic for each in found]


def of(*found: Finding, hubs: set[str] = HUBS, is_registered: bool = True, is_told: bool = True) -> list[str]:
    """The topics for replica 1/2."""
    return topics(of_replica(found, "1/2", hubs, is_registered=is_registered, is_told=is_told))


def of_waiting(*found: Finding, stages: tuple[int, ...] = (), hubs: set[str] = HUBS) -> list[str]:
    return topics(of_requests(found, "--waiting", stages, hubs))


def test_what_names_the_replica_tells_why_and_what_names_another_does_not() -> None:
    own = finding("pipeline", replica="1/2", stage_id=1)
    host = finding("host", also=("0/0", "1/2"))
    note = finding("control", Grade.NOTE, replica="1/2", stage_id=1)
    others = finding("pipeline", replica="1/0", stage_id=1), finding("host", also=("0/0", "1/0")), finding("requests")
    assert of(own, host, note, *others) == ["pipeline", "host", "control"]


@pytest.mark.parametrize("topic", ["ended", "crash loop", "settings", "no room", "waiting", "record", "too few"])
def test_of_a_replica_that_is_not_there_what_is_wrong_with_its_stage_tells_why(topic: str) -> None:
    own, other = finding(topic, stage_id=1), finding(topic, stage_id=0)
    assert of(own, other, is_registered=False, is_told=False) == [topic]
    assert of(own, other) == []


def test_an_overload_of_its_stage_is_no_reason_that_a_replica_is_missing() -> None:
    assert of(finding("load", stage_id=1), is_registered=False, is_told=False) == []


def test_that_a_stage_has_nobody_is_left_out_where_it_is_said_why() -> None:
    nobody, ended = finding("stage", stage_id=1), finding("ended", stage_id=1)
    assert of(nobody, ended, is_registered=False, is_told=False) == ["ended"]
    assert of(nobody, finding("etcd"), is_registered=False, is_told=False) == ["stage", "etcd"]


def test_what_leads_to_the_question_is_left_out_once_a_hub_has_told_of_the_replica() -> None:
    slow = finding("replica", replica="1/2", stage_id=1, more=WHY)
    assert of(slow) == []
    assert of(slow, is_told=False) == ["replica"]


def test_a_revoked_hub_is_named_if_it_was_asked_or_if_none_answers() -> None:
    revoked, gone = finding("hub", hub="hub-1"), finding("hub", Grade.NOTE, hub="hub-2")
    assert of(revoked, gone) == ["hub"]
    assert of(revoked, gone, hubs={"hub-3"}) == []
    assert of(revoked, gone, hubs=set()) == ["hub", "hub"]
    assert of_waiting(revoked) == ["hub"]


def test_a_registry_or_document_that_is_wrong_concerns_all() -> None:
    wrong = finding("etcd"), finding("pipeline"), finding("namespace")
    assert of(*wrong) == of_waiting(*wrong) == ["etcd", "pipeline", "namespace"]
    assert of(finding("namespace", Grade.NOTE)) == []


def test_requests_are_told_of_their_stages_and_of_those_that_have_nobody() -> None:
    """Without a request of it, too: those that are refused at once leave none."""
    here, there = finding("replica", replica="0/1", stage_id=0), finding("slots", replica="2/0", stage_id=2)
    assert of_waiting(here, there, stages=(0,)) == ["replica"]
    nobody, ended = finding("stage", stage_id=1), finding("ended", stage_id=1)
    assert of_waiting(nobody, ended, there) == ["stage", "ended"]
    notes = (finding("control", Grade.NOTE, replica=f"{stage}/0", stage_id=stage) for stage in (1, 2))
    assert of_waiting(nobody, *notes) == ["stage", "control"]
    assert of_waiting(finding("hub", Grade.NOTE, hub="gone"), hubs=set()) == ["hub"]
    assert of_waiting(finding("host", also=("1/0", "1/1")), stages=(1,)) == ["host"]
    assert of_waiting(finding("host", also=("1/0", "1/1")), stages=(0,)) == []


def test_requests_are_not_told_what_led_to_the_question() -> None:
    load = finding("load", stage_id=0, more=WAITING)
    assert of_waiting(load, stages=(0,)) == []
    assert of_waiting(load, stages=(0,), hubs=set()) == ["load"], "no hub has answered it"
