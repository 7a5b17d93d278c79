"""The demo's thinker in two stages, prefill and decode, whose KV goes through a shared folder by vLLM's connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from omni_discovery.deploy.document import DeployConfig, decode_deploy
from tests.support.engines import DEMO

#: Longer than a block of KV, so that there is something to transfer.
PROMPTS = [
    f"What is 1 + 2? And what is 3 + 4? And what is 5 + 6, and 7 + 8? But what is {first} + {second}?"
    for first, second in ((5, 6), (17, 25))
]


def stage(stage_id: int, **more: Any) -> dict[str, Any]:
    """A stage of the thinker; ``more`` goes into its engine_args."""
    engine_args = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 16 << 20,
        "enforce_eager": True,
        "block_size": 32,
        # That connector reckons without what the engine itself remembers.
        "enable_prefix_caching": False,
        **more,
    }
    return {"stage_id": stage_id, "engine": "vllm", "model": str(DEMO / "thinker"), "engine_args": engine_args}


def pair(folder: Path, decoders: int = 1) -> DeployConfig:
    """The two stages as a deploy document; the KV goes through ``folder``."""
    transfer = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    prefill = stage(0, pd="prefill", kv_transfer_config=transfer)
    decode = stage(1, pd="decode", kv_transfer_config=transfer)
    decode |= {"final_output": "text", "runtime": {"num_replicas": decoders}}
    decode["default_sampling_params"] = {"ignore_eos": True}
    return decode_deploy(msgspec.json.encode({"stages": [prefill, decode]}), "test")


def over_network(connector: str, **extra: Any) -> DeployConfig:
    """The two stages, with a KV that goes from replica to replica; a decode that can't have it fails.

    ``extra`` are settings of the connector.
    """
    transfer: dict[str, Any] = {"kv_connector": connector, "kv_load_failure_policy": "fail"}
    if extra:
        transfer["kv_connector_extra_config"] = extra
    prefill = stage(0, pd="prefill", kv_transfer_config=transfer)
    decode = stage(1, pd="decode", kv_transfer_config=transfer)
    decode |= {"final_output": "text", "default_sampling_params": {"ignore_eos": True}}
    return decode_deploy(msgspec.json.encode({"stages": [prefill, decode]}), "test")


def alone(**params: Any) -> DeployConfig:
    """The same model in one stage; ``params`` are its default sampling parameters."""
    only = {**stage(0), "final_output": "text", "default_sampling_params": params}
    return decode_deploy(msgspec.json.encode({"stages": [only]}), "test")
