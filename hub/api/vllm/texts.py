"""Bounds of the texts that vLLM's renderer reads, for the servers of vLLM and of vLLM-Omni."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hub.api.vllm.errors import as_vllm_error
from omni_discovery.errors import InvalidRequestError

if TYPE_CHECKING:
    from vllm.exceptions import VLLMError

    from omni_discovery.errors import OmniError


class BoundsTexts:
    """To be put before a class of vLLM's renderers."""

    #: The renderer's own.
    model_config: Any
    #: Makes an error of the hub's one for the server.
    as_theirs: Callable[[OmniError], VLLMError] = staticmethod(as_vllm_error)

    def render_messages(self, messages: Any, params: Any) -> Any:
        """See vLLM. Raise VLLMValidationError for arguments of earlier calls that are nested too deep."""
        parent: Any = super()
        with self._depth():
            return parent.render_messages(messages, params)

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        """See vLLM, and render_messages."""
        parent: Any = super()
        with self._depth():
            return await parent.render_messages_async(messages, params)

    @contextmanager
    def _depth(self) -> Iterator[None]:
        try:
            yield
        except RecursionError:
            # The arguments are JSON in a text, which vLLM reads itself. The stack is of no use.
            refused = InvalidRequestError("a text of JSON in the messages is nested too deep: send less of it")
            raise self.as_theirs(refused) from refused

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        """See vLLM, which bounds texts where they become tokens by the model's context, but not where tokens are only
        shown or cut off.
        """
        parent: Any = super()
        tokenizer, text = parent.get_tokenizer(), prompt["prompt"]
        most = self.model_config.max_model_len * tokenizer.max_chars_per_token
        if len(text) > most:
            if params.truncate_prompt_tokens is None:
                refused = InvalidRequestError(
                    f"a text of {len(text)} characters can't fit into the model's context of "
                    f"{self.model_config.max_model_len} tokens, which are at most {most} characters: send less"
                )
                raise self.as_theirs(refused) from refused
            side = params.truncation_side or tokenizer.truncation_side
            prompt = {**prompt, "prompt": text[-most:] if side == "left" else text[:most]}
        return parent._tokenize_prompt(prompt, params)  # noqa: SLF001 - the step that is overridden
