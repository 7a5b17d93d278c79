"""What vLLM is working on, by the names that were given to it; it makes up its own names for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.vllm.handoff import HiddenStates, Rows


class Runs:
    """Starts and stops requests of a loaded LLMEngine."""

    def __init__(self, llm: Any, hidden: HiddenStates | None = None) -> None:
        self._llm = llm
        self._hidden = hidden
        # vLLM refuses a priority where nobody may overtake.
        self._takes_priority = str(llm.vllm_config.scheduler_config.policy) == "priority"
        #: vLLM's name of each.
        self._names: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._names)

    def warm_up(self, params: Any) -> None:
        """Send a prompt through the whole engine: one that can't do that must not be called ready."""
        self.start("warm-up", {"prompt_token_ids": [0, 0]}, params)
        while self._llm.has_unfinished_requests():
            self._llm.step()
        self.run_ended("warm-up")

    def start(
        self, name: str, prompt: Mapping[str, Any], params: Any, priority: int = 0, lora: Any = None, trace: str = ""
    ) -> Rows | None:
        """Have vLLM begin; where hidden states are wanted of it, they will be in what is returned.

        Raise InvalidRequestError if vLLM refuses it.
        """
        from vllm.exceptions import VLLMValidationError

        more: dict[str, Any] = {"priority": priority} if self._takes_priority else {}
        if trace:
            more["trace_headers"] = {"traceparent": trace}
        try:
            vllm_name = self._llm.add_request(name, prompt, params, lora_request=lora, **more)
        except (ValueError, VLLMValidationError) as error:
            raise InvalidRequestError(str(error)) from error
        self._names[name] = vllm_name
        # Who wants the hidden states of all tokens reads no prefix cache; what nobody takes goes with the request.
        if self._hidden is None or not params.skip_reading_prefix_cache:
            return None
        self._hidden.record_rows(vllm_name)
        return self._hidden.rows_of(vllm_name)

    def stop(self, name: str) -> None:
        """Have vLLM forget it. Unknown ones are fine."""
        if name in self._names:
            self._llm.abort_request([name])
            self.run_ended(name)

    def run_ended(self, name: str) -> None:
        """VLLM is done with it."""
        vllm_name = self._names.pop(name, None)
        if self._hidden is not None and vllm_name is not None:
            self._hidden.drop_rows(vllm_name)
