"""What the torch engine is told to call to learn which temporary files its process, torch and vLLM use."""

from __future__ import annotations

import json
import os
import tempfile

import msgspec
import vllm.envs
from torch._inductor.runtime.cache_dir_utils import cache_dir
from vllm.model_executor.model_loader.weight_utils import get_lock

MODEL = "somebody/model"


class Nothing(msgspec.Struct):
    prompt: str = ""


def used(_: Nothing) -> str:
    """The folders, and vLLM's lock of a model, which is taken; as JSON."""
    lock = get_lock(MODEL)
    with lock.acquire(timeout=10.0):
        folders = {
            "temporary": tempfile.gettempdir(),
            "torch": cache_dir(),
            "triton": os.environ["TRITON_CACHE_DIR"],
            "vllm": vllm.envs.VLLM_CACHE_ROOT,
            "lock": lock.lock_file,
        }
    return json.dumps(folders)
