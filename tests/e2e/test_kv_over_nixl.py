"""``omni serve`` with prefill and decode apart and the KV over NIXL; `make engines` runs it where NIXL is installed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from omni_discovery.deploy.document import encode_deploy
from tests.support.kv_pair import answers, ready_prefill, serving
from tests.support.prefill_decode import alone, over_network
from tests.support.processes import wait_for

pytest.importorskip("nixl", reason="NIXL is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

#: UCX over TCP on this machine alone.
LOOPBACK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
_READY_S = 400.0


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
        (first,) = ready_prefill(hub)
        os.kill(first, signal.SIGKILL)
        wait_for("another prefill replica", lambda: ready_prefill(hub) - {first}, _READY_S)
        assert answers(hub) == expected
