"""What an operator reads: one name for a replica, when all stages can serve, and JSON if asked for."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.errors import StageUnavailableError
from tests.support.hub import ECHO_PAIR, Hub
from tests.support.hub_fakes import QUICK, FakeReplica, collect, running_hub, show, until
from tests.support.processes import Child, wait_for

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
FAILING = """
stages:
  - {stage_id: 0, engine: echo, engine_args: {fail_on: FAIL}, final_output: text}
"""
DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO |WARNING|ERROR) "
#: A line of a replica that has registered, and the line with which it does.
NAMED = re.compile(rf"\[replica (\d+/\d+)\] {DATE}")
REGISTERED = re.compile(rf"\[replica (\d+/\d+)\] {DATE}.*registrar\.registered key=\S+/replicas/(\S+) \S+ pid=(\d+)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[Hub]:
    started = Hub.of_yaml(folder, ECHO_PAIR)
    try:
        yield started.wait_ready()
    finally:
        assert started.stop() == []


def events(hub: Hub, event: str) -> list[str]:
    return [line for line in hub.text.splitlines() if f" {event} " in line]


def test_the_lines_of_a_replica_bear_the_id_that_the_tables_show(hub: Hub) -> None:
    """1. four replicas start, and the etcd ids that they get are in another order than their starts
    2. each names its process once it has its id, and it is the one that ``omni replicas`` shows under that id
    3. before that, a line has the process; the number of a start is nowhere
    """
    wait_for("all replicas", lambda: len(hub.replicas()) == 4)
    records = {f"{each['stage_id']}/{each['replica_id']}": str(each["pid"]) for each in hub.replicas()}
    wait_for("the last registration", lambda: len(REGISTERED.findall(hub.text)) == 4)
    lines = [match.groups() for match in map(REGISTERED.match, hub.text.splitlines()) if match]
    assert {name: pid for name, _, key, pid in lines if name == key} == records
    assert {match[1] for match in map(NAMED.match, hub.text.splitlines()) if match} == set(records)
    for name, pid in records.items():
        stage_id = name.partition("/")[0]
        assert f"[stage {stage_id} pid {pid}] " in hub.text
        assert f"replica.attached replica={name} epoch=" in hub.text
    assert not re.search(r"stage \d+ #|ordinal|replica=\d+ ", hub.text)


def test_a_hub_says_once_that_it_is_ready_and_what_it_has_waited_for(hub: Hub) -> None:
    """1. from the start it says what is missing; 2. one line has its URL, the stages and the replicas"""
    wait_for("the line", lambda: events(hub, "hub.ready"))
    (ready,) = events(hub, "hub.ready")[:1]
    assert re.match(DATE, ready)
    assert f"hub.ready url={hub.url} stages=0,1 replicas=0/" in ready
    assert "stage 0 (" in events(hub, "hub.waiting")[0]
    lines = hub.text.splitlines()
    assert lines.index(events(hub, "hub.waiting")[0]) < lines.index(ready)


def test_a_stage_that_is_lost_and_comes_back_is_a_line_each(hub: Hub) -> None:
    """1. both replicas of stage 1 are killed: not ready, with the stage; 2. they are started again: ready again"""
    wait_for("all replicas", lambda: len(hub.replicas()) == 4)
    before = len(events(hub, "hub.ready"))
    lost = len(events(hub, "hub.not_ready"))
    # Stopped first: neither may be back before the other is gone.
    pids = [each["pid"] for each in hub.replicas() if each["stage_id"] == 1]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    wait_for("the loss", lambda: len(events(hub, "hub.not_ready")) > lost)
    assert "stage 1 (" in events(hub, "hub.not_ready")[-1]
    wait_for("its return", lambda: len(events(hub, "hub.ready")) > before)
    restarting = events(hub, "supervisor.restarting")
    assert all(re.search(r"stage=1 replica=1/\d+ code=-9 ", line) for line in restarting[:2])


def test_a_headless_stage_says_in_json_when_it_can_serve_and_each_line_is_an_object(hub: Hub, folder: Path) -> None:
    """1. it joins the hub's etcd, at the level debug; each line of supervisor and replica is one JSON object
    2. once it can serve, a line has its replicas; a registered replica's lines have its name and the process's id
    3. the hub, which was ready before, says that one more can serve
    """
    flags = ("--headless", "--stage-id", "0", "--etcd-endpoints", hub.endpoint, "--namespace", hub.namespace)
    logs = ("--log-format", "json", "--log-level", "debug")
    stage = Child(["serve", *flags, *logs], folder, "headless")

    def objects() -> list[dict[str, Any]]:
        whole, _, _ = stage.text.rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def named(event: str) -> list[dict[str, Any]]:
        stage.must_run()
        return [each for each in objects() if each["event"] == event]

    try:
        (ready,) = wait_for("the stage to be ready", lambda: named("stage.ready"), 60.0)
        (registered,) = named("registrar.registered")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", ready["time"])
        assert (ready["level"], ready["logger"]) == ("info", "stage_runtime.supervisor.supervisor")
        assert ready["fields"]["replicas"] == registered["replica"]
        assert (ready["stage"], ready["fields"]["up"], ready["fields"]["of"]) == (0, 1, 1)
        assert named("stage.starting")[0]["fields"] == {"replicas": 1, "namespace": hub.namespace}
        assert named("stage.waiting")[0]["fields"]["after_s"] < ready["fields"]["after_s"]
        (up,) = wait_for("the line of the replica itself", lambda: named("replica.ready"))
        assert (up["stage"], up["pid"]) == (0, registered["fields"]["pid"])
        assert up["pid"] != ready["pid"]
        assert {each["level"] for each in objects()} >= {"info"}
        joined = re.compile(rf" hub\.joined replicas=\S*\b{registered['replica']}\b\S*: \d can serve now")
        wait_for("the hub's line", lambda: joined.search(hub.text))
    finally:
        assert stage.stop() == []
    assert {each["event"] for each in objects()} >= {"supervisor.draining", "replica.stopped", "supervisor.ended"}


def test_json_lines_name_request_stage_replica_epoch_and_trace_and_each_transition_is_one_event(tmp_path: Path) -> None:
    """1. a hub traces, to a collector that is not there, and one of its requests, in a trace of its client, fails
    2. hub and replica name the same request, trace, stage, replica and epoch: what etcd has; so does the access log
    3. one that names no trace is given one, the same in both
    4. another life of the replica has another epoch in each of its lines; no transition is told twice
    """
    flags = ("--log-format", "json", "--access-log", "--otlp-traces-endpoint", "http://127.0.0.1:9")
    hub = Hub.of_yaml(tmp_path, FAILING, *flags)

    def objects() -> list[dict[str, Any]]:
        whole, _, _ = hub.text.rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def named(event: str, count: int = 1) -> list[dict[str, Any]]:
        hub.must_run()
        # A hub registers, too.
        found = [each for each in objects() if each["event"] == event and "/hubs/" not in str(each)]
        return found if len(found) >= count else []

    where = ("request", "trace", "stage", "replica", "epoch")
    try:
        (ready,) = wait_for("every stage to be ready", lambda: named("hub.ready"), 60.0)
        (registered,) = named("registrar.registered")
        body = json.dumps({"messages": [{"role": "user", "content": "FAIL"}]}).encode()
        own = {"Content-Type": "application/json", "traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
        url = f"{ready['fields']['url']}/v1/chat/completions"
        for headers in (own, {"Content-Type": "application/json"}):
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60)
        failed = wait_for("the lines of hub and replica", lambda: named("request.failed", 4))
        pids = (hub.process.pid, registered["fields"]["pid"])
        here, there = ([each for each in failed if each["pid"] == pid] for pid in pids)
        assert [[each[name] for name in where] for each in here] == [[each[name] for name in where] for each in there]
        assert len({each["request"] for each in here}) == 2
        assert here[0]["trace"] == TRACE_ID
        assert re.fullmatch("[0-9a-f]{32}", here[1]["trace"])
        assert here[1]["trace"] != TRACE_ID
        assert {(each["stage"], each["replica"], each["epoch"]) for each in failed} == {(0, "0/0", registered["epoch"])}
        asked = wait_for("the access log", lambda: named("http.request", 2))
        names = [each["request"].partition("~")[0] for each in here]
        assert [(each["request"], each.get("trace")) for each in asked] == [(names[0], TRACE_ID), (names[1], None)]
        os.kill(registered["fields"]["pid"], signal.SIGKILL)
        lives = [registered["epoch"], wait_for("another life", lambda: named("registrar.registered", 2))[1]["epoch"]]
        wait_for("its session", lambda: named("replica.session_up", 2))
        wait_for("it to serve", lambda: named("replica.ready", 2))
    finally:
        assert hub.stop() == []
    assert lives[0] < lives[1]

    def told(event: str) -> list[int]:
        return [each["epoch"] for each in objects() if each["event"] == event and "/hubs/" not in str(each)]

    for event in ("registrar.registered", "replica.attached", "replica.session_up", "replica.ready"):
        assert told(event) == lives, event
    assert lives[:1] == told("replica.session_down")[:1]
    # A process that is killed says nothing more.
    assert told("replica.stopped") == lives[1:]
    assert Counter(told("replica.removed")).most_common(1)[0][1] == 1


async def test_a_request_without_a_replica_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_hub(wait=False, config=replace(QUICK, pick_timeout_s=0.1)) as omni:
        with pytest.raises(StageUnavailableError):
            await collect(omni.generate({"prompt": "x"}, request_id="r1"))
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1, told
    assert told[0].startswith("request.failed request=r1")


async def test_a_replica_that_is_lost_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """1. it has a session, and its process dies: one line with its name and addresses
    2. that nobody answers there, longer than a replica without a session is given, is no second one
    """
    replica = FakeReplica()
    async with running_hub(replica, config=replace(QUICK, unmet_after_s=0.5)) as omni:
        replica.kill()
        await until(lambda: "replica.session_down" in caplog.text)
        show(omni, replace(replica.info, queue_length=1))
        with pytest.raises(TimeoutError):
            await until(lambda: "replica.no_session" in caplog.text, timeout_s=3.0)
    told = [record.getMessage() for record in caplog.records if "replica." in record.getMessage()]
    warnings = [line for line in told if line.startswith(("replica.session_down", "replica.no_session"))]
    info = replica.info
    where = f"replica=0/0 epoch={info.epoch} addr={info.input_addr} output_addr={info.output_addr}: "
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith(f"replica.session_down {where}")
