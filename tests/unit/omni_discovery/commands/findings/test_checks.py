"""What doctor makes of a namespace's keys."""

from __future__ import annotations

import shlex
import time
from typing import Any

import msgspec
import pytest

from omni_discovery.commands.findings.checks import (
    Evidence,
    Finding,
    Grade,
    count_namespaces,
    examine,
    judge_version,
)
from omni_discovery.deploy.document import decode_deploy
from omni_discovery.deploy.fingerprint import document_fingerprint, stage_fingerprint
from omni_discovery.kv import KeyValue, Listing
from omni_discovery.records import keys
from omni_discovery.records.beat import BeatRecord
from omni_discovery.records.health import HubHealth, ReplicaTrouble, StageFailures
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.records.sizes import MAX_KEY_BYTES, decode_key
from omni_discovery.view import table
from omni_discovery.view.record_bounds import Most
from omni_discovery.view.table import ReplicaTable

NOW_S = 5000.0
PIPELINE = b'{"stages": [{"stage_id": 0, "engine": "echo", "final_output": "text"}]}'
RIGHT = stage_fingerprint(decode_deploy(PIPELINE, "test"), 0)


def record(replica_id: int = 0, stage_id: int = 0, at_s: float = NOW_S - 9, **fields: Any) -> tuple[str, bytes]:
    made = ReplicaRecord(
        stage_id=stage_id,
        replica_id=replica_id,
        input_addr="tcp://h:1",
        output_addr="tcp://h:2",
        updated_at=at_s,
        **{"status": ReplicaStatus.UP, "fingerprint": RIGHT, "host": "gpu-7", "curve_public_key": "k", **fields},
    )
    return keys.replica_key("n", stage_id, replica_id), encode_record(made)


HUB = (keys.hub_key("n", "hub-1"), encode_record(HubRecord(hub_id="hub-1", curve_public_key="k", host="front")))
PLAIN_HUB = (keys.hub_key("n", "hub-2"), encode_record(HubRecord(hub_id="hub-2", host="gpu-8", pid=7)))
FORCE = (keys.pipeline_key("n"), PIPELINE)
NO_LEASE = ("pipeline", "control")


def report(hub_id: str = "hub-1", **health: Any) -> tuple[str, bytes]:
    """The beat of a hub that reports."""
    return keys.beat_key("n", hub_id), msgspec.json.encode(BeatRecord(written_at=NOW_S, health=HubHealth(**health)))


def found(
    *items: tuple[str, bytes],
    namespaces: dict[str, int] | None = None,
    bare: bool = False,
    silent: bool = False,
) -> list[Finding]:
    """The findings about keys written in this order, each but plain ones under a lease unless ``bare``.

    Hubs without a beat report that all is well, unless they are ``silent``.
    """
    names = [key for key, _ in items]
    calm = [report(hub[0].rpartition("/")[2]) for hub in (HUB, PLAIN_HUB) if hub[0] in names]
    items += tuple(beat for beat in calm if beat[0] not in names and not silent)
    listed = tuple(
        KeyValue(key, value, number, number, 0 if bare or key.split("/")[4] in NO_LEASE else 7)
        for number, (key, value) in enumerate(items, 10)
    )
    table = ReplicaTable("n")
    table.replace(Listing(99, 1, listed), NOW_S)
    return examine(Evidence("n", table.snapshot(), listed, NOW_S, namespaces))


def wrong(findings: list[Finding], grade: Grade = Grade.PROBLEM) -> list[str]:
    return [f"{each.topic}: {each.text}" for each in findings if each.grade is grade]


def test_nothing_is_wrong_with_what_is_right() -> None:
    findings = found(FORCE, HUB, record())
    assert wrong(findings) == wrong(findings, Grade.NOTE) == []
    assert {each.topic for each in findings} == {"namespace", "record", "lease", "clock", "pipeline", "requests"}


def test_an_empty_namespace_beside_full_ones_is_the_wrong_namespace() -> None:
    assert wrong(found(namespaces={"prod": 4, "n": 0}))[0].endswith("other namespaces have: prod (4)")
    assert wrong(found(namespaces={})) == []
    assert wrong(found(namespaces=None)) == []


