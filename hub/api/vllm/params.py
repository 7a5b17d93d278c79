"""What vLLM's server asks of its engine, as the parameters of a stage. Needs no vLLM itself.

A field that no stage takes is refused by its name, also one that a later vLLM adds: nothing is ever left out silently.

How likely the tokens of an answer, and those of its prompt, were, in vLLM's own form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind

from omni_discovery.errors import EngineFailedError, InvalidRequestError
from omni_discovery.wire import MAX_PROMPT_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hub.request.outputs import OmniOutput
    from omni_discovery.wire import TokenLogprobs

#: How many answers one request may want: each of them is a request of its own to the replicas.
MAX_ANSWERS: Final = 1024

#: The server has worked these out from the request, the model and the deploy document, so they are always said.
_SETTLED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
#: Said only where they differ from vLLM's defaults, so that the deploy document's own defaults stand otherwise.
_CARRIED: Final = (
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
    "repetition_detection",
    "thinking_token_budget",
    "stream_interval",
    "logprobs",
    "prompt_logprobs",
    "watermarking",
    "extra_args",
)
#: What the hub does itself, and what vLLM keeps there for its own use.
_OURS: Final = frozenset(
    {"n", "output_kind", "detokenize", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache"}
)


def stage_params(asked: Any) -> dict[str, Any]:
    """The parameters of one answer. Raise InvalidRequestError that names a field which no stage takes."""
    usual = type(asked)()
    params: dict[str, Any] = {}
    for name in asked.__struct_fields__:
        value = getattr(asked, name)
        if name in _SETTLED:
            if value is not None:
                params[name] = value
        elif name in _OURS or name.startswith("_") or _same(value, getattr(usual, name)):
            continue
        elif name in _CARRIED:
            params[name] = _plain(value)
        else:
            raise InvalidRequestError(f"{name} can't be asked of a stage; leave it out")
    return params


def params_of_choices(asked: Any) -> list[dict[str, Any]]:
    """The parameters of each of ``n`` answers: a seed counts up from one to the next, as vLLM has it.

    Raise InvalidRequestError if those are too many.
    """
    if asked.n > MAX_ANSWERS:
        raise InvalidRequestError(
            f"n: {asked.n} answers, where one request may have {MAX_ANSWERS}; send several requests"
        )
    params = stage_params(asked)
    if asked.n == 1:
        return [params]
    seed = params.get("seed")
    more = ({} if seed is None else {"seed": seed + index} for index in range(asked.n))
    choices = [{**params, **each} for each in more]
    for choice in choices[tellers(asked) :]:
        choice.pop("prompt_logprobs", None)
    return choices


def tellers(asked: Any) -> int:
    """How many answers, from the first on, are asked of their prompt: one is enough where all go out together."""
    return 1 if asked.output_kind.name == "FINAL_ONLY" else int(asked.n)


def check_prompt_logprobs(asked: Any, prompt_tokens: int) -> None:
    """Raise InvalidRequestError if all answers together would tell more of their prompt than a request may have."""
    if asked.prompt_logprobs is None:
        return
    each, answers = prompt_tokens * (asked.prompt_logprobs + 1), tellers(asked)
    if each * answers > MAX_PROMPT_LOGPROBS:
        times = f", for each of {answers} answers," if answers > 1 else ""
        raise InvalidRequestError(
            f"prompt_logprobs: {asked.prompt_logprobs} and its own for each of {prompt_tokens} tokens{times} are more "
            f"than the {MAX_PROMPT_LOGPROBS} that one request may have; ask for fewer"
        )


def default_overrides(document: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's defaults of the deploy document, as the generation config that vLLM's server takes its own from."""
    # Not max_tokens: vLLM would cut every answer to it, also where a request asks for more.
    return {name: document[name] for name in _SETTLED if document.get(name) is not None and name != "max_tokens"}


def _same(value: Any, usual: Any) -> bool:
    if isinstance(value, dict | list) and not value:
        return not usual
    # An array has no single truth; none of the defaults is one.
    return value is usual or (type(value) is type(usual) and bool(value == usual))


def _plain(value: Any) -> Any:
    if not is_dataclass(value):
        return value
    return {
        each.name: found
        for each in fields(value)
        if not each.name.startswith("_") and (found := getattr(value, each.name)) is not None and found is not False
    }


class Logprobs:
    """Those of one answer so far: what its tokens add up to and, unless they go out as they come, each of them."""

    def __init__(self) -> None:
        self.places: list[dict[int, Logprob]] = []
        self.total = 0.0

    def add(self, output: OmniOutput, kind: RequestOutputKind) -> list[dict[int, Logprob]]:
        """One entry for each new token, which comes first in it. Raise EngineFailedError if some are missing."""
        told, due = len(output.logprobs), len(output.token_ids)
        if told != due:
            raise EngineFailedError(f"stage {output.stage_id} gave logprobs of {told} tokens where there are {due}")
        new = _in_vllms_form(output.logprobs)
        self.total += sum(place[0].logprob for place in output.logprobs)
        if kind != RequestOutputKind.DELTA:
            self.places += new
        return new


class PromptLogprobs:
    """Those of the prompt of one answer: they come before the answer, in several outputs where there are many."""

    def __init__(self) -> None:
        #: None for the first token, which nothing comes before.
        self._places: list[dict[int, Logprob] | None] = [None]
        self._is_told = False

    def add(self, output: OmniOutput, prompt_tokens: int) -> bool:
        """Take in those of an output; whether the answer has begun. Raise EngineFailedError if it has without them."""
        self._places += _in_vllms_form(output.prompt_logprobs)
        if self._is_told or not (output.token_ids or output.finish_reason):
            return self._is_told
        # One that was aborted may have had none of them.
        if len(self._places) != prompt_tokens and output.finish_reason != "abort":
            told = f"stage {output.stage_id} gave logprobs of {len(self._places) - 1} tokens"
            raise EngineFailedError(f"{told} of a prompt that has {prompt_tokens - 1} behind its first")
        self._is_told = True
        return True

    def shown(self, kind: RequestOutputKind) -> list[dict[int, Logprob] | None]:
        """What the server gets of them now: all each time, but where it gets pieces, once."""
        places = self._places
        if kind == RequestOutputKind.DELTA:
            self._places = []
        return places


def _in_vllms_form(places: Iterable[TokenLogprobs]) -> list[dict[int, Logprob]]:
    return [{token_id: Logprob(logprob, rank, text) for token_id, logprob, rank, text in place} for place in places]
