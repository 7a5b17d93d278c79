"""``omni serve`` with prefill and decode apart and the KV over NIXL; `make engines` runs it where NIXL is installed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from omni_discovery.deploy.document import encode_deploy
from tests.support.hub import Hub
from tests.support.prefill_decode import PROMPTS, alone, over_network
from tests.support.processes import wait_for

pytest.importorskip("nixl", reason="NIXL is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

#: UCX over TCP on this machine alone.
LOOPBACK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
ASKED = {"temperature": 0.0, "max_tokens": 24}
_READY_S = 400.0


@contextmanager
def serving(folder: Path, document: bytes, variables: Mapping[str, str]) -> Iterator[Hub]:
    folder.mkdir()
    file = folder / "deploy.yaml"
    file.write_text(json.dumps(msgspec.json.decode(document)))
    hub = Hub(folder, ["--deploy-config", str(file)], variables=variables)
    try:
        yield hub.wait_ready(_READY_S)
    finally:
        hub.stop(signal.SIGINT)


def answers(hub: Hub) -> list[str]:
    said = [hub.ask(prompt, **ASKED) for prompt in PROMPTS]
    assert [status for status, _ in said] == [200] * len(PROMPTS), said
    return [body["choices"][0]["message"]["content"] for _, body in said]


def test_kv_goes_from_replica_to_replica_and_a_lost_prefill_replica_is_replaced(tmp_path: Path) -> None:
    """1. one stage that does both says what is right
    2. prefill and decode apart say the same, though a decode replica may read no prompt itself
    3. the prefill replica is killed; its successor's KV is fetched, and the answers are the same
    """
    with serving(tmp_path / "alone", encode_deploy(alone(ignore_eos=True)), {}) as hub:
        expected = answers(hub)
    assert all(expected)
    with serving(tmp_path / "pair", encode_deploy(over_network("NixlConnector")), LOOPBACK) as hub:
        assert answers(hub) == expected
        (first,) = (record["pid"] for record in hub.replicas() if record["stage_id"] == 0)
        os.kill(first, signal.SIGKILL)
        wait_for("another prefill replica", lambda: ready_prefill(hub) - {first}, _READY_S)
        assert answers(hub) == expected


def ready_prefill(hub: Hub) -> set[int]:
    return {each["pid"] for each in hub.replicas() if each["stage_id"] == 0 and each["status"] == "up"}