def test_namespaces_are_counted_by_their_replicas() -> None:
    listed = ["/omni/v1/a/replicas/0/0", "/omni/v1/a/replicas/0/1", "/omni/v1/b/hubs/h", "/other/a/replicas/0/0"]
    assert count_namespaces(listed) == {"a": 2}


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ([FORCE, HUB, record(), (keys.replica_key("n", 0, 1), b"{")], "the record of replica 0/1 is refused: /omni/v1"),
        (
            [FORCE, HUB, record(fingerprint="other")],
            f"replica 0/0 on gpu-7 does not match: it runs another deploy document than the one in force (other instead"
            f" of {RIGHT})",
        ),
        ([FORCE, HUB, record(), record(0, 3)], "pipeline: replica 3/0 serves a stage that the pipeline has not"),
        ([HUB, record()], "pipeline: no pipeline is in force"),
        ([(keys.pipeline_key("n"), b"{"), HUB, record()], "pipeline: the pipeline key can't be read"),
        ([FORCE, HUB, record(status=ReplicaStatus.STARTING)], "stage: stage 0 has nobody who takes work"),
        ([FORCE, HUB, record(cordoned=True)], "stage: stage 0 has nobody who takes work"),
        ([FORCE, HUB, record(), record(1, status=ReplicaStatus.ERROR, reason="sick")], "replica 0/1 reports an error"),
        ([FORCE, HUB, record(), (keys.replica_control_key("n", 0, 0), b"{")], "control: /omni/v1/n/control/0/0: not"),
        (
            [FORCE, HUB, record(), (keys.replica_control_key("n", 0, 0), b'{"weight": 2}')],
            "replica 0/0 has not answered revision 13",
        ),
    ],
)
def test_what_is_wrong_is_named(items: list[tuple[str, bytes]], told: str) -> None:
    assert any(told in text for text in wrong(found(*items))), wrong(found(*items))


def test_records_without_a_lease_are_named() -> None:
    leases = [text for text in wrong(found(FORCE, HUB, record(), bare=True)) if text.startswith("lease: ")]
    assert [text.split()[1] for text in leases] == ["/omni/v1/n/hubs/hub-1", "/omni/v1/n/replicas/0/0"]


def test_a_clock_ahead_of_ours_and_one_that_is_behind_another_are_told_apart() -> None:
    """The second record was written after the first, so its clock can't rightly tell an earlier time."""
    findings = found(FORCE, HUB, record(at_s=NOW_S + 60, host="fast"))
    assert wrong(findings, Grade.NOTE) == ["clock: the clock of fast is 60 s ahead of this machine"]
    findings = found(FORCE, HUB, record(at_s=NOW_S - 5, host="good"), record(1, at_s=NOW_S - 95, host="slow"))
    assert wrong(findings, Grade.NOTE) == ["clock: the clock of slow is at least 90 s behind good"]
    findings = found(FORCE, HUB, record(at_s=1e308, host="false"), record(1, at_s=-1e308, host="false, too"))
    assert wrong(findings, Grade.NOTE) == []


def test_control_keys_that_steer_nobody_or_keep_somebody_idle_are_notes() -> None:
    drain = (keys.replica_control_key("n", 0, 0), b'{"drain": true, "epoch": 3}')
    nobody = (keys.replica_control_key("n", 0, 9), b'{"cordon": true}')
    cordon = (keys.replica_control_key("n", 0, 1), b'{"cordon": true}')
    findings = found(FORCE, HUB, record(), record(1, cordoned=True, control_revision=99), drain, nobody, cordon)
    assert wrong(findings) == []
    drained, absent, kept = wrong(findings, Grade.NOTE)
    assert "drains epoch 3, which is over" in drained
    assert "is for nobody" in absent
    assert kept == 'control: replica 0/1 is kept from new work: {"cordon": true}'


def test_a_cordon_that_etcd_has_lost_and_one_that_was_meant_for_the_replica_before_are_told_as_such() -> None:
    told = "the registry has lost the control key"
    findings = found(FORCE, HUB, record(), record(1, cordoned=True, control_error=told))
    (kept,) = wrong(findings, Grade.NOTE)
    assert kept == f"control: replica 0/1 is kept from new work, and its control key is gone: {told}"
    assert "to let it take work: omni cordon 0/1 --undo" in [each.advice for each in findings]
    cordon = (keys.replica_control_key("n", 0, 1), b'{"cordon": true}')
    (inherited,) = wrong(found(FORCE, HUB, record(), cordon, record(1, cordoned=True, control_revision=13)), Grade.NOTE)
    assert inherited.endswith("that was written before it registered, or put back by it when etcd had lost it")


