"""What vLLM leaves in the temporary folder goes with the engine that made it, and nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

_CLOSE_EACH = """
import json, os, sys, torch.distributed as dist
from stage_runtime.engines.vllm.load import rendezvous_removed
left = []
for file in sys.argv[1:]:
    dist.init_process_group("gloo", init_method="file://" + file, rank=0, world_size=1)
    with rendezvous_removed():
        assert os.path.exists(file)
    left.append(os.path.exists(file))
    dist.destroy_process_group()
with rendezvous_removed():
    pass
print(json.dumps(left))
"""


def test_only_the_file_of_the_own_process_group_is_removed(tmp_path: Path) -> None:
    """1. a process meets itself at a file of vLLM's, at another one, and at one in another folder
    2. as it closes, only the first is gone; the file of one that is still at work stays
    """
    other, deeper = tmp_path / "vllm_dist_other", tmp_path / "deeper"
    other.write_bytes(b"still at work")
    deeper.mkdir()
    files = [tmp_path / "vllm_dist_mine", tmp_path / "mine", deeper / "vllm_dist_x"]
    found = subprocess.run(
        [sys.executable, "-c", _CLOSE_EACH, *map(str, files)],
        check=True,
        timeout=120,
        stdout=subprocess.PIPE,
        env={"TMPDIR": str(tmp_path), "PATH": "", "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert json.loads(found.stdout) == [False, True, True]
    assert other.read_bytes() == b"still at work"
