"""The fields that routes have in common, and what becomes of them as parameters of stages. Pure.

The names are OpenAI's, and vLLM's where it adds some. A field that is not served here is refused by its name unless it
has a neutral value: OpenAI's clients, and many programs around them, always send such values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from hub.api.errors import ModelNotFoundError
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.token_choices import check_token_choices
from omni_discovery.wire import MAX_LOGPROBS, MAX_PRIORITY

_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]

#: Answers that one HTTP request may ask for, to all its prompts together.
MOST_ANSWERS: Final = 64


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``include_usage`` asks for one last chunk with the token counts, ``continuous_usage_stats`` for them in each."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class RequestFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of every route that generates.

    ``sampling_params_list`` holds a mapping for each stage, None for the defaults; it may end early, and wins over all.
    """

    model: str = ""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    sampling_params_list: list[dict[str, Any] | None] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    #: As in vLLM: of queued requests, a lower priority goes first.
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    #: Whether stages start on pieces of each other's output; None: as the pipeline says.
    async_chunk: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None


class SamplingFields(RequestFields, frozen=True, kw_only=True):
    """How tokens are drawn, by vLLM's names."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    max_tokens: _Tokens | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[_TokenId] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None

    def text_params(self) -> dict[str, Any]:
        """The sampling parameters of the body, by the names that a text stage takes; none that asks for nothing."""
        given = {name: getattr(self, name) for name in _PASSED}
        return {
            name: value
            for name, value in given.items()
            if value is not None and not (name in _NOTHING and is_same(value, _NOTHING[name]))
        }


class TextFields(SamplingFields, frozen=True, kw_only=True):
    """The fields of routes that put out text."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    #: Each answer sends the whole prompt once more.
    n: Annotated[int, msgspec.Meta(ge=1, le=16)] | None = None
    #: Whether the answer has ``timings_s``; a stream has them in its last chunk.
    include_timings: bool = False


#: The parameters that text stages get as they are.
_PASSED: Final = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "bad_words", "logit_bias"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "allowed_token_ids"),
)
#: Values of them with which nothing is asked for: a stage whose engine does not know the parameter never sees it.
_NOTHING: Final[dict[str, Any]] = {
    "min_p": 0,
    "min_tokens": 0,
    "repetition_penalty": 1,
    "stop_token_ids": [],
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "bad_words": [],
    "logit_bias": {},
}


def is_same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are the same."""
    # In Python True == 1.
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


def check_neutral(request: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise InvalidRequestError for a field with a value that is neither null nor one of its neutral ones."""
    for name, values in neutral.items():
        value = getattr(request, name)
        if value is not None and not any(is_same(value, each) for each in values):
            raise InvalidRequestError(f"'{name}' is not served here: leave it out")


def refuse_logprobs(stages: Sequence[StageConfig], explicit: Sequence[Mapping[str, Any] | None] | None) -> None:
    """Raise InvalidRequestError for logprobs of a vLLM stage that are asked for in its list of parameters."""
    for stage, params in zip(stages, explicit or (), strict=False):
        for name in ("logprobs", "prompt_logprobs"):
            if stage.engine == "vllm" and params and params.get(name) is not None:
                raise InvalidRequestError(
                    f"'sampling_params_list': '{name}' are shown by a hub with --api vllm only; leave them out, or ask "
                    "for 'logprobs' of the answer beside 'sampling_params_list'"
                )


def refuse_adapter_paths(explicit: Sequence[Mapping[str, Any] | None] | None) -> None:
    """Raise InvalidRequestError if a client gives the path of an adapter: only the operator may."""
    for params in explicit or ():
        if params and not isinstance(params.get("lora"), str | None):
            raise InvalidRequestError("'sampling_params_list': 'lora' is the name of an adapter")


def refuse_partial_images(explicit: Sequence[Mapping[str, Any] | None] | None) -> None:
    """Raise InvalidRequestError for unfinished pictures that are asked for in the list of parameters."""
    if any(params and params.get("partial_images") for params in explicit or ()):
        raise InvalidRequestError(
            "'sampling_params_list': unfinished pictures come by /v1/images only: give 'partial_images' beside it"
        )


