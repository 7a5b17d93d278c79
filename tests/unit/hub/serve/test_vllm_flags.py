"""Values of vLLM's flags as arguments of its engine. That the names are vLLM's: ``integration/api/test_vllm_flags``."""

from __future__ import annotations

from typing import Any

import pytest

from hub.serve import vllm_flags
from hub.serve.vllm_flags import engine_value
from omni_discovery.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("enforce_eager", True, True),
        ("enable_prefix_caching", False, False),
        ("dtype", "bfloat16", "bfloat16"),
        ("revision", "12345", "12345"),
        ("tensor_parallel_size", "2", 2),
        ("gpu_memory_utilization", "0.85", 0.85),
        ("max_model_len", "auto", "auto"),
        ("max_model_len", "4k", 4000),
        ("max_num_batched_tokens", "2K", 2048),
        ("kv_cache_memory_bytes", "1.5G", 3 << 29),
        ("limit_mm_per_prompt", '{"image": 2}', {"image": 2}),
        ("cudagraph_capture_sizes", ["1", "2"], [1, 2]),
        ("logits_processors", ["a.B", "7"], ["a.B", "7"]),
    ],
)
def test_a_value_has_the_type_that_the_engine_wants(name: str, given: Any, value: Any) -> None:
    made = engine_value(name, given)
    assert made == value
    assert type(made) is type(value)


@pytest.mark.parametrize("text", ["{", '{"a": }', "[1,"])
def test_json_that_is_none_is_refused_by_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-config is not JSON"):
        engine_value("kv_transfer_config", text)


def test_no_name_is_in_two_lists() -> None:
    lists = (
        *(vllm_flags.SWITCHES, vllm_flags.TEXTS, vllm_flags.VALUES, vllm_flags.TEXT_LISTS, vllm_flags.VALUE_LISTS),
        *(vllm_flags.SERVER_SWITCHES, vllm_flags.SERVER_VALUES, vllm_flags.SERVER_LISTS),
    )
    assert len(frozenset[str]().union(*lists)) == sum(map(len, lists))
    assert set(vllm_flags.ALIASES.values()) <= frozenset[str]().union(*lists)
