"""What of a namespace's keys needs an operator, the causes first, each with its command."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omni_discovery.commands.findings.checks import Evidence, Finding, Grade, examine
from omni_discovery.commands.findings.processes import ended_findings
from omni_discovery.commands.status.needs import Needs, judge
from omni_discovery.commands.status.overview import stage_lines
from omni_discovery.deploy.document import decode_deploy
from omni_discovery.deploy.fingerprint import stage_fingerprint
from omni_discovery.kv import KeyValue, Listing
from omni_discovery.records import keys
from omni_discovery.records.beat import BeatRecord
from omni_discovery.records.health import HubHealth, ReplicaTrouble, StageFailures, StageLoad, UnreadAnswers
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.records.waits import WaitEntry, WaitKind, WaitRecord, encode_waits, last_words_among, waits_among
from omni_discovery.view.table import ReplicaTable

NOW_S = 5000.0
PIPELINE = (
    b'{"stages": [{"stage_id": 0, "engine": "echo", "runtime": {"num_replicas": 2}, "final_output": "text"},'
    b' {"stage_id": 1, "engine": "echo", "final_output": "image"}]}'
)


def replica(name: str, status: ReplicaStatus = ReplicaStatus.UP, **fields: Any) -> tuple[str, bytes]:
    stage_id, replica_id = map(int, name.split("/"))
    usual: dict[str, Any] = {"host": "gpu-1", "pid": 7, "capacity": 4, "updated_at": NOW_S - 9, "version": "0.2"}
    usual |= {"fingerprint": stage_fingerprint(decode_deploy(PIPELINE, "test"), stage_id), "curve_public_key": "k"}
    record = ReplicaRecord(
        stage_id=stage_id,
        replica_id=replica_id,
        input_addr=f"tcp://h:{replica_id}",
        output_addr="tcp://h:9",
        status=status,
        **{**usual, **fields},
    )
    return keys.replica_key("n", stage_id, replica_id), encode_record(record)


def beat(health: HubHealth | None = None, age_s: float = 1.0) -> tuple[str, bytes]:
    record = BeatRecord(written_at=NOW_S - age_s, health=HubHealth(loads=[]) if health is None else health)
    return keys.beat_key("n", "hub-1"), msgspec.json.encode(record)


HUB = (keys.hub_key("n", "hub-1"), encode_record(HubRecord(hub_id="hub-1", curve_public_key="k", host="front", pid=3)))
FORCE = (keys.pipeline_key("n"), PIPELINE)
WELL = (replica("0/0"), replica("0/1"), replica("1/0"))


def wait(
    kind: str, reason: str = "a reason", stage_id: int | None = 1, since_s: float = NOW_S - 2
) -> tuple[str, bytes]:
    entry = WaitEntry(who="the supervisor of stage 1", reason=reason, since=since_s, kind=kind, stage_id=stage_id)
    return keys.wait_key("n", "w"), encode_waits(WaitRecord(host="gpu-2", pid=8, waits=[entry]))


def judged(*items: tuple[str, bytes]) -> Needs:
    """The needs of a namespace with these keys."""
    names = [key for key, _ in items]
    base = [each for each in (FORCE, HUB, beat()) if each[0] not in names]
    listed = tuple(KeyValue(key, value, at, at, 7) for at, (key, value) in enumerate([*base, *items], 10))
    table = ReplicaTable("n")
    table.replace(Listing(99, 1, listed), NOW_S)
    evidence = Evidence("n", table.snapshot(), listed, NOW_S)
    findings = [*examine(evidence), *ended_findings(last_words_among(listed, "n"), evidence.view, NOW_S)]
    return judge(evidence, findings, waits_among(listed, "n"), stage_lines(evidence))


def told(*items: tuple[str, bytes]) -> list[Finding]:
    return list(judged(*items).found)


def topics(needs: list[Finding]) -> list[str]:
    return [need.topic for need in needs]


def test_nothing_needs_anybody_where_all_is_well() -> None:
    assert judged(*WELL) == Needs((), ())


def test_fewer_replicas_than_asked_for_are_a_need_with_the_command_for_those_that_lack() -> None:
    (need,) = told(replica("0/0"), replica("1/0"))
    assert need.text == "stage 0 has 1 of the 2 replicas that the document asks for"
    assert need.command == ("omni", "serve", "--headless", "--stage-id", "0")
    (none, _) = told()
    assert none.topic == "stage"


def test_a_replica_on_its_way_up_is_no_need() -> None:
    assert told(replica("0/0"), replica("0/1", ReplicaStatus.STARTING, phase="loading"), replica("1/0")) == []
    assert told(*WELL[:2], replica("1/0", ReplicaStatus.STARTING, phase="loading")) == []
    again = replica("1/0", ReplicaStatus.STARTING, phase="loading", reason="the process before it: it broke")
    assert topics(told(*WELL[:2], again)) == ["stage"]


def test_of_a_stage_without_replicas_the_known_cause_has_the_command() -> None:
    """What starts another replica of it would end the same way."""
    refused = wait(WaitKind.REFUSED, "it has ended: no such model")
    needs = told(*WELL[:2], refused)
    assert topics(needs) == ["stage", "ended"]
    assert needs[0].command == ()
    assert needs[1].text == "the supervisor of stage 1 on gpu-2 ended 2 s ago: no such model"
    assert needs[1].command == ("omni", "serve", "--headless", "--stage-id", "1")
    back = replica("1/0", host="gpu-2")
    assert told(*WELL[:2], back, refused) == [], "another one runs there by now"


@pytest.mark.parametrize(
    ("kind", "topic", "words"),
    [
        (WaitKind.CRASH_LOOP, "crash loop", ("omni", "history", "1")),
        (WaitKind.MISCONFIGURED, "settings", ("omni", "history", "1")),
        (WaitKind.DEVICES, "no room", ("omni", "replicas")),
        (WaitKind.ROOM, "no room", ("omni", "replicas")),
    ],
)
def test_who_can_not_go_on_without_a_hand_is_named_at_once(kind: str, topic: str, words: tuple[str, ...]) -> None:
    (need,) = told(*WELL, wait(kind))
    assert (need.topic, need.command) == (topic, words)
    assert "gpu-2" in need.text
    assert "a reason" in need.text


def test_a_short_wait_is_part_of_a_start_and_a_long_one_is_not() -> None:
    assert told(*WELL, wait(WaitKind.RESTART)) == []
    assert told(*WELL, wait("")) == []
    (need,) = told(*WELL, wait("", since_s=NOW_S - 60))
    assert "waits for 60 s: a reason" in need.text


def test_a_crash_loop_is_not_told_again_as_a_lost_replica() -> None:
    lost = ReplicaTrouble(stage_id=1, replica_id=0, epoch=5, kind="lost", host="gpu-2", pid=9, since=NOW_S - 5)
    loop = wait(WaitKind.CRASH_LOOP, "replica 1/0 is started again after 30.0 s; its last process: killed")
    needs = told(*WELL[:2], beat(HubHealth(troubles=[lost], loads=[])), loop)
    assert topics(needs) == ["stage", "crash loop"]


def test_a_host_that_is_gone_is_one_need_for_all_of_its_replicas() -> None:
    """One that has lost a single replica of several is not gone."""
    lost = [
        ReplicaTrouble(stage_id=0, replica_id=number, epoch=5, kind="lost", host="gpu-2", since=NOW_S - 5)
        for number in (2, 3)
    ]
    needs = told(*WELL, beat(HubHealth(troubles=lost, loads=[])))
    assert topics(needs) == ["host"]
    assert "gpu-2 is down or cut off" in needs[0].text
    assert "(0/2, 0/3)" in needs[0].text
    one_left = replica("0/4", host="gpu-2")
    (need,) = told(*WELL, one_left, beat(HubHealth(troubles=lost, loads=[])))
    assert need.topic == "replica"
    assert need.text.endswith("so with 0/3")


def test_many_replicas_of_another_document_are_one_need() -> None:
    old = [replica(f"0/{number}", fingerprint="other", host=f"gpu-{number}") for number in range(3)]
    (need,) = told(*old, replica("1/0"))
    assert need.text.endswith("so with 0/1, 0/2")
    assert need.command == ("omni", "drain", "0/0")


def test_mixed_releases_are_a_need_and_the_rarer_one_is_to_be_drained() -> None:
    (need,) = told(replica("0/0", version="0.3"), *WELL[1:])
    assert (need.topic, need.grade) == ("version", Grade.PROBLEM)
    assert need.command == ("omni", "drain", "0/0")


def test_an_overloaded_stage_is_a_need_while_it_refuses_or_falls_behind() -> None:
    def load(**fields: Any) -> list[Finding]:
        return told(*WELL, beat(HubHealth(loads=[StageLoad(stage_id=0, **fields)])))

    assert topics(load(refused=9, refused_at=NOW_S - 3)) == ["load"]
    assert load(refused=9, refused_at=NOW_S - 100) == []
    assert topics(load(waiting=16)) == ["load"]
    assert load(waiting=3) == []


def test_lost_slots_are_a_need_of_their_own_and_no_overload() -> None:
    """More replicas are no answer to them; the hub says what waits there."""
    reason = "2 of its 4 slots serve nobody: hub hub-1 waits for slots"
    waits = beat(HubHealth(loads=[StageLoad(stage_id=0, waiting=30)]))
    (need,) = told(replica("0/0", lost_slots=2, reason=reason), replica("0/1"), replica("1/0"), waits)
    assert (need.topic, need.text) == ("slots", f"replica 0/0 is up, but {reason}")
    assert need.command == ("omni", "drain", "0/0")
    assert (need.more, need.more_host) == (("omni", "why", "0/0"), "front")
    (load,) = told(*WELL, waits)
    assert (load.topic, load.more) == ("load", ("omni", "why", "--waiting"))


def test_clients_that_read_too_slowly_are_named_and_so_are_their_places_in_a_full_hub() -> None:
    unread = UnreadAnswers(count=2, since=NOW_S - 25)
    (need,) = told(*WELL, beat(HubHealth(loads=[], unread=unread)))
    assert need.text == (
        "2 requests of hub hub-1 have a client that reads too slowly: what is there of the answer has waited for 25 s"
    )
    assert (need.more, need.more_host) == (("omni", "why", "--waiting"), "front")
    full = [StageLoad(refused=3, refused_at=NOW_S - 1)]
    load, _ = told(*WELL, beat(HubHealth(loads=full, unread=unread)))
    assert load.text.endswith("3 requests answered 429 in 5 min; 2 of them wait for clients that don't read")


def test_requests_that_fail_name_the_command_that_shows_them_and_its_host() -> None:
    (need,) = told(*WELL, beat(HubHealth(requests=9, failures=[StageFailures(stage_id=1, failed=9)], loads=[])))
    assert (need.more, need.more_host) == (("omni", "why", "--last-failures"), "front")


def test_a_hub_that_holds_its_lease_and_does_not_beat_has_an_old_view() -> None:
    (need,) = told(*WELL, beat(age_s=60.0))
    assert need.topic == "view"
    assert "has not beaten for 60 s" in need.text


def test_a_revoked_hub_a_bad_record_and_a_key_that_no_shell_may_run() -> None:
    revoked = (keys.hub_control_key("n", "hub-1"), b'{"revoked": true}')
    (hub,) = [need for need in told(*WELL, revoked) if need.topic == "hub"]
    assert hub.command == ("omni", "hub", "allow", "hub-1")
    bad = "/omni/v1/n/replicas/0/9;reboot"
    (record,) = told(*WELL, (bad, b"{"))
    assert record.command == ("etcdctl", "del", bad)
    assert (record.replica, record.stage_id, hub.hub) == ("", 0, "hub-1")
    (refused,) = told(*WELL, ("/omni/v1/n/replicas/1/7", b"{"))
    assert (refused.replica, refused.stage_id) == ("1/7", 1)
    (hidden,) = told(*WELL, (f"{bad}\x1b[2J", b"{"))
    assert hidden.command == (), "what a terminal would not show is not to be pasted"


def test_a_hub_that_does_not_report_is_unknown_and_no_need() -> None:
    needs = judged(*WELL, (keys.beat_key("n", "hub-1"), b'{"counter": 1, "written_at": 4999}'))
    assert needs.found == ()
    assert needs.unknown[0].startswith("hub hub-1 does not report")


def test_replicas_with_the_same_trouble_are_one_need_and_each_of_them_is_known() -> None:
    needs = judged(*(replica(name, fingerprint="another") for name in ("0/0", "0/1")), WELL[2])
    (need,) = needs.found
    assert need.text.endswith("; so with 0/1")
    assert [(each.replica, each.stage_id) for each in needs.each] == [("0/0", 0), ("0/1", 0)]
    assert needs.each[1].command == ("omni", "drain", "0/1")


def test_a_short_wait_is_a_note_for_who_asks_about_its_stage() -> None:
    reason = "replica 1/0 is started again after 2.0 s; its last process: it broke"
    needs = judged(*WELL, wait(WaitKind.RESTART, reason))
    assert needs.found == ()
    (note,) = needs.each
    assert (note.grade, note.topic, note.stage_id) == (Grade.NOTE, "waiting", 1)
    assert note.text.endswith(reason)