@pytest.mark.parametrize(
    ("version", "grade"),
    [("3.6.5", Grade.OK), ("3.5.23", Grade.OK), ("3.4.23", Grade.NOTE), ("3.5.1", Grade.NOTE), ("", Grade.NOTE)],
)
def test_the_release_of_etcd_is_judged(version: str, grade: Grade) -> None:
    assert judge_version("etcd:2379", version).grade is grade


@pytest.mark.parametrize(
    ("version", "grade"),
    [("3.6.14", Grade.OK), ("3.7.1", Grade.OK), ("3.6.13", Grade.PROBLEM), ("3.5.34", Grade.PROBLEM)],
)
def test_a_release_that_lets_users_out_is_wrong_where_there_are_users(version: str, grade: Grade) -> None:
    finding = judge_version("etcd:2379", version, has_users=True)
    assert finding.grade is grade
    assert judge_version("etcd:2379", version).grade is Grade.OK
    assert judge_version("etcd:2379", version, embedded=True, has_users=True).grade is Grade.OK
    assert judge_version("etcd:2379", "3.6.13", has_tls=True).grade is Grade.NOTE


def test_nobody_is_told_to_upgrade_an_etcd_that_the_hub_brings_along() -> None:
    finding = judge_version("127.0.0.1:2379", "3.5.1", embedded=True)
    assert (finding.grade, finding.advice) == (Grade.OK, "")
    assert "a watch may lose events" in judge_version("etcd:2379", "3.5.3").text


@pytest.mark.parametrize("whose", ["", "the process before it: "], ids=["as 0.1 says it", "as it is said now"])
def test_a_replica_that_starts_anew_is_a_note_with_how_the_one_before_it_ended(whose: str) -> None:
    reason = f"{whose}it was ended by SIGSEGV"
    again = record(1, status=ReplicaStatus.STARTING, phase="loading", reason=reason)
    findings = found(FORCE, HUB, record(), again)
    assert wrong(findings) == []
    said = "replica: replica 0/1 starts anew; the process before it: it was ended by SIGSEGV"
    assert wrong(findings, Grade.NOTE) == [said]


@pytest.mark.parametrize(
    ("fields", "undo"),
    [
        ({"cordoned": True}, "omni cordon 0/0 --undo"),
        ({"weight": 0.0}, "omni weight 0/0 --undo"),
        ({"cordoned": True, "weight": 0.0}, "omni cordon 0/0 --undo and omni weight 0/0 --undo"),
    ],
)
def test_where_the_last_replica_of_a_stage_is_cordoned_the_way_back_is_named(fields: dict[str, Any], undo: str) -> None:
    findings = found(FORCE, HUB, record(**fields))
    (finding,) = [each for each in findings if each.topic == "stage"]
    assert finding.grade is Grade.PROBLEM
    assert finding.text == "stage 0 has nobody who takes work: its requests get 503; up but kept from it: 0/0"
    assert finding.advice == f"let it take work again: {undo}; or start another replica"
    (finding,) = [each for each in found(FORCE, HUB) if each.topic == "stage"]
    assert finding.advice.startswith("start a replica")


def test_a_replica_without_what_carries_its_hand_offs_is_named_before_it_is_up_and_after() -> None:
    lost, never = (
        record(reason="m:1 is away"),
        record(1, status=ReplicaStatus.STARTING, phase="waiting", reason="no m:1"),
    )
    assert wrong(found(FORCE, HUB, lost, never)) == [
        "replica: replica 0/0 is up, but m:1 is away",
        "replica: replica 0/1 waits: no m:1",
    ]


def test_replicas_of_several_releases_are_a_note() -> None:
    findings = found(FORCE, HUB, record(version="1"), record(1, version="2"))
    assert wrong(findings, Grade.NOTE) == ["version: replicas of several releases: 1: 0/0; 2: 0/1"]


def test_a_revoked_hub_that_still_runs_is_named_and_one_that_is_gone_is_only_noted() -> None:
    revoked = (keys.hub_control_key("n", "hub-1"), b'{"revoked": true}')
    (text,) = wrong(found(FORCE, HUB, revoked, record()))
    assert text.startswith("hub: hub hub-1 is revoked and still registered")
    findings = found(FORCE, HUB, (keys.hub_control_key("n", "old"), b'{"revoked": true}'), record())
    assert wrong(findings) == []
    assert wrong(findings, Grade.NOTE) == ["hub: hub old is revoked; it is not registered"]