def check_model(asked: str, served: str) -> None:
    """Raise ModelNotFoundError if a request names another model than the one that is served; it may name none."""
    if asked and asked != served:
        raise ModelNotFoundError(asked, served)


def logprobs_asked(deploy: DeployConfig, modalities: Sequence[str] | None, count: int) -> dict[int, dict[str, Any]]:
    """The parameters, by stage, with which the wanted text stages give log probabilities of ``count`` tokens.

    Raise InvalidRequestError with the reason if one of them can't.
    """
    if count > MAX_LOGPROBS:
        raise InvalidRequestError(f"log probabilities of {count} tokens were asked for; {MAX_LOGPROBS} are the most")
    wanted = [stage for stage in deploy.stages if stage.final_output == "text"]
    if not wanted or (modalities is not None and "text" not in modalities):
        raise InvalidRequestError("'logprobs' are of text, and no text is asked for: leave them out")
    for stage in wanted:
        if stage.engine != "vllm":
            raise InvalidRequestError(
                f"'logprobs': stage {stage.stage_id} runs on engine {stage.engine!r}, which gives none; 'vllm' does"
            )
    return {stage.stage_id: {"logprobs": count} for stage in wanted}


def stage_params(
    deploy: DeployConfig,
    fields: RequestFields,
    text: Mapping[str, Any],
    more: Mapping[int, Mapping[str, Any]] | None = None,
    answers: int = 1,
) -> dict[int, dict[str, Any]]:
    """The parameters of each stage: ``text`` for text stages, the seed for all, ``more``, then the explicit list.

    Raise InvalidRequestError, also for what costs too much for so many ``answers``.
    """
    explicit = fields.sampling_params_list or []
    refuse_logprobs(deploy.stages, explicit)
    refuse_adapter_paths(explicit)
    refuse_partial_images(explicit)
    if len(explicit) > len(deploy.stages):
        raise InvalidRequestError(
            f"'sampling_params_list' has {len(explicit)} entries; the pipeline has {len(deploy.stages)} stages"
        )
    params: dict[int, dict[str, Any]] = {}
    for position, stage in enumerate(deploy.stages):
        asked = dict(text) if stage.final_output == "text" else {}
        if fields.seed is not None:
            asked["seed"] = fields.seed
        asked.update((more or {}).get(stage.stage_id, {}))
        if position < len(explicit):
            asked.update(explicit[position] or {})
        check_token_choices(asked, answers)
        params[stage.stage_id] = asked
    return params


def voice_params(deploy: DeployConfig, asked: Mapping[str, str | None]) -> dict[int, dict[str, Any]]:
    """The parameters of how something is said, by stage: ``speaker``, ``language``, ``instruct``.

    Each goes to the stages whose ``default_sampling_params`` name it; where none does, to the first stage, which takes
    or refuses it.
    """
    params: dict[int, dict[str, Any]] = {}
    for name, value in asked.items():
        if value:
            named = [stage.stage_id for stage in deploy.stages if name in stage.default_sampling_params]
            for stage_id in named or [deploy.stages[0].stage_id]:
                params.setdefault(stage_id, {})[name] = value
    return params


class Voice(msgspec.Struct, frozen=True):
    """A voice as OpenAI's clients may name it, by an id of its own."""

    id: _Word


def name_of_voice(voice: str | Voice | None) -> str | None:
    """The name of a voice; None for the model's own, which ``default`` asks for, too."""
    name = voice.id if isinstance(voice, Voice) else voice
    return None if name in {None, "", "default"} else name


def with_seed(params: Mapping[int, Mapping[str, Any]], number: int) -> dict[int, dict[str, Any]]:
    """The parameters of the answer with this number: each has seeds of its own, one above those of the one before."""
    changed = {stage_id: dict(each) for stage_id, each in params.items()}
    for each in changed.values() if number else ():
        if isinstance(each.get("seed"), int):
            each["seed"] += number
    return changed
