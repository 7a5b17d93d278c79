"""The requests that vLLM works on, by the names given here and by the names that vLLM makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from stage_runtime.engines.client_threads import work_of
from stage_runtime.engines.vllm.forms.checking import form_errors
from stage_runtime.engines.vllm.handoff import HiddenStates, Rows
from stage_runtime.engines.vllm.prompt import Prompt

_NO_CACHE: Final = "skip_mm_cache"


class Runs:
    """Starts and stops requests of a loaded LLMEngine."""

    def __init__(self, llm: Any, hidden: HiddenStates | None = None) -> None:
        self._llm = llm
        self._hidden = hidden
        # vLLM refuses a priority under any other policy.
        self._takes_priority = str(llm.vllm_config.scheduler_config.policy) == "priority"
        #: vLLM's name of each run.
        self._names: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._names)

    def warm_up(self, params: Any) -> None:
        """Send a prompt of two tokens through the whole engine. Raises what vLLM raises if that fails."""
        self.start("warm-up", {"prompt_token_ids": [0, 0]}, params)
        while self._llm.has_unfinished_requests():
            self._llm.step()
        self.run_ended("warm-up")

    def start(
        self,
        name: str,
        prompt: Mapping[str, Any],
        params: Any,
        priority: int = 0,
        lora: Any = None,
        trace: str = "",
        client: str = "",
    ) -> Rows | None:
        """Have vLLM begin a run; returns where its hidden states will be, None if none are recorded for it.

        Lower ``priority`` goes first; ``trace`` is a W3C traceparent or empty; ``client`` has turns with others, see
        ``ClientThreads``. Raise InvalidRequestError if vLLM refuses the prompt or the parameters.
        """
        more: dict[str, Any] = {"priority": priority} if self._takes_priority else {}
        if trace:
            more["trace_headers"] = {"traceparent": trace}
        # vLLM has the form of the answer compiled from here on.
        with form_errors(params), work_of(client):
            vllm_name = self._llm.add_request(name, prompt, params, lora_request=lora, **more)
        self._names[name] = vllm_name
        # A request reads no prefix cache exactly if the hidden states of all its tokens are wanted, or its prompt's
        # log probabilities; in the second case the recorded rows are dropped with the run.
        if self._hidden is None or not params.skip_reading_prefix_cache:
            return None
        self._hidden.record_rows(vllm_name)
        return self._hidden.rows_of(vllm_name)

    def stop(self, name: str) -> None:
        """Abort a run. Unknown names are ignored."""
        if name in self._names:
            self._llm.abort_request([name])
            self.run_ended(name)

    def run_ended(self, name: str) -> None:
        """Note that vLLM is done with a run. Unknown names are ignored."""
        vllm_name = self._names.pop(name, None)
        if self._hidden is not None and vllm_name is not None:
            self._hidden.drop_rows(vllm_name)


def prepare_prompt(llm: Any, prompt: Prompt) -> Prompt:
    """The prompt with what vLLM makes of its items, so that a run of it begins at once. May be called in a thread.

    Of a vLLM that can't do that beside its engine, the prompt as it is. Raise InvalidRequestError if vLLM refuses it.
    """
    renderer = getattr(llm, "renderer", None)
    render = getattr(renderer, "render_cmpl", None)
    if prompt.items is None or render is None or _NO_CACHE not in inspect.signature(render).parameters:
        return prompt
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    with form_errors(None):
        parsed = parse_model_prompt(llm.vllm_config.model_config, prompt.with_answer(()))
        # Where vLLM keeps items for the next prompt, it counts on the engine to have seen those of this one, which may
        # be aborted before.
        (prepared,) = render([parsed], **{_NO_CACHE: True})
    # Pixels take a hundred times what is made of them.
    return replace(prompt, prepared=prepared, items={}) if prepared["type"] == "multimodal" else prompt
