"""Beam searches of vLLM's server: to the end it keeps the tokens of each beam that has ended, and its prompt's."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

from hub.api.vllm.bounds.wrapping import wrapped_once
from hub.api.vllm.errors import as_vllm_error
from omni_discovery.errors import InvalidRequestError

#: Tokens of all beams of all steps, each with its prompt, in one search: half a GiB of a hub if each of them ends.
MAX_BEAM_TOKENS: Final = 1 << 26


def check_beams(prompt_tokens: int, beams: int, steps: int) -> None:
    """Raise InvalidRequestError for a search that may keep too many tokens."""
    kept = (prompt_tokens + steps) * beams * steps
    if kept > MAX_BEAM_TOKENS:
        raise InvalidRequestError(
            f"use_beam_search: {beams} beams of {prompt_tokens} tokens and {steps} more may come to {kept} in all,"
            f" where a request may have {MAX_BEAM_TOKENS}: ask for fewer 'n' or 'max_tokens', or send a shorter prompt"
        )


def bound_beams(*servers: type) -> None:
    """Have classes of vLLM's servers refuse such a search before its first step."""
    for server in servers:
        kind: Any = next((each for each in server.__mro__ if "beam_search" in vars(each)), None)
        if kind is not None:
            kind.beam_search = wrapped_once(kind.beam_search, _bounded)


def _bounded(search: Any) -> Any:
    async def bounded(
        self: Any, prompt: Any, request_id: str, params: Any, *more: Any, **named: Any
    ) -> AsyncGenerator[Any, None]:
        decoded = prompt.get("decoder_prompt", prompt)
        try:
            check_beams(len(decoded.get("prompt_token_ids") or ()), params.beam_width, params.max_tokens)
        except InvalidRequestError as error:
            raise as_vllm_error(error) from error
        async for each in search(self, prompt, request_id, params, *more, **named):
            yield each

    return bounded
