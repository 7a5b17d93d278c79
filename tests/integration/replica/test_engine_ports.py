"""Ports that an engine opens for torch's process groups: groups of one rank work, and no stranger can connect."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from omni_discovery import wire
from omni_discovery.deploy.document import DeployConfig
from tests.support.attackers import descriptors, listeners
from tests.support.engines import THINKER
from tests.support.replica_stage import Deployment

_ROOT: Final = Path(__file__).resolve().parents[3]

_GROUPS = """
import os, socket, sys
from datetime import timedelta
from stage_runtime.engines.process_group import seal_single_rank_groups
seal_single_rank_groups()
seal_single_rank_groups()
import torch, torch.distributed as dist
from tests.support.attackers import listeners

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
group = dist.new_group([0], backend="gloo", timeout=timedelta(seconds=7))
tensor, gathered = torch.ones(3), [None]
dist.all_reduce(tensor, group=group)
dist.all_gather_object(gathered, "mine", group=group)
dist.barrier(group=group)
backend = group._get_backend(torch.device("cpu"))
assert tensor.tolist() == [1.0, 1.0, 1.0] and gathered == ["mine"]
assert backend.options._timeout == timedelta(seconds=7) and dist.get_backend(group) == "gloo"

(address,) = listeners(os.getpid())
assert address[0].startswith("127."), address
with socket.socket() as stranger:
    stranger.settimeout(2)
    try:
        stranger.connect(address)
        sys.exit("a stranger was let in")
    except TimeoutError:
        pass

pid = os.fork()
if pid == 0:
    dist.distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1).barrier().wait()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
dist.destroy_process_group()
"""

_TWO_RANKS = """
import os, sys
from stage_runtime.engines.process_group import seal_single_rank_groups
seal_single_rank_groups()
import torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == 2.0
"""


@pytest.mark.attack("F1")
def test_a_group_of_one_rank_works_and_its_port_answers_nobody() -> None:
    """1. two groups of one rank gather, reduce and wait; their process listens on one port of loopback
    2. a stranger gets no connection to it; 3. a fork of the process has a group of its own
    """
    subprocess.run([sys.executable, "-c", _GROUPS], check=True, timeout=120, cwd=_ROOT)


def test_groups_of_two_ranks_still_meet(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", _TWO_RANKS, str(rank), f"{tmp_path}/meet"], cwd=_ROOT)
        for rank in range(2)
    ]
    assert [each.wait(120) for each in ranks] == [0, 0]


def lets_in(address: tuple[str, int]) -> bool:
    """Whether the port takes connections: all of many that are opened and closed at once."""
    try:
        for _ in range(100):
            socket.create_connection(address, 2.0).close()
    except OSError:
        return False
    return True


@pytest.mark.attack("F1")
def test_a_replica_of_vllm_lets_strangers_connect_to_its_two_ports_only(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    """1. of all ports that a replica listens on, only its own two, which hubs know, let a stranger connect
    2. connections that were closed again have not taken its descriptors, and it serves
    """
    with Deployment(
        endpoint, namespace, DeployConfig(stages=(msgspec.structs.replace(THINKER, final_output="text"),)), tmp_path
    ) as running:
        running.start(0)
        (replica,) = running.wait_up(0)
        before = descriptors(replica.pid)
        known = {int(addr.rpartition(":")[2]) for addr in (replica.input_addr, replica.output_addr)}
        assert {port for host, port in listeners(replica.pid) if lets_in((host, port))} == known
        hub = running.session(replica)
        hub.submit("r", inputs={"prompt": "1 + 2"}, params={"max_tokens": 2})
        hub.acknowledged(30.0)
        _, done, _ = hub.collect("r", 30.0)
        assert isinstance(done, wire.StageDone)
        assert descriptors(replica.pid) < before + 50
