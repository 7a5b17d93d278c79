"""The table of replicas, as a person sees it on 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from omni_discovery.commands.tables import age, replica_json, replica_table
from omni_discovery.deploy.document import encode_deploy, parse_deploy
from omni_discovery.errors import RecordError
from omni_discovery.etcd.check import empty_namespace_text, namespaces_in
from omni_discovery.records.beat import BeatRecord
from omni_discovery.records.health import HubHealth, ReplicaTrouble
from omni_discovery.records.schema import HubRecord, ReplicaInfo, ReplicaStatus
from omni_discovery.view.hub_reports import HubReports, read_reports
from omni_discovery.view.table import View


def info(replica_id: int, status: ReplicaStatus = ReplicaStatus.UP, **fields: Any) -> ReplicaInfo:
    known = {"host": "gpu-node-17.rack-4", "pid": 4194303, "device": "cuda:0,1", "capacity": 128, "model": "/m/thinker"}
    address = "tcp://10.120.130.140:36151"
    return ReplicaInfo(address, address, 0, status, 100, 0.0, 0.0, replica_id=replica_id, **{**known, **fields})


def printed(*infos: ReplicaInfo, pipeline: bytes | None = None) -> list[str]:
    view = View(replicas={(each.stage_id, each.replica_id): each for each in infos}, pipeline=pipeline)
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(replica_table(view, "default", 30_000.0))
    return captured.get().splitlines()


def shown_with(*troubles: ReplicaTrouble, hubs: dict[str, bool], infos: tuple[ReplicaInfo, ...]) -> list[str]:
    """The lines on 80 columns beside hubs that report these troubles; False: the hub does not report."""
    view = View(
        replicas={(each.stage_id, each.replica_id): each for each in infos},
        hubs={hub_id: HubRecord(hub_id=hub_id) for hub_id in hubs},
    )
    health = HubHealth(troubles=list(troubles))
    beats = {hub_id: BeatRecord(health=health if reports else msgspec.UNSET) for hub_id, reports in hubs.items()}
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(replica_table(view, "default", 30_000.0, reports=read_reports(view, beats)))
    return captured.get().splitlines()


def replica_row(shown: ReplicaInfo) -> str:
    """The row of one replica on a wide screen."""
    console = Console(width=300, file=io.StringIO())
    with console.capture() as captured:
        console.print(replica_table(View(replicas={(0, 0): shown}), "default", 30_000.0, 300))
    return captured.get()


def test_what_the_operator_asked_for_is_shown_and_no_line_is_too_long() -> None:
    lines = printed(
        info(0, cordoned=True),
        info(1, ReplicaStatus.DRAINING, weight=0.25),
        info(2, control_error='revision 21: weight is "x"; right would be a number from 0 to 1000'),
        info(3, ReplicaStatus.ERROR, reason="no progress for 60 s with work in hand"),
    )
    text = "\n".join(lines)
    assert "0/0  up cordoned" in text
    assert "draining w0.25" in text
    assert '! control/0/2, revision 21: weight is "x"' in text
    assert "10.120.130.140:36151" in text
    assert "error no prog" in text
    assert "0/3, no progress for 60 s with work in hand" in text
    assert all(len(line) <= 80 for line in lines), text


def test_a_calm_table_has_no_marks_and_an_empty_one_says_so() -> None:
    text = "\n".join(printed(info(0)))
    assert "!" not in text
    assert "cordoned" not in text
    assert "no replica is registered yet" in "\n".join(printed())


def test_who_does_not_match_the_pipeline_in_force_is_marked_and_the_reason_is_said_once() -> None:
    pipeline = b'{"stages": [{"stage_id": 0, "engine": "echo", "final_output": "text"}]}'
    lines = printed(info(0, fingerprint="old"), info(1), info(2, fingerprint="old"), pipeline=pipeline)
    text = "\n".join(lines)
    assert text.count("up ≠") == 2
    assert "≠ 0/0, 0/2: it runs another deploy document than the one in force" in text
    assert "rollout: 2 of 3 replicas left to restart" in text
    assert all(len(line) <= 80 for line in lines), text


def test_a_replica_that_starts_shows_how_far_it_is_and_how_the_one_before_ended() -> None:
    starting = info(0, ReplicaStatus.STARTING, phase="loading", progress=0.4, reason="died")
    assert "starting 40% loading died" in replica_row(starting)


def test_a_stage_that_nobody_serves_is_told() -> None:
    stages = b'{"stage_id": 0, "engine": "echo"}, {"stage_id": 7, "engine": "echo", "final_output": "text"}'
    pipeline = b'{"stages": [' + stages + b"]}"
    assert "stage 7: nobody" in "\n".join(printed(info(0), pipeline=pipeline))
    text = "\n".join(printed(pipeline=pipeline))
    assert "no replica is registered yet" in text
    assert "stage 0: nobody" in text
    assert "nobody" not in "\n".join(printed(info(0), pipeline=b"{"))


def test_who_looks_into_an_empty_namespace_is_told_of_the_others() -> None:
    names = namespaces_in(["/omni/v1/b/pipeline", "/omni/v1/a/replicas/0/0", "/omni/v1/b/hubs/x", "/other/key"])
    assert empty_namespace_text("c", names) == "nothing is in namespace 'c'; there are: a, b; choose with --namespace"
    assert empty_namespace_text("c", ["c", "a"]) == "nothing is in namespace 'c'; there is 'a': add --namespace a"
    assert "nor in any other" in empty_namespace_text("c", [])
    assert "may not see" in empty_namespace_text("c", None)


def test_an_ejected_replica_is_shown_with_until_when_by_whom_and_why() -> None:
    ejected = ReplicaTrouble(
        stage_id=0, replica_id=1, kind="ejected", until=30_009.0, reason="3 failures in a row, the last: engine"
    )
    lines = shown_with(ejected, hubs={"front-1": True}, infos=(info(0), info(1)))
    text = " ".join("\n".join(lines).split())
    assert "0/1 up, ejected" in text
    assert "0/0 up 100/128" in text
    assert "0/1 is ejected until " in text
    assert "by hub front-1: 3 failures in a row, the last: engine" in text
    assert all(len(line) <= 80 for line in lines), text


def test_a_replica_that_does_not_answer_a_hub_is_not_shown_as_up() -> None:
    silent = ReplicaTrouble(stage_id=0, replica_id=0, kind="no-session", since=29_990.0, reason="no heartbeats")
    text = " ".join("\n".join(shown_with(silent, hubs={"a": True, "b": True}, infos=(info(0),))).split())
    assert "0/0 up, no session" in text
    assert "0/0 is up by its record, but without a session with hubs a, b since" in text
    assert text.endswith(": no heartbeats")


def test_what_no_hub_reports_is_told_as_unknown() -> None:
    assert "no hub is registered" in " ".join(shown_with(hubs={}, infos=(info(0),)))
    text = " ".join(shown_with(hubs={"old-1": False, "new-1": True}, infos=(info(0),)))
    assert "hub old-1 does not report ejections: unknown" in text
    assert "ejections are unknown" in " ".join(printed(info(0)))


def test_the_records_of_scripts_hold_what_hubs_report() -> None:
    lost = ReplicaTrouble(stage_id=0, replica_id=0, kind="ejected", until=9.0)
    view = View(replicas={(0, 0): info(0), (0, 1): info(1)}, hubs={"a": HubRecord(hub_id="a")})
    reports: HubReports = read_reports(view, {"a": BeatRecord(health=HubHealth(troubles=[lost]))})
    first, second = replica_json(view, reports)
    assert first["troubles"] == [{"stage_id": 0, "replica_id": 0, "kind": "ejected", "until": 9.0, "hubs": ("a",)}]
    assert second["troubles"] == []


@pytest.mark.attack("D4")
@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-5.0, "0 s"),
        (89.0, "89 s"),
        (4 * 365 * 86400.0, "35040.0 h"),
        (11 * 366 * 86400.0, "> 10 y"),
        *((each, "-") for each in (1e308, -1e308, 1e18, float("inf"), float("nan"), -1e10)),
    ],
)
def test_an_age_has_few_characters_whatever_a_record_says(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


@pytest.mark.attack("D4")
@pytest.mark.parametrize(
    "forged",
    [
        {"address": "tcp://" + "a" * 4000 + ":1"},
        {"queue": 2**53 - 1, "capacity": 2**31 - 1},
        {"registered_at": -1e308},
        {"reason": "x" * 4096, "control_error": "y" * 4096},
        {"model": "m" * 4096, "host": "h" * 4096, "device": "d" * 4096},
        {
            "host": "h" * 4096,
            "address": "tcp://" + "a" * 4000,
            "queue": 2**53 - 1,
            "reason": "x" * 99,
            "registered_at": 1,
        },
    ],
    ids=lambda forged: next(iter(forged)),
)
def test_one_record_does_not_cut_what_the_others_show(forged: dict[str, Any]) -> None:
    address, queue = forged.pop("address", "tcp://10.120.130.140:36152"), forged.pop("queue", 1)
    registered_at = forged.pop("registered_at", 0.0)
    bad = replace(info(1), input_addr=address, queue_length=queue, registered_at=registered_at, **forged)
    lines = printed(info(0), bad, info(2))
    assert max(len(line) for line in lines) <= 80
    # Names, states, addresses and ages of the others are whole.
    for replica_id in (0, 2):
        row = next(line for line in lines if line.strip().startswith(f"0/{replica_id}"))
        assert "up" in row, row
        assert "10.120.130.140:36151" in row, row
        assert "8.3 h" in row, row
    assert len(lines) < 25, lines


@pytest.mark.attack("D4")
def test_json_shows_what_a_record_holds_however_deep() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    shown = replace(info(0), connectors=deep)
    (line,) = replica_json(View(replicas={(0, 0): shown}), read_reports(View(), {}))
    assert line["connectors"] is deep
    assert line["status"] == "up"


@pytest.mark.attack("K4")
@pytest.mark.parametrize(("count", "told"), [(1, "k0; omni doctor"), (5, "k0, k1, k2 and 2 more; omni doctor")])
def test_keys_that_can_not_be_read_are_named_below_the_table(count: int, told: str) -> None:
    view = View(
        replicas={(0, 0): info(0)}, bad={f"k{number}": RecordError(f"k{number}", "is bad") for number in range(count)}
    )
    console = Console(width=300, file=io.StringIO())
    with console.capture() as captured:
        console.print(replica_table(view, "default", 30_000.0, 300))
    assert f"not shown, since they can't be read: {told} says what to do" in captured.get()


@pytest.mark.attack("P3")
def test_how_many_records_are_not_read_is_said_below_the_table() -> None:
    console = Console(width=300, file=io.StringIO())
    with console.capture() as captured:
        console.print(replica_table(View(replicas={(0, 0): info(0)}, refused_count=7), "default", 30_000.0, 300))
    assert "7 more records of replicas are not read: there are too many; omni doctor says" in captured.get()


@pytest.mark.attack("Q41")
def test_how_many_hubs_are_not_read_is_said_below_the_table() -> None:
    console = Console(width=300, file=io.StringIO())
    with console.capture() as captured:
        console.print(replica_table(View(replicas={(0, 0): info(0)}, refused_hubs=7), "default", 30_000.0, 300))
    assert "7 more records of hubs are not read: there are too many; omni doctor says" in captured.get()


@pytest.mark.attack("P1")
def test_of_thousands_that_run_another_document_a_line_names_the_first() -> None:
    console = Console(width=300, file=io.StringIO())
    replicas = {(0, number): replace(info(number), fingerprint=f"v{number}") for number in range(500)}
    document = encode_deploy(parse_deploy("stages: [{stage_id: 0, engine: echo, final_output: text}]", "test"))
    with console.capture() as captured:
        console.print(replica_table(View(replicas=replicas, pipeline=document), "default", 30_000.0, 300))
    assert "0/31 and 468 more: it runs another deploy document than the one in force" in " ".join(
        captured.get().split()
    )