@pytest.mark.attack("H4")
def test_hubs_with_one_public_key_are_named() -> None:
    twin = (keys.hub_key("n", "zz"), encode_record(HubRecord(hub_id="zz", curve_public_key="k", host="front")))
    said = wrong(found(FORCE, HUB, twin, record(), report("zz")))
    assert said == ["hub: hubs hub-1, zz have one public key: all these records but one are copies"]
    plain = (twin[0], encode_record(HubRecord(hub_id="zz")))
    assert wrong(found(FORCE, PLAIN_HUB, plain, record(curve_public_key=""), report("zz"))) == []


def test_a_hubs_control_key_that_makes_no_sense_is_named_with_what_would_be_right() -> None:
    (text,) = wrong(found(FORCE, HUB, (keys.hub_control_key("n", "hub-1"), b'{"revoke": true}'), record()))
    assert "control/hubs/hub-1" in text
    assert '"revoke" is not known for a hub; known is: revoked' in text


def test_who_does_not_encrypt_among_those_who_do_is_named() -> None:
    (text,) = wrong(found(FORCE, HUB, PLAIN_HUB, record(0), record(1, curve_public_key="")))
    assert text.startswith("encryption: some encrypt and some don't")
    assert text.endswith("without encryption: hub hub-2, replica 0/1")
    findings = found(FORCE, PLAIN_HUB, record(0, curve_public_key=""))
    assert wrong(findings) == []
    assert "nobody encrypts" in wrong(findings, Grade.NOTE)[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_hand_off_that_other_hosts_can_not_fetch_is_reported(host: str) -> None:
    """A replica of the next stage on the same host, and an address that others reach, are nothing to report."""
    at = {"0-1": {"connector": "MooncakeTransferEngineConnector", "host": host, "zmq_port": 50051}}
    next_stage = {"stage_id": 1, "fingerprint": ""}
    here, there = record(0, **next_stage), record(1, host="gpu-8", **next_stage)
    findings = found(FORCE, HUB, record(0, connectors=at), here, there)
    expected = f"hand-off: replica 0/0 on gpu-7 hands over at {host}, out of reach of 1/1 elsewhere"
    assert [text for text in wrong(findings) if "hand-off" in text] == [expected]
    reached: list[Any] = [{"0-1": {"host": "10.0.0.1"}}, {"0-1": "nonsense"}, {"0-1": {"host": 1}}, {"0-2": at["0-1"]}]
    for connectors in reached:
        assert not any("hand-off" in text for text in wrong(found(FORCE, HUB, record(0, connectors=connectors), there)))
    assert not any("hand-off" in text for text in wrong(found(FORCE, HUB, record(0, connectors=at), here)))


def beat(**fields: Any) -> tuple[str, bytes]:
    return keys.beat_key("n", "hub-1"), msgspec.json.encode(BeatRecord(**{"revision": 99, **fields}))


def test_a_replica_that_has_loaded_other_files_than_most_is_named_with_what_to_do() -> None:
    findings = found(FORCE, HUB, record(0, content="a"), record(1, content="a"), record(2, content="b", host="gpu-9"))
    (text,) = wrong(findings)
    assert text == (
        "pipeline: replica 0/2 on gpu-9 does not match: it has loaded other files of its model (b) than most of its"
        " stage (a)"
    )
    (finding,) = [each for each in findings if each.grade is Grade.PROBLEM]
    assert finding.advice.startswith("make the model's files the same on every host")


def test_replicas_of_one_stage_that_differ_in_what_may_be_meant_are_notes() -> None:
    findings = found(FORCE, HUB, record(0, dtype="bfloat16", code="a"), record(1, dtype="float16", code="a"))
    assert wrong(findings) == []
    assert wrong(findings, Grade.NOTE) == [
        "version: replicas of stage 0 differ in their dtype: bfloat16: 0/0; float16: 0/1"
    ]


def test_a_hub_that_has_seen_the_pipeline_in_force_and_serves_another_is_named() -> None:
    served = document_fingerprint(PIPELINE)
    assert wrong(found(FORCE, HUB, record(), beat(pipeline=served))) == []
    assert wrong(found(FORCE, HUB, record(), beat())) == [], "an older release does not say"
    assert wrong(found(FORCE, HUB, record(), beat(pipeline="other", revision=9))) == [], "it may follow yet"
    (text,) = wrong(found(FORCE, HUB, record(), beat(pipeline="other")))
    assert text == "pipeline: hub hub-1 on front serves another document than the one in force"


def test_replicas_without_a_hub_are_wrong() -> None:
    (finding,) = [each for each in found(FORCE, record()) if each.grade is Grade.PROBLEM]
    assert finding.text == "no hub is registered: nobody sends requests to these replicas"
    assert "--hub-only" in finding.advice


def trouble(kind: str, replica_id: int = 0, epoch: int = 12, **fields: Any) -> ReplicaTrouble:
    return ReplicaTrouble(stage_id=0, replica_id=replica_id, epoch=epoch, kind=kind, **fields)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("ejected", "replica 0/0 is ejected until"),
        ("probed", "replica 0/0 is on probation at hub hub-1"),
        ("no-session", "replica 0/0 is up by its record, but without a session with hub hub-1"),
        ("unusable", "replica 0/0 is unusable for hub hub-1"),
        ("what a later release says", "replica 0/0 is what a later releas"),
    ],
)
def test_a_replica_that_a_hub_does_not_use_is_wrong_and_the_hub_is_named(kind: str, told: str) -> None:
    health = report(troubles=[trouble(kind, until=NOW_S + 9, reason="3 failures in a row")])
    findings = found(FORCE, HUB, record(pid=42), health)
    (finding,) = [each for each in findings if each.grade is Grade.PROBLEM]
    assert finding.text.startswith(told)
    assert finding.text.endswith(": 3 failures in a row")
    assert "hub-1" in finding.text
    assert finding.advice == "see its log on gpu-7, process 42"


