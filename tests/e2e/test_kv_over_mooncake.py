"""``omni serve`` with prefill and decode apart and the KV over Mooncake's TCP, on a host of the tests' own.

vLLM's Mooncake connector asks torch for the number of its accelerator, and ends where there is none. A plugin of vLLM
that is installed for these tests alone answers 0; all the rest is vLLM's and Mooncake's own.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from omni_discovery.deploy.document import encode_deploy
from tests.support.kv_pair import answers, ready_prefill, serving
from tests.support.mooncake import mooncake_host
from tests.support.prefill_decode import alone, over_network
from tests.support.processes import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.long]

_PLUGIN = """
import torch

def register():
    torch.accelerator.current_device_index = lambda: 0
"""
_READY_S = 400.0


def install_plugin(folder: Path) -> dict[str, str]:
    """The variables with which vLLM finds the plugin in ``folder``."""
    told = folder / "cpu_accelerator-1.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-accelerator\nVersion: 1\n")
    (told / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu_accelerator = cpu_accelerator:register\n")
    (folder / "cpu_accelerator.py").write_text(_PLUGIN)
    return {"PYTHONPATH": str(folder)}


def test_kv_goes_by_mooncake_and_a_lost_prefill_replica_is_replaced(tmp_path: Path) -> None:
    """1. one stage that does both says what is right
    2. prefill and decode apart say the same, though a decode replica may read no prompt itself
    3. the prefill replica is killed; its successor's KV is fetched, and the answers are the same
    """
    variables = install_plugin(tmp_path / "plugin")
    with mooncake_host().inside():
        with serving(tmp_path / "alone", encode_deploy(alone(ignore_eos=True)), {}) as hub:
            expected = answers(hub)
        assert all(expected)
        pair = over_network("MooncakeConnector", mooncake_protocol="tcp")
        with serving(tmp_path / "pair", encode_deploy(pair), variables) as hub:
            assert answers(hub) == expected
            (first,) = ready_prefill(hub)
            os.kill(first, signal.SIGKILL)
            wait_for("another prefill replica", lambda: ready_prefill(hub) - {first}, _READY_S)
            assert answers(hub) == expected
