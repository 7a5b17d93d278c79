"""The control methods of a vLLM stage: vLLM's own, between two of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stage_runtime.control import allowed_rpc
from stage_runtime.engines.vllm_adapters import Adapters, with_lora
from stage_runtime.errors import ControlRefusedError

__all__ = ["Adapters", "vllm_controls"]


def vllm_controls(llm: Any, allow_rpc: Sequence[str], adapters: Adapters) -> Mapping[str, Callable[..., Any]]:
    """See ControlEngine. ``llm`` is a loaded LLMEngine; of its workers, ``allow_rpc`` names what may be called."""

    def find(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: llm.collective_rpc(name, args=args, kwargs=kwargs)

    return {
        "start_profile": llm.start_profile,
        "stop_profile": llm.stop_profile,
        "sleep": lambda level=1: _sleep(llm, level),
        "wake_up": lambda tags=None: llm.wake_up(tags),
        "is_sleeping": llm.is_sleeping,
        "add_lora": adapters.add,
        "remove_lora": adapters.remove,
        "list_loras": lambda: sorted(with_lora(llm).list_loras()),
        "pin_lora": lambda lora_id: with_lora(llm).pin_lora(lora_id),
        "reset_prefix_cache": llm.reset_prefix_cache,
        "collective_rpc": allowed_rpc(allow_rpc, find),
    }


def _sleep(llm: Any, level: int) -> None:
    # vLLM would stop its scheduler first, and find out only then that nothing can be given back.
    if level not in (0, 1, 2):
        raise ValueError(f"the level of sleep is 0, 1 or 2, not {level!r}")
    if level and not llm.vllm_config.model_config.enable_sleep_mode:
        raise ControlRefusedError(
            "memory is only given back where engine_args.enable_sleep_mode is true, which vLLM's CPU build has not;"
            " level 0 stops the work and keeps the memory"
        )
    llm.sleep(level)