def test_a_replica_that_vanished_is_wrong_until_another_life_of_it_is_there() -> None:
    """The hub's beat may be older than the replica's return."""
    gone = report(troubles=[trouble("lost", 1, 5, since=NOW_S - 60, host="gpu-8", pid=9)])
    (text,) = wrong(found(FORCE, HUB, record(), gone))
    assert "replica 0/1 was lost at" in text
    assert "(process 9 on gpu-8) and not replaced, says hub hub-1" in text
    back = report(troubles=[trouble("ejected", epoch=3)])
    assert wrong(found(FORCE, HUB, record(), back)) == [], "that was another life of 0/0"


@pytest.mark.parametrize(
    ("requests", "failed", "grade"),
    [(12, 12, Grade.PROBLEM), (1, 1, Grade.PROBLEM), (1000, 10, Grade.PROBLEM), (1001, 10, Grade.NOTE)],
)
def test_failing_requests_are_wrong_and_few_among_many_are_a_note(requests: int, failed: int, grade: Grade) -> None:
    failures = [StageFailures(stage_id=0, failed=failed, kinds={"EngineFailedError": failed})]
    findings = found(FORCE, HUB, record(), report(requests=requests, failures=failures))
    (finding,) = [each for each in findings if each.topic == "requests"]
    assert finding.grade is grade
    assert f"hub hub-1: {failed} of {requests} request" in finding.text
    assert f"stage 0: {failed} EngineFailedError" in finding.text
    assert "request.failed" in finding.advice


def test_a_hub_that_does_not_report_is_told_as_unknown_not_as_well() -> None:
    for more in ((), (beat(),)):
        findings = found(FORCE, HUB, record(), *more, silent=True)
        assert [each.grade for each in findings if each.topic == "requests"] == [Grade.NOTE]
        assert "hub hub-1 does not report" in wrong(findings, Grade.NOTE)[0]


@pytest.mark.attack("Z9")
@pytest.mark.parametrize("name", ["$(touch pwned)", "7 /omni/v2", "7;reboot", "`id`", "a'b", "7 --prefix", "7\nreboot"])
def test_a_key_is_no_part_of_a_command_but_one_word_of_it(name: str) -> None:
    """What an operator is told to type deletes that key; where it can't be shown, nothing is told to be typed."""
    key = f"/omni/v1/n/replicas/0/{name}"
    findings = found(FORCE, HUB, (key, b"{}"), bare=True)
    (bad,) = [each for each in findings if each.topic == "record" and each.grade is Grade.PROBLEM]
    told = bad.advice.partition("or delete it: ")[2]
    if name.isprintable():
        assert shlex.split(told) == ["etcdctl", "del", key]
        assert bad.command == ("etcdctl", "del", key)
    else:
        assert told == "etcdctl del, of a key that no terminal shows as it is"
        assert bad.command == ()


