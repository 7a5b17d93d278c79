"""The control methods of a vLLM stage, which are vLLM's own, and its LoRA adapters.

Adapters are loaded by a control call, or by the first request that names one with its path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError
from stage_runtime.config import ControlRefusedError
from stage_runtime.engines.base import allowed_rpc

__all__ = ["Adapters", "vllm_controls"]

#: The ids that are given here begin above those that people choose.
_FIRST_ID: Final = 1 << 20


class Adapters:
    """The adapters of a stage, by name, or by name and path.

    A name alone means an adapter that a control call has loaded. With a path, an adapter is loaded by the first request
    for it, without a call, so that replicas that start later serve it, too: hubs that know the path ask so.
    """

    def __init__(self, llm: Any) -> None:
        """Of a loaded LLMEngine."""
        self._llm = llm
        self._by_name: dict[str, Any] = {}
        #: Adapters with an id from here, by name and path.
        self._by_source: dict[tuple[str, str], Any] = {}
        self._next_id = _FIRST_ID

    def add(self, name: str, lora_id: int | None, path: str, more: Mapping[str, Any] | None = None) -> bool:
        """Load an adapter; whether it is new. ``lora_id`` None: requests will name it with its path.

        ``more`` are further fields of vLLM's LoRARequest. Raise ControlRefusedError if the stage takes no adapters, and
        what vLLM raises.
        """
        llm = with_lora(self._llm)
        if lora_id is None:
            return self._bring(llm, name, path, dict(more or {}))
        adapter = _lora_request(name, lora_id, path, more or {})
        is_new = bool(llm.add_lora(adapter))
        self._forget(lora_id)
        self._by_name[name] = adapter
        return is_new

    def remove(self, lora_id: int) -> bool:
        """Unload an adapter; whether it was loaded. Raise ControlRefusedError if the stage takes no adapters."""
        self._forget(lora_id)
        return bool(with_lora(self._llm).remove_lora(lora_id))

    def named(self, asked: Any) -> Any:
        """The LoRARequest for a request's ``lora``, a name or ``{"name": ..., "path": ...}``; None for None.

        Raise InvalidRequestError for an unknown name or a wrong type, and what vLLM raises if it can't load one.
        """
        if asked is None:
            return None
        if self._llm.vllm_config.lora_config is None:
            raise InvalidRequestError("lora: this stage takes no adapters")
        if isinstance(asked, Mapping):
            return self._brought(dict(asked))
        if not isinstance(asked, str) or asked not in self._by_name:
            there = ", ".join(sorted(self._by_name)) or "none"
            raise InvalidRequestError(f"lora: there is no adapter {asked!r}; there are: {there}")
        return self._by_name[asked]

    def _brought(self, asked: dict[str, Any]) -> Any:
        name, path = asked.pop("name", None), asked.pop("path", None)
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise InvalidRequestError("lora: give an adapter's name, or its name and path")
        if (name, path) not in self._by_source:
            # Loaded here and not in a step, where an adapter that can't be loaded would end the engine.
            self._bring(self._llm, name, path, asked)
        return self._by_source[name, path]

    def _bring(self, llm: Any, name: str, path: str, more: Mapping[str, Any]) -> bool:
        adapter = self._by_source.get((name, path))
        if adapter is None:
            # ``load_inplace`` is for this one load only.
            lasting = {field: value for field, value in more.items() if field != "load_inplace"}
            adapter = _lora_request(self._shown_name(name, path), self._next_id, path, lasting)
        is_new = bool(llm.add_lora(_lora_request(adapter.lora_name, adapter.lora_int_id, path, more)))
        self._by_source[name, path] = adapter
        self._next_id = max(self._next_id, adapter.lora_int_id + 1)
        return is_new

    def _shown_name(self, name: str, path: str) -> str:
        """The name for vLLM, which takes two adapters of one name in a batch for one."""
        is_taken = any(each.lora_name == name for each in (*self._by_name.values(), *self._by_source.values()))
        return f"{name}={path}" if is_taken else name

    def _forget(self, lora_id: int) -> None:
        self._by_name = {name: each for name, each in self._by_name.items() if each.lora_int_id != lora_id}
        self._by_source = {source: each for source, each in self._by_source.items() if each.lora_int_id != lora_id}


def with_lora(llm: Any) -> Any:
    """The engine itself. Raise ControlRefusedError if it takes no adapters."""
    if llm.vllm_config.lora_config is None:
        raise ControlRefusedError("adapters are only taken where engine_args.enable_lora is true")
    return llm


def _lora_request(name: str, lora_id: int, path: str, more: Mapping[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    try:
        return LoRARequest(name, lora_id, path, **more)
    except TypeError as error:
        raise InvalidRequestError(f"lora: this vLLM's adapters are not described so: {error}") from error


def vllm_controls(llm: Any, allow_rpc: Sequence[str], adapters: Adapters) -> Mapping[str, Callable[..., Any]]:
    """See ControlEngine. ``llm`` is a loaded LLMEngine; ``allow_rpc`` names the methods of workers to allow."""

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
    # Checked first: vLLM would stop its scheduler before it finds out that it can't free memory.
    if level not in (0, 1, 2):
        raise ValueError(f"the level of sleep is 0, 1 or 2, not {level!r}")
    if level and not llm.vllm_config.model_config.enable_sleep_mode:
        raise ControlRefusedError(
            "memory is only given back where engine_args.enable_sleep_mode is true, which vLLM's CPU build has not;"
            " level 0 stops the work and keeps the memory"
        )
    llm.sleep(level)
