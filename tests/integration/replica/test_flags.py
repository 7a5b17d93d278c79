"""What the flags of a supervisor put into its replicas' records, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from omni_discovery import wire
from omni_discovery.commands.findings.checks import Evidence, examine
from tests.support.replica_hub import eventually
from tests.support.replica_stage import Deployment, echo_stages


@pytest.fixture
def deployment(endpoint: str, namespace: str, tmp_path: Path) -> Iterator[Deployment]:
    with Deployment(endpoint, namespace, echo_stages({}), tmp_path) as running:
        yield running


def test_labels_are_in_the_record_and_keys_are_unless_that_is_turned_off(deployment: Deployment) -> None:
    deployment.start(0, 1, "--label", "zone=a", "--label", "rack=7 b")
    (info,) = deployment.wait_up()
    assert dict(info.labels) == {"zone": "a", "rack": "7 b"}
    assert len(info.curve_public_key) == 40
    assert "zmq.plain" not in deployment.log().read_text()


def test_without_encryption_the_record_has_no_key_plain_hubs_are_served_and_everybody_is_told(
    deployment: Deployment,
) -> None:
    """1. the supervisor warns, once; the replica names the hub that encrypts; doctor names the mix
    2. a socket without keys is welcomed
    """
    deployment.start(0, 2, "--zmq-security", "none")
    info, _ = deployment.wait_up(0, 2)
    assert info.curve_public_key == ""
    log = deployment.log()
    assert eventually(lambda: log.read_text().count("hub.unusable hub=hub-1: it speaks with --zmq-security curve") == 2)
    assert log.read_text().count("zmq.plain") == 1
    findings = examine(Evidence(deployment.namespace, deployment.client.view(), (), info.last_heartbeat))
    (mixed,) = [finding for finding in findings if finding.topic == "encryption"]
    assert "some encrypt and some don't" in mixed.text
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.identity = b"plain"
        dealer.connect(info.input_addr)
        dealer.send(wire.encode(wire.Hello(hub_id="plain", epoch=info.epoch)))
        assert dealer.poll(5000)
        messages, _ = wire.decode_from_replica(dealer.recv_multipart())
        assert isinstance(messages[0], wire.Welcome)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--omni-replica-address", "tcp://h:1"], "right would be a host name or an IP address"),
        (["--label", "zone"], "right would be KEY=VALUE"),
        (["--drain-timeout", "-1"], "right would be a number of seconds"),
        (["--zmq-security", "tls"], "invalid choice: 'tls'"),
    ],
)
@pytest.mark.parametrize("command", [["stage_runtime"], ["omni_discovery", "serve", "--headless"]])
def test_flags_that_can_not_be_meant_are_refused_with_what_would_be_right(
    command: list[str], flags: list[str], told: str
) -> None:
    words = [sys.executable, "-m", *command, "--stage-id", "0", "--etcd-endpoints", "127.0.0.1:9", *flags]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr
