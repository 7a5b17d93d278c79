"""Records that name another replica's address, and a hub that sees both."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
from tests.support.hub import ECHO_PAIR, Hub
from tests.support.processes import wait_for


@pytest.mark.attack("A23")
def test_a_record_with_the_addresses_of_another_replica_disturbs_nobody(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. a hub and its replicas serve; a record 0/8 appears that names the addresses of 1/0
    2. the log tells so and names 1/0; all requests of both stages are answered
    3. a hub that starts now, and sees both records at once, answers all of them, too
    """
    (tmp_path / "deploy.yaml").write_text(ECHO_PAIR.replace("num_replicas: 2", "num_replicas: 1"))
    arguments = ["--deploy-config", str(tmp_path / "deploy.yaml"), "--etcd-endpoints", endpoint]
    with ExitStack() as stack:
        hub = Hub(tmp_path, arguments, namespace)
        stack.callback(hub.stop)
        hub.wait_ready()
        with OmniCoordClientForHub(endpoint, namespace=namespace) as client:
            victim = client.wait_synced(30.0).replicas[1, 0]
        fields = {"curve_public_key": victim.curve_public_key, "capacity": 8, "fingerprint": ""}
        stack.enter_context(
            OmniCoordClientForStage(
                endpoint, victim.input_addr, victim.output_addr, 0, namespace=namespace, replica_id=8, fields=fields
            )
        )
        told = f"its address {victim.input_addr} is that of replica 1/0, which answers there"
        wait_for("the refusal", lambda: told in hub.text)
        ask_all(hub)
        (tmp_path / "later").mkdir()
        later = Hub(tmp_path / "later", [*arguments, "--hub-only"], namespace)
        stack.callback(later.stop)
        later.wait_ready()
        ask_all(later)


def ask_all(hub: Hub) -> None:
    for _ in range(6):
        status, body = hub.ask("well", modalities=["text", "image"])
        assert status == 200, body
        assert len(body["choices"]) == 2, json.dumps(body)[:500]
