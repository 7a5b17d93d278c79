"""The engines under test, and what runs requests through them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omni_discovery.deploy.document import StageConfig
from stage_runtime.testing import run as run

DEMO = Path(__file__).resolve().parents[2] / "stage_runtime" / "demo"

THINKER = StageConfig(
    stage_id=0,
    engine="vllm",
    model=str(DEMO / "thinker"),
    engine_args={
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 16 << 20,
        "enforce_eager": True,
        "handoff": {"require_token": "<|paint|>"},
    },
)
PAINTER = StageConfig(stage_id=1, engine="diffusion", model=str(DEMO / "painter"), engine_args={"capacity": 4})
ECHO = StageConfig(stage_id=0, engine="echo", engine_args={"capacity": 4})


def skip_without_vllms_server() -> None:
    """Skip a test of ``--api vllm`` where the installed vLLM is older than the one whose server it drives."""
    from vllm import AsyncEngineArgs

    if not hasattr(AsyncEngineArgs, "create_structured_outputs_config"):
        pytest.skip("--api vllm drives the server of vLLM 0.32; this one's engine is what is tested here")


@contextmanager
def as_the_supervisor_has_it() -> Iterator[None]:
    """What the supervisor puts into a replica's environment; read as vllm is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "TOKENIZERS_PARALLELISM": "false",
        }.items():
            patch.setitem(os.environ, name, value)
        yield
