"""Continues an answer that another replica began, exactly: same tokens, same text.

The tokens that were shown become part of the prompt, and the bounds shrink by their number. That is exact if each token
depends only on the tokens before it, not on which of them count as the answer, nor on random numbers or other state.
``NOT_RESUMABLE`` lists what breaks that. An answer sampled with a temperature and without a seed is continued with
other random numbers, which are as good as the lost ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from omni_discovery.wire import Resume
from stage_runtime.config import NotResumableError
from stage_runtime.engines.vllm.load import Model

#: See Engine.not_resumable.
NOT_RESUMABLE: Final[Mapping[str, str]] = {
    "stop": "stop texts hold text back that may be the beginning of one, so what was shown lags behind the tokens",
    "seed": "random numbers were drawn from the seed for the tokens that were shown, and those draws are gone",
    "presence_penalty": "it looks at the answer's own tokens, and those that were shown count as prompt now",
    "frequency_penalty": "it counts the answer's own tokens, and those that were shown count as prompt now",
    "bad_words": "a bad word of several tokens might begin in what was shown",
    "structured_outputs": "the grammar has to have read the answer from its beginning",
    "repetition_detection": "it looks for repetition in the answer from its beginning",
    "thinking_token_budget": "it counts the answer's own tokens",
    "extra_args": "what reads them is not known, nor what it remembers of an answer",
    "logits_processors": "the engine has processors of its own, and what they remember of an answer is not known",
    "prompt_embeds": "what was shown is tokens, and can't be put behind a prompt that is none",
    "hidden_states": "nothing is left to say, and the next stage needs what is gone with the replica that said it",
    "other text": "the tokens that were shown say something else here, so this is another model or tokenizer",
    "no text": "many of the tokens that were shown in a row make no text, and to read those takes ever longer",
    "other prompt": "this replica does not take the prompt with what was shown behind it",
}


#: Where so many tokens in a row make no text, special ones aside, the answer is not continued.
_WORDLESS: Final = 128


def refusal(name: str) -> NotResumableError:
    """The error for an entry of ``NOT_RESUMABLE``."""
    return NotResumableError(f"{name}: {NOT_RESUMABLE[name]}")


def check(params: Any, model: Model) -> None:
    """Raise NotResumableError if an answer made with these sampling parameters can't be continued exactly."""
    obstacles = {
        "stop": bool(params.stop),
        "seed": params.seed is not None and params.temperature > 0,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        # A bad word of a single token does not depend on what came before.
        "bad_words": any(
            len(model.tokenizer.encode(word.lstrip(), add_special_tokens=False)) != 1 for word in params.bad_words or ()
        ),
        "structured_outputs": params.structured_outputs is not None,
        "repetition_detection": getattr(params, "repetition_detection", None) is not None,
        "thinking_token_budget": getattr(params, "thinking_token_budget", None) is not None,
        "extra_args": bool(params.extra_args),
        "logits_processors": model.has_logits_processors,
    }
    for name, stands in obstacles.items():
        if stands:
            raise refusal(name)


def end_of(shown: Sequence[int], prompt_tokens: int, params: Any, model: Model) -> str | None:
    """The finish reason if the tokens that were shown are a complete answer, else None."""
    if not shown:
        return None
    ends = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        ends |= model.eos_token_ids
    if shown[-1] in ends:
        return "stop"
    if prompt_tokens + len(shown) >= model.max_model_len:
        return "length"
    return "length" if params.max_tokens is not None and len(shown) >= params.max_tokens else None


def stop_reason_of(shown: Sequence[int], params: Any, model: Model) -> int | None:
    """The stop reason, as vLLM gives it, of a complete answer that ended with a stop token; None for the usual end."""
    is_usual = shown[-1] == model.tokenizer.eos_token_id and not params.ignore_eos
    return None if is_usual else shown[-1]


def shorten(params: Any, shown: int) -> None:
    """Shorten the parameters to the rest of an answer, after ``shown`` tokens; vLLM makes no text, this module does."""
    if params.max_tokens is not None:
        params.max_tokens -= shown
    params.min_tokens = max(0, params.min_tokens - shown)
    params.detokenize = False


class ResumableDetokenizer:
    """Makes the text of an answer as vLLM does: a character of several tokens comes with the last of them."""

    def __init__(self, key: str, prompt_token_ids: Sequence[int], params: Any, model: Model) -> None:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        # Detokenize the answer from its beginning: a tokenizer may put a space before a token that follows another.
        request = SimpleNamespace(
            request_id=key, prompt_token_ids=list(prompt_token_ids), prompt_embeds=None, sampling_params=params
        )
        self._stream: Any = IncrementalDetokenizer.from_new_request(model.tokenizer, request)  # type: ignore[arg-type]
        #: Tokens that make no text, and no other text of those around them.
        self._silent = frozenset(model.tokenizer.all_special_ids) if params.skip_special_tokens else frozenset[int]()

    def replay(self, resume: Resume, *, stopped: bool) -> None:
        """Consume the tokens that were shown. Raise NotResumableError if their text differs from the one shown."""
        token_ids, text = self._heard(resume.token_ids), ""
        for start in range(0, len(token_ids), _WORDLESS):
            part = token_ids[start : start + _WORDLESS]
            added = self.text_of(part, "stop" if stopped and start + len(part) == len(token_ids) else None)
            # Tokens without text are all read anew with each token behind them.
            if not added and len(part) == _WORDLESS:
                raise refusal("no text")
            text += added
        if text != resume.text:
            raise refusal("other text")

    def _heard(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Those that are not silent, and the last one, which may have ended the answer."""
        if self._silent.isdisjoint(token_ids):
            return token_ids
        return [*(each for each in token_ids[:-1] if each not in self._silent), *token_ids[-1:]]

    def text_of(self, token_ids: Sequence[int], finish_reason: str | None) -> str:
        """The text that these tokens add."""
        self._stream.update(list(token_ids), finish_reason == "stop")
        return str(self._stream.get_next_output_text(finish_reason is not None, delta=True))