@pytest.mark.attack("Z11")
def test_a_key_that_is_cut_is_deleted_by_its_begin() -> None:
    whole = f"/omni/v1/n/replicas/0/{'x' * 1_400_000}"
    findings = found(FORCE, HUB, (decode_key(whole.encode()), b"x"), bare=True)
    (bad,) = [each for each in findings if each.topic == "record" and each.grade is Grade.PROBLEM]
    *words, begin = bad.command
    assert words == ["etcdctl", "del", "--prefix"]
    assert whole.startswith(begin)
    assert len(begin) == MAX_KEY_BYTES
    assert len(bad.text) + len(bad.advice) < 4 * MAX_KEY_BYTES


@pytest.mark.attack("K4")
def test_of_many_keys_that_can_not_be_read_the_first_are_named_with_what_to_do() -> None:
    """And the next ones once those are gone. A finding for each of thousands would hide all others."""
    many = [(keys.replica_key("n", 1, number), b"[" * 200_000) for number in range(100, 140)]
    findings = found(FORCE, HUB, *many, bare=True)
    bad = [each for each in findings if each.topic == "record"]
    assert [each.text for each in bad[:8]] == [
        f"the record of replica 1/{number} is refused: /omni/v1/n/replicas/1/{number}: has more than 98304 bytes, as no"
        " record has: find who writes it, then delete it with etcdctl del"
        for number in range(100, 108)
    ]
    assert bad[0].advice.endswith("etcdctl del /omni/v1/n/replicas/1/100")
    assert (bad[8].text, bad[8].advice) == (
        "32 more keys can't be read, the last of them /omni/v1/n/replicas/1/139",
        "delete those above, and the next will be shown here",
    )
    assert len(bad) == 9
    (lease,) = [each.text for each in findings if each.topic == "lease"]
    assert lease.startswith("/omni/v1/n/hubs/hub-1 has no lease"), "a key that can't be read is named once"


@pytest.mark.attack("K4")
def test_of_many_records_without_a_lease_the_first_are_named() -> None:
    many = [record(number) for number in range(100, 140)]
    leases = [each.text for each in found(FORCE, HUB, *many, bare=True) if each.topic == "lease"]
    assert len(leases) == 9
    assert "33 more keys have no lease" in leases[8]


@pytest.mark.attack("P3")
def test_that_there_are_too_many_records_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST_REPLICAS", Most(2, 1 << 20))
    findings = found(FORCE, HUB, *map(record, range(5)))
    (finding,) = [each for each in findings if each.topic == "record"]
    assert (finding.grade, finding.text) == (
        Grade.PROBLEM,
        "3 more records of replicas are not read: there are too many (at most 10000, and 512 MiB of them)",
    )


@pytest.mark.attack("Q41")
def test_that_there_are_too_many_hubs_is_a_finding() -> None:
    many = [(keys.hub_key("n", f"h{number}"), b'{"hub_id":"h%d"}' % number) for number in range(1030)]
    texts = [each.text for each in found(FORCE, *many) if each.topic == "record"]
    assert texts == ["6 more records of hubs are not read: there are too many (at most 1024, and 64 MiB of them)"]


@pytest.mark.attack("P1")
def test_of_thousands_that_run_another_document_the_first_have_a_finding_each() -> None:
    findings = found(FORCE, HUB, *(record(number, fingerprint=f"v{number}") for number in range(500)))
    pipeline = [each for each in findings if each.topic == "pipeline"]
    assert len(pipeline) == 33
    assert pipeline[-1].text == "468 more replicas do not match the pipeline in force"


@pytest.mark.attack("V4")
def test_thousands_of_records_that_hand_over_at_loopback_are_looked_at_once_each() -> None:
    """Each on a host of its own, so that each hand-off is out of reach of all others; a few are named."""
    edges = {f"0-{stage_id}": {"host": "127.0.0.1"} for stage_id in range(3)}
    flood = [record(number, number % 2, host=f"h{number}", connectors=edges) for number in range(6000)]
    began_s = time.process_time()
    told = [each for each in wrong(found(FORCE, HUB, *flood)) if each.startswith("hand-off: ")]
    assert time.process_time() - began_s < 10.0
    assert len(told) == 33
    assert told[0].endswith("out of reach of 0/2, 0/4, 0/6, 0/8, 0/10, 0/12, 0/14, 0/16 elsewhere")
    assert told[-1] == "hand-off: 5968 more hand over at loopback, out of reach of replicas elsewhere"
