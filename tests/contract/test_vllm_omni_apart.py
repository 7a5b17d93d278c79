"""A plain vLLM replica in a Python that has vLLM-Omni, too: vLLM loads its plugin by itself, and here it must not.

Runs in the environment that `make setup-omni` makes, each engine in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni has an environment of its own: make omni-test", allow_module_level=True)

from omni_discovery.deploy.document import StageConfig
from omni_discovery.plugins import vllm_plugins
from stage_runtime.engines.base import modules_to_preload
from stage_runtime.supervisor.environment import stage_environment

pytestmark = pytest.mark.vllm
THINKER = Path(__file__).resolve().parents[2] / "stage_runtime" / "demo" / "thinker"
_WAIT_S = 300

#: Loads and asks an engine as a zygote and its replica do, and says which packages that has imported.
PROGRAM = """
import importlib, json, sys
from omni_discovery.deploy.document import StageConfig
from stage_runtime.engines.base import StageRequest, create_engine, modules_to_preload
for module in modules_to_preload("vllm"):
    importlib.import_module(module)
forked = "vllm_omni" in sys.modules
arguments = {"enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 2}
engine = create_engine(StageConfig(stage_id=0, engine="vllm", model=sys.argv[1], engine_args=arguments))
engine.load(lambda *_: None)
engine.add(StageRequest("a", "a", inputs={"prompt": "3 + 4 ="}, params={"max_tokens": 4, "temperature": 0}))
said = []
while engine.has_unfinished():
    said += engine.step()
engine.close()
answer = {"forked": forked, "loaded": "vllm_omni" in sys.modules, "error": said[-1].error, "end": said[-1].finished}
print(json.dumps(answer))
"""


def plain_vllm(**variables: str) -> dict[str, object]:
    stage = StageConfig(stage_id=0, engine="vllm", model=str(THINKER))
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(THINKER)],
        env={**os.environ, **stage_environment(stage, True), "MASTER_ADDR": "127.0.0.1", **variables},
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    answer: dict[str, object] = json.loads(ended.stdout.strip().splitlines()[-1])
    return answer


def test_a_plain_replica_never_imports_vllm_omni() -> None:
    """1. as replicas are started, with VLLM_PLUGINS, vLLM answers and vllm_omni is not there
    2. without that it is: vLLM loads what it finds
    """
    kept = vllm_plugins("vllm")
    assert kept is not None
    apart = plain_vllm(VLLM_PLUGINS=kept)
    assert apart == {"forked": False, "loaded": False, "error": None, "end": True}
    assert plain_vllm()["loaded"] is True


def test_a_zygote_imports_for_its_own_engine_alone() -> None:
    tops = {engine: {name.split(".")[0] for name in modules_to_preload(engine)} for engine in ("vllm", "vllm-omni")}
    assert "vllm_omni" not in tops["vllm"]
    assert "vllm_omni" in tops["vllm-omni"]
