"""Counts a token's rank without a compiler, on a CPU.

vLLM compiles the function that counts it with the first answer that has log probabilities, within a step: for seconds
to a minute every other answer of the engine stands still, and a host without a C++ compiler fails that step. On a GPU
the warm-up has it compiled, since the plain function needs memory there for a copy of all logits.
"""

from __future__ import annotations

import sys
from typing import Any, Final

_MODULE: Final = "vllm.v1.sample.sampler"
_COUNT: Final = "batched_count_greater_than"
#: By what torch names the function that it compiles.
_PLAIN: Final = "_torchdynamo_orig_callable"


def count_ranks_plainly(llm: Any) -> None:
    """See the module; does nothing where the model does not run on a CPU in this process."""
    device = getattr(llm.vllm_config.device_config, "device", None)
    sampler = sys.modules.get(_MODULE)
    plain = getattr(getattr(sampler, _COUNT, None), _PLAIN, None)
    if getattr(device, "type", "") == "cpu" and plain is not None:
        setattr(sampler, _COUNT, plain)
