"""Prompts that vLLM computes in parts, of requests with a seed: the answer is that of the prompt in one part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from omni_discovery.deploy.document import StageConfig
from stage_runtime.engines.base import Engine, StageRequest, create_engine
from tests.support.engines import DEMO, as_the_supervisor_has_it

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 16 << 20,
    "enforce_eager": True,
    "enable_prefix_caching": False,
}
SEEDED = {"seed": 5, "temperature": 1.0, "max_tokens": 10}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    """One that takes a prompt of 50 tokens in one part, and one that takes eight tokens in a step."""
    with as_the_supervisor_has_it():
        loaded = []
        for at_once in (512, 8):
            args = {**ARGS, "max_num_batched_tokens": at_once}
            stage = StageConfig(
                stage_id=0, engine="vllm", model=str(DEMO / "thinker"), engine_args=args, final_output="text"
            )
            loaded.append(create_engine(stage))
            loaded[-1].load(lambda *_: None)
        yield loaded
        for engine in loaded:
            engine.close()


def answers(engine: Engine, *keys: str) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {key: [] for key in keys}
    for key in keys:
        engine.add(StageRequest(key, key, inputs={"prompt": "What is 17 + 25? " * 3}, params=SEEDED))
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
            said[output.key] += output.token_ids
    return said


@pytest.mark.attack("S8")
def test_a_seeded_request_whose_prompt_takes_several_steps_ends_no_engine(engines: list[Engine]) -> None:
    """1. three requests with a seed come at once, and vLLM computes each prompt in parts
    2. all are answered, each as it is in one part: no draw was lost to the parts
    """
    whole, in_parts = engines
    ((_, expected),) = answers(whole, "alone").items()
    assert len(expected) == SEEDED["max_tokens"]
    assert answers(in_parts, "a", "b", "c") == dict.fromkeys("abc", expected)
