"""Sampling parameters of vLLM's server as parameters of a stage, and logprobs of a stage in vLLM's form.

A field that no stage takes is refused by its name, also one that a later vLLM adds: none is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind

from omni_discovery.errors import EngineFailedError, InvalidRequestError
from omni_discovery.inputs.answer_form import check_answer_form
from omni_discovery.inputs.token_choices import check_token_choices
from omni_discovery.wire import MAX_PROMPT_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hub.request.outputs import OmniOutput
    from omni_discovery.wire import TokenLogprobs

#: Answers (``n``) of one request: each is a request of its own to the replicas.
MAX_ANSWERS: Final = 1024

#: Always sent: vLLM's server has settled them by the request, the model and the deploy document.
_SETTLED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
#: Sent only where they differ from vLLM's defaults, so that the deploy document's defaults hold otherwise.
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
#: Handled by the hub, or for vLLM's internal use.
_OURS: Final = frozenset(
    {"n", "output_kind", "detokenize", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache"}
)


def stage_params(asked: Any) -> dict[str, Any]:
    """The parameters of one answer. Raise InvalidRequestError that names a field that no stage takes."""
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


def params_of_choices(asked: Any, prompts: int = 1) -> list[dict[str, Any]]:
    """The parameters of each of ``n`` answers; a seed is incremented from one to the next, as in vLLM.

    ``prompts``: how many the request has in all, each with so many answers. Raise InvalidRequestError if ``n`` is too
    large, or the answer's form or words may cost too much.
    """
    if asked.n > MAX_ANSWERS:
        raise InvalidRequestError(
            f"n: {asked.n} answers, where one request may have {MAX_ANSWERS}; send several requests"
        )
    params = stage_params(asked)
    if params.get("structured_outputs"):
        # VLLM's server has made some of them itself, from tools.
        check_answer_form("structured_outputs", params["structured_outputs"])
    check_token_choices(params, asked.n * prompts)
    if asked.n == 1:
        return [params]
    seed = params.get("seed")
    more = ({} if seed is None else {"seed": seed + index} for index in range(asked.n))
    choices = [{**params, **each} for each in more]
    for choice in choices[answers_with_prompt(asked) :]:
        choice.pop("prompt_logprobs", None)
    return choices


def answers_with_prompt(asked: Any) -> int:
    """How many answers have prompt logprobs: the first one if all answers are sent together, else all."""
    return 1 if asked.output_kind.name == "FINAL_ONLY" else int(asked.n)


def check_prompt_logprobs(asked: Any, prompt_tokens: int) -> None:
    """Raise InvalidRequestError if all answers together would have too many prompt logprobs."""
    if asked.prompt_logprobs is None:
        return
    # The server writes them into each answer, also where the stage has told them once.
    each, answers = prompt_tokens * (asked.prompt_logprobs + 1), asked.n
    if each * answers > MAX_PROMPT_LOGPROBS:
        times = f", for each of {answers} answers," if answers > 1 else ""
        raise InvalidRequestError(
            f"prompt_logprobs: {asked.prompt_logprobs} and its own for each of {prompt_tokens} tokens{times} are more "
            f"than the {MAX_PROMPT_LOGPROBS} that one request may have; ask for fewer"
        )


def default_overrides(document: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's defaults in the deploy document, as a generation config for vLLM's server."""
    # Without max_tokens: vLLM would take it as an upper bound for every request.
    return {name: document[name] for name in _SETTLED if document.get(name) is not None and name != "max_tokens"}


def _same(value: Any, usual: Any) -> bool:
    if isinstance(value, dict | list) and not value:
        return not usual
    # Types first: an array has no truth value; no default is an array.
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
    """The logprobs of one answer so far: their sum and, unless outputs are deltas, each of them."""

    def __init__(self) -> None:
        self.places: list[dict[int, Logprob]] = []
        self.total = 0.0

    def add(self, output: OmniOutput, kind: RequestOutputKind) -> list[dict[int, Logprob]]:
        """One entry for each new token, with that token first. Raise EngineFailedError if some are missing."""
        count, due = len(output.logprobs), len(output.token_ids)
        if count != due:
            raise EngineFailedError(f"stage {output.stage_id} gave logprobs of {count} tokens where there are {due}")
        new = _in_vllms_form(output.logprobs)
        self.total += sum(place[0].logprob for place in output.logprobs)
        if kind != RequestOutputKind.DELTA:
            self.places += new
        return new


class PromptLogprobs:
    """The prompt logprobs of one answer: they come before its tokens, in several outputs if they are many."""

    def __init__(self) -> None:
        #: None for the first token of the prompt.
        self._places: list[dict[int, Logprob] | None] = [None]
        self._is_complete = False

    def add(self, output: OmniOutput, prompt_tokens: int) -> bool:
        """Add those of an output; return whether the answer has begun. Raise EngineFailedError if some are missing."""
        self._places += _in_vllms_form(output.prompt_logprobs)
        if self._is_complete or not (output.token_ids or output.finish_reason):
            return self._is_complete
        # An aborted answer may have had none of them.
        if len(self._places) != prompt_tokens and output.finish_reason != "abort":
            given = f"stage {output.stage_id} gave logprobs of {len(self._places) - 1} tokens"
            raise EngineFailedError(f"{given} of a prompt that has {prompt_tokens - 1} behind its first")
        self._is_complete = True
        return True

    def shown(self, kind: RequestOutputKind) -> list[dict[int, Logprob] | None]:
        """The prompt logprobs for one output: in each output, but with deltas in the first only."""
        places = self._places
        if kind == RequestOutputKind.DELTA:
            self._places = []
        return places


def _in_vllms_form(places: Iterable[TokenLogprobs]) -> list[dict[int, Logprob]]:
    return [{token_id: Logprob(logprob, rank, text) for token_id, logprob, rank, text in place} for place in places]
