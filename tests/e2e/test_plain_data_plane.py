"""A hub and its replicas with ``--zmq-security none``, with labels, and beside ones that encrypt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.hub import ECHO_PAIR, Hub
from tests.support.processes import Child, wait_for

pytestmark = pytest.mark.e2e


def test_a_pipeline_without_encryption_serves_warns_and_is_noted_by_doctor(tmp_path: Path) -> None:
    """1. requests are answered; no record holds a key, each holds the label; one warning in the whole log
    2. doctor notes it and finds nothing wrong
    3. a replica that encrypts joins: it says why it can't use the hub, doctor names the mix; the others serve on
    """
    hub = Hub.of_yaml(tmp_path, ECHO_PAIR, "--zmq-security", "none", "--label", "zone=a", "--drain-timeout", "5")
    more = None
    try:
        hub.wait_ready()
        assert hub.ask("hello")[0] == 200
        wait_for("two replicas of each stage", lambda: len(hub.replicas()) == 4)
        records = hub.replicas()
        assert {record["curve_public_key"] for record in records} == {""}
        assert [record["labels"] for record in records] == [{"zone": "a"}] * 4
        assert hub.text.count("zmq.plain") == 1
        where = ["--etcd-endpoints", hub.endpoint, "--namespace", hub.namespace]
        doctor = Child(["doctor", *where], tmp_path, "doctor")
        assert doctor.process.wait(30) == 0, doctor.text
        assert "nobody encrypts" in " ".join(doctor.text.split())
        more = Child(["serve", "--headless", "--stage-id", "0", *where], tmp_path, "more")
        wait_for(
            "it to name the hub", lambda: "it speaks with --zmq-security none, this replica with curve" in more.text
        )
        wait_for("it to be up", lambda: "replica.ready" in more.text)
        wait_for("the hub to name it", lambda: "this hub was started with --zmq-security none" in hub.text)
        doctor = Child(["doctor", "--json", *where], tmp_path, "doctor")
        assert doctor.process.wait(30) == 1, doctor.text
        findings = [json.loads(line) for line in doctor.text.splitlines()]
        (mixed,) = [each for each in findings if each["topic"] == "encryption"]
        assert "some encrypt and some don't" in mixed["text"]
        assert hub.ask("hello")[0] == 200
    finally:
        left = [] if more is None else more.stop()
        left += hub.stop()
    assert left == []
