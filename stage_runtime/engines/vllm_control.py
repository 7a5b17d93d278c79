"""The control methods of a vLLM stage: vLLM's own, between two of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_discovery.errors import InvalidRequestError
from stage_runtime.control import allowed_rpc
from stage_runtime.errors import ControlRefusedError


class Adapters:
    """The adapters that collective calls have brought, by the names that requests ask for them."""

    def __init__(self, llm: Any) -> None:
        """Of a loaded LLMEngine."""
        self._llm = llm
        self._by_name: dict[str, Any] = {}

    def add(self, name: str, lora_id: int, path: str) -> bool:
        """Load one; whether it was not there. Raise ControlRefusedError where none are taken."""
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(name, lora_id, path)
        is_new = bool(_with_lora(self._llm).add_lora(adapter))
        self._forget(lora_id)
        self._by_name[name] = adapter
        return is_new

    def remove(self, lora_id: int) -> bool:
        """Unload one; whether it was there. Raise ControlRefusedError where none are taken."""
        self._forget(lora_id)
        return bool(_with_lora(self._llm).remove_lora(lora_id))

    def named(self, name: Any) -> Any:
        """The LoRARequest for a request's ``lora``; None for None. Raise InvalidRequestError if it is not here."""
        if name is None:
            return None
        if self._llm.vllm_config.lora_config is None:
            raise InvalidRequestError("lora: this stage takes no adapters")
        if not isinstance(name, str) or name not in self._by_name:
            there = ", ".join(sorted(self._by_name)) or "none"
            raise InvalidRequestError(f"lora: there is no adapter {name!r}; there are: {there}")
        return self._by_name[name]

    def _forget(self, lora_id: int) -> None:
        self._by_name = {name: each for name, each in self._by_name.items() if each.lora_int_id != lora_id}


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
        "list_loras": lambda: sorted(_with_lora(llm).list_loras()),
        "pin_lora": lambda lora_id: _with_lora(llm).pin_lora(lora_id),
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


def _with_lora(llm: Any) -> Any:
    if llm.vllm_config.lora_config is None:
        raise ControlRefusedError("adapters are only taken where engine_args.enable_lora is true")
    return llm
